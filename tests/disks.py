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
    path = str(directory)
    done = subprocess.run(["mount", "--bind", path, path], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def mount(directory: Path, nbytes: int) -> str:
    """Make ``directory`` an empty file system of ``nbytes`` bytes; why that cannot be, "" when it could. Ends with :func:`unmount`."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "ckpt-run-test", str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""


def unmount(directory: Path) -> None:
    """Take away every mount at ``directory``; files that are still open keep their own until they are closed."""
    while os.path.ismount(directory):
        subprocess.run(["umount", "-l", str(directory)], check=True)
