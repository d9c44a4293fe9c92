"""Grow a file image from front to back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

from datastates.engine.image import CPU, Checksum, Digest, FileImage, Literal, Memory
from datastates.formats import device

Describe: TypeAlias = "Callable[[int, int], tuple[bool, str]]"
"""Asked for each storage, by its address and its size in bytes: does it hold still until the fence, and what should a message call it ("": the
format's own name)."""

INLINE_BYTES = 4096
"""Host memory up to this size is copied at once: many small tensors become one literal part, and need no later checksum."""

INLINE_BUDGET = 16 * 2**20
"""Bytes that one image copies that way; small memory beyond it becomes memory parts."""


class ImageBuilder:
    """Appends parts; neighbouring literal bytes become one part.

    ``offset`` is where the next byte goes. It, and the ranges given to :meth:`checksum` and :meth:`digest`, count from ``origin``: the
    beginning of the file, or of one of several archives that lie in it back to back.
    """

    def __init__(self) -> None:
        self.offset = 0
        self.origin = 0
        self._image = FileImage(0)
        self._pending: list[bytes] = []
        self._pending_start = 0
        self._inline_budget = INLINE_BUDGET

    def begin_archive(self) -> None:
        """From now on offsets count from here."""
        self.origin += self.offset
        self.offset = 0

    def literal(self, data: bytes) -> None:
        self._pending.append(data)
        self.offset += len(data)

    def small(self, address: int, nbytes: int, place: device.Place) -> bytes | None:
        """A copy of the memory, for :meth:`literal`, if there is so little that a memory part would cost more; else None."""
        if nbytes == 0:
            return b""
        if nbytes > INLINE_BYTES or nbytes > self._inline_budget or place.device != CPU:
            return None
        self._inline_budget -= nbytes
        return ctypes.string_at(address, nbytes)

    def memory(
        self, address: int, nbytes: int, owner: Any, still: bool, name: str, device: int, stream: int
    ) -> None:
        self._flush()
        part = Memory(self.origin + self.offset, address, nbytes, owner, still, name, device, stream)
        self._image.memory.append(part)
        self._skip(nbytes)

    def checksum(self, start: int, end: int) -> None:
        self._flush()
        origin = self.origin
        self._image.checksums.append(Checksum(origin + self.offset, origin + start, origin + end))
        self._skip(4)

    def digest(self, ranges: list[tuple[int, int]]) -> None:
        self._flush()
        origin = self.origin
        ranges = [(origin + start, origin + end) for start, end in ranges] if origin else ranges
        self._image.digests.append(Digest(origin + self.offset, ranges))
        self._skip(20)

    def finish(self) -> FileImage:
        self._flush()
        self._image.size = self.origin + self.offset
        return self._image

    def _skip(self, nbytes: int) -> None:
        self.offset += nbytes
        self._pending_start = self.origin + self.offset

    def _flush(self) -> None:
        if self._pending:
            data = b"".join(self._pending)
            if data:
                self._image.literals.append(Literal(self._pending_start, data))
            self._pending.clear()
        self._pending_start = self.origin + self.offset
