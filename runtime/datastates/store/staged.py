"""One checkpoint takes the place of another: a directory that is saved into again and again, as training loops do with ``last``.

The old checkpoint stays where it is, whole, until the new one is committed. The new files wait in a folder of their own; the manifest
names the save, and the folder is called after it, so that nothing has to be written down besides::

    last/                                    the files of the checkpoint before
        .ckpt/manifest.json                  its manifest; replacing it is the commit
        .ckpt/<attempt>-<save>/last/         the files of the new one
        .ckpt/<attempt>-<save>/replaces.json the manifest that was there
        .ckpt/stock                          what lies in place was written without us, and is as good as it was

After the commit :func:`settle` moves the files to where they belong and removes those that only the old one had. Killed on the way, the
next :func:`settle` goes on; it is called before anybody reads the directory or saves into it. What has no name in either manifest is the
user's, and is not touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from datastates.store.durable import fsync_directory, write_whole
from datastates.store.layout import PRIVATE, CheckpointDir, rank_of
from datastates.store.manifest import (
    FileEntry,
    Manifest,
    ManifestError,
    parse_manifest,
    read_manifest,
    read_vote,
)
from datastates.store.regular import open_regular
from datastates.store.verify import shape_problem

_REPLACES = "replaces.json"
_STOCK = "stock"
_MARKS = ("manifest.json", _STOCK)
"""In the private folder: with neither of them, what lies beside it is no checkpoint."""


def name_of(attempt: str, save: int) -> str:
    """What :attr:`CheckpointDir.staged` is for a save."""
    return f"{attempt}-{save}"


def open_directory(path: Path, step: int, attempt: str, save: int) -> CheckpointDir:
    """Get a directory ready for a save: settle it, remove what earlier saves into it left, and say where the files go.

    They go where they belong if nothing is there. No save into the directory may be in flight. Raises OSError.
    """
    settle(path)
    present = _present(path)
    if present == {PRIVATE} or not present:
        in_place = CheckpointDir(path, step)
        in_place.prepare()
        _clear(in_place)
        if not in_place.manifest.exists():
            return in_place
    elif PRIVATE not in present:
        _mark_stock(path, attempt)
    elif uncommitted(path):
        _remove_uncommitted(path)
    directory = CheckpointDir(path, step, name_of(attempt, save))
    _clear(directory)
    directory.prepare()
    return directory


def replace(directory: CheckpointDir) -> None:
    """Remember what a staged checkpoint is about to replace; just before its commit. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), open_regular(directory.manifest) as old:
        write_whole(directory.private / directory.staged / _REPLACES, old.read())


def settle(path: Path) -> None:
    """Finish what a commit has begun: move the files of the committed save into place. Nothing where nothing waits. Raises OSError."""
    manifest = _manifest(path)
    if manifest is None:
        return
    directory = _waiting(path, manifest)
    folder = directory.private / directory.staged
    if not folder.is_dir():
        return
    for entry in manifest.files:
        if os.path.lexists(directory.files / entry.path):
            target = path / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(directory.files / entry.path, target)
    _remove_replaced(path, folder, manifest)
    for parent in {(path / entry.path).parent for entry in manifest.files} | {path}:
        fsync_directory(parent)
    shutil.rmtree(folder)
    (directory.private / _STOCK).unlink(missing_ok=True)


def waits(path: Path) -> bool:
    """Whether :func:`settle` has something to do here."""
    manifest = _manifest(path)
    return manifest is not None and (path / PRIVATE / name_of(manifest.attempt, manifest.save)).is_dir()


def places(path: Path, manifest: Manifest) -> dict[Path, list[FileEntry]]:
    """The files of the committed checkpoint at ``path`` by the directory that they lie in now: those that wait to be moved into place lie elsewhere."""
    folder = _waiting(path, manifest).files
    found: dict[Path, list[FileEntry]] = {folder: [], path: []}
    for entry in manifest.files:
        found[folder if os.path.lexists(folder / entry.path) else path].append(entry)
    return found


def uncommitted(path: Path) -> bool:
    """Whether a save of ours began here and was never committed, or nothing has been written yet. False for what stock code wrote, and for
    what is not there."""
    private = path / PRIVATE
    if private.is_dir():
        return not any(os.path.lexists(private / name) for name in _MARKS)
    return path.is_dir() and not _present(path)


def remove(path: Path) -> None:
    """Delete a checkpoint where it lies, whoever wrote it. Killed on the way, what is left passes for no checkpoint, of stock code's neither.

    Raises OSError.
    """
    private = path / PRIVATE
    with contextlib.suppress(OSError):  # on a full disk there may be no space for it
        private.mkdir(exist_ok=True)
    for name in _MARKS:
        (private / name).unlink(missing_ok=True)
    for entry in [path / name for name in _present(path) - {PRIVATE}]:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    shutil.rmtree(path)


def _waiting(path: Path, manifest: Manifest) -> CheckpointDir:
    """The committed checkpoint as it was written: where its files wait, unless they were written in place or have been moved there."""
    return CheckpointDir(path, manifest.step, name_of(manifest.attempt, manifest.save))


def _present(path: Path) -> set[str]:
    try:
        return set(os.listdir(path))
    except FileNotFoundError:
        return set()


def _mark_stock(path: Path, attempt: str) -> None:
    """The private folder appears with the mark in it, or not at all."""
    new = path / f"{PRIVATE}-{attempt}"
    new.mkdir(exist_ok=True)
    (new / _STOCK).touch()
    new.rename(path / PRIVATE)


def _clear(directory: CheckpointDir) -> None:
    """Remove what saves that were never committed left in the private folder."""
    with os.scandir(directory.private) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.name.endswith((".part", ".tmp")):
            os.unlink(entry.path)


def _remove_uncommitted(path: Path) -> None:
    """Files that a save in place has voted for and that were never committed: other ranks may save now, and a shard be too many."""
    for name in _present(path / PRIVATE):
        if rank_of(name) is not None:
            with contextlib.suppress(FileNotFoundError, ManifestError):
                for entry in read_vote(path / PRIVATE / name).files:
                    if shape_problem(path, entry) is None:
                        (path / entry.path).unlink()


def _remove_replaced(path: Path, folder: Path, manifest: Manifest) -> None:
    """Files that the old checkpoint had and the new one has not: a shard too many would make it another checkpoint."""
    kept = {entry.path for entry in manifest.files}
    for entry in _replaced(folder / _REPLACES):
        if entry.path not in kept and shape_problem(path, entry) is None:
            (path / entry.path).unlink()


def _replaced(record: Path) -> tuple[FileEntry, ...]:
    try:
        with open_regular(record) as stream:
            return parse_manifest(stream.read(), record).files
    except (FileNotFoundError, ManifestError):
        return ()


def _manifest(path: Path) -> Manifest | None:
    try:
        return read_manifest(path / PRIVATE / "manifest.json")
    except (FileNotFoundError, NotADirectoryError, ManifestError):
        return None
