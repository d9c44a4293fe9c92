"""Who saves into a root: one training at a time.

Two trainings in one directory would remove each other's checkpoints, and one of them would resume from what the other wrote. So a training
holds a lock on ``.run/occupant`` for as long as its process lives, and writes its name there. The lock is a record lock (``lockf``): the
kernel drops it when the process ends, however it ends, and forked children do not inherit it. File systems that have no locks are left to
the user's care.
"""

from __future__ import annotations

import errno
import fcntl
import os

from datastates.store.durable import make_directories
from datastates.store.layout import Root
from datastates.store.regular import open_descriptor

_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_LONGEST_NAME = 4096

_held: dict[str, tuple[int, int]] = {}
"""By real path: the descriptor, and how many trainings of this process use it. A second descriptor must not be opened and closed: that
would drop all of the process's locks on the file."""


def occupy(root: Root, name: str) -> str | None:
    """Take the root for this process; None when it has it, else the name of who does. Give it back with :func:`leave`.

    Args:
        name: what others shall read, one line.

    Raises:
        OSError: the lock's file cannot be made.
    """
    make_directories(root.run_dir)
    path = _path(root)
    if path in _held:
        descriptor, users = _held[path]
        _held[path] = descriptor, users + 1
        return None
    descriptor = open_descriptor(path, os.O_RDWR | os.O_CREAT)
    try:
        other = _lock(descriptor)
        if other is None:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{name}\n".encode(errors="replace")[:_LONGEST_NAME], 0)
    except OSError:
        os.close(descriptor)
        raise
    if other is not None:
        os.close(descriptor)
        return other
    _held[path] = descriptor, 1
    return None


def leave(root: Root) -> None:
    """One training of this process has ended; after the last one others may have the root. Nothing if it was not occupied."""
    path = _path(root)
    descriptor, users = _held.pop(path, (-1, 0))
    if users > 1:
        _held[path] = descriptor, users - 1
    elif users == 1:
        os.close(descriptor)


def _path(root: Root) -> str:
    return os.path.realpath(root.run_dir / "occupant")


def _lock(descriptor: int) -> str | None:
    """Lock; the name of who has it already."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return (
                os.pread(descriptor, _LONGEST_NAME, 0).decode(errors="replace").strip() or "another process"
            )
        if error.errno not in _NO_LOCKS:
            raise
    return None
