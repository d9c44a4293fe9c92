"""Faults on purpose, at a named function of the process that installs them."""

from __future__ import annotations

import errno
import importlib
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any


def install(
    at: str,
    do: str,
    *,
    when: str = "before",
    nth: int = 1,
    times: int = 10**9,
    rank: int | None = None,
    amount: float = 0.0,
    about: str = "",
) -> None:
    """Let ``do`` happen at ``times`` calls of ``at``, the first of them the ``nth``.

    Args:
        at: ``module:function`` or ``module:Class.method``.
        do: ``kill``: SIGKILL to this process. ``sleep``: for ``amount`` seconds. ``limit``: no file of this process may become longer than
            ``amount`` bytes until ``unlimit``. Anything else is the name of an errno: that OSError is raised.
        when: ``before`` or ``after`` the call.
        rank: only in the process of this rank.
        about: only calls with an argument that has this in its text are counted.
    """
    if rank is not None and rank != int(os.environ.get("RANK", "0")):
        return
    module, _, path = at.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if about and not any(about in str(arg) for arg in args):
            return original(*args, **kwargs)
        calls += 1
        now = nth <= calls < nth + times
        if now and when == "before":
            happen(do, amount)
        result = original(*args, **kwargs)
        if now and when == "after":
            happen(do, amount)
        return result

    setattr(owner, name, faulty)


def happen(do: str, amount: float) -> None:
    if do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "sleep":
        time.sleep(amount)
    elif do == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(amount), resource.RLIM_INFINITY))
    elif do == "unlimit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    else:
        number = getattr(errno, do)
        raise OSError(number, os.strerror(number))
