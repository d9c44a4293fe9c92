"""Parts on a GPU, against the stand-in driver library: its device memory is host memory, so the bytes can be compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from datastates.engine import Engine
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stand_in import StandIn
from waiting import until

SIZE = 20 * BLOCK


def test_device_bytes_are_those_after_the_work_queued_at_the_save(
    cuda: StandIn, engine: Engine, tmp_path: Path
) -> None:
    stream = cuda.stream()
    builder = memory_image(bytes(SIZE), device=0, stream=stream)
    address = address_of(builder.buffers[0])
    for value in (7, 9):
        cuda.hold(stream)
        cuda.fill(stream, address, value, SIZE)
        ticket = engine.submit([pending(builder, tmp_path / "file")])
        assert ticket.state == "staging"
        cuda.release(stream)
        assert finish(ticket).state == "persisted", ticket.error
        assert (tmp_path / "file").read_bytes() == bytes([value]) * SIZE


def test_a_save_does_not_wait_for_the_devices_queue(cuda: StandIn, engine: Engine, tmp_path: Path) -> None:
    stream = cuda.stream()
    cuda.hold(stream)
    builder = ImageBuilder()
    for i in range(50):
        builder.memory(random_bytes(BLOCK, i), device=0, stream=stream, name=str(i))
    ticket = engine.submit([pending(builder, tmp_path / "file")])  # would hang here, samples included
    assert not ticket.wait_staged(0.05)
    cuda.release(stream)
    assert finish(ticket).state == "persisted"
    assert (tmp_path / "file").read_bytes() == builder.expected


@pytest.mark.parametrize("size", [10, 1024, 5000, 1 << 20, (1 << 20) + 1, SIZE])
def test_device_parts_that_will_not_hold_still_are_copied_before_submit_returns(
    cuda: StandIn, engine: Engine, tmp_path: Path, size: int
) -> None:
    stream = cuda.stream()
    builder = memory_image(bytes(size), still=False, device=0, stream=stream)
    address = address_of(builder.buffers[0])
    cuda.fill(stream, address, 3, size)
    ticket = engine.submit([pending(builder, tmp_path / "file")])
    cuda.fill(stream, address, 4, size)
    cuda.synchronize(stream)
    finish(ticket)
    assert (tmp_path / "file").read_bytes() == bytes([3]) * size


@pytest.mark.parametrize("size", [1025, 5000, BLOCK, SIZE + 3])
def test_a_torn_device_part_is_named(
    cuda: StandIn, make_engine: Callable[..., Engine], tmp_path: Path, size: int
) -> None:
    engine = make_engine(2, threads=0)  # nothing is staged before somebody waits
    builder = memory_image(random_bytes(SIZE), device=0, name="steady")
    torn = builder.memory(random_bytes(size, 1), device=0, name="torn")
    copied = cuda.copies
    ticket = engine.submit([pending(builder, tmp_path / "file")])
    until(lambda: cuda.copies == copied + 2)  # both samples are taken
    torn[-1] ^= 1
    assert finish(ticket).torn == ["torn"]
    assert names(tmp_path) == []


def test_all_torn_device_parts_are_named_at_once(
    cuda: StandIn, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine(2, threads=0)
    builder = ImageBuilder()
    buffers = [builder.memory(random_bytes(2 * BLOCK, i), device=0, name=f"layer {i}") for i in range(9)]
    copied = cuda.copies
    ticket = engine.submit([pending(builder, tmp_path / "file")])
    until(lambda: cuda.copies == copied + 9)
    for buffer in buffers[4:]:
        buffer[:] = bytes(2 * BLOCK)
    assert finish(ticket).torn == [f"layer {i}" for i in range(4, 9)]


def test_samples_of_a_device_are_taken_behind_its_stream(
    cuda: StandIn, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine(2)
    stream = cuda.stream()
    builder = memory_image(bytes(SIZE), device=0, stream=stream, name="weight")
    cuda.hold(stream)
    cuda.fill(stream, address_of(builder.buffers[0]), 5, SIZE)
    ticket = engine.submit([pending(builder, tmp_path / "file")])
    cuda.release(stream)
    assert finish(ticket).torn == []
    assert (tmp_path / "file").read_bytes() == bytes([5]) * SIZE


parts = st.tuples(
    st.sampled_from(["literal", "host", "device 0", "device 1"]),
    st.booleans(),
    st.integers(0, 30_000),
    st.integers(0, 2**32),
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    layout=st.lists(parts, max_size=14),
    blocks=st.integers(2, 6),
    pin=st.booleans(),
    threads=st.integers(1, 3),
)
def test_any_mix_of_host_and_devices_gives_the_images_bytes(
    cuda: StandIn, tmp_path: Path, layout, blocks, pin, threads
) -> None:
    builder = ImageBuilder()
    for kind, still, size, seed in layout:
        if kind == "literal":
            builder.literal(random_bytes(size, seed))
        else:
            device = -1 if kind == "host" else int(kind[-1])
            builder.memory(random_bytes(size, seed), still=still, device=device)
        if seed % 3 == 0:
            builder.checksum(0, len(builder.expected))
    engine = Engine(blocks * 8192, block_bytes=8192, pin=pin, threads=threads, cuda_driver=str(cuda.path))
    try:
        assert save(engine, (builder, tmp_path / "file")).state == "persisted"
        assert (tmp_path / "file").read_bytes() == builder.expected
    finally:
        assert engine.close(PATIENCE)


def test_cache_blocks_are_page_locked_as_they_are_used(
    cuda: StandIn, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine(500)
    before = cuda.registered
    ticket = save(engine, (memory_image(random_bytes(3 * BLOCK), device=0), tmp_path / "file"))
    assert ticket.stats["pinned"] == 1
    blocks_and_samples = 3 + 1
    assert cuda.registered - before == blocks_and_samples
    engine.close(PATIENCE)
    del ticket
    assert cuda.registered == before


def test_where_memory_cannot_be_page_locked_copies_are_plain(
    cuda: StandIn, engine: Engine, tmp_path: Path
) -> None:
    cuda.fail("cuMemHostRegister_v2")
    before = cuda.unpinned_copies
    builder = memory_image(random_bytes(SIZE), device=0)
    ticket = save(engine, (builder, tmp_path / "file"))
    assert ticket.stats["pinned"] == 0
    assert cuda.unpinned_copies > before
    assert (tmp_path / "file").read_bytes() == builder.expected


def test_pinning_can_be_turned_off(cuda: StandIn, make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    before = cuda.count("cuMemHostRegister_v2")
    ticket = save(make_engine(pin=False), (memory_image(random_bytes(SIZE), device=0), tmp_path / "file"))
    assert ticket.stats["pinned"] == 0
    assert cuda.count("cuMemHostRegister_v2") == before


def test_page_locked_memory_for_samples_is_used_again(cuda: StandIn, engine: Engine, tmp_path: Path) -> None:
    builder = ImageBuilder()
    for i in range(300):
        builder.memory(random_bytes(2000, i), device=0)
    save(engine, (builder, tmp_path / "file"))
    before = cuda.pinned_allocated
    for _ in range(20):
        save(engine, (builder, tmp_path / "file"))
    assert cuda.pinned_allocated == before
    assert cuda.live_events == 0


@pytest.mark.parametrize(
    "function",
    [
        "cuCtxPushCurrent_v2",
        "cuEventCreate",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpy2DAsync_v2",
        "cuEventSynchronize",
    ],
)
@pytest.mark.parametrize("nth", [1, 3])
def test_a_driver_call_that_fails_ends_the_save_alone(
    cuda: StandIn, engine: Engine, tmp_path: Path, function: str, nth: int
) -> None:
    def build() -> list:
        parts = [memory_image(random_bytes(SIZE, i), still=i % 2 == 0, device=0) for i in range(4)]
        return [pending(part, tmp_path / str(i)) for i, part in enumerate(parts)]

    finish(engine.submit(build()))
    assert names(tmp_path) == ["0", "1", "2", "3"]
    for path in tmp_path.iterdir():
        path.unlink()
    cuda.fail(function, nth)
    ticket = finish(engine.submit(build()))
    if (
        ticket.state == "failed"
    ):  # events are looked at in more than one way, so the nth call of one need not come
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(ticket.error)
        assert names(tmp_path) == []
    cuda.fail(function, 0)
    assert finish(engine.submit(build())).state == "persisted"
    assert cuda.live_events == 0


def test_without_the_driver_library_a_save_from_a_device_fails_and_says_why(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine(cuda_driver=str(tmp_path / "libcuda.so.1"))
    ticket = save(engine, (memory_image(random_bytes(SIZE), device=0), tmp_path / "file"))
    assert ticket.error is not None
    assert ticket.error.operation == "load"
    assert "libcuda.so.1: cannot open shared object file" in str(ticket.error)
    assert save(engine, (memory_image(random_bytes(SIZE)), tmp_path / "file")).state == "persisted"


def test_the_driver_is_not_loaded_before_a_part_needs_it(
    cuda: StandIn, engine: Engine, tmp_path: Path
) -> None:
    before = cuda.count("cuInit")
    save(engine, (memory_image(random_bytes(SIZE)), tmp_path / "file"))
    assert cuda.count("cuInit") == before


def test_a_device_that_is_not_there_is_an_error(cuda: StandIn, engine: Engine, tmp_path: Path) -> None:
    ticket = save(engine, (memory_image(random_bytes(SIZE), device=5), tmp_path / "file"))
    assert ticket.error is not None
    assert ticket.error.operation == "cuDeviceGet"
