"""File systems that are small enough to be filled, where the tests may mount any (root, with the capability to)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small(directory: Path, nbytes: int) -> Iterator[Path]:
    """An empty file system of ``nbytes`` bytes at ``directory``, which is made; the test is skipped where nothing may be mounted."""
    problem = mount(directory, nbytes)
    if problem:
        pytest.skip(f"nothing can be mounted here: {problem}")
    try:
        yield directory
    finally:
        unmount(directory)


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """A directory that is there and cannot be written to, not even by root; the test is skipped where nothing may be mounted."""
    problem = _bind(directory)
    if problem:
        pytest.skip(f"nothing can be mounted here: {problem}")
    try:
        _remount_read_only(directory)
        yield
    finally:
        unmount(directory)


def freeze(directory: Path) -> None:
    """Make it read-only, as a kernel does after errors, by a second mount over it: files that are open stay writable. Ends with :func:`unmount`."""
    problem = _bind(directory)
    assert not problem, problem
    _remount_read_only(directory)


def mount(directory: Path, nbytes: int) -> str:
    """Make ``directory`` an empty file system of ``nbytes`` bytes; why that cannot be, "" when it could. Ends with :func:`unmount`."""
    directory.mkdir()
    return _mount("-t", "tmpfs", "-o", f"size={nbytes}", "ckpt-run-test", str(directory))


def unmount(directory: Path) -> None:
    """Take away every mount at ``directory``; files that are still open keep their own until they are closed."""
    while _is_mounted(directory):
        subprocess.run(["umount", "-l", str(directory)], check=True)


def _is_mounted(directory: Path) -> bool:
    """os.path.ismount sees no directory that is mounted over itself."""
    mounted = (line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines())
    return os.path.realpath(directory) in mounted


def _bind(directory: Path) -> str:
    """The directory once more over itself, with options of its own."""
    return _mount("--bind", str(directory), str(directory))


def _remount_read_only(directory: Path) -> None:
    problem = _mount("-o", "remount,bind,ro", str(directory))
    assert not problem, problem


def _mount(*words: str) -> str:
    """Why it cannot be, "" when it could."""
    try:
        done = subprocess.run(["mount", *words], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""
