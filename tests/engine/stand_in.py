"""The stand-in driver library of stand_in_cuda.c, compiled and loaded: device memory is host memory, streams can be held."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datastates.engine import Engine
from engine_support import PATIENCE, memory_image, pending

SOURCE = Path(__file__).with_name("stand_in_cuda.c")
ILLEGAL_ADDRESS = 700


class StandIn:
    """The functions that the library has for tests; ``path`` is where it lies."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "libcuda.so.1"
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-pthread", "-o", self.path, SOURCE], check=True)
        self._library = ctypes.CDLL(str(self.path))
        self._library.standin_stream.restype = ctypes.c_void_p
        self._library.standin_pinned_allocated.restype = ctypes.c_size_t
        self._library.standin_fill.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_size_t,
        ]
        self._library.standin_hold.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._library.standin_synchronize.argtypes = [ctypes.c_void_p]

    def stream(self) -> int:
        return int(self._library.standin_stream())

    def fill(self, stream: int, address: int, value: int, size: int) -> None:
        """Queue a kernel that sets memory to a value."""
        self._library.standin_fill(stream, address, value, size)

    def hold(self, stream: int) -> None:
        self._library.standin_hold(stream, 1)

    def release(self, stream: int) -> None:
        self._library.standin_hold(stream, 0)

    def synchronize(self, stream: int) -> None:
        self._library.standin_synchronize(stream)

    def fail(self, function: str, nth: int = 1, code: int = ILLEGAL_ADDRESS) -> None:
        """Let the nth call from now of a driver function fail, once."""
        self._library.standin_fail(function.encode(), nth, code)

    def count(self, function: str) -> int:
        return int(self._library.standin_count(function.encode()))

    @property
    def live_events(self) -> int:
        return int(self._library.standin_live_events())

    @property
    def registered(self) -> int:
        """Pieces of page-locked memory."""
        return int(self._library.standin_registered())

    @property
    def unpinned_copies(self) -> int:
        return int(self._library.standin_unpinned_copies())

    @property
    def copies(self) -> int:
        """Copies that have arrived."""
        return int(self._library.standin_copies())

    @property
    def pinned_allocated(self) -> int:
        return int(self._library.standin_pinned_allocated())

    @contextmanager
    def held_up(self, engine: Engine, directory: Path) -> Iterator[None]:
        """Inside, no save that is submitted to ``engine`` is staged: an earlier one, of a held stream, has the whole cache."""
        stream = self.stream()
        self.hold(stream)
        plug = memory_image(bytes(engine.cache_bytes), device=0, stream=stream)
        ticket = engine.submit([pending(plug, directory / "plug")])
        try:
            yield
        finally:
            ticket.cancel("only a plug")
            self.release(stream)
        assert ticket.wait(PATIENCE)
