"""What training loops without the Trainer have saved: checkpoints with names of their own, in directories of their own.

Our folder lies in the directory that the checkpoints lie in, or beside it where every name in there has to be a checkpoint's (accelerate's
automatic naming). The run's record tells which.
"""

from __future__ import annotations

import os
from pathlib import Path

from datastates.store.catalog import Catalog, Checkpoint
from datastates.store.document import ManifestError
from datastates.store.layout import LOOP_HOME, PRIVATE, Root
from datastates.store.runrecord import RunRecord


def loop_root(directory: Path) -> Root | None:
    """The root at or in ``directory``; None when no training loop has saved there."""
    directory = Path(os.path.abspath(directory))
    for parent in (directory, directory.parent):
        root = _told(parent)
        if root is not None and directory in (root.path, root.path.parent):
            return root
    return None


def all_checkpoints(root: Root) -> list[Checkpoint]:
    """Every checkpoint of a root of either kind, committed or not, newest first.

    A loop's are in the order of their commits: what counts them begins anew when a script with accelerate is started again.
    """
    if root.home is None:
        return Catalog(root).checkpoints()
    return sorted(loop_checkpoints(root), key=_committed_at, reverse=True)


def loop_checkpoints(root: Root) -> list[Checkpoint]:
    """Every checkpoint of a root, committed or not, highest step first; of one step the one that was committed last."""
    folders = [*root.path.glob(f"*/{PRIVATE}"), *root.path.glob(f"*/*/{PRIVATE}")]
    found = [Checkpoint.load(folder.parent) for folder in folders if folder.is_dir()]
    return sorted(found, key=_order, reverse=True)


def _order(checkpoint: Checkpoint) -> tuple[int, float]:
    return checkpoint.step, _committed_at(checkpoint)


def _committed_at(checkpoint: Checkpoint) -> float:
    return checkpoint.manifest.created if checkpoint.manifest else 0.0


def _told(parent: Path) -> Root | None:
    home = parent / LOOP_HOME
    if not home.is_dir():
        return None
    try:
        record = RunRecord.read(Root(parent, home))
    except (ManifestError, OSError):
        record = None
    # The directory may have been moved since: only the last name counts.
    inner = parent / Path(record.output_dir).name if record is not None else parent
    return Root(inner if inner.is_dir() and not (inner / LOOP_HOME).is_dir() else parent, home)
