"""Engine, Ticket and EngineError: the part of the engine that people call."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from typing import Any, Literal

from datastates.engine import _native
from datastates.engine.image import FileResult, PendingFile
from datastates.engine.memory import memory_limit

_LARGEST_BLOCK = 16 << 20
_SMALLEST_BLOCK = 64 << 10
_FEWEST_BLOCKS = 8
_FOREVER = float("inf")

State = Literal["staging", "staged", "persisted", "failed"]


class EngineError(RuntimeError):
    """Why a save came to nothing: what was tried, on which file, and what the system said.

    ``operation`` is the step that failed ("write", "rename", "snapshot", "cancel", ...), ``path`` the file ("" if none is to
    blame), ``errno`` the system's number (0 if no system call failed), ``text`` the reason.
    """

    def __init__(self, operation: str, path: str, errno: int, text: str) -> None:
        super().__init__(operation, path, errno, text)
        self.operation = operation
        self.path = path
        self.errno = errno
        self.text = text

    def __str__(self) -> str:
        return f"{self.operation} {self.path}: {self.text}" if self.path else f"{self.operation}: {self.text}"


class Ticket:
    """One save on its way to the disk. Made by :meth:`Engine.submit`; safe to use from any thread."""

    def __init__(self, native: _native.Ticket, files: Sequence[PendingFile], process: int) -> None:
        self._native = native
        self._process = process
        # Only what is copied later: everything else was copied before submit returned.
        self._owners: list[Any] = [part.owner for file in files for part in file.image.memory if part.still]
        self._owners += [part.data for file in files for part in file.image.literals]

    @property
    def state(self) -> State:
        """``staging``: tensor memory is still needed. ``staged``: it is not. ``persisted``: the files are durable under their
        own names. ``failed``: see :attr:`error`."""
        state: Any = self._here().state
        self._release()
        return state  # type: ignore[no-any-return]

    @property
    def error(self) -> EngineError | None:
        """Why the ticket failed, or None."""
        error = self._here().error
        return None if error is None else EngineError(*error)

    @property
    def torn(self) -> list[str]:
        """The names of the still parts that changed, or went away, between the save and their staging."""
        return self._here().torn

    @property
    def files(self) -> list[FileResult]:
        """What is on disk, in the order submitted; empty until persisted."""
        return [FileResult(*file) for file in self._here().files]

    @property
    def stats(self) -> dict[str, float]:
        """Measurements so far; those that end in ``_s`` are seconds.

        ``bytes`` of all files; ``capture_s`` of the copies and samples made by submit; ``side_bytes`` copied there;
        ``stage_s``, ``durable_s`` and ``persist_s`` from submit to that state; ``help_s`` that waiting threads spent on
        copies; ``cache_wait_s`` for which no cache block was free, which a cache of ``cache_need`` bytes
        would have avoided for a save alone; ``direct``, ``io_uring`` and ``pinned``: 1 if used.
        """
        return self._here().stats

    def wait_staged(self, timeout: float | None = None, *, help: bool = True) -> bool:
        """Wait until nobody reads the saved memory any more: the ticket is staged, or failed. False: not yet.

        With ``help`` the calling thread does what is left of the copies itself; the engine's threads have a low priority.
        """
        done = self._here().await_staged(_FOREVER if timeout is None else timeout, help)
        self._release()
        return done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the ticket is persisted, or has failed and its temporary files are gone. False: not yet."""
        done = self._here().await_over(_FOREVER if timeout is None else timeout)
        self._release()
        return done

    def approve(self) -> None:
        """Let the files get their names as soon as they are durable; nothing is renamed before."""
        self._here().approve()

    def cancel(self, reason: str) -> None:
        """Give the save up: state failed, operation "cancel". No effect once it has failed, or its files get their names."""
        self._here().cancel(reason)

    def _here(self) -> _native.Ticket:
        _check_process(self._process)
        return self._native

    def _release(self) -> None:
        if self._owners and self._native.quiet:
            self._owners = []


