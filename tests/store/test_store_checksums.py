from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from datastates.store.checksums import BUFFER_BYTES, crc32_combine, crc32_of_range
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(deadline=None)
@given(st.binary(max_size=2000), st.binary(max_size=2000))
def test_combined_checksums_equal_the_checksum_of_the_whole(a: bytes, b: bytes) -> None:
    assert crc32_combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**61), st.integers(0, 2**61))
def test_combining_is_associative_for_lengths_no_memory_holds(a: int, b: int, c: int, length: int) -> None:
    other = length // 3
    left = crc32_combine(crc32_combine(a, b, length), c, other)
    right = crc32_combine(a, crc32_combine(b, c, other), length + other)
    assert left == right


def test_zeros_of_many_gigabytes_combine_as_repeated_doubling_does() -> None:
    value, length = zlib.crc32(bytes(1 << 20)), 1 << 20
    direct = zlib.crc32(bytes(1 << 26))
    while length < 1 << 26:
        value, length = crc32_combine(value, value, length), length * 2
    assert value == direct


@pytest.mark.parametrize("size", [0, 1, BUFFER_BYTES - 1, BUFFER_BYTES, 2 * BUFFER_BYTES + 5])
def test_a_range_of_a_file_has_the_checksum_of_its_bytes(tmp_path: Path, size: int) -> None:
    data = bytes(i * 7 % 251 for i in range(1000)) * (size // 1000 + 1)
    path = tmp_path / "file"
    path.write_bytes(b"head" + data[:size] + b"tail")
    assert crc32_of_range(path, 4, size, zlib.crc32) == zlib.crc32(data[:size])


def test_a_range_beyond_the_end_is_an_error_not_a_checksum(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"short")
    with pytest.raises(EOFError):
        crc32_of_range(path, 0, 6, zlib.crc32)
