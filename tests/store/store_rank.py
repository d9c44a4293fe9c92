"""One rank of a save, as a process: ``python store_rank.py ROOT STEP RANK WORLD_SIZE [error]``. Prints the outcome."""

from __future__ import annotations

import sys
from pathlib import Path

from datastates.store import commit
from datastates.store.layout import Root
from store_files import vote, write


def main(root: str, step: int, rank: int, world_size: int, how: str = "") -> None:
    checkpoint = Root(Path(root)).checkpoint(step)
    files = {
        f"rng_state_{rank}.pth": b"%d" % rank * 5000,
        "shared.json": b"{}" if how != "differs" else b"[]",
    }
    checkpoint.prepare()
    for n, (name, data) in enumerate(files.items()):
        write(checkpoint.private, {f"attempt1-{rank}{n}.part": data})
        (checkpoint.private / f"attempt1-{rank}{n}.part").rename(checkpoint.path / name)
    ballot = vote(checkpoint, files, rank=rank, world_size=world_size)
    commit.cast_vote(
        checkpoint, commit.failed_vote(ballot, "No space left on device") if how == "error" else ballot
    )
    if rank == 0:
        try:
            votes = commit.collect_votes(checkpoint, "attempt1", 1, range(world_size), timeout=30)
            commit.publish(checkpoint, votes)
        except commit.CommitAbandoned as abandoned:
            commit.abandon(checkpoint, "attempt1", 1, abandoned.reason)
    print(commit.wait_outcome(checkpoint, "attempt1", 1, timeout=30))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
