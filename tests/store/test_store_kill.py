"""A process is killed with SIGKILL in the middle of the protocol, at every kind of point, and nothing half is ever accepted."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from datastates.store import commit, retention
from datastates.store.catalog import Catalog, damage, resume_point
from datastates.store.layout import Root
from store_files import FILES, save, vote, write
from waiting import until

POINTS = 40
ROUNDS = 10


def die_at(line: int) -> Callable[[FrameType, str, object], object]:
    """A trace function that kills this process when the store has run so many lines."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal left
        if "datastates/store" not in frame.f_code.co_filename and "shutil" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def killed_at(line: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a process that dies after so many lines; False when it finished before."""
    pid = os.fork()
    if pid == 0:
        try:
            sys.settrace(die_at(line))  # type: ignore[arg-type]
            work()
        finally:
            os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def lines_of(work: Callable[[], object]) -> int:
    """How many lines of the store ``work`` runs; it really runs, in this process."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal count
        if "datastates/store" not in frame.f_code.co_filename and "shutil" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def points(total: int) -> list[int]:
    """The last lines, where the renames are, all of them; the rest spread evenly."""
    return sorted({*range(0, total, max(1, total // POINTS)), *range(total - 25, total)})


def test_killed_at_any_line_of_a_save_the_checkpoint_is_whole_or_is_none(tmp_path: Path) -> None:
    dry = Root.of(tmp_path / "dry")
    save(dry, 10)
    total = lines_of(lambda: save(dry, 20, attempt="attempt2"))
    outcomes = set()
    for line in points(total):
        root = Root.of(tmp_path / f"{line}")
        save(root, 10)
        assert killed_at(line, lambda root=root: save(root, 20, attempt="attempt2"))
        newest = Catalog(root).newest("lineage1")
        assert newest is not None
        assert newest.step == (20 if root.checkpoint(20).manifest.exists() else 10)
        outcomes.add(newest.step)
        commit.sweep(root, "attempt3")
        if newest.step == 10:
            assert damage(save(root, 20, attempt="attempt3")) is None
    assert outcomes == {10, 20}


def test_killed_at_any_line_of_a_deletion_no_half_checkpoint_is_accepted_and_the_rest_goes_later(
    tmp_path: Path,
) -> None:
    def prepared(name: str) -> Root:
        root = Root.of(tmp_path / name)
        save(root, 10)
        save(root, 20)
        return root

    dry = prepared("dry")
    total = lines_of(lambda: retention.remove(Catalog(dry).get(10)))
    for line in points(total):
        root = prepared(str(line))
        killed_at(line, lambda root=root: retention.remove(Catalog(root).get(10)))
        assert all(damage(checkpoint) is None for checkpoint in Catalog(root).checkpoints())
        assert Catalog(root).newest().step == 20  # type: ignore[union-attr]
        commit.sweep(root, "attempt2")
        assert not root.aside.exists() or not any(root.aside.iterdir())


SAVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from store_files import FILES, save
from datastates.store import commit
from datastates.store.catalog import Catalog
from datastates.store.layout import Root
from datastates.store.retention import expendable, remove
root = Root.of(sys.argv[1])
attempt = sys.argv[3]
commit.sweep(root, attempt)
newest = Catalog(root).newest("lineage1")
step = newest.step if newest else 0
while True:
    step += 1
    print(step, flush=True)
    save(root, step, {name: data * 20 for name, data in FILES.items()}, attempt=attempt, save=step)
    for checkpoint in expendable(Catalog(root).checkpoints(), 3, lineage="lineage1"):
        remove(checkpoint)
"""


def test_killed_at_random_moments_again_and_again_only_whole_checkpoints_are_accepted(tmp_path: Path) -> None:
    chance = random.Random(20)
    root = Root.of(tmp_path)
    last = 0
    for attempt in range(ROUNDS):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path), str(Path(__file__).parent), f"attempt{attempt}"],
            stdout=subprocess.PIPE,
        )
        assert process.stdout and process.stdout.readline()
        time.sleep(chance.uniform(0, 0.2))
        process.kill()
        process.wait()
        told = len(process.stdout.read().splitlines())
        process.stdout.close()
        point = resume_point(tmp_path)
        newest = Catalog(root).newest("lineage1")
        assert (point.step if point else 0) == (newest.step if newest else 0)
        step = newest.step if newest else 0
        assert last + told <= step <= last + told + 1
        committed = [checkpoint for checkpoint in Catalog(root).checkpoints() if checkpoint.committed]
        assert all(damage(checkpoint) is None for checkpoint in committed)
        assert len(committed) <= 4
        last = step
    assert last > 0


def test_while_the_committer_hangs_the_others_wait_only_so_long_and_a_late_commit_still_counts(
    tmp_path: Path,
) -> None:
    root = Root.of(tmp_path)
    checkpoint = root.checkpoint(10)
    command = [sys.executable, str(Path(__file__).with_name("store_rank.py")), str(root.path), "10", "0", "2"]
    committer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        until(checkpoint.vote(0).exists)
        committer.send_signal(signal.SIGSTOP)
        until(lambda: b") T " in Path(f"/proc/{committer.pid}/stat").read_bytes())
        write(checkpoint.path, FILES)
        commit.cast_vote(checkpoint, vote(checkpoint, FILES, rank=1, world_size=2))
        assert commit.wait_outcome(checkpoint, "attempt1", 1, timeout=0.3) == "timeout"
        committer.send_signal(signal.SIGCONT)
        assert commit.wait_outcome(checkpoint, "attempt1", 1, timeout=60) == "committed"
        assert committer.communicate(timeout=60)[0].strip() == "committed"
    finally:
        committer.kill()
        committer.wait()
    assert damage(Catalog(root).get(10)) is None
