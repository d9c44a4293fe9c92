"""File images for tests, with the bytes that their files must have: computed here, with nothing of the engine's."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from datastates.engine import Checksum, Digest, Engine, FileImage, Literal, Memory, PendingFile, Ticket

BLOCK = 64 << 10
PATIENCE = 60.0
"""Seconds after which a wait counts as one that never ends."""


def address_of(buffer: bytearray | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def digest_of(crcs: list[int]) -> bytes:
    value = 0
    for crc in crcs:
        value ^= (crc + 0x9E3779B9 + (value << 6) + (value >> 2)) & 0xFFFFFFFFFFFFFFFF
    return b"%020d" % value


@dataclass
class ImageBuilder:
    """Adds parts at the end of an image; ``expected`` grows with the bytes that the file must have there."""

    expected: bytearray = field(default_factory=bytearray)
    image: FileImage = field(default_factory=lambda: FileImage(0))
    buffers: list[bytearray] = field(default_factory=list)

    def literal(self, data: bytes) -> None:
        self.image.literals.append(Literal(len(self.expected), data))
        self._grow(data)

    def memory(
        self, data: bytes, *, still: bool = True, name: str = "", device: int = -1, stream: int = 0
    ) -> bytearray:
        buffer = bytearray(data) or bytearray(1)
        self.buffers.append(buffer)
        self.image.memory.append(
            Memory(len(self.expected), address_of(buffer), len(data), buffer, still, name, device, stream)
        )
        self._grow(data)
        return buffer

    def checksum(self, start: int, end: int) -> None:
        self.image.checksums.append(Checksum(len(self.expected), start, end))
        self._grow(zlib.crc32(self.expected[start:end]).to_bytes(4, "little"))

    def digest(self, ranges: list[tuple[int, int]]) -> None:
        self.image.digests.append(Digest(len(self.expected), ranges))
        self._grow(digest_of([zlib.crc32(self.expected[start:end]) for start, end in ranges]))

    def _grow(self, data: bytes) -> None:
        self.expected += data
        self.image.size = len(self.expected)


def memory_image(
    data: bytes, *, still: bool = True, name: str = "part", device: int = -1, stream: int = 0
) -> ImageBuilder:
    """An image that is one part of memory."""
    builder = ImageBuilder()
    builder.memory(data, still=still, name=name, device=device, stream=stream)
    return builder


def pending(builder: ImageBuilder, final: Path) -> PendingFile:
    return PendingFile(builder.image, f"{final}.tmp", str(final))


def random_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def save(engine: Engine, *files: tuple[ImageBuilder, Path]) -> Ticket:
    """One save from submit to the end."""
    ticket = engine.submit([pending(builder, final) for builder, final in files])
    assert ticket.wait_staged(PATIENCE)
    ticket.approve()
    assert ticket.wait(PATIENCE)
    return ticket


def finish(ticket: Ticket) -> Ticket:
    assert ticket.wait_staged(PATIENCE)
    ticket.approve()
    assert ticket.wait(PATIENCE)
    return ticket


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def native_threads() -> list[Path]:
    """The directories in /proc of the engines' threads in this process."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        try:
            ours = (thread / "comm").read_text().startswith("ckpt-run-")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if ours:
            found.append(thread)
    return found


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process of its own, where everything of this module is at hand, and ``until``."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [
        sys.executable,
        "-c",
        "from engine_support import *\nfrom waiting import until\n" + script,
        *map(str, arguments),
    ]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
