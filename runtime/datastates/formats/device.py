"""Where tensor memory lies, and how the stock writers are kept from copying it to the host first."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from datastates.engine.image import CPU


class Place(NamedTuple):
    """``device``: :data:`CPU` or a CUDA ordinal; ``stream``: the raw stream whose queued work must finish before the memory is read."""

    device: int
    stream: int


HOST = Place(CPU, 0)


class _Thread(threading.local):
    uncopied = 0


_thread = _Thread()


def place(device: torch.device) -> Place | None:
    """The place of memory on ``device``; None if the engine cannot read that kind of memory."""
    if device.type == "cpu":
        return HOST
    if device.type == "cuda" and torch.version.cuda is not None:
        stream = torch.cuda.current_stream(device)
        return Place(stream.device_index, stream.cuda_stream)
    return None


class Places:
    """:func:`place`, asked once for each device. Good for one save on one thread: the current stream may be another one later."""

    def __init__(self) -> None:
        self._known: dict[torch.device, Place | None] = {}

    def __call__(self, device: torch.device) -> Place | None:
        try:
            return self._known[device]
        except KeyError:
            return self._known.setdefault(device, place(device))


def install() -> None:
    """Let ``UntypedStorage.cpu`` answer the storage itself on threads inside :func:`uncopied`. Idempotent, process-wide."""
    stock = torch.UntypedStorage.cpu
    if getattr(stock, "_ckpt_run", False):
        return

    def cpu(self: torch.UntypedStorage) -> Any:
        if _thread.uncopied and place(self.device) is not None:
            return self
        return stock(self)

    cpu._ckpt_run = True  # type: ignore[attr-defined]
    cpu.__doc__ = stock.__doc__
    torch.UntypedStorage.cpu = cpu  # type: ignore[method-assign]


@contextlib.contextmanager
def uncopied() -> Iterator[None]:
    """While open, ``storage.cpu()`` on this thread copies no memory that the engine can read where it is."""
    with _pageable():
        _thread.uncopied += 1
        try:
            yield
        finally:
            _thread.uncopied -= 1


@contextlib.contextmanager
def _pageable() -> Iterator[None]:
    """Turn off torch's own way to copy through pinned memory, which does not ask ``storage.cpu()``. Newer than torch 2.6."""
    save = getattr(_serialization_config(), "save", None)
    if not getattr(save, "use_pinned_memory_for_d2h", False):
        yield
        return
    save.use_pinned_memory_for_d2h = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        save.use_pinned_memory_for_d2h = True  # type: ignore[union-attr]


def _serialization_config() -> Any:
    try:
        from torch.utils.serialization import config
    except ImportError:
        return None
    return config
