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


class CannotImage(Exception):  # noqa: N818 - it is a verdict, not a fault
    """The object has something whose file cannot be imaged exactly. The caller leaves it to the stock writer; the text says why."""


class _Thread(threading.local):
    uncopied = 0


_thread = _Thread()


def place(device: torch.device) -> Place:
    """The place of memory on ``device``; its stream is the one that is current on this thread.

    Raises:
        CannotImage: the engine cannot read that kind of memory.
    """
    if device.type == "cpu":
        return HOST
    if device.type == "cuda" and torch.version.cuda is not None:
        stream = torch.cuda.current_stream(device)
        return Place(stream.device_index, stream.cuda_stream)
    raise CannotImage(f"tensors on a {device.type} device")


def install() -> None:
    """Make ``UntypedStorage.cpu`` heed :func:`uncopied`. Idempotent, process-wide."""
    stock: Any = torch.UntypedStorage.cpu
    if getattr(stock, "_ckpt_run", False):
        return

    def cpu(self: torch.UntypedStorage) -> Any:
        return self if _thread.uncopied else stock(self)

    cpu._ckpt_run = True  # type: ignore[attr-defined]
    cpu.__doc__ = stock.__doc__
    torch.UntypedStorage.cpu = cpu  # type: ignore[method-assign, assignment]


@contextlib.contextmanager
def uncopied() -> Iterator[None]:
    """While open, ``storage.cpu()`` on this thread copies nothing and answers the storage itself."""
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
