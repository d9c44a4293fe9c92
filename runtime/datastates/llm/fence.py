"""The fence: the wait just before saved memory would be changed.

There is one fence in a process. Saves enter it when their call returns with memory still to be copied; whoever is about to change that
memory passes it first: every optimizer step, ``Module.load_state_dict``, a user's callback, the next save, the end of training. A save of
copies that are ours alone (:mod:`datastates.llm.orphans`) holds up only the last two: nobody can change those, but they take room.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from datastates.llm import deepspeed, fsdp
from datastates.llm.still import SteppingOptimizers


class Staging(Protocol):
    """A save whose memory is being copied."""

    changeable: bool
    """Whether some of it is memory that training will change."""

    def settle(self) -> None:
        """Return when nothing of it is left to copy, having checked that it held still. Never raises."""

    def note_stall(self, seconds: float) -> None:
        """``seconds`` of training were spent waiting for it."""


class Fence:
    """Thread-safe; ``wait`` costs a list look-up when nothing is staged."""

    def __init__(self) -> None:
        self.forget()
        self.optimizers = SteppingOptimizers()

    @property
    def busy(self) -> bool:
        """Whether a save has memory left to copy that could change."""
        return bool(self._changeable)

    def forget(self) -> None:
        """In a forked child: what is staged is the parent's, and a lock may have been held by a thread that is not here."""
        self._lock = threading.Lock()
        self._changeable: list[Staging] = []
        self._unchanging: list[Staging] = []

    def enter(self, save: Staging) -> None:
        with self._lock:
            (self._changeable if save.changeable else self._unchanging).append(save)

    def leave(self, save: Staging) -> None:
        with self._lock:
            for staging in (self._changeable, self._unchanging):
                if save in staging:
                    staging.remove(save)

    def wait(self) -> None:
        """Return when no save has memory left to copy that could change; the calling thread copies what is left itself."""
        self._settle(self._changeable)

    def wait_for_all(self) -> None:
        """As :meth:`wait`, for copies that are ours alone as well: before there are more of them, or when nothing else is to be done."""
        self._settle(self._changeable)
        self._settle(self._unchanging)

    def _settle(self, staging: list[Staging]) -> None:
        while staging:
            with self._lock:
                save = staging[0] if staging else None
            if save is None:
                return
            began = time.perf_counter()
            save.settle()
            self.leave(save)
            save.note_stall(time.perf_counter() - began)


FENCE = Fence()

_installed = False


def install() -> None:
    """Put the fence before every optimizer step and every ``load_state_dict`` of this process. Idempotent.

    DeepSpeed's engines get theirs as soon as DeepSpeed is loaded: call it again when that may have happened.
    """
    global _installed
    deepspeed.install(FENCE.wait, FENCE.optimizers.note_engine)
    if _installed:
        return
    _installed = True
    fsdp.install(FENCE.wait)
    os.register_at_fork(after_in_child=FENCE.forget)
    register_optimizer_step_pre_hook(_before_step)
    torch.nn.Module.load_state_dict = _fenced(torch.nn.Module.load_state_dict)  # type: ignore[method-assign]


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    FENCE.optimizers.note_step(optimizer)
    FENCE.wait()


def _fenced(method: Any) -> Any:
    @functools.wraps(method)
    def behind_the_fence(*args: Any, **kwargs: Any) -> Any:
        FENCE.wait()
        return method(*args, **kwargs)

    return behind_the_fence
