"""Nobody waits for a pipe, a terminal or a device that lies where a file was expected."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from datastates.store import catalog, occupant
from datastates.store.checksums import crc32_of_range
from datastates.store.durable import fsync_file
from datastates.store.journal import Journal, read_events
from datastates.store.layout import Root
from datastates.store.regular import open_regular
from datastates.store.stock import global_step, stock_problem
from store_files import stock

pytestmark = pytest.mark.timeout(20)


@pytest.fixture(params=["pipe", "terminal", "device"])
def put(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], None]]:
    """Puts something in the place of a file that one would wait for."""
    ends = os.openpty() if request.param == "terminal" else ()

    def into(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        if request.param == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(os.ttyname(ends[1]) if ends else "/dev/zero")

    yield into
    for end in ends:
        os.close(end)


Put = Callable[[Path], None]


def test_opening_it_is_an_error_that_names_it(tmp_path: Path, put: Put) -> None:
    put(tmp_path / "file")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"is not a regular file: .*/file"):
        open_regular(tmp_path / "file")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_is_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)


@pytest.mark.parametrize("name", ["trainer_state.json", "model.safetensors", "optimizer.pt"])
def test_a_stock_checkpoint_with_it_is_passed_over(tmp_path: Path, put: Put, name: str) -> None:
    older, newer = stock(tmp_path, 10), stock(tmp_path, 20)
    put(newer / name)
    assert name in str(stock_problem(newer))
    point = catalog.resume_point(tmp_path)
    assert point is not None and point.path == older


def test_a_stock_checkpoint_whose_index_is_one_is_passed_over(tmp_path: Path, put: Put) -> None:
    path = stock(tmp_path, 10)
    put(path / "model.safetensors.index.json")
    assert "model.safetensors.index.json" in str(stock_problem(path))


def test_an_explicit_path_with_it_tells_no_step(tmp_path: Path, put: Put) -> None:
    put(tmp_path / "elsewhere/trainer_state.json")
    assert global_step(tmp_path / "elsewhere") is None
    assert catalog.explicit_point(tmp_path, 0, tmp_path / "elsewhere").step == -1


def test_a_journal_is_neither_read_from_it_nor_written_to_it(tmp_path: Path, put: Put) -> None:
    root = Root.of(tmp_path)
    assert Journal(root, 1, "run1").event("save")
    put(root.events(0))
    journal = Journal(root, 0, "run1")
    assert journal.event("save") is False
    assert "is not a regular file" in str(journal.problem)
    assert [event.rank for event in read_events(root)] == [1]


def test_status_shows_the_run_beside_it(tmp_path: Path, put: Put) -> None:
    root = Root.of(tmp_path)
    assert Journal(root, 1, "run1").event("hooked", rank=1, world_size=2)
    put(root.events(0))
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_run", "status", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_training_is_told_that_it_cannot_lock_it(tmp_path: Path, put: Put) -> None:
    root = Root.of(tmp_path)
    put(root.run_dir / "occupant")
    with pytest.raises(OSError, match="is not a regular file"):
        occupant.occupy(root, "this training")


def test_it_is_neither_checksummed_nor_made_durable(tmp_path: Path, put: Put) -> None:
    put(tmp_path / "file")
    with pytest.raises(OSError, match="is not a regular file"):
        crc32_of_range(tmp_path / "file", 0, 100, lambda data, value: value)
    with pytest.raises(OSError):  # a link is refused before what it leads to
        fsync_file(tmp_path / "file")
