"""The collectives inside ``_save_checkpoint``, which a rank that fails half-way has to attend all the same.

Stock code lets all ranks meet in ``store_flos`` at the beginning, and at a barrier before the best model is noted. A rank whose disk fails
before one of them would leave the others waiting there for ever, and be out of step with them in every collective of the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from datastates.llm.ranks import Ranks


@contextmanager
def kept(trainer: Any, after_first: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Run ``_save_checkpoint``; should it fail, attend first what this rank has missed.

    Args:
        after_first: is called each time the ranks have met at the beginning.
    """
    with ExitStack() as stack:
        flos = stack.enter_context(counted_calls(trainer, "store_flos", after_first))
        barriers = stack.enter_context(counted_calls(dist, "barrier"))
        try:
            yield
        except Exception:
            if not Ranks.of(trainer).alone:
                _attend(trainer, flos, barriers)
            raise


def _attend(trainer: Any, flos: list[None], barriers: list[None]) -> None:
    if not flos and trainer.hp_search_backend is None and not trainer.state.is_hyper_param_search:
        type(trainer).store_flos(trainer)
    if not barriers and trainer.state.best_global_step:
        dist.barrier()


@contextmanager
def counted_calls(
    owner: Any, name: str, afterwards: Callable[[], object] = lambda: None
) -> Iterator[list[None]]:
    """The list grows by one with each call of ``owner.name``."""
    calls: list[None] = []
    own = name in vars(owner)
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        result = original(*args, **kwargs)
        afterwards()
        return result

    setattr(owner, name, counted)
    try:
        yield calls
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
