"""Who this process is among the ranks, and the few collectives that run on the main thread at the start of ``train()``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """This process's place: ``rank`` of ``size``, and ``local_rank`` of ``local_size`` on this host.

    ``together`` are the ranks that save into one directory, in order, the one that commits first; empty stands for all of them, where every
    rank sees the same disk. ``node`` of ``nodes`` is the number of that directory.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    together: tuple[int, ...] = ()
    node: int = 0
    nodes: int = 1

    @classmethod
    def of(cls, trainer: Any) -> Ranks:
        """As the Trainer itself counts: its arguments are the truth, the environment only tells the ranks of this host."""
        args = trainer.args
        size = max(int(args.world_size), 1)
        local_size = min(size, max(int(os.environ.get("LOCAL_WORLD_SIZE", size)), 1))
        return cls(int(args.process_index), size, int(args.local_process_index), local_size)

    @property
    def alone(self) -> bool:
        return self.size == 1 or not (dist.is_available() and dist.is_initialized())

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
