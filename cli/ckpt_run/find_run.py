"""Find the checkpoints that a person means: by a directory, by the last launch in the working directory, by looking."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from datastates.store.launches import LaunchRecord
from datastates.store.layout import CHECKPOINT_ROOT, PRIVATE, Root
from datastates.store.loops import loop_root
from datastates.store.runrecord import RunRecord

DEPTHS = ("", "*/", "*/*/")  # a search over hyperparameters has an output directory for each trial


def root_at(directory: Path) -> Root | None:
    """The newest root at, in, or one or two levels below ``directory``; one of a training loop at or in it. None when there is none."""
    directory = directory.absolute()
    if directory.name == CHECKPOINT_ROOT or (directory / ".run").is_dir() or _has_checkpoints(directory):
        return Root(directory)
    loop = loop_root(directory)
    if loop is not None:
        return loop
    for depth in DEPTHS:
        found = [Root(path) for path in directory.glob(depth + CHECKPOINT_ROOT) if path.is_dir()]
        if found:
            return _newest(found)
    return None


def last_launch() -> LaunchRecord | None:
    """What ``ckpt-run`` ran in the working directory last."""
    return LaunchRecord.newest(str(Path.cwd()))


def _has_checkpoints(directory: Path) -> bool:
    return any(path.is_dir() for path in directory.glob(f"checkpoint-*/{PRIVATE}"))


def _newest(roots: Iterable[Root]) -> Root:
    return max(roots, key=_updated)


def _updated(root: Root) -> float:
    from datastates.store.document import ManifestError

    try:
        record = RunRecord.read(root)
    except ManifestError:
        record = None
    return record.updated if record else root.path.stat().st_mtime
