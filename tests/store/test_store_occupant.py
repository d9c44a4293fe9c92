"""One training at a time saves into a root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import datastates
from datastates.store.layout import Root
from datastates.store.occupant import leave, occupy

OCCUPY = """
import os, sys
from datastates.store.layout import Root
from datastates.store.occupant import occupy
print(occupy(Root.of(sys.argv[1]), "the first"), flush=True)
if sys.argv[2] == "fork" and os.fork() == 0:
    os.close(1)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
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
