"""The container of torch.save: a zip file of stored records, laid out as torch's own writer does it.

Each record is a local header, an extra field "FB" that pads its data to the storage alignment, the data, and (unless it is
empty) a descriptor with the CRC-32; the directory and a zip64 end follow. Sizes and offsets of 4 GiB and more appear as
0xffffffff and, in full, in a zip64 extra field. Times are zero: two saves of one object are identical.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from datastates.formats.builder import CannotImage, ImageBuilder

_HUGE = 0xFFFFFFFF
_UTF8_NAME = 0x0800
_HAS_DESCRIPTOR = 0x0008

_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_DIRECTORY_START = struct.Struct("<4sHHHHHH")
_DIRECTORY_REST = struct.Struct("<IIHHHHHII")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")
_DESCRIPTOR = b"PK\x07\x08"


class _Entry(NamedTuple):
    """What the directory repeats of a record; ``crc`` is None while the bytes are unknown."""

    name: bytes
    header: int
    start: int
    size: int
    crc: int | None


class ZipLayout:
    """Lays records out one after the other.

    Between :meth:`open` and :meth:`close` the caller appends exactly the record's bytes to ``builder``.

    Args:
        prefix: the folder that every record lies in, without the slash.
        alignment: bytes; the data of each record starts at a multiple of it.
    """

    def __init__(self, prefix: bytes, alignment: int) -> None:
        self.builder = ImageBuilder()
        self._prefix = prefix + b"/"
        self._alignment = alignment
        self._entries: list[_Entry] = []

    def open(self, name: str, size: int) -> None:
        full_name = self._prefix + name.encode()
        header = self.builder.offset
        extra = _zip64_extra(size, 0, header)
        extra += self._padding(header + _LOCAL_HEADER.size + len(full_name) + len(extra))
        _check_length(full_name)
        _check_length(extra)
        fixed = _LOCAL_HEADER.pack(b"PK\x03\x04", 0, _flags(size), 0, 0, 0, 0, 0, 0, len(full_name), len(extra))
        self.builder.literal(fixed + full_name + extra)
        self._entries.append(_Entry(full_name, header, self.builder.offset, size, None))

    def close(self, crc: int | None) -> None:
        """End the record. ``crc`` is that of its bytes, None if a checksum part has to find it later."""
        entry = self._entries[-1]._replace(crc=crc)
        if self.builder.offset != entry.start + entry.size:
            raise CannotImage(f"record {entry.name!r} has not the size it was announced with")
        self._entries[-1] = entry
        if entry.size:
            wide = entry.size >= _HUGE or entry.header >= _HUGE
            self.builder.literal(_DESCRIPTOR)
            self._crc(entry)
            self.builder.literal(struct.pack("<QQ" if wide else "<II", entry.size, entry.size))

    def add(self, name: str, data: bytes) -> None:
        self.open(name, len(data))
        self.builder.literal(data)
        self.close(zlib.crc32(data))

    def digested_ranges(self) -> list[tuple[int, int]]:
        """Where the bytes of the records so far lie, without empty ones: what the serialization id folds together."""
        return [(entry.start, entry.start + entry.size) for entry in self._entries if entry.size]

    def finish(self) -> None:
        """Append the directory and the end records."""
        start = self.builder.offset
        for entry in self._entries:
            self._directory_entry(entry)
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

    def _directory_entry(self, entry: _Entry) -> None:
        extra = _zip64_extra(entry.size, entry.size, entry.header)
        size = min(entry.size, _HUGE)
        self.builder.literal(_DIRECTORY_START.pack(b"PK\x01\x02", 0, 0, _flags(entry.size), 0, 0, 0))
        self._crc(entry)
        rest = _DIRECTORY_REST.pack(size, size, len(entry.name), len(extra), 0, 0, 0, 0, min(entry.header, _HUGE))
        self.builder.literal(rest + entry.name + extra)

    def _crc(self, entry: _Entry) -> None:
        if entry.crc is None:
            self.builder.checksum(entry.start, entry.start + entry.size)
        else:
            self.builder.literal(entry.crc.to_bytes(4, "little"))

    def _padding(self, unpadded_start: int) -> bytes:
        length = -(unpadded_start + 4) % self._alignment
        return b"FB" + (length & 0xFFFF).to_bytes(2, "little") + b"Z" * length


def _flags(size: int) -> int:
    return _UTF8_NAME | (_HAS_DESCRIPTOR if size else 0)


def _zip64_extra(size: int, stored_size: int, header: int) -> bytes:
    """The zip64 field; a local header does not know the stored size yet and has 0 there."""
    wide = [size, stored_size] if size >= _HUGE else []
    if header >= _HUGE:
        wide.append(header)
    if not wide:
        return b""
    return struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide)


def _check_length(field: bytes) -> None:
    if len(field) > 0xFFFF:
        raise CannotImage("a record's name or padding is longer than a zip file can say")
