"""Names and paths below an output directory.

::

    <output_dir>/concurrent_checkpoint/      Root
        checkpoint-200/                      CheckpointDir: exactly the files that stock Trainer writes, and
            .ckpt/rank-0.json                a vote for each rank
            .ckpt/manifest.json              published last: its presence, whole and matching, is the commit
            .ckpt/abandoned.json             instead of it, when a save was given up
            .ckpt/<attempt>-<n>.part         files that are not durable yet
        .aside/200-<attempt>/                what was never committed, or stood in the way of a newer training
        .run/run.json                        the newest run and its lineages
        .run/events-rank0.jsonl              events with timings
        .run/heartbeat.json                  the step that training is at
        .run/gave-up-<attempt>-<n>-rank1     the last word of a rank that cannot write any more
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

CHECKPOINT_ROOT = "concurrent_checkpoint"
PRIVATE = ".ckpt"
LOOP_HOME = ".ckpt-run"
ASIDE = ".aside"

_CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
_VOTE = re.compile(r"rank-(0|[1-9][0-9]*)\.json")


def step_of(name: str) -> int | None:
    """The step in ``checkpoint-<step>``, None for any other name."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else None


def rank_of(name: str) -> int | None:
    """The rank in ``rank-<rank>.json``, None for any other name."""
    match = _VOTE.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class CheckpointDir:
    """One ``checkpoint-<step>`` directory. It need not exist. Use absolute paths: a training script may change directory.

    ``staged`` names a save whose files wait in a folder below ``.ckpt``, since another checkpoint is in place until they are committed
    (:mod:`datastates.store.staged`). Without it they are written where they belong.
    """

    path: Path
    step: int
    staged: str = ""

    @property
    def root(self) -> Root:
        """The root it lies in, in place or set aside."""
        parent = self.path.parent
        return Root(parent.parent if parent.name == ASIDE else parent)

    @property
    def private(self) -> Path:
        return self.path / PRIVATE

    @property
    def files(self) -> Path:
        """Where the files are written. The last name is the same either way: some writers make something of it."""
        return self.private / self.staged / self.path.name if self.staged else self.path

    @property
    def manifest(self) -> Path:
        return self.private / "manifest.json"

    @property
    def abandoned(self) -> Path:
        return self.private / "abandoned.json"

    def vote(self, rank: int) -> Path:
        return self.private / f"rank-{rank}.json"

    def temporary(self, attempt: str, n: int) -> Path:
        """Where the ``n``-th file of an attempt is written until it is durable."""
        return self.private / f"{attempt}-{n}.part"

    def prepare(self) -> None:
        """Make the directory and its private folder, at once: the commit makes their names durable, and nothing needs that before.

        A directory without the private one is never deleted as a leftover.
        """
        self.private.mkdir(parents=True, exist_ok=True)
        if self.staged:
            self.files.mkdir(parents=True, exist_ok=True)

    def relative(self, path: str | os.PathLike[str]) -> str:
        """The name of a file of this checkpoint as votes and manifests spell it, wherever it is written.

        Raises:
            ValueError: the path is not inside the checkpoint.
        """
        return Path(os.path.abspath(path)).relative_to(os.path.abspath(self.files)).as_posix()


@dataclass(frozen=True, slots=True)
class Root:
    """A ``concurrent_checkpoint`` directory, or one that a training loop saves into. It need not exist.

    ``home`` is where our own folders lie; without it they lie in the root itself. A training loop's directory is not ours: there they share
    one folder, :data:`LOOP_HOME`.
    """

    path: Path
    home: Path | None = None

    @classmethod
    def of(cls, output_dir: str | os.PathLike[str]) -> Root:
        """The root of an output directory, with an absolute path."""
        return cls(Path(os.path.abspath(output_dir)) / CHECKPOINT_ROOT)

    @property
    def aside(self) -> Path:
        return (self.home or self.path) / ASIDE

    @property
    def run_dir(self) -> Path:
        return (self.home or self.path) / ".run"

    @property
    def run_record(self) -> Path:
        return self.run_dir / "run.json"

    @property
    def heartbeat(self) -> Path:
        return self.run_dir / "heartbeat.json"

    def events(self, rank: int) -> Path:
        return self.run_dir / f"events-rank{rank}.jsonl"

    def checkpoint(self, step: int) -> CheckpointDir:
        return CheckpointDir(self.path / f"checkpoint-{step}", step)

    def steps(self) -> list[int]:
        """The steps that have a directory, committed or not, highest first; empty when there is no root."""
        found = (step_of(entry.name) for entry in directories(self.path))
        return sorted((step for step in found if step is not None), reverse=True)


def directories(path: Path) -> list[os.DirEntry[str]]:
    """The directories in ``path`` in order of their names; empty when it does not exist."""
    try:
        with os.scandir(path) as entries:
            return sorted((entry for entry in entries if _is_directory(entry)), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """A link that leads round in a circle leads to no directory, as one that leads nowhere."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False