class Engine:
    """Turns file images into durable files on threads of its own, through a host cache of fixed size.

    Args:
        cache_bytes: size of the host cache: tensor bytes that are staged but not on disk. Memory is taken as it is needed.
        threads: native threads that copy and checksum; one more writes. With 0 only a thread that waits with ``help`` copies.
        pin: page-lock the cache blocks that take bytes from a GPU.
        block_bytes: unit of the cache, a multiple of 4096; by default 16 MiB, or less where the cache is small.
        io: "auto" writes past the page cache where the file system takes it, "direct" does or fails, "buffered" does not.
        cuda_driver: the CUDA driver's library, looked for when the first part on a GPU comes.

    Raises:
        ValueError: a size that cannot work; the message says why and what would.
        OSError: the cache or the threads cannot be had.

    Thread-safe. After a fork it works in the parent only; in the child every call raises :class:`EngineError`.
    """

    def __init__(
        self,
        cache_bytes: int,
        *,
        threads: int = 1,
        pin: bool = True,
        block_bytes: int | None = None,
        io: Literal["auto", "direct", "buffered"] = "auto",
        cuda_driver: str = "libcuda.so.1",
    ) -> None:
        self._process = os.getpid()
        self.block_bytes = _checked_block_bytes(cache_bytes, block_bytes)
        self.cache_bytes = cache_bytes // self.block_bytes * self.block_bytes
        if threads < 0:
            raise ValueError(f"there cannot be {threads} threads")
        if io not in ("auto", "direct", "buffered"):
            raise ValueError(f"io is {io!r}; expected auto, direct or buffered")
        self._native = _native.Engine(cache_bytes, self.block_bytes, threads, pin, io, cuda_driver)
        # Tickets keep the owners of saved memory; the engine keeps the tickets for as long as it reads that memory.
        self._reading: dict[int, Ticket] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def submit(self, files: Sequence[PendingFile]) -> Ticket:
        """Take in one save and return its ticket; a later save never overtakes an earlier one.

        Parts that are not still are copied before this returns, which for large ones may wait for the disk. Still parts
        are copied later: their memory must not change before :meth:`Ticket.wait_staged`; their owners are kept until then.
        Files are renamed in the order given. Trouble with memory or disk is reported by the ticket.

        Raises:
            ValueError: an image whose parts do not cover its size exactly once, or that looks forward.
            EngineError: the engine is closed, or belongs to the parent process.
        """
        _check_process(self._process)
        self._forget_staged()
        native, error = self._native.submit(files)
        if error is not None and error[0] == "image":
            raise ValueError(f"malformed image of {error[1]}: {error[3]}")
        if native is None:
            raise EngineError(*(error or ("submit", "", 0, "refused")))
        ticket = Ticket(native, files, self._process)
        with self._lock:
            self._reading[next(self._numbers)] = ticket
        try:
            native.await_eager()
        except BaseException:
            # Interrupted (Ctrl-C): the caller gets no ticket, so nobody else could give it up.
            ticket.cancel("interrupted")
            native.await_staged(_FOREVER, False)
            raise
        return ticket

    def close(self, timeout: float | None = None) -> bool:
        """Take in no more, wait for what is in flight, give up at the timeout what is not on disk, end the threads.

        True: every ticket had ended by itself. False: something was given up, or hangs in the kernel.
        """
        _check_process(self._process)
        closed = self._native.close(_FOREVER if timeout is None else timeout)
        self._forget_staged()
        return closed

    def _forget_staged(self) -> None:
        with self._lock:
            for number, ticket in list(self._reading.items()):
                if ticket._native.quiet:
                    ticket._release()
                    del self._reading[number]


def _checked_block_bytes(cache_bytes: int, block_bytes: int | None) -> int:
    if cache_bytes <= 0:
        raise ValueError(f"a host cache of {cache_bytes} bytes cannot hold anything")
    limit = memory_limit()
    if cache_bytes > limit:
        raise ValueError(
            f"a host cache of {cache_bytes / 2**30:.1f} GiB is more than the {limit / 2**30:.1f} GiB of memory that this process can have"
        )
    if block_bytes is None:
        block_bytes = _LARGEST_BLOCK
        while block_bytes > _SMALLEST_BLOCK and cache_bytes < _FEWEST_BLOCKS * block_bytes:
            block_bytes //= 2
    if block_bytes <= 0 or block_bytes % _native.PAGE:
        raise ValueError(f"a block of {block_bytes} bytes is not a multiple of {_native.PAGE}")
    if cache_bytes < 2 * block_bytes:
        raise ValueError(
            f"a host cache of {cache_bytes} bytes is less than two blocks of {block_bytes} bytes"
        )
    return block_bytes


def _check_process(process: int) -> None:
    if os.getpid() != process:
        raise EngineError(
            "use", "", 0, f"the engine belongs to process {process}; in a forked child it cannot be used"
        )
