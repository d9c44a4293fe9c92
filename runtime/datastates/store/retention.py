"""Which checkpoints go when a newer one is committed, by the limit that the user set."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from datastates.store.catalog import Checkpoint
from datastates.store.commit import delete


def expendable(
    checkpoints: Sequence[Checkpoint],
    limit: int | None,
    best: Collection[str | os.PathLike[str]] = (),
    *,
    lineage: str,
) -> list[Checkpoint]:
    """The committed checkpoints of ``lineage`` that ``limit`` does not allow, oldest first.

    As in Trainer, the newest and every best one always stay, even when that is more than the limit; they count towards it. Whatever is
    not committed, or belongs to another lineage, neither counts nor goes. Without a limit (None, 0 or less) nothing goes.

    Args:
        best: paths or names of the checkpoints that are the best, or may yet be. Only the name counts: a path may be relative to a
            working directory that has changed, or from before the output directory was moved.
    """
    if limit is None or limit <= 0:
        return []
    counted = [
        item for item in checkpoints if item.committed and item.manifest and item.manifest.lineage == lineage
    ]
    counted.sort(key=lambda item: item.step)
    names = {Path(path).name for path in best}
    protected = [item for item in counted if item is counted[-1] or item.path.name in names]
    others = [item for item in counted if item not in protected]
    room = max(0, limit - len(protected))
    return others[: len(others) - room] if room < len(others) else []


def remove(checkpoint: Checkpoint) -> None:
    """Delete a checkpoint so that no moment shows half of it. Raises OSError when the file system refuses."""
    delete(checkpoint.directory)
