"""Sizes that cannot work are refused in clear words; memory and descriptors stay flat."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from datastates.engine import Engine, memory, memory_available, memory_limit
from engine_support import BLOCK, run

GIB = 1 << 30


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cache_bytes": 0}, "a host cache of 0 bytes cannot hold anything"),
        ({"cache_bytes": -5}, "a host cache of -5 bytes cannot hold anything"),
        ({"cache_bytes": 100_000}, "a host cache of 100000 bytes is less than two blocks of 65536 bytes"),
        ({"cache_bytes": 3 * BLOCK, "block_bytes": 2 * BLOCK}, "less than two blocks"),
        ({"cache_bytes": 1 << 50}, "1048576.0 GiB is more than the .* GiB of memory"),
        ({"cache_bytes": GIB, "block_bytes": 5000}, "5000 bytes is not a multiple of 4096"),
        ({"cache_bytes": GIB, "block_bytes": 0}, "0 bytes is not a multiple of 4096"),
        ({"cache_bytes": GIB, "threads": -1}, "there cannot be -1 threads"),
        ({"cache_bytes": GIB, "io": "fast"}, "expected auto, direct or buffered"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(options: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Engine(**options)


@pytest.mark.parametrize(
    ("cache_bytes", "block_bytes"),
    [
        (GIB, 16 << 20),
        (128 << 20, 16 << 20),
        (127 << 20, 8 << 20),
        (1 << 20, 128 << 10),
        (512 << 10, 64 << 10),
        (128 << 10, 64 << 10),
    ],
)
def test_a_small_cache_has_small_blocks(cache_bytes: int, block_bytes: int) -> None:
    engine = Engine(cache_bytes)
    assert engine.block_bytes == block_bytes
    assert engine.cache_bytes <= cache_bytes
    assert engine.close(0)


def test_the_memory_limit_is_the_smallest_around_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "a" / "b"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (tmp_path / "a" / "memory.max").write_text(f"{64 << 20}\n")
    (tmp_path / "a" / "memory.current").write_text(f"{60 << 20}\n")
    monkeypatch.setattr(memory, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(memory, "_cgroup_directories", lambda: [group, tmp_path / "a", tmp_path])
    assert memory_limit() == 64 << 20
    assert memory_available() == 4 << 20
    with pytest.raises(ValueError, match=r"0\.1 GiB is more than the 0\.1 GiB"):
        Engine(65 << 20)


def test_the_machines_memory_is_known() -> None:
    assert 0 < memory_available() <= memory_limit()
    assert memory_limit() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


ADDRESS_SPACE = """
import re, resource
from datastates.engine import memory_available, memory_limit
GIB = 1 << 30
used = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (used + GIB, resource.RLIM_INFINITY))
assert GIB // 2 < memory_available() <= GIB, memory_available()
assert memory_limit() == used + GIB
"""


def test_a_limit_of_the_address_space_is_one_of_memory() -> None:
    """A cache that takes what is left of it would leave nothing to train with."""
    result = run(ADDRESS_SPACE)
    assert result.returncode == 0, result.stderr


FLAT = """
engine = Engine(4 * BLOCK, block_bytes=BLOCK)
builder = memory_image(random_bytes(6 * BLOCK))
directory = Path(sys.argv[1])
def saves(count):
    for i in range(count):
        final = directory / "missing" / "file" if i % 10 == 9 else directory / str(i % 3)
        assert save(engine, (builder, final)).state == ("failed" if i % 10 == 9 else "persisted")
    return descriptors(), resident_bytes()
warm, end = saves(20), saves(200)
print(end[0] - warm[0], end[1] - warm[1])
"""


def test_descriptors_and_memory_stay_flat_over_two_hundred_saves(tmp_path: Path) -> None:
    result = run(FLAT, tmp_path)
    more_descriptors, more_bytes = map(int, result.stdout.split())
    assert more_descriptors == 0
    assert more_bytes < 1 << 20


RELEASED = """
before = descriptors()
for closed in (True, False):
    engine = Engine(4 * BLOCK, block_bytes=BLOCK)
    save(engine, (memory_image(random_bytes(6 * BLOCK)), Path(sys.argv[1]) / "file"))
    if closed:
        assert engine.close(0)
    del engine
    assert descriptors() == before
    until(lambda: native_threads() == [])
    assert "ckpt-run-" not in Path("/proc/self/maps").read_text()
print("released")
"""


def test_an_engine_gives_everything_back_when_it_is_closed_or_forgotten(tmp_path: Path) -> None:
    result = run(RELEASED, tmp_path)
    assert (result.stdout, result.stderr) == ("released\n", "")


RESIDENT = """
builder = memory_image(bytes(64 << 20))
engine = Engine(int(sys.argv[1]), block_bytes=1 << 20)
before = resident_bytes()
for size in map(int, sys.argv[3:]):
    builder.image.memory[0] = Memory(0, builder.image.memory[0].address, size, None, True)
    builder.image.size = size
    assert save(engine, (builder, Path(sys.argv[2]) / "file")).state == "persisted"
print(resident_bytes() - before)
"""


@pytest.mark.parametrize(
    ("cache", "sizes", "bound"),
    [
        (4 << 20, [64 << 20], 6 << 20),  # no more than the cache, whatever the file
        (1 << 30, [3 << 20] * 20, 6 << 20),  # no more than is needed, whatever the cache
    ],
)
def test_memory_is_bounded_by_the_cache_and_by_the_need(
    tmp_path: Path, cache: int, sizes: list[int], bound: int
) -> None:
    assert int(run(RESIDENT, cache, tmp_path, *sizes).stdout) < bound
