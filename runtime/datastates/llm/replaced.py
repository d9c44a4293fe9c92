"""Functions that are replaced for as long as a block of code runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(
    owner: Any, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """While open, ``owner.name`` is what ``wrapped`` makes of it."""
    own = name in vars(owner)
    original = getattr(owner, name)
    # Callers look at signatures: Trainer asks whether save_checkpoint can leave out frozen parameters.
    setattr(owner, name, functools.update_wrapper(wrapped(original), original))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


@contextmanager
def counted_calls(
    owner: Any, name: str, afterwards: Callable[[], object] = lambda: None
) -> Iterator[list[None]]:
    """The list grows by one with each call of ``owner.name``, after which ``afterwards`` is called."""
    calls: list[None] = []

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            result = original(*args, **kwargs)
            afterwards()
            return result

        return counted

    with replaced(owner, name, wrapped):
        yield calls
