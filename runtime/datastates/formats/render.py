"""Turn a file image into bytes, plainly: for tests and for the self check, never for saving."""

from __future__ import annotations

import ctypes
import struct
import zlib
from typing import Any

import torch

from datastates.engine.image import CPU, Checksum, Digest, FileImage, Literal, Memory

_WRAP = 2**64 - 1


def render(image: FileImage) -> bytes:
    """The bytes of the file, with checksums and digests filled in.

    Raises:
        ValueError: see :func:`validate`.
    """
    validate(image)
    out = bytearray(image.size)
    for literal in image.literals:
        out[literal.offset : literal.offset + len(literal.data)] = literal.data
    for memory in image.memory:
        out[memory.offset : memory.offset + memory.nbytes] = _read(memory)
    derived: list[Checksum | Digest] = [*image.checksums, *image.digests]
    for part in sorted(derived, key=lambda part: part.offset):
        data = _derive(part, out)
        out[part.offset : part.offset + len(data)] = data
    return bytes(out)


def validate(image: FileImage) -> None:
    """Check what the engine relies on.

    Raises:
        ValueError: the parts leave a gap, overlap, are not sorted, or a checksum looks ahead; the text names the offset.
    """
    lists: list[list[Any]] = [image.literals, image.memory, image.checksums, image.digests]
    for parts in lists:
        offsets = [part.offset for part in parts]
        if offsets != sorted(offsets):
            raise ValueError(f"{type(parts[0]).__name__} parts are not sorted by offset")
    position = 0
    for part in sorted((part for parts in lists for part in parts), key=lambda part: part.offset):
        if part.offset != position:
            raise ValueError(
                f"{'gap' if part.offset > position else 'overlap'} at byte {min(position, part.offset)}"
            )
        if length(part) == 0:
            raise ValueError(f"empty part at byte {position}")
        if _looks_back_to(part) > position:
            raise ValueError(f"the part at byte {position} needs bytes behind it")
        position += length(part)
    if position != image.size:
        raise ValueError(f"the parts end at byte {position} of {image.size}")


def length(part: Literal | Memory | Checksum | Digest) -> int:
    """How many bytes of the file the part covers."""
    if isinstance(part, Literal):
        return len(part.data)
    if isinstance(part, Memory):
        return part.nbytes
    return 4 if isinstance(part, Checksum) else 20


def fold(crcs: list[int]) -> bytes:
    """The twenty digits of a :class:`Digest` over ranges with these CRC-32s."""
    digest = 0
    for crc in crcs:
        digest ^= (crc + 0x9E3779B9 + (digest << 6) + (digest >> 2)) & _WRAP
    return b"%020d" % digest


def _looks_back_to(part: Literal | Memory | Checksum | Digest) -> int:
    if isinstance(part, Checksum):
        return part.end
    if isinstance(part, Digest):
        return max((end for _, end in part.ranges), default=0)
    return 0


def _derive(part: Checksum | Digest, out: bytearray) -> bytes:
    view = memoryview(out)
    if isinstance(part, Checksum):
        return struct.pack("<I", zlib.crc32(view[part.start : part.end]))
    return fold([zlib.crc32(view[start:end]) for start, end in part.ranges])


def _read(part: Memory) -> bytes:
    if part.device == CPU:
        return ctypes.string_at(part.address, part.nbytes)
    owner = part.owner.untyped_storage() if isinstance(part.owner, torch.Tensor) else part.owner
    start = part.address - owner.data_ptr()
    copy = owner.cpu()
    return ctypes.string_at(copy.data_ptr() + start, part.nbytes)
