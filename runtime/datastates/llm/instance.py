"""Replace a method on one object, so that the object stays what it was to everybody else.

A Trainer's own class is never changed: a subclass that overrides ``_save_checkpoint`` is wrapped as a whole, other trainers of the
class are not touched, and a pickled trainer carries nothing of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Around = Callable[..., Any]


class InstanceMethod:
    """Stands in an object's ``__dict__`` for the method ``name`` and calls ``around(original, *args, **kwargs)``.

    Pickled (or deep-copied) it becomes the class's own method again.
    """

    def __init__(self, owner: Any, name: str, around: Around) -> None:
        self._owner = owner
        self._name = name
        self._around = around
        self._original = getattr(owner, name)
        # inspect.signature follows __wrapped__: accelerate's find_executable_batch_size counts the parameters of what it is given.
        functools.update_wrapper(self, self._original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._original, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)


def wrap(owner: Any, name: str, around: Around) -> None:
    """Let calls of ``owner.name`` go through ``around``; nothing when the object has no such method."""
    if hasattr(owner, name):
        owner.__dict__[name] = InstanceMethod(owner, name, around)
