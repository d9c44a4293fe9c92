"""Who saves into a root: one training at a time.

Two trainings in one directory would remove each other's checkpoints, and one of them would resume from what the other wrote. So a training
holds a lock on ``.run/occupant`` for as long as its process lives, and writes its name there. The lock is a record lock (``lockf``): the
kernel, or the file server, drops it when the process ends, however it ends, and forked children do not inherit it.

Where the file system has no locks, the file's time is the witness: who has the root touches it every few seconds, and who wants it looks
for a while whether that happens. A training that has ended well has taken its name out of the file, and nobody looks.

A lock that a file system keeps for one host alone (NFS mounted with ``nolock``, most of FUSE) does not protect against another host.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from dataclasses import dataclass, field

from datastates.store.durable import make_directories
from datastates.store.layout import Root
from datastates.store.regular import open_descriptor

BEAT_SECONDS = 3.0
SILENT_SECONDS = 5 * BEAT_SECONDS
"""So long a file without locks is looked at before its occupant counts as gone."""

_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_LONGEST_NAME = 4096


@dataclass
class _Hold:
    """What this process has of a root. A second descriptor must not be opened and closed: that would drop all of its locks on the file."""

    path: str
    descriptor: int
    locked: bool
    users: int = 1
    over: threading.Event = field(default_factory=threading.Event)

    def beat(self) -> None:
        while not self.over.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self.path)


_held: dict[str, _Hold] = {}
"""By real path."""
os.register_at_fork(after_in_child=_held.clear)  # the locks stay with the parent


def occupy(root: Root, name: str, *, take: bool = False) -> str | None:
    """Take the root for this process; None when it has it, else the name of who does. Give it back with :func:`leave`.

    Args:
        name: what others shall read, one line.
        take: whoever else seems to have it. A file server may hold a lock for a machine that died.

    Raises:
        OSError: the lock's file cannot be made.
    """
    make_directories(root.run_dir)
    path = _path(root)
    if path in _held:
        _held[path].users += 1
        return None
    descriptor = open_descriptor(path, os.O_RDWR | os.O_CREAT)
    try:
        locked, other = _lock(descriptor)
        if not locked and other is None:
            other = _beating(path, _name(descriptor))
        if other is None or take:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{name}\n".encode(errors="replace")[:_LONGEST_NAME], 0)
    except OSError:
        os.close(descriptor)
        raise
    if other is not None and not take:
        os.close(descriptor)
        return other
    _held[path] = hold = _Hold(path, descriptor, locked)
    if not locked:
        threading.Thread(target=hold.beat, name="occupant", daemon=True).start()
    return None


def shared(root: Root) -> bool:
    """Whether more than one training of this process has the root: one of them runs inside another."""
    hold = _held.get(_path(root))
    return hold is not None and hold.users > 1


def leave(root: Root) -> None:
    """One training of this process has ended; after the last one others may have the root. Nothing if it was not occupied."""
    path = _path(root)
    hold = _held.get(path)
    if hold is None:
        return
    hold.users -= 1
    if hold.users == 0:
        del _held[path]
        hold.over.set()
        with contextlib.suppress(OSError):
            os.ftruncate(hold.descriptor, 0)
        os.close(hold.descriptor)


def _path(root: Root) -> str:
    return os.path.realpath(root.run_dir / "occupant")


def _lock(descriptor: int) -> tuple[bool, str | None]:
    """Whether we have the lock; else the name of who has it, None where there are no locks."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False, _name(descriptor) or "another process"
        if error.errno not in _NO_LOCKS:
            raise
        return False, None
    return True, None


def _name(descriptor: int) -> str:
    return os.pread(descriptor, _LONGEST_NAME, 0).decode(errors="replace").strip()


def _beating(path: str, name: str) -> str | None:
    """The name of an occupant that still touches the file, None when it is gone or has taken its name out."""
    before = _touched(path)
    deadline = time.monotonic() + SILENT_SECONDS
    while name and time.monotonic() < deadline:
        time.sleep(BEAT_SECONDS / 10)
        if _touched(path) != before:
            return name
    return None


def _touched(path: str) -> int:
    """Opened anew each time: only then a network file system asks its server."""
    descriptor = open_descriptor(path, os.O_RDONLY)
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)
