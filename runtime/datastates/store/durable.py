"""Writes that survive a power cut: temporary name, fsync, rename, fsync of the directory.

After :func:`write_durably` returns, the path holds either what it held before or all of the new bytes, whatever happens to the process or
the machine at any point. Modes follow the umask.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from datastates.store.regular import open_descriptor

_NO_DIRECTORY_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}


def write_durably(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace ``path`` with ``data``; its directory must exist. ``mode`` is cut by the umask.

    Raises:
        OSError: nothing was replaced, and the temporary file is gone (unless the directory's own fsync failed: then the new bytes are in
            place but may not survive a power cut).
    """
    _replace(path, data, mode, os.fsync)
    fsync_directory(path.parent)


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """As :func:`write_durably`, for what nobody needs after a power cut: readers see all of it or none, and no disk is waited for."""
    _replace(path, data, mode, lambda descriptor: None)


def remove_temporaries(path: Path) -> None:
    """Delete what writers of ``path`` left that were killed. Nobody may be writing to it."""
    for temporary in path.parent.glob(f".{path.name}.*.tmp"):
        temporary.unlink(missing_ok=True)


def make_directories(path: Path) -> None:
    """``mkdir -p``, each new directory durable in its parent before the next."""
    if path.is_dir():
        return
    make_directories(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
    fsync_directory(path.parent)


def fsync_file(path: Path) -> None:
    """Make a file durable that somebody else wrote."""
    descriptor = open_descriptor(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable. File systems that cannot (some network and FUSE ones) are left to their own promises."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_FSYNC:
            raise
    finally:
        os.close(descriptor)


def fsync_ancestors(path: Path) -> None:
    """Make the name of a directory durable, and those of the directories that it lies in, as far as its file system goes.

    What we may not open for reading belongs to somebody else, who made it long ago.

    Raises:
        OSError: a directory cannot be made durable.
    """
    device = path.stat().st_dev
    for directory in path.resolve().parents:
        if directory.stat().st_dev != device:
            return
        with contextlib.suppress(PermissionError):
            fsync_directory(directory)


def _replace(path: Path, data: bytes, mode: int, sync: Callable[[int], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        _write_new(temporary, data, mode, sync)
        os.replace(temporary, path)
    except BaseException:  # an interrupt leaves nothing behind either
        temporary.unlink(missing_ok=True)
        raise


def _write_new(path: Path, data: bytes, mode: int, sync: Callable[[int], object]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        sync(descriptor)
    finally:
        os.close(descriptor)
