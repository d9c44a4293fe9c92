"""The engine of this process: made once, with a host cache that fits the machine."""

from __future__ import annotations

import atexit
import errno
import os
import threading

from datastates.engine import Engine, memory_available
from datastates.llm import log
from datastates.llm.ranks import Ranks
from datastates.settings import Settings

GIB = 1 << 30
_SHARE_OF_FREE_MEMORY = 4
_SMALLEST_DEFAULT = 64 << 20

logger = log.logger("datastates.llm.decorator")

_engine: Engine | None = None
_making = threading.Lock()


def engine(settings: Settings, ranks: Ranks) -> Engine:
    """The process's engine; the first caller's settings make it.

    A host cache that the machine cannot give is refused in the log, and the size that fits is used: the same script has to
    run on machines of different size, and a checkpointing setting must not end a training.

    Raises:
        OSError: the memory cannot be had at all.
    """
    global _engine
    with _making:
        if _engine is None:
            _engine = _make(settings, ranks)
            atexit.register(_close, _engine, os.getpid(), settings.exit_timeout)
        return _engine


def _forget() -> None:
    """In a forked child: the engine's threads are its parent's, and a lock may have been held by a thread that is not here."""
    global _engine, _making
    _engine, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _close(engine: Engine, process: int, timeout: float) -> None:
    """At the interpreter's exit; a forked child has no threads to wait for."""
    if os.getpid() == process:
        engine.close(timeout)


def _make(settings: Settings, ranks: Ranks) -> Engine:
    if settings.host_cache_size is not None:
        try:
            return _sized(int(settings.host_cache_size * GIB), settings)
        except (ValueError, OSError) as error:
            logger.error(
                "%s host_cache_size=%g GiB is refused: %s. Set another host_cache_size or CKPT_RUN_HOST_CACHE_SIZE.",
                log.PREFIX,
                settings.host_cache_size,
                error,
            )
    size = default_size(memory_available(), ranks.local_size)
    if ranks.local_rank == 0:
        logger.info(
            "%s host cache: at most %.2f GiB for each of %d ranks on this host (a quarter of the free memory; "
            "host_cache_size sets it)",
            log.PREFIX,
            size / GIB,
            ranks.local_size,
        )
    while True:
        try:
            return _sized(size, settings)
        except OSError as error:  # a limit on address space, for example
            size //= 2
            if size < _SMALLEST_DEFAULT:
                if os.strerror(errno.EFBIG) in str(error):
                    raise OSError(
                        f"{error} (the limit of file size, ulimit -f, counts for it as well)"
                    ) from error
                raise


def default_size(free: int, local_size: int) -> int:
    """Bytes of host cache for each of ``local_size`` ranks of a host with ``free`` bytes of memory."""
    return max(free // _SHARE_OF_FREE_MEMORY // local_size, _SMALLEST_DEFAULT)


def _sized(cache_bytes: int, settings: Settings) -> Engine:
    return Engine(
        cache_bytes,
        threads=settings.parser_threads,
        pin=settings.pin_host_cache,
        io=settings.io,
        cuda_driver=settings.cuda_driver,
    )
