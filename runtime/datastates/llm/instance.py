"""Replace a method on one object, so that the object stays what it was to everybody else.

A Trainer's own class is never changed: a subclass that overrides ``_save_checkpoint`` is wrapped as a whole, other trainers of the
class are not touched, and a trainer that was copied, deep or shallow, or pickled carries nothing of ours: its methods are its class's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Around = Callable[..., Any]


class InstanceMethod:
    """Stands in an object's ``__dict__`` for the method ``name`` and calls ``around(original, *args, **kwargs)``.

    Pickled by itself it becomes the class's own method again.
    """

    def __init__(self, owner: Any, name: str, around: Around) -> None:
        original = getattr(owner, name)
        # inspect.signature follows __wrapped__: accelerate's find_executable_batch_size counts the parameters of what it is given.
        functools.update_wrapper(
            self, original
        )  # first: it takes over the attributes of one of us that is wrapped again
        self._owner = owner
        self._name = name
        self._around = around
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._original, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)


class _State:
    """Stands in an object's ``__dict__`` for ``__getstate__``, which copies and pickles are made from, and leaves out what is ours.

    A shallow copy would otherwise share the replaced methods, and call them with the state of the object that it was copied from.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __call__(self) -> Any:
        own = getattr(
            type(self._owner), "__getstate__", None
        )  # none in Python 3.10, unless the class has one
        state = vars(self._owner) if own is None else own(self._owner)
        if isinstance(state, tuple):  # with __slots__: the dictionary, and the slots
            return (_without_ours(state[0]), *state[1:])
        return _without_ours(state)


def _without_ours(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if not isinstance(value, (InstanceMethod, _State))}


def wrap(owner: Any, name: str, around: Around) -> None:
    """Let calls of ``owner.name`` go through ``around``; nothing when the object has no such method."""
    if hasattr(owner, name):
        owner.__dict__[name] = InstanceMethod(owner, name, around)
        owner.__dict__.setdefault("__getstate__", _State(owner))
