"""A training over several nodes, played on one machine: each has its ranks and a working directory of its own, as torchrun places them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "scripts"))

import train


@dataclass
class Job(train.Job):
    """``output_dir`` is relative to the node's ``disk``; ``nodes`` of them with as many ranks each; ``one_disk``: they all see the same."""

    disks: str = ""
    nodes: int = 2
    one_disk: bool = False


def disk(job: Job, node: int) -> Path:
    return Path(job.disks) / ("shared" if job.one_disk else f"node{node}")


def main(job: Job) -> None:
    ranks = int(os.environ["WORLD_SIZE"]) // job.nodes
    node, local_rank = divmod(int(os.environ["RANK"]), ranks)
    os.environ.update(GROUP_RANK=str(node), LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(ranks))
    disk(job, node).mkdir(parents=True, exist_ok=True)
    os.chdir(disk(job, node))
    train.main(job)
