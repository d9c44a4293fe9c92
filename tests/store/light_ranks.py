"""Hundreds of ranks on one machine: processes that know nothing but the store, forked from one.

``python light_ranks.py JOB`` runs :class:`Job` (as JSON) and prints a JSON list with what each rank has to tell: the ``outcomes`` of its saves
in order ("" is a commit), the ``calls`` to the file system that each save cost it by name, and ``seconds``. A rank that was killed tells
nothing; one that was stopped is killed when all others have ended.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import slow_files
from datastates.store import commit
from datastates.store.layout import CheckpointDir, Root
from datastates.store.manifest import FileEntry, Vote
from datastates.store.quorum import Quorum

CALLS = (
    *("open", "stat", "lstat", "mkdir", "replace", "rename", "unlink", "remove", "scandir", "listdir"),
    *("fsync", "readlink", "utime"),
)
"""What is counted: the functions of ``os`` that reach a file server each time."""


@dataclass
class Job:
    """``world`` ranks save at each of ``steps``, and ``faults`` happen: see :func:`happen`. ``lag``: see :mod:`slow_files`.

    ``stock``: how many files rank 0 leaves that nobody votes for. ``pause``: seconds that each rank is later than the one before.
    """

    output_dir: str
    world: int
    steps: list[int]
    attempt: str = "attempt1"
    first_save: int = 1
    timeout: float = 60.0
    patience: float = 0.0
    stock: int = 10
    pause: float = 0.0
    lag: dict[str, float] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)


class Rank:
    """One rank's part of every save, in the order in which a training does it."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.rank = rank
        self.root = Root.of(job.output_dir)
        self.quorum = Quorum(self.root, job.attempt, rank, 0, tuple(range(job.world)), job.timeout)
        self.save = 0

    def saves(self) -> dict[str, Any]:
        outcomes, calls, seconds = [], [], []
        time.sleep(self.job.pause * self.rank)
        for number, step in enumerate(self.job.steps, self.job.first_save):
            self.save = number
            began = time.monotonic()
            with counted() as count:
                outcomes.append(self._save(self.root.checkpoint(step)))
            calls.append(dict(count))
            seconds.append(time.monotonic() - began)
        return {"rank": self.rank, "outcomes": outcomes, "calls": calls, "seconds": seconds}

    def _save(self, checkpoint: CheckpointDir) -> str:
        self._reach("begun")
        try:
            files = self._write(checkpoint)
        except OSError as error:
            return self._vote(checkpoint, (), str(error))
        return self._vote(checkpoint, files, None)

    def _write(self, checkpoint: CheckpointDir) -> tuple[FileEntry, ...]:
        """As the engine does: a temporary file, and its name when it is durable."""
        checkpoint.prepare()
        if self.rank == 0:
            for number in range(self.job.stock):
                (checkpoint.path / f"stock{number}.json").write_text("{}")
        data = b"%d" % self.rank * 500
        temporary = checkpoint.temporary(f"{self.job.attempt}-r{self.rank}", 0)
        with open(temporary, "wb", buffering=0) as stream:
            stream.write(data)
            self._reach("written")
            os.fsync(stream.fileno())
        final = checkpoint.path / f"state_{self.rank}.pt"
        os.rename(temporary, final)
        self._reach("renamed")
        return (FileEntry(final.name, len(data), commit.zlib.crc32(data)),)

    def _vote(self, checkpoint: CheckpointDir, files: tuple[FileEntry, ...], error: str | None) -> str:
        vote = Vote(
            attempt=self.job.attempt,
            save=self.save,
            step=checkpoint.step,
            rank=self.rank,
            world_size=self.job.world,
            lineage="lineage1",
            ordinal=0,
            files=files,
            error=error,
        )
        if self.rank == 0:
            return self.quorum.lead(checkpoint, vote, lambda votes: self._publish(checkpoint, votes))
        return self.quorum.follow(checkpoint, vote)

    def _publish(self, checkpoint: CheckpointDir, votes: list[Vote]) -> None:
        self._reach("collected")
        commit.publish(checkpoint, votes, patience=self.job.patience)
        self._reach("published")

    def _reach(self, place: str) -> None:
        """Faults happen here; those at a call are installed (:func:`install`)."""
        for fault in self.job.faults:
            if (fault["at"], fault["rank"], fault["save"]) == (place, self.rank, self.save):
                happen(fault["do"])


def happen(what: str) -> None:
    """``KILL`` or ``STOP`` this process, or raise the OSError of that name."""
    import errno

    if what in ("KILL", "STOP"):
        os.kill(os.getpid(), getattr(signal, f"SIG{what}"))
    else:
        number = getattr(errno, what)
        raise OSError(number, os.strerror(number))


def install(rank: Rank) -> None:
    """Faults ``at`` a function of the store: before it is called (``at`` its name) or after (``at`` its name and "!")."""
    for fault in rank.job.faults:
        if fault["rank"] != rank.rank or not hasattr(commit, fault["at"].rstrip("!")):
            continue
        name, after = fault["at"].rstrip("!"), fault["at"].endswith("!")
        original = getattr(commit, name)

        def faulty(
            *args: Any, original: Any = original, fault: Any = fault, after: bool = after, **how: Any
        ) -> Any:
            now = rank.save == fault["save"]
            if now and not after:
                happen(fault["do"])
            result = original(*args, **how)
            if now and after:
                happen(fault["do"])
            return result

        setattr(commit, name, faulty)


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls that the block makes; what was there before is called."""
    count: Counter[str] = Counter()
    before = {name: getattr(os, name) for name in CALLS}
    before_open = builtins.open

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            count[name] += 1
            return original(*args, **how)

        return call

    def open_counted(*args: Any, **how: Any) -> Any:
        count["open"] += "opener" not in how  # an opener is os.open, which counts itself
        return before_open(*args, **how)

    for name, original in before.items():
        setattr(os, name, counting(name, original))
    builtins.open = open_counted  # type: ignore[assignment]
    try:
        yield count
    finally:
        builtins.open = before_open
        for name, original in before.items():
            setattr(os, name, original)


def main(job: Job) -> list[dict[str, Any]]:
    """Run all ranks at once; what they told, in order of rank."""
    report = Path(job.output_dir).with_name(Path(job.output_dir).name + f"-{job.attempt}-told")
    report.mkdir()
    pids = [_fork(job, rank, report) for rank in range(job.world)]
    running = set(pids)
    stopped: set[int] = set()
    while running - stopped:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            stopped.add(pid)
        else:
            running.discard(pid)
    for pid in stopped & running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    told = [report / str(rank) for rank in range(job.world)]
    return [json.loads(path.read_text()) for path in told if path.exists()]


def _fork(job: Job, rank: int, report: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if job.lag:
            slow_files.install(Path(job.output_dir), **job.lag)
        me = Rank(job, rank)
        install(me)
        told = json.dumps(me.saves())
        (report / f".{rank}").write_text(told)
        os.rename(report / f".{rank}", report / str(rank))
        code = 0
    finally:
        os._exit(code)


def encode(job: Job) -> str:
    return json.dumps(asdict(job))


if __name__ == "__main__":
    print(json.dumps(main(Job(**json.loads(sys.argv[1])))))
