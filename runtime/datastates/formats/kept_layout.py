"""The layout of an archive, kept for the next save of the same records.

Where everything lies in a torch zip follows from the names and sizes of its records, and from nothing else. So an archive whose records
have the same names and sizes differs from the one before in three ways only: the bytes of records that are known, their checksums, and where
the memory of the others is.
"""

from __future__ import annotations

import bisect
import threading
import zlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from datastates.engine.image import FileImage, Literal, Memory

FEWEST = 64
"""Parts. A smaller image is laid out anew as fast as it is looked up."""

MOST = 500_000
"""Parts of all images that are kept; about 100 MiB."""


class Spot(NamedTuple):
    """Where in the file a record stands whose bytes are known when it is laid out: its bytes, and its checksum once or twice."""

    start: int
    size: int
    checksums: tuple[int, ...]


class KeptLayout:
    """An image without the memory that it was made for.

    Args:
        spots: of the known records, in order.
        known: the numbers of the storages whose records are known.
        late: the numbers of the others, of which there is a memory part each, in order.

    Attributes:
        known: as above.
        memory: for each memory part the number of its storage, and its offset.
    """

    def __init__(
        self, image: FileImage, spots: Sequence[Spot], known: Sequence[int], late: Sequence[int]
    ) -> None:
        self.known = known
        self.memory = [(number, part.offset) for number, part in zip(late, image.memory, strict=True)]
        self.parts = len(image.literals) + len(image.memory) + len(image.checksums)
        self._image = FileImage(image.size, [*image.literals], [], [*image.checksums], [*image.digests])
        self._spots = spots
        self._starts = [part.offset for part in image.literals]

    def fill(self, known: Iterable[bytes], memory: list[Memory]) -> FileImage:
        """The image of an archive with the same names and sizes.

        Args:
            known: the bytes of the first known records; those behind them are the same every time.
            memory: the memory parts, at their old offsets.
        """
        kept = self._image
        patched = _Patched(kept.literals, self._starts)
        for spot, data in zip(self._spots, known, strict=False):
            patched.put(spot.start, data)
            crc = zlib.crc32(data).to_bytes(4, "little")
            for offset in spot.checksums:
                patched.put(offset, crc)
        return FileImage(kept.size, patched.literals(), memory, kept.checksums, kept.digests)


class _Patched:
    """Literals, some bytes of which are replaced."""

    def __init__(self, literals: Sequence[Literal], starts: Sequence[int]) -> None:
        self._literals = literals
        self._starts = starts
        self._changed: dict[int, bytearray] = {}

    def put(self, offset: int, data: bytes) -> None:
        number = bisect.bisect_right(self._starts, offset) - 1
        content = self._changed.get(number)
        if content is None:
            content = self._changed[number] = bytearray(self._literals[number].data)
        at = offset - self._starts[number]
        content[at : at + len(data)] = data

    def literals(self) -> list[Literal]:
        found = [*self._literals]
        for number, content in self._changed.items():
            found[number] = Literal(self._starts[number], bytes(content))
        return found


class KeptLayouts(threading.local):
    """The newest layouts of this thread, by all that decides about them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, KeptLayout] = OrderedDict()

    def find(self, key: Hashable) -> KeptLayout | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def keep(self, key: Hashable, layout: KeptLayout) -> None:
        if not FEWEST <= layout.parts <= MOST:
            return
        self._kept[key] = layout
        while sum(kept.parts for kept in self._kept.values()) > MOST:
            self._kept.popitem(last=False)
