"""Back-pressure instead of growth, eager before late, earlier saves before later ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from datastates.engine import Engine
from engine_support import (
    BLOCK,
    PATIENCE,
    ImageBuilder,
    finish,
    memory_image,
    names,
    pending,
    random_bytes,
    save,
)
from stand_in import StandIn
from waiting import until


def test_a_cache_of_two_blocks_holds_up_staging_until_the_disk_has_taken_them(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine(2)
    data = random_bytes(50 * BLOCK)
    ticket = engine.submit([pending(memory_image(data), tmp_path / "file")])
    assert ticket.wait_staged(PATIENCE)
    # Staged means: all but what the cache holds has already been written.
    assert (tmp_path / "file.tmp").stat().st_size >= 48 * BLOCK
    finish(ticket)
    assert ticket.stats["cache_wait_s"] > 0
    assert (tmp_path / "file").read_bytes() == data


def test_large_parts_that_will_not_hold_still_are_copied_before_submit_returns(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    for blocks in (2, 3, 100):
        builder = ImageBuilder()
        late = builder.memory(random_bytes(20 * BLOCK, 1), still=True)
        moving = builder.memory(random_bytes((1 << 20) + 7 * BLOCK, 2), still=False)
        small = builder.memory(random_bytes(5000, 3), still=False)
        builder.memory(random_bytes(3 * BLOCK, 4), still=True)
        ticket = make_engine(blocks).submit([pending(builder, tmp_path / f"{blocks}")])
        moving[:] = bytes(len(moving))
        small[:] = bytes(len(small))
        finish(ticket)
        assert ticket.state == "persisted", ticket.error
        assert (tmp_path / f"{blocks}").read_bytes() == builder.expected
        del late


def test_small_parts_that_will_not_hold_still_need_no_room_in_the_cache(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine(2)
    builder = ImageBuilder()
    buffers = []
    for seed in range(100):
        builder.memory(random_bytes(2 * BLOCK, seed), still=True)
        buffers.append(builder.memory(random_bytes(3000, seed), still=False))
    ticket = engine.submit([pending(builder, tmp_path / "file")])
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    finish(ticket)
    assert (tmp_path / "file").read_bytes() == builder.expected


def test_saves_submitted_together_are_all_written_in_order(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine(3, threads=3)
    builders = [memory_image(random_bytes(9 * BLOCK + i, i)) for i in range(8)]
    tickets = [engine.submit([pending(builder, tmp_path / str(i))]) for i, builder in enumerate(builders)]
    assert tickets[-1].wait_staged(PATIENCE)
    # Blocks get memory in the order of the saves: when the last one is staged, all are.
    assert [ticket.state for ticket in tickets] == ["staged"] * 8
    for ticket in reversed(tickets):
        ticket.approve()
    for i, ticket in enumerate(tickets):
        assert ticket.wait(PATIENCE)
        assert (tmp_path / str(i)).read_bytes() == builders[i].expected
    durable = [ticket.stats["durable_s"] for ticket in tickets]
    assert all(seconds > 0 for seconds in durable)


def test_a_save_that_waits_for_its_approval_holds_up_no_other(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine(2)
    waiting = engine.submit([pending(memory_image(random_bytes(9 * BLOCK)), tmp_path / "waiting")])
    assert save(engine, (memory_image(random_bytes(9 * BLOCK)), tmp_path / "other")).state == "persisted"
    assert names(tmp_path) == ["other", "waiting.tmp"]
    assert finish(waiting).state == "persisted"


def test_files_get_their_names_in_the_order_given(engine: Engine, tmp_path: Path) -> None:
    order = ["optimizer", "scheduler", "config", "model"]
    ticket = engine.submit(
        [pending(memory_image(random_bytes(2000, i)), tmp_path / name) for i, name in enumerate(order)]
    )
    (tmp_path / "config").mkdir()  # so that the third rename fails
    ticket.wait_staged(PATIENCE)
    ticket.approve()
    assert ticket.wait(PATIENCE)
    assert ticket.error is not None
    assert ticket.error.operation == "rename"
    assert ticket.error.path == str(tmp_path / "config")
    assert names(tmp_path) == ["config", "optimizer", "scheduler"]


@pytest.fixture
def busy_engine(cuda: StandIn, make_engine: Callable[..., Engine], tmp_path: Path) -> Iterator[Engine]:
    """An engine with room in its cache whose only staging thread waits for a device."""
    engine = make_engine(100)
    stream = cuda.stream()
    cuda.hold(stream)
    waits = cuda.count("cuEventSynchronize")
    ticket = engine.submit(
        [pending(memory_image(bytes(4 * BLOCK), device=0, stream=stream), tmp_path / "busy")]
    )
    until(lambda: cuda.count("cuEventSynchronize") > waits)
    yield engine
    cuda.release(stream)
    assert finish(ticket).state == "persisted"


def test_a_waiting_thread_does_the_copies_itself(busy_engine: Engine, tmp_path: Path) -> None:
    data = random_bytes(50 * BLOCK)
    ticket = busy_engine.submit([pending(memory_image(data), tmp_path / "file")])
    assert ticket.wait_staged(PATIENCE, help=True)
    assert ticket.state == "staged"
    assert ticket.stats["help_s"] > 0


def test_a_wait_without_help_copies_nothing(busy_engine: Engine, tmp_path: Path) -> None:
    ticket = busy_engine.submit([pending(memory_image(random_bytes(50 * BLOCK)), tmp_path / "file")])
    assert not ticket.wait_staged(0.1, help=False)
    assert ticket.state == "staging"
    assert "help_s" not in ticket.stats


def test_many_threads_may_save_through_one_engine(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine(3, threads=2)
    failures: list[str] = []

    def work(number: int) -> None:
        for i in range(10):
            builder = memory_image(random_bytes(2 * BLOCK + number, number * 100 + i), still=i % 2 == 0)
            ticket = save(engine, (builder, tmp_path / f"{number}-{i}"))
            if (tmp_path / f"{number}-{i}").read_bytes() != builder.expected:
                failures.append(f"{number}-{i}: {ticket.error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_stats_say_what_happened(engine: Engine, tmp_path: Path) -> None:
    builder = memory_image(random_bytes(9 * BLOCK))
    builder.memory(random_bytes(5000), still=False)
    stats = save(engine, (builder, tmp_path / "file")).stats
    assert stats["bytes"] == len(builder.expected)
    assert stats["side_bytes"] == 5000
    assert stats["cache_need"] == 10 * BLOCK
    assert 0 < stats["stage_s"] <= stats["durable_s"] <= stats["persist_s"]
    assert stats["direct"] in (0, 1)
