"""One training at a time saves into a root."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import datastates
import pytest
from datastates.store import occupant as occupancy
from datastates.store.layout import Root
from datastates.store.occupant import leave, occupy

OCCUPY = """
import errno, fcntl, os, sys
from datastates.store import occupant
from datastates.store.layout import Root
from datastates.store.occupant import occupy
def no_locks(descriptor, how):
    raise OSError(errno.ENOLCK, "No locks available")
if sys.argv[2].startswith("no locks"):
    fcntl.lockf, occupant.BEAT_SECONDS = no_locks, 0.05
print(occupy(Root.of(sys.argv[1]), "the first"), flush=True)
if sys.argv[2] == "fork" and os.fork() == 0:
    os.close(1)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
if sys.argv[2] == "no locks, ends well":
    occupant.leave(Root.of(sys.argv[1]))
"""


def start(output_dir: Path, how: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OCCUPY, str(output_dir), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(datastates.__file__).parent.parent)},
    )


def occupant(output_dir: Path, how: str = "") -> subprocess.Popen[str]:
    process = start(output_dir, how)
    assert process.stdout is not None
    assert process.stdout.readline() == "None\n"
    return process


def occupant_says(output_dir: Path) -> str:
    """What another process is told when it tries."""
    return start(output_dir).communicate(input="")[0].strip()


def test_a_second_process_is_told_who_has_the_root(tmp_path: Path) -> None:
    first = occupant(tmp_path)
    assert occupy(Root.of(tmp_path), "the second") == "the first"
    first.kill()
    first.wait()
    assert occupy(Root.of(tmp_path), "the second") is None


def test_a_killed_process_leaves_the_root_free_though_its_children_live(tmp_path: Path) -> None:
    first = occupant(tmp_path, "fork")
    first.kill()
    first.wait()
    assert occupy(Root.of(tmp_path), "the second") is None
    assert first.stdin is not None
    first.stdin.close()


def test_one_process_may_take_its_root_again(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert occupy(Root.of(tmp_path), "once") is None
    assert occupy(Root.of(tmp_path / "link"), "twice") is None
    leave(Root.of(tmp_path))
    assert occupant_says(tmp_path) == "once"
    leave(Root.of(tmp_path))
    assert occupant_says(tmp_path) == "None"


def test_who_is_told_that_the_occupant_is_gone_takes_the_root_over_its_lock(tmp_path: Path) -> None:
    first = occupant(tmp_path)
    assert occupy(Root.of(tmp_path), "the second", take=True) is None
    assert occupant_says(tmp_path) == "the second"
    leave(Root.of(tmp_path))
    first.kill()
    first.wait()


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system without locks: all that is left is whether the file is touched."""

    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(occupancy, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(occupancy, "SILENT_SECONDS", 2.0)


def test_without_locks_a_second_process_is_told_of_one_that_lives(tmp_path: Path, no_locks: None) -> None:
    first = occupant(tmp_path, "no locks")
    assert occupy(Root.of(tmp_path), "the second") == "the first"
    first.kill()
    first.wait()


@pytest.mark.parametrize("how", ["no locks", "no locks, ends well"])
def test_without_locks_one_that_has_ended_leaves_the_root_free(
    how: str, tmp_path: Path, no_locks: None
) -> None:
    first = occupant(tmp_path, how)
    if how == "no locks":
        first.kill()
    first.communicate(input="")
    kept = (Root.of(tmp_path).run_dir / "occupant").read_text()
    assert kept == ("the first\n" if how == "no locks" else "")
    assert occupy(Root.of(tmp_path), "the second") is None
    leave(Root.of(tmp_path))
