"""The container of torch.save: a zip file of stored records, laid out as torch's own writer does it.

Each record is a local header, an extra field "FB" that pads its data to the storage alignment, the data, and (unless it is
empty) a descriptor with the CRC-32; the directory and a zip64 end follow. Sizes and offsets of 4 GiB and more appear as
0xffffffff and, in full, in a zip64 extra field. Times are zero: two saves of one object are identical.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from datastates.formats.builder import ImageBuilder
from datastates.formats.device import CannotImage
from datastates.formats.kept_layout import Spot

_HUGE = 0xFFFFFFFF
_UTF8_NAME = 0x0800
_HAS_DESCRIPTOR = 0x0008

_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_DIRECTORY_START = struct.Struct("<4sHHHHHH")
_DIRECTORY_REST = struct.Struct("<IIHHHHHII")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")
_NARROW = struct.Struct("<II")
_WIDE = struct.Struct("<QQ")

DESCRIPTOR_MARK = b"PK\x07\x08"


class _Entry(NamedTuple):
    """What the directory repeats of a record; ``crc`` is four bytes, None while the data are unknown."""

    name: bytes
    header: int
    start: int
    size: int
    crc: bytes | None


class ZipLayout:
    """Lays records out one after the other in ``builder``.

    Args:
        prefix: the folder that every record lies in, without the slash.
        alignment: bytes; the data of each record start at a multiple of it.
        builder: where the archive is appended; its offsets count from the archive's beginning.
    """

    def __init__(self, prefix: bytes, alignment: int, builder: ImageBuilder) -> None:
        self.builder = builder
        self._prefix = prefix + b"/"
        self._alignment = alignment
        self._paddings: dict[int, bytes] = {}
        self._entries: list[_Entry] = []
        self.spots: list[Spot] = []
        """After :meth:`finish`, of each record that was added with bytes: where in the archive they and their checksums stand."""

    def add(self, name: str, data: bytes) -> None:
        """A record whose bytes are known."""
        size = len(data)
        full_name, header = self._open(name, size)
        start = self.builder.offset
        self.builder.literal(data)
        crc = zlib.crc32(data).to_bytes(4, "little")
        if size:
            self.builder.literal(DESCRIPTOR_MARK + crc + _sizes(size, header))
        self._entries.append(_Entry(full_name, header, start, size, crc))

    def begin(self, name: str, size: int) -> None:
        """A record of ``size`` > 0 bytes that the caller appends to ``builder`` before :meth:`end`; their checksum is found later."""
        full_name, header = self._open(name, size)
        self._entries.append(_Entry(full_name, header, self.builder.offset, size, None))

    def end(self) -> None:
        entry = self._entries[-1]
        end = entry.start + entry.size
        if self.builder.offset != end:
            raise CannotImage(f"record {entry.name!r} has not the size it was announced with")
        self.builder.literal(DESCRIPTOR_MARK)
        self.builder.checksum(entry.start, end)
        self.builder.literal(_sizes(entry.size, entry.header))

    def digested_ranges(self) -> list[tuple[int, int]]:
        """Where the bytes of the records so far lie, without empty ones: what the serialization id folds together."""
        return [(start, start + size) for _, _, start, size, _ in self._entries if size]

    def finish(self) -> None:
        """Append the directory and the end records."""
        start = self.builder.offset
        for entry in self._entries:
            self._add_to_directory(entry)
        end = self.builder.offset
        count, size = len(self._entries), end - start
        if size >= _HUGE:
            raise CannotImage("the zip directory would be larger than 4 GiB")
        short = min(count, 0xFFFF)
        self.builder.literal(
            _END64.pack(b"PK\x06\x06", _END64.size - 12, 0x031E, 0x002D, 0, 0, count, count, size, start)
            + _LOCATOR64.pack(b"PK\x06\x07", 0, end, 1)
            + _END.pack(b"PK\x05\x06", 0, 0, short, short, size, min(start, _HUGE), 0)
        )

    def _open(self, name: str, size: int) -> tuple[bytes, int]:
        """Append the local header and the padding; returns the record's full name and the header's offset."""
        full_name = self._prefix + name.encode()
        header = self.builder.offset
        zip64 = _zip64_extra(size, 0, header)
        padding = self._padding(header + _LOCAL_HEADER.size + len(full_name) + len(zip64))
        extra_length = len(zip64) + len(padding)
        if len(full_name) > 0xFFFF or extra_length > 0xFFFF:
            raise CannotImage("a record's name or padding is longer than a zip file can say")
        fixed = _LOCAL_HEADER.pack(
            b"PK\x03\x04", 0, _flags(size), 0, 0, 0, 0, 0, 0, len(full_name), extra_length
        )
        self.builder.literal(fixed + full_name + zip64 + padding)
        return full_name, header

    def _padding(self, start: int) -> bytes:
        length = -(start + 4) % self._alignment
        known = self._paddings.get(length)
        if known is None:
            known = self._paddings[length] = b"FB" + (length & 0xFFFF).to_bytes(2, "little") + b"Z" * length
        return known

    def _add_to_directory(self, entry: _Entry) -> None:
        name, header, start, size, crc = entry
        if crc is not None and size:
            descriptor = start + size + len(DESCRIPTOR_MARK)
            self.spots.append(Spot(start, size, (descriptor, self.builder.offset + _DIRECTORY_START.size)))
        zip64 = _zip64_extra(size, size, header)
        short = min(size, _HUGE)
        first = _DIRECTORY_START.pack(b"PK\x01\x02", 0, 0, _flags(size), 0, 0, 0)
        rest = _DIRECTORY_REST.pack(short, short, len(name), len(zip64), 0, 0, 0, 0, min(header, _HUGE))
        if crc is not None:
            self.builder.literal(first + crc + rest + name + zip64)
            return
        self.builder.literal(first)
        self.builder.checksum(start, start + size)
        self.builder.literal(rest + name + zip64)


def _flags(size: int) -> int:
    return _UTF8_NAME | _HAS_DESCRIPTOR if size else _UTF8_NAME


def _sizes(size: int, header: int) -> bytes:
    wide = size >= _HUGE or header >= _HUGE
    return (_WIDE if wide else _NARROW).pack(size, size)


def _zip64_extra(size: int, stored_size: int, header: int) -> bytes:
    """The zip64 field; a local header does not know the stored size yet and has 0 there."""
    if size < _HUGE and header < _HUGE:
        return b""
    wide = [size, stored_size] if size >= _HUGE else []
    if header >= _HUGE:
        wide.append(header)
    return struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide)
