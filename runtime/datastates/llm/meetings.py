"""The collectives inside ``_save_checkpoint``, which a rank that fails half-way has to attend all the same.

Stock code lets all ranks meet in ``store_flos`` at the beginning, and at a barrier before the best model is noted. A rank whose disk fails
before one of them would leave the others waiting there for ever, and be out of step with them in every collective of the training.

Where the state is sharded the ranks meet many times more, to gather a model or to agree on who writes what. There a rank whose disk fails at
something that it does for itself goes on, as if it had succeeded, and says so in the end. What torch.distributed.checkpoint does it
carries to all ranks itself.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from datastates.llm import trouble
from datastates.llm.deepspeed_meetings import TrainerMeetings
from datastates.llm.ranks import Ranks
from datastates.llm.replaced import counted_calls, replaced


def many(trainer: Any) -> bool:
    """Whether the ranks meet more often than at the beginning and before the best model is noted."""
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    return bool(sharded) and not Ranks.of(trainer).alone


@contextmanager
def kept(trainer: Any, root: str, after_first: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Run ``_save_checkpoint``; should it fail, attend first what this rank has missed.

    Args:
        root: the directory whose disk may fail.
        after_first: is called each time the ranks have met at the beginning.

    Raises:
        Exception: as the code inside, or the first error at the disk that was put off.
    """
    put_off = PutOff(root)
    sharded = TrainerMeetings(trainer) if many(trainer) and trainer.is_deepspeed_enabled else None
    with ExitStack() as stack:
        if many(trainer):
            after_first = put_off.wrap(after_first)
            stack.enter_context(replaced(trainer, "_save", put_off.wrap))
            stack.enter_context(replaced(os, "makedirs", put_off.wrap_for_any_path))
        flos = stack.enter_context(counted_calls(trainer, "store_flos", after_first))
        barriers = stack.enter_context(counted_calls(dist, "barrier"))
        if sharded:
            stack.enter_context(sharded.kept(put_off, barriers))
        try:
            yield
        except BaseException as error:
            ours = isinstance(error, Exception) or trouble.at_the_disk(error, root)
            if ours and not Ranks.of(trainer).alone:
                _attend(trainer, flos, barriers, sharded)
            raise
        if put_off.errors:
            raise put_off.errors[0]


def _attend(trainer: Any, flos: list[None], barriers: list[None], sharded: TrainerMeetings | None) -> None:
    if not flos and trainer.hp_search_backend is None and not trainer.state.is_hyper_param_search:
        type(trainer).store_flos(trainer)
    if sharded:
        sharded.attend_model()
    apart = Ranks.of(trainer).misled  # then Trainer's own code meets nobody
    if len(barriers) == (sharded.barriers if sharded else 0) and _meets_for_best(trainer) and not apart:
        dist.barrier()
    if sharded:
        sharded.attend_state()


def _meets_for_best(trainer: Any) -> bool:
    """Whether stock code lets the ranks meet before it notes the best model.

    A best step alone does not tell: it may come from the checkpoint of a training with another save strategy. "best" is a strategy that
    stock code meets for since transformers 5.
    """
    stock = sys.modules["transformers.trainer"].Trainer._save_checkpoint.__code__
    notes = {"steps", "epoch", *(["best"] if "BEST" in stock.co_names else [])}
    return trainer.args.save_strategy in notes and bool(trainer.state.best_global_step)


class PutOff:
    """Collects the errors at the disk of ``root`` from what this thread does for its rank alone."""

    def __init__(self, root: str) -> None:
        self.errors: list[Exception] = []
        self._root = root
        self._thread = threading.get_ident()

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """For a writer of files: it has the error once, and then nothing is missing but the files."""
        return self._wrap(original, lambda error: trouble.at_the_disk(error, self._root))

    def wrap_for_any_path(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """For a function that code may also call to see it fail."""
        return self._wrap(original, trouble.only_disks_have)

    def _wrap(self, original: Callable[..., Any], is_ours: Callable[[Exception], bool]) -> Callable[..., Any]:
        def forgiven(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except Exception as error:
                if threading.get_ident() != self._thread or not is_ours(error):
                    raise
                self.errors.append(error)

        return forgiven
