from __future__ import annotations

import random
import zlib

import pytest
from datastates.engine import _native, crc32, crc32_combine
from engine_support import random_bytes
from hypothesis import given
from hypothesis import strategies as st

PATHS = [crc32, _native.crc32_portable]


@pytest.mark.parametrize("path", PATHS)
def test_crc32_is_zlibs_for_every_length_and_alignment(path) -> None:
    data = random_bytes(1400)
    for start in range(17):
        for length in range(1100):
            piece = memoryview(data)[start : start + length]
            assert path(piece) == zlib.crc32(piece), (start, length)


@pytest.mark.parametrize("path", PATHS)
@given(data=st.binary(max_size=3000), value=st.integers(0, 2**32 - 1))
def test_crc32_continues_a_value_as_zlib_does(path, data: bytes, value: int) -> None:
    assert path(data, value) == zlib.crc32(data, value)


@pytest.mark.parametrize("path", PATHS)
def test_crc32_of_megabytes_is_zlibs(path) -> None:
    data = random_bytes(5_000_003)
    assert path(data) == zlib.crc32(data)


@given(a=st.binary(max_size=300), b=st.binary(max_size=300))
def test_crc32_combine_is_the_crc_of_both(a: bytes, b: bytes) -> None:
    assert crc32_combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


def test_crc32_combine_takes_lengths_beyond_four_gigabytes() -> None:
    rng = random.Random(1)
    length = 5 << 32
    whole, half = rng.randrange(2**32), rng.randrange(2**32)
    # Appending 2n zero-crc bytes is appending n of them twice.
    assert crc32_combine(whole, half, 2 * length) == crc32_combine(
        crc32_combine(whole, 0, length), half, length
    )


def test_crc32_reads_any_buffer_but_text() -> None:
    assert crc32(bytearray(b"abc")) == crc32(memoryview(b"abc")) == zlib.crc32(b"abc")
    with pytest.raises(TypeError):
        crc32("abc")
