"""The meetings of the ranks inside DeepSpeed's part of a save, and how a rank whose disk fails attends them all.

    engine.save_checkpoint: make the directory, barrier, compare the tag, [ZeRO-3: gather small parameters], write, `latest`, barrier
    ZeRO-3's gathered model: a broadcast for each parameter

What a rank writes there by itself is put off when it fails: DeepSpeed's own code goes on to the next meeting, and the save comes to nothing
in the end. Where a rank has left before DeepSpeed's part began, it takes part with nothing to write.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from datastates.llm.replaced import counted_calls, replaced

_GATHER = "_zero3_consolidated_16bit_state_dict"

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class PutOff(Protocol):
    """Collects the errors at the disk."""

    errors: list[Exception]

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """For a function that is not to raise them."""


@contextmanager
def writers_forgiven(engine: Any, put_off: PutOff) -> Iterator[None]:
    """While open, no write of ``engine.save_checkpoint`` that fails at the disk keeps the rank from the meetings that follow."""
    with (
        _writers(engine, put_off.wrap),
        replaced(engine, "save_checkpoint", lambda save: _to_the_end(engine, save, put_off)),
    ):
        yield


@contextmanager
def _writers(engine: Any, wrap: Wrap) -> Iterator[None]:
    """Replace everything by which an engine writes, except for ``latest``, which comes last."""
    with ExitStack() as stack:
        for owner, name in (
            (engine.checkpoint_engine, "makedirs"),
            (engine.checkpoint_engine, "save"),
            (engine.checkpoint_engine, "commit"),
            (engine, "_copy_recovery_script"),
            (shutil, "copytree"),
        ):
            stack.enter_context(replaced(owner, name, wrap))
        yield


def _to_the_end(engine: Any, save: Callable[..., Any], put_off: PutOff) -> Callable[..., Any]:
    """``save_checkpoint`` that attends its last barrier also when ``latest`` cannot be written."""

    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        done: list[Any] = []
        put_off.wrap(lambda: done.append(save(*args, **kwargs)))()
        if not done:
            _barrier()
        return True

    return save_checkpoint


def _barrier() -> None:
    sys.modules["deepspeed.comm"].barrier()


class TrainerMeetings:
    """Which of the meetings that a Trainer's save has with DeepSpeed this rank has attended.

    Without a gathered model ZeRO-3 has none to save: Trainer calls ``save_checkpoint`` in its place, and once more for the state.
    """

    def __init__(self, trainer: Any) -> None:
        self.barriers = 0
        """How many of the barriers so far were DeepSpeed's own."""
        self._trainer = trainer
        self._engine = trainer.deepspeed
        self._gathers: list[None] = []
        self._saves: list[None] = []
        partitioned = self._engine.zero_optimization_partition_weights()
        adapter = hasattr(trainer.model, "peft_config")
        self._gathered = partitioned and (adapter or self._engine.zero_gather_16bit_weights_on_model_save())
        self._saved_twice = partitioned and not self._gathered

    @contextmanager
    def kept(self, put_off: PutOff, barriers: list[None]) -> Iterator[None]:
        """Run what saves; ``barriers`` grows with each barrier, whoever asks for it."""
        with ExitStack() as stack:
            stack.enter_context(writers_forgiven(self._engine, put_off))
            stack.enter_context(
                replaced(self._engine, "save_checkpoint", lambda save: self._apart(save, barriers))
            )
            self._saves = stack.enter_context(counted_calls(self._engine, "save_checkpoint"))
            self._gathers = stack.enter_context(counted_calls(self._engine, _GATHER))
            yield

    def attend_model(self) -> None:
        """What comes before the best model is noted."""
        if self._gathered and not self._gathers:
            getattr(self._engine, _GATHER)()
        if self._saved_twice and not self._saves:
            self._save_nothing()

    def attend_state(self) -> None:
        """What comes after it."""
        if not self._trainer.args.save_only_model and len(self._saves) < 1 + self._saved_twice:
            self._save_nothing()

    def _apart(self, save: Callable[..., Any], barriers: list[None]) -> Callable[..., Any]:
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            before = len(barriers)
            try:
                return save(*args, **kwargs)
            finally:
                self.barriers += len(barriers) - before

        return save_checkpoint

    def _save_nothing(self) -> None:
        with _writers(self._engine, lambda write: lambda *args, **kwargs: True):
            self._engine.save_checkpoint(os.curdir, save_latest=False)
