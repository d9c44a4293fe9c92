"""Faults on purpose, at a named function of the process that installs them."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any


def install(
    at: str, do: str, *, when: str = "before", nth: int = 1, rank: int | None = None, seconds: float = 0.0
) -> None:
    """Let ``do`` happen at the ``nth`` call of ``at``, and at each later one.

    Args:
        at: ``module:function`` or ``module:Class.method``.
        do: ``kill`` (SIGKILL to this process), ``EIO`` or another name of an errno (raise that OSError), ``sleep`` (for ``seconds``).
        when: ``before`` or ``after`` the call.
        rank: only in the process of this rank.
    """
    if rank is not None and rank != int(os.environ.get("RANK", "0")):
        return
    module, _, path = at.partition(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= nth and when == "before":
            happen(do, seconds)
        result = original(*args, **kwargs)
        if calls >= nth and when == "after":
            happen(do, seconds)
        return result

    setattr(owner, name, faulty)


def happen(do: str, seconds: float) -> None:
    if do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "sleep":
        time.sleep(seconds)
    else:
        number = getattr(errno, do)
        raise OSError(number, os.strerror(number))
