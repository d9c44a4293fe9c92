"""``keep_trainer_saves``: Trainer's own checkpoint-N in its usual place, made from the committed one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from datastates.store.layout import PRIVATE, CheckpointDir, step_of


def trainer_save(
    committed: CheckpointDir, output_dir: Path, attempt: str, limit: int | None, best: Collection[str]
) -> Path:
    """Give ``output_dir/checkpoint-N``, hard links where the file system has them, and keep Trainer's limit there.

    The name appears with everything in it: the copy is made under another name that no tool of Trainer's looks at.

    Args:
        best: names of checkpoints that are the best, or were when this one was saved.

    Returns:
        The new directory; an older one of the same step is replaced.
    """
    destination = output_dir / committed.path.name
    making = output_dir / f".{committed.path.name}-{attempt}"
    shutil.rmtree(making, ignore_errors=True)
    shutil.copytree(
        committed.path, making, copy_function=_link_or_copy, symlinks=True, ignore=_private_of(committed.path)
    )
    if destination.exists():
        shutil.rmtree(destination)
    making.rename(destination)
    _rotate(output_dir, limit, best)
    return destination


def _private_of(checkpoint: Path):  # type: ignore[no-untyped-def]
    return lambda directory, names: {PRIVATE} if Path(directory) == checkpoint else set()


def _link_or_copy(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, destination)


def _rotate(output_dir: Path, limit: int | None, best: Collection[str]) -> None:
    """Trainer's rule, in the order of steps: the newest and the best stay, then the oldest go until ``limit`` are left."""
    saves = sorted((step, path) for path in output_dir.iterdir() if (step := step_of(path.name)) is not None)
    if not limit or limit <= 0 or len(saves) <= limit:
        return
    others = [path for _, path in saves[:-1] if path.name not in best]
    surplus = len(saves) - max(limit, len(saves) - len(others))
    for path in others[:surplus]:
        shutil.rmtree(path)
