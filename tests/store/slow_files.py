"""A file system as this process might see it over a network: a rename takes long, and what others have made is seen late.

It is played inside the process, by functions of ``os`` that answer as such a file system would: only below one directory, and only for what
other processes made. What this process makes itself, it sees at once, as every network file system promises.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from datastates.store.layout import PRIVATE

_real = {
    name: getattr(os, name)
    for name in ("open", "stat", "lstat", "mkdir", "rename", "replace", "scandir", "listdir")
}
_real_open = builtins.open
_own: set[tuple[int, int]] = set()


def install(
    below: Path, *, rename: float = 0.0, entry: float = 0.0, listing: float = 0.0, data: float = 0.0
) -> None:
    """From now on, in this process.

    Args:
        rename: seconds that each rename takes before it is done.
        entry: seconds until a file or directory of another process can be opened or looked at by its name.
        listing: seconds until a directory's listing shows it.
        data: as ``entry``, for the files of checkpoints alone, which then appear after the votes that name them.
    """
    top = os.path.realpath(below) + os.sep
    seen: set[tuple[tuple[int, int], float]] = set()

    def inside(path: Any) -> bool:
        return not isinstance(path, int) and os.path.abspath(os.fspath(path)).startswith(top)

    def hidden(path: Any, seconds: float) -> bool:
        try:
            status = _real["lstat"](path)
        except OSError:
            return False
        file = (status.st_dev, status.st_ino)
        if file in _own or (file, seconds) in seen:
            return False
        if time.time() - status.st_ctime < seconds:
            return True
        seen.add((file, seconds))  # a directory's time changes with each entry: once seen, it stays seen
        return False

    def unseen(path: Any) -> bool:
        return inside(path) and hidden(path, max(entry, 0.0 if PRIVATE in str(path) else data))

    def looking(original: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any, *args: Any, **how: Any) -> Any:
            if unseen(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
            return original(path, *args, **how)

        return look

    def opening(path: Any, flags: int, *args: Any, **how: Any) -> int:
        if not flags & os.O_CREAT and unseen(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        descriptor = _real["open"](path, flags, *args, **how)
        if flags & os.O_CREAT and inside(path):
            own(path)
        return int(descriptor)

    def renaming(original: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(source: Any, target: Any, **how: Any) -> None:
            if inside(source):
                time.sleep(rename)
            original(source, target, **how)
            own(target)

        return slowly

    def making(path: Any, *args: Any, **how: Any) -> None:
        try:
            _real["mkdir"](path, *args, **how)
        finally:  # made, or told by the server that it is there
            own(path)

    def listed(path: Any = ".") -> list[str]:
        names = _real["listdir"](path)
        return [name for name in names if not (inside(path) and hidden(os.path.join(path, name), listing))]

    @contextlib.contextmanager
    def scanned(path: Any = ".") -> Iterator[Iterator[os.DirEntry[str]]]:
        with _real["scandir"](path) as entries:
            yield (found for found in entries if not (inside(path) and hidden(found.path, listing)))

    os.open, os.stat, os.lstat = opening, looking(_real["stat"]), looking(_real["lstat"])
    os.rename, os.replace = renaming(_real["rename"]), renaming(_real["replace"])
    os.mkdir, os.listdir, os.scandir = making, listed, scanned  # type: ignore[assignment]
    builtins.open = io.open = _opened(opening)  # type: ignore[assignment]


def own(path: Any) -> None:
    """What this process made."""
    with contextlib.suppress(OSError):
        status = _real["lstat"](path)
        _own.add((status.st_dev, status.st_ino))


def _opened(opener: Callable[..., int]) -> Callable[..., Any]:
    def opened(file: Any, *args: Any, **how: Any) -> Any:
        if not isinstance(file, int):
            how.setdefault("opener", opener)
        return _real_open(file, *args, **how)

    return opened
