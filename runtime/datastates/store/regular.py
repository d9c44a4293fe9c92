"""Open files that are found on disk, and never wait for one.

To open a pipe waits for its other end, and to read from a terminal or a device may never end. Whoever put one in the place of a file of
ours, or of Trainer's, is told that it is no regular file; no training and no command stands still for it.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Raises:
        OSError: there is none, it cannot be opened, or it is something else; ``filename`` and ``strerror`` say which and why.
    """
    return open(path, "rb", opener=open_descriptor)


def open_descriptor(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """``os.open`` without inheritance and without waiting, for regular files alone; also an ``opener`` for :func:`open`.

    Raises:
        OSError: as :func:`open_regular`.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    try:
        found = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(found):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(found):
            raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
