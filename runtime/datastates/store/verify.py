"""Whether the files of a checkpoint are what its manifest says.

A manifest's word covers the files it names. Files that were added later are no damage, nor is anything in ``.ckpt``. A symbolic link is
followed inside the checkpoint, never out of it. Nothing is unpickled or decoded: sizes and checksums alone decide.
"""

from __future__ import annotations

import functools
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from datastates.store.checksums import Crc32, crc32_combine, crc32_of_range
from datastates.store.layout import PRIVATE
from datastates.store.manifest import FileEntry

Progress = Callable[[int, int], None]
"""``progress(bytes_done, bytes_total)``, called on the thread that called verify."""

RANGE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class FileVerdict:
    """What is known of one file. ``reason`` says what is wrong when ``ok`` is False; otherwise it is empty or a remark."""

    path: str
    ok: bool
    reason: str = ""


def shape_problem(
    directory: Path, entry: FileEntry, resolve: Callable[[Path], Path] = Path.resolve
) -> str | None:
    """What is wrong with a file without reading it: missing, no regular file, wrong size, outside; None when nothing is.

    Args:
        resolve: gives the real path of a directory; whoever looks at many files remembers what it was told.
    """
    path = directory / entry.path
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            status, place = path.stat(), path.resolve()
        else:
            place = resolve(path.parent) / path.name
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not place.is_relative_to(resolve(directory)):
        return "is a symbolic link that leads out of the checkpoint"
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_size != entry.size:
        return f"has {status.st_size} bytes instead of {entry.size}"
    return None


def verify_shapes(directory: Path, entries: Iterable[FileEntry]) -> list[FileVerdict]:
    """A verdict for each file by its presence and size alone: fast, and blind to changed bytes."""
    resolve = functools.cache(Path.resolve)
    problems = [(entry.path, shape_problem(directory, entry, resolve)) for entry in entries]
    return [FileVerdict(path, problem is None, problem or "") for path, problem in problems]


def verify_files(
    directory: Path,
    entries: Iterable[FileEntry],
    crc32: Crc32 = zlib.crc32,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[FileVerdict]:
    """A verdict for each file, all of its bytes read; files are read in ranges by ``workers`` threads (default: one a usable core)."""
    entries = list(entries)
    verdicts = {verdict.path: verdict for verdict in verify_shapes(directory, entries)}
    readable = [entry for entry in entries if verdicts[entry.path].ok]
    with ThreadPoolExecutor(workers or usable_cores(), "verify") as pool:
        try:
            reads = {entry.path: _start(pool, directory, entry, crc32) for entry in readable}
            _follow([part for parts in reads.values() for part in parts], progress)
        except BaseException:
            pool.shutdown(
                wait=False, cancel_futures=True
            )  # an interrupt, or the caller's progress raised: read no further
            raise
    for entry in readable:
        problem = _content_problem(entry, reads[entry.path])
        verdicts[entry.path] = FileVerdict(entry.path, problem is None, problem or "")
    return [verdicts[entry.path] for entry in entries]


def scan(directory: Path) -> Iterator[str]:
    """The regular files of a checkpoint, as a manifest spells them, in order; links are not followed, ``.ckpt`` is left out."""
    yield from _scan(directory, "")


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class _Part:
    length: int
    value: Future[int]


def _start(pool: ThreadPoolExecutor, directory: Path, entry: FileEntry, crc32: Crc32) -> list[_Part]:
    path = directory / entry.path
    parts = []
    for start in range(0, entry.size, RANGE_BYTES):
        length = min(RANGE_BYTES, entry.size - start)
        parts.append(_Part(length, pool.submit(crc32_of_range, path, start, length, crc32)))
    return parts


def _follow(parts: list[_Part], progress: Progress | None) -> None:
    lengths = {part.value: part.length for part in parts}
    total = sum(lengths.values())
    done = 0
    for future in as_completed(lengths):
        done += lengths[future]
        if progress:
            progress(done, total)


def _content_problem(entry: FileEntry, parts: list[_Part]) -> str | None:
    value = 0
    try:
        for part in parts:
            value = crc32_combine(value, part.value.result(), part.length)
    except EOFError:
        return "became shorter while it was read"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if value != entry.crc32:
        return f"has checksum {value:08x} instead of {entry.crc32:08x}"
    return None


def _scan(directory: Path, prefix: str) -> Iterator[str]:
    try:
        with os.scandir(directory) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in found:
        name = prefix + entry.name
        if entry.is_dir(follow_symlinks=False):
            if name != PRIVATE:
                yield from _scan(Path(entry.path), name + "/")
        elif entry.is_file(follow_symlinks=False):
            yield name
