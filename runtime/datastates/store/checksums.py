"""CRC-32 of files and parts of files.

A big file is read in ranges by several threads; :func:`crc32_combine` joins the ranges' checksums into the file's. Any function with
zlib's signature may be passed in as ``crc32``; zlib's own releases the GIL.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from datastates.store.regular import open_descriptor

Crc32 = Callable[[memoryview, int], int]
"""``crc32(data, value)`` with zlib's meaning."""

BUFFER_BYTES = 1 << 20

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # the polynomial 1: coefficients are stored in reverse, as CRC-32 does


def _multiply(a: int, b: int) -> int:
    """``a * b`` modulo the CRC-32 polynomial, over GF(2)."""
    product = 0
    bit = _ONE
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


def _squares() -> list[int]:
    """``x ** (2 ** k)`` for k in 0..31; the sequence then repeats, since the polynomial is primitive."""
    powers = [_ONE >> 1]
    while len(powers) < 32:
        powers.append(_multiply(powers[-1], powers[-1]))
    return powers


_SQUARES = _squares()


def crc32_combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of ``A + B`` from the checksums of A and B and B's ``length`` in bytes. Takes microseconds for any length."""
    shift = _ONE
    k = 3  # 8 bits a byte
    while length:
        if length & 1:
            shift = _multiply(_SQUARES[k & 31], shift)
        length >>= 1
        k += 1
    return _multiply(shift, first) ^ second


def crc32_of_range(path: Path, start: int, length: int, crc32: Crc32) -> int:
    """The CRC-32 of ``length`` bytes of a file.

    Raises:
        EOFError: the file ends before that.
        OSError: it cannot be read.
    """
    descriptor = open_descriptor(path, os.O_RDONLY)
    try:
        return _checksum(descriptor, start, length, crc32)
    finally:
        os.close(descriptor)


def _checksum(descriptor: int, start: int, length: int, crc32: Crc32) -> int:
    buffer = memoryview(bytearray(min(BUFFER_BYTES, length)))
    value = 0
    end = start + length
    while start < end:
        count = os.preadv(descriptor, [buffer[: end - start]], start)
        if count == 0:
            raise EOFError(f"ends at byte {start}")
        value = crc32(buffer[:count], value)
        start += count
    return value
