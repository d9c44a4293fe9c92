"""``keep_trainer_saves``: Trainer's own checkpoint-N in its usual place, made from the committed one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from datastates.store.layout import PRIVATE, CheckpointDir, step_of

_UNFINISHED = re.compile(r"\.checkpoint-[0-9]+-[0-9a-f]{8}(-[0-9]+)?")
"""Copies in the making, of this attempt or of one that was killed."""


def trainer_save(
    committed: CheckpointDir, output_dir: Path, attempt: str, limit: int | None, best: Collection[str]
) -> Path:
    """Give ``output_dir/checkpoint-N``, hard links where the file system has them, and keep Trainer's limit there.

    The name appears with everything in it: the copy is made under another name that no tool of Trainer's looks at. Where there is such a
    directory already, files of the same name are replaced and all others stay, as when Trainer saves into it.

    Args:
        best: names of checkpoints that are the best, or were when this one was saved.

    Returns:
        The directory.
    """
    destination = output_dir / committed.path.name
    making = output_dir / f".{committed.path.name}-{attempt}"
    for unfinished in filter(_UNFINISHED.fullmatch, os.listdir(output_dir)):
        shutil.rmtree(output_dir / unfinished)
    shutil.copytree(
        committed.path, making, copy_function=_link_or_copy, symlinks=True, ignore=_private_of(committed.path)
    )
    if destination.exists():
        _move_files(making, destination)
    else:
        making.rename(destination)
    _rotate(output_dir, limit, best)
    return destination


def _move_files(source: Path, destination: Path) -> None:
    for directory, _, names in os.walk(source):
        target = destination / Path(directory).relative_to(source)
        target.mkdir(exist_ok=True)
        for name in names:
            (Path(directory) / name).replace(target / name)
    shutil.rmtree(source)


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
