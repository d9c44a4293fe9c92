"""A snapshot that mixes two moments is noticed, and memory that goes away ends a save, not the process."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
from datastates.engine import CPU, Engine, Literal, Memory, Ticket
from engine_support import (
    BLOCK,
    PATIENCE,
    ImageBuilder,
    address_of,
    finish,
    memory_image,
    names,
    pending,
    random_bytes,
    save,
)
from stand_in import StandIn

SIZE = 40 * BLOCK


class Saver:
    """Saves through a cache of two blocks, and lets a test act between a save and its staging."""

    def __init__(self, engine: Engine, cuda: StandIn, directory: Path) -> None:
        self.engine = engine
        self._cuda = cuda
        self._directory = directory

    def save(self, builder: ImageBuilder, act: Callable[[], object]) -> Ticket:
        with self._cuda.held_up(self.engine, self._directory):
            ticket = self.engine.submit([pending(builder, self._directory / "file")])
            act()
        return finish(ticket)


@pytest.fixture
def saver(cuda: StandIn, make_engine: Callable[..., Engine], tmp_path: Path) -> Saver:
    return Saver(make_engine(2), cuda, tmp_path)


def test_a_still_part_that_changes_fails_the_save_and_is_named(saver: Saver, tmp_path: Path) -> None:
    builder = ImageBuilder()
    builder.memory(random_bytes(2 * BLOCK), name="embedding")
    changing = builder.memory(random_bytes(SIZE, 1), name="layers.0.weight")
    ticket = saver.save(builder, lambda: changing.__setitem__(slice(None), bytes(SIZE)))
    assert ticket.state == "failed"
    assert ticket.error is not None
    assert ticket.error.operation == "snapshot"
    assert "layers.0.weight" in str(ticket.error)
    assert ticket.torn == ["layers.0.weight"]
    assert names(tmp_path) == []


def test_all_parts_that_changed_are_named_at_once(saver: Saver, tmp_path: Path) -> None:
    builder = ImageBuilder()
    buffers = {
        f"layer {i:02}": builder.memory(random_bytes(2 * BLOCK, i), name=f"layer {i:02}") for i in range(40)
    }
    changed = [name for name in buffers if name >= "layer 20"]

    def act() -> None:
        for name in changed:
            buffers[name][:] = bytes(2 * BLOCK)

    ticket = saver.save(builder, act)
    assert ticket.torn == changed
    assert "and 19 more" in str(ticket.error)


@pytest.mark.parametrize("size", [1025, 4096, BLOCK, 3 * BLOCK + 7])
@pytest.mark.parametrize("where", ["first", "last"])
def test_a_change_of_the_first_or_last_bytes_is_seen(
    saver: Saver, tmp_path: Path, size: int, where: str
) -> None:
    builder = memory_image(random_bytes(SIZE), name="filler")
    watched = builder.memory(random_bytes(size, 1), name="watched")

    def act() -> None:
        watched[0 if where == "first" else -1] ^= 1

    assert saver.save(builder, act).torn == ["watched"]


def test_a_change_of_a_twentieth_of_a_part_is_seen_wherever_it_is(saver: Saver, tmp_path: Path) -> None:
    size = 20 * 1024
    for i in range(20):
        builder = memory_image(random_bytes(SIZE), name="filler")
        watched = builder.memory(random_bytes(size, 1), name="watched")
        change = slice(i * size // 20, (i + 2) * size // 20)

        def act(watched: bytearray = watched, change: slice = change) -> None:
            watched[change] = bytes(byte ^ 0xFF for byte in watched[change])

        assert saver.save(builder, act).torn == ["watched"], i


def test_small_parts_are_the_saves_whatever_happens_to_them_later(saver: Saver, tmp_path: Path) -> None:
    builder = memory_image(random_bytes(SIZE))
    small = [builder.memory(random_bytes(size, size), still=True) for size in range(1, 1025, 31)]

    def act() -> None:
        for buffer in small:
            buffer[:] = bytes(len(buffer))

    assert saver.save(builder, act).state == "persisted"
    assert (tmp_path / "file").read_bytes() == builder.expected


@pytest.mark.parametrize("pages", ["all", "last"])
def test_memory_that_goes_away_fails_the_save_and_the_process_lives(
    saver: Saver, tmp_path: Path, pages: str
) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(
        None, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    ctypes.memset(address, 7, SIZE)
    builder = memory_image(random_bytes(SIZE), name="filler")
    builder.image.memory.append(Memory(SIZE, address, SIZE, None, True, "resized storage", CPU))
    builder.image.size = 2 * SIZE
    skipped = 0 if pages == "all" else SIZE - 4096

    def act() -> None:
        assert libc.munmap(address + skipped, SIZE - skipped) == 0

    ticket = saver.save(builder, act)
    assert ticket.state == "failed"
    assert ticket.error is not None
    assert ticket.error.operation == "snapshot"
    assert ticket.torn == ["resized storage"]
    assert names(tmp_path) == []
    libc.munmap(address, skipped)
    assert save(saver.engine, (memory_image(b"next" * 1000), tmp_path / "file")).state == "persisted"


def test_owners_are_kept_until_staged_and_no_longer(
    cuda: StandIn, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    alive: set[int] = set()

    class Owner:
        def __init__(self, number: int) -> None:
            self.buffer = bytearray(random_bytes(SIZE))
            self.number = number
            alive.add(number)

        def __del__(self) -> None:
            alive.remove(self.number)

    def submit(number: int, still: bool) -> Ticket:
        owner = Owner(number)
        builder = ImageBuilder()
        builder.image.size = SIZE + 3
        builder.image.memory.append(Memory(0, address_of(owner.buffer), SIZE, owner, still))
        builder.image.literals.append(Literal(SIZE, b"".join([b"ab", b"c"])))
        return engine.submit([pending(builder, tmp_path / "file")])

    engine = make_engine(2)
    with cuda.held_up(engine, tmp_path):
        ticket = submit(1, still=True)
        assert alive == {1}
    assert ticket.wait_staged(PATIENCE)
    assert alive == set()
    finish(ticket)
    assert (tmp_path / "file").read_bytes() == random_bytes(SIZE) + b"abc"

    ticket = submit(2, still=False)
    assert alive == set()  # copied before submit returned
    finish(ticket)

    with cuda.held_up(engine, tmp_path):
        submit(3, still=True)  # the caller lets go of the ticket at once
        assert alive == {3}
    assert save(engine, (memory_image(b"later" * 1000), tmp_path / "later")).state == "persisted"
    engine.submit([]).cancel("only to look around")
    assert alive == set()


def test_a_canceled_save_lets_go_of_memory(
    cuda: StandIn, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine(2)
    builder = memory_image(random_bytes(SIZE))
    with cuda.held_up(engine, tmp_path):
        ticket = engine.submit([pending(builder, tmp_path / "file")])
        assert ticket.state == "staging"
        assert not ticket.wait_staged(0.01)
        ticket.cancel("no longer wanted")
        assert ticket.state == "failed"
        assert ticket.wait_staged(0)
        assert ticket.wait(PATIENCE)
    assert str(ticket.error) == "cancel: no longer wanted"
    assert names(tmp_path) == []
