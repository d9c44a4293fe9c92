"""The file image: the exact bytes of one checkpoint file, before they exist anywhere as a file.

Formats (:mod:`datastates.formats`) turn an object into a file image and do no I/O; the engine turns a file image
into a durable file and knows no format. An image is a size and, at offsets, four kinds of part that together cover
every byte exactly once:

========== =====================================================================================================
Literal    bytes that are known now: headers, pickles, padding
Memory     tensor memory: an address whose bytes are copied later (``still``) or before ``submit`` returns
Checksum   four bytes, the little-endian CRC-32 of an earlier range of this file
Digest     twenty decimal digits that fold earlier checksums into one number
========== =====================================================================================================

Checksums and digests exist because the bytes of still memory are unknown when the image is made. Both only look
backwards, so a file of any size can be written in one pass through a small cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

CPU = -1
"""Device number of host memory; a CUDA device has its ordinal."""


class Literal(NamedTuple):
    offset: int
    data: bytes


class Memory(NamedTuple):
    """``nbytes`` bytes of tensor memory that belong at ``offset`` of the file.

    ``still`` promises that nobody changes the bytes before the fence; the engine samples them and says when the promise was broken.
    ``owner`` is kept alive until the bytes are staged, so that the address stays valid.
    ``stream`` is the raw ``CUstream`` (0: the default stream) whose queued work must finish before a CUDA part is read.
    ``name`` is what a message calls the part.
    """

    offset: int
    address: int
    nbytes: int
    owner: Any
    still: bool = False
    name: str = ""
    device: int = CPU
    stream: int = 0


class Checksum(NamedTuple):
    """The CRC-32 of bytes ``[start, end)`` of the file, little-endian, at ``offset >= end``."""

    offset: int
    start: int
    end: int


class Digest(NamedTuple):
    """Twenty decimal digits at ``offset``: a running combination of checksums of earlier ranges.

    Starting from 0, each CRC-32 ``crc`` of the ``ranges`` (pairs of start and end), in order, is folded in as ``h ^= crc + 0x9e3779b9 + (h << 6) + (h >> 2)``
    in 64-bit arithmetic; the result is printed in decimal with leading zeros.
    """

    offset: int
    ranges: list[tuple[int, int]]


@dataclass(slots=True)
class FileImage:
    """The bytes of one file; ``size`` in bytes. The parts cover ``[0, size)`` without gap or overlap, each list sorted by offset."""

    size: int
    literals: list[Literal] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    checksums: list[Checksum] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class PendingFile:
    """An image and where it goes: written as ``temporary``, renamed to ``final`` (same file system) once durable."""

    image: FileImage
    temporary: str
    final: str


@dataclass(slots=True, frozen=True)
class FileResult:
    """A file that is on disk under its final name: its size in bytes and the CRC-32 of all of it."""

    path: str
    size: int
    crc32: int
