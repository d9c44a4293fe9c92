"""Whatever the disk does, a save ends with one clear error, nothing half is left, and the next one works."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import disks
import pytest
from datastates.engine import Engine, EngineError, Ticket
from engine_support import BLOCK, PATIENCE, finish, memory_image, names, pending, random_bytes, save
from stand_in import StandIn

SIZE = 20 * BLOCK


def check_failed(ticket: Ticket, operation: str, error: int, path: Path) -> EngineError:
    assert ticket.state == "failed"
    assert ticket.error is not None
    assert (ticket.error.operation, ticket.error.errno, ticket.error.path) == (operation, error, str(path))
    assert str(ticket.error) == f"{operation} {path}: {os.strerror(error)}"
    assert ticket.files == []
    return ticket.error


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    with disks.small(tmp_path / "small", 1 << 20) as directory:
        yield directory


def test_a_full_disk_fails_the_save_alone(engine: Engine, small_disk: Path) -> None:
    (small_disk / "older").write_bytes(b"older")
    ticket = save(engine, (memory_image(random_bytes(SIZE)), small_disk / "file"))
    check_failed(ticket, "write", errno.ENOSPC, small_disk / "file.tmp")
    assert names(small_disk) == ["older"]
    assert save(engine, (memory_image(b"x" * 5000), small_disk / "file")).state == "persisted"
    assert (small_disk / "older").read_bytes() == b"older"


@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_a_file_size_limit_fails_the_save_alone(
    make_engine: Callable[..., Engine], tmp_path: Path, io: str
) -> None:
    engine = make_engine(io=io)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * BLOCK + 100, before[1]))
    try:
        ticket = save(engine, (memory_image(random_bytes(SIZE)), tmp_path / "file"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    check_failed(ticket, "write", errno.EFBIG, tmp_path / "file.tmp")
    assert names(tmp_path) == []


def test_a_missing_directory_is_named(engine: Engine, tmp_path: Path) -> None:
    ticket = save(engine, (memory_image(random_bytes(SIZE)), tmp_path / "missing" / "file"))
    check_failed(ticket, "open", errno.ENOENT, tmp_path / "missing" / "file.tmp")


def test_a_file_in_the_way_of_a_directory_is_named(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    ticket = save(engine, (memory_image(random_bytes(100)), tmp_path / "file"))
    check_failed(ticket, "rename", errno.EISDIR, tmp_path / "file")
    assert names(tmp_path) == ["file"]


def test_a_temporary_on_another_file_system_is_an_error(
    engine: Engine, small_disk: Path, tmp_path: Path
) -> None:
    file = pending(memory_image(b"x" * 5000), tmp_path / "file")
    moved = type(file)(file.image, str(small_disk / "file.tmp"), file.final)
    ticket = finish(engine.submit([moved]))
    check_failed(ticket, "rename", errno.EXDEV, tmp_path / "file")
    assert names(small_disk) == []


def test_one_bad_file_fails_the_whole_save(engine: Engine, tmp_path: Path) -> None:
    files = [
        (memory_image(random_bytes(2 * BLOCK, i)), path)
        for i, path in enumerate([tmp_path / "a", tmp_path / "no" / "b", tmp_path / "c"])
    ]
    ticket = save(engine, *files)
    check_failed(ticket, "open", errno.ENOENT, tmp_path / "no" / "b.tmp")
    assert names(tmp_path) == []


def test_a_failed_save_does_not_fail_those_beside_it(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine(3)
    tickets = []
    for i in range(12):
        directory = tmp_path / "missing" if i % 3 == 1 else tmp_path
        tickets.append(engine.submit([pending(memory_image(random_bytes(5 * BLOCK, i)), directory / str(i))]))
    for i, ticket in enumerate(tickets):
        assert finish(ticket).state == ("failed" if i % 3 == 1 else "persisted")


def test_a_cancel_deletes_what_was_written(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"older")
    ticket = engine.submit([pending(memory_image(random_bytes(SIZE)), tmp_path / "file")])
    assert ticket.wait_staged(PATIENCE)
    ticket.cancel("the trainer changed its mind")
    ticket.approve()
    ticket.cancel("again")
    assert ticket.wait(PATIENCE)
    assert ticket.state == "failed"
    assert str(ticket.error) == "cancel: the trainer changed its mind"
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"older"


def test_a_cancel_after_the_end_changes_nothing(engine: Engine, tmp_path: Path) -> None:
    ticket = save(engine, (memory_image(random_bytes(SIZE)), tmp_path / "file"))
    ticket.cancel("too late")
    assert ticket.state == "persisted"
    assert ticket.error is None
    assert names(tmp_path) == ["file"]


def test_memory_file_systems_are_written_as_well(engine: Engine, small_disk: Path) -> None:
    builder = memory_image(random_bytes(5 * BLOCK + 3))
    assert save(engine, (builder, small_disk / "file")).state == "persisted"
    assert (small_disk / "file").read_bytes() == builder.expected


KILLED = """
import sys
from engine_support import *
from pathlib import Path
engine = Engine(2 * BLOCK, block_bytes=BLOCK)
directory = Path(sys.argv[1])
for i in range(1000):
    data = bytes([i % 251]) * (20 * BLOCK)
    ticket = engine.submit([pending(memory_image(data), directory / f"file-{i}")])
    ticket.approve()
    ticket.wait()
    print(i, flush=True)
"""


def test_a_kill_at_any_moment_leaves_whole_files_and_temporaries_only(tmp_path: Path) -> None:
    for count in (1, 4, 9):
        directory = tmp_path / str(count)
        directory.mkdir()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, directory], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None
        for _ in range(count):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        saved = [path for path in directory.iterdir() if path.suffix != ".tmp"]
        assert len(saved) >= count
        for path in saved:
            number = int(path.name.removeprefix("file-"))
            assert path.read_bytes() == bytes([number % 251]) * (20 * BLOCK)


def test_a_save_whose_device_call_fails_says_so_in_the_drivers_words(
    cuda: StandIn, engine: Engine, tmp_path: Path
) -> None:
    cuda.fail("cuMemcpyDtoHAsync_v2")
    ticket = save(engine, (memory_image(random_bytes(SIZE), device=0), tmp_path / "file"))
    assert str(ticket.error) == (
        f"cuMemcpyDtoHAsync {tmp_path / 'file'}: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"
    )
    assert names(tmp_path) == []
