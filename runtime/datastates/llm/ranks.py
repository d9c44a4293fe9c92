"""Who this process is among the ranks, and the few collectives that run on the main thread at the start of ``train()``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from datastates.llm import log

logger = log.logger("datastates.llm.decorator")


@dataclass(frozen=True)
class Ranks:
    """This process's place: ``rank`` of ``size``, and ``local_rank`` of ``local_size`` on this host.

    ``together`` are the ranks that save into one directory, in order, the one that commits first; empty stands for all of them, where every
    rank sees the same disk. ``node`` of ``nodes`` is the number of that directory.

    ``misled``: the Trainer of every rank believes to be alone. All of them would write the same files; rank 0 does.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    together: tuple[int, ...] = ()
    node: int = 0
    nodes: int = 1
    misled: bool = False

    @classmethod
    def of(cls, trainer: Any) -> Ranks:
        """As the Trainer itself counts: its arguments are the truth, the environment only tells the ranks of this host.

        Except where they say that it is alone and it is not: accelerate finds no backend for DeepSpeed on CPUs, for one.
        """
        args = trainer.args
        if int(args.world_size) <= 1 and _launched() > 1:
            return cls._launched_together()
        size = max(int(args.world_size), 1)
        local_size = min(size, max(int(os.environ.get("LOCAL_WORLD_SIZE", size)), 1))
        return cls(int(args.process_index), size, int(args.local_process_index), local_size)

    @classmethod
    def _launched_together(cls) -> Ranks:
        """As the process group counts, which DeepSpeed may have; else as the launcher does, and then no rank can speak to another."""
        size = _launched()
        local_size = min(size, max(int(os.environ.get("LOCAL_WORLD_SIZE", size)), 1))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if _connected():
            return cls(dist.get_rank(), size, local_rank, local_size, misled=True)
        return cls(int(os.environ["RANK"]), size, local_rank, local_size, together=(0,), misled=True)

    @property
    def bystander(self) -> bool:
        """Whether this rank saves nothing, since rank 0 saves the same and they cannot speak."""
        return self.misled and self.alone and self.rank != 0

    @property
    def alone(self) -> bool:
        return self.size == 1 or not _connected()

    @property
    def voters(self) -> tuple[int, ...]:
        """The ranks whose votes make a checkpoint in this rank's directory."""
        return self.together or tuple(range(self.size))

    @property
    def committer(self) -> int:
        """The rank that commits in this rank's directory, and keeps the record there."""
        return self.voters[0]

    @property
    def leads(self) -> bool:
        return self.rank == self.committer


def _connected() -> bool:
    return dist.is_available() and dist.is_initialized()


def _launched() -> int:
    """How many ranks there are, whatever the Trainer believes."""
    if _connected():
        return dist.get_world_size()
    given = (os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK"))
    size, rank = (int(text) if text.isdigit() else -1 for text in given)
    return size if 0 <= rank < size else 1


def tell_misled(ranks: Ranks) -> None:
    """One line, on rank 0, when the Trainers are."""
    if ranks.misled and ranks.rank == 0:
        logger.warning(
            "%s %d ranks are running, but the Trainer of each believes to be alone: they train on the same data, and would write the same "
            "files. Only rank 0 saves%s",
            log.PREFIX,
            ranks.size,
            "" if ranks.alone else ", and each rank its part of what DeepSpeed has spread over them",
        )


@contextmanager
def trainer_writes_nothing(trainer: Any) -> Iterator[None]:
    """While open, the Trainer leaves the files to another rank that are no part of a sharded state."""
    args = trainer.args
    kind = type(args)
    args.__class__ = type(kind.__name__, (kind,), {"should_save": False, "__module__": kind.__module__})
    try:
        yield
    finally:
        args.__class__ = kind


def of_trainer_alone(name: str) -> bool:
    """Whether a file of that name is the same on every misled rank: all but the parts of what DeepSpeed has spread over them."""
    return not name.endswith("_states.pt")


def meet(ranks: Ranks) -> None:
    """Return when every rank has come here. Main thread only."""
    if not ranks.alone:
        dist.barrier()


def tell(ranks: Ranks, value: Any, device: Any) -> Any:
    """Rank 0's ``value``, on every rank. Main thread only; ``value`` is pickled; ``device`` is the group's device."""
    if ranks.alone:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=device if dist.get_backend() == "nccl" else None)
    return box[0]


def gather(ranks: Ranks, value: Any) -> list[Any]:
    """Every rank's ``value``, in order of rank, on every rank. Main thread only; ``value`` is pickled."""
    if ranks.alone:
        return [value]
    values: list[Any] = [None] * ranks.size
    dist.all_gather_object(values, value)
    return values


def first(ranks: Ranks, value: str) -> str:
    """The first ``value`` of any rank that is not empty, "" when all are. Main thread only."""
    if ranks.alone:
        return value
    return next((f"rank {rank}: {text}" for rank, text in enumerate(gather(ranks, value)) if text), "")


def committed_everywhere(ranks: Ranks, steps: Iterable[int]) -> int | None:
    """The newest of the ``steps`` that the committing ranks of all nodes have; None when there is no such step. Main thread only."""
    everywhere = [
        set(found) for found in gather(ranks, tuple(steps) if ranks.leads else None) if found is not None
    ]
    return max(set.intersection(*everywhere), default=None)
