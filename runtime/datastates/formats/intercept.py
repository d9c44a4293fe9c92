"""Catch what a program saves with torch.save and safetensors, and hand it over as file images.

The functions that a program calls are left alone, since it may have bound them under any name long ago. Replaced are the module
globals that they look up each time they run: ``_open_zipfile_writer`` and ``_save`` in ``torch.serialization`` and, in ``safetensors.torch``,
``_flatten_as_ptr`` (``_flatten`` before 0.8) and ``serialize_file``; and, in torch.distributed.checkpoint, two methods of
``FileSystemWriter``. A replacement does what the stock function does unless this thread has a sink that wants the path.

Before a format is intercepted for the first time, :mod:`datastates.formats.self_check` compares an image of it with the stock
writer's bytes. Whatever cannot be imaged exactly is written by the stock writer, synchronously, and the sink is told why once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, Protocol

import safetensors.torch
import torch

from datastates.engine.image import FileImage
from datastates.formats import device, quick_pickle, safetensors_file, self_check
from datastates.formats.collection import without_garbage_collection
from datastates.formats.device import CannotImage
from datastates.formats.quick_pickle import Storages
from datastates.formats.torch_zip import Archive, ZipRecorder


class Sink(Protocol):
    """What a save scope offers to the files that are saved inside it. All methods are called on the saving thread."""

    def wants(self, path: str) -> bool:
        """Whether the file at ``path``, as the program gave it, is to be imaged instead of written."""

    def describe(self, address: int, nbytes: int) -> tuple[bool, str]:
        """See :data:`datastates.formats.builder.Describe`."""

    def accept(self, path: str, image: FileImage) -> None:
        """Takes over the image of a file that was wanted."""

    def note(self, text: str) -> None:
        """Is told, once for each text in a process, why files are written synchronously."""


class _Thread(threading.local):
    sink: Sink | None = None


_thread = _Thread()
_told: set[str] = set()
_install_lock = threading.Lock()
_installed = False


@contextlib.contextmanager
def sink(target: Sink) -> Iterator[None]:
    """While open, ``target`` is offered every file that this thread saves. Scopes nest; the innermost counts."""
    outer, _thread.sink = _thread.sink, target
    try:
        yield
    finally:
        _thread.sink = outer


def collecting() -> bool:
    """Whether this thread has an open :func:`sink`."""
    return _thread.sink is not None


def install() -> None:
    """Put the replacements in place. Process-wide, idempotent, for good; without an open :func:`sink` nothing changes."""
    global _installed
    with _install_lock:
        if not _installed:
            device.install()
            _install_torch()
            _install_safetensors()
            if torch.distributed.is_available():
                _install_dcp()
            _installed = True


def _wanting_sink(path: Any, check: Callable[[], str | None]) -> Sink | None:
    """This thread's sink if it wants ``path``, the stock writer could write there at all, and the format passed its check."""
    target = _thread.sink
    if target is None or not isinstance(path, str) or not target.wants(path):
        return None
    if isinstance(target, self_check.Collector):
        return target
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        return None  # the stock writer says best what is wrong with it
    problem = check()
    if problem is not None:
        _tell(target, problem)
        return None
    return target


def _tell(target: Sink, text: str) -> None:
    if text not in _told:
        _told.add(text)
        target.note(f"written at once by the stock writer: {text}")


# torch.save


def _install_torch() -> None:
    library: Any = torch.serialization
    stock_open: Callable[[Any], AbstractContextManager[Any]] = library._open_zipfile_writer

    def open_zipfile_writer(name_or_buffer: Any) -> AbstractContextManager[Any]:
        if isinstance(name_or_buffer, Archive):
            return name_or_buffer
        path = os.fspath(name_or_buffer) if isinstance(name_or_buffer, os.PathLike) else name_or_buffer
        target = _wanting_sink(path, self_check.torch_zip)
        if target is None:
            return stock_open(name_or_buffer)
        try:
            return _RedirectedZip(path, target, stock_open)
        except CannotImage as reason:
            _tell(target, str(reason))
            return stock_open(name_or_buffer)

    stock_save: Callable[..., None] = library._save

    def save(obj: Any, zip_file: Any, pickle_module: Any, *how: Any, **options: Any) -> None:
        if not isinstance(zip_file, _RedirectedZip) or pickle_module is not pickle:
            stock_save(obj, zip_file, pickle_module, *how, **options)
            return
        storages = quick_pickle.Storages()
        with without_garbage_collection():
            stock_save(obj, zip_file, quick_pickle.pickle_module(storages), *how, **options)
            zip_file.write_storages(storages)

    library._open_zipfile_writer = open_zipfile_writer
    library._save = save


class _RedirectedZip:
    """Takes the place of torch's zip writer; becomes one, and repeats all records to it, when something cannot be imaged."""

    def __init__(
        self, path: str, target: Sink, stock_open: Callable[[str], AbstractContextManager[Any]]
    ) -> None:
        self._path = path
        self._sink = target
        self._stock_open = stock_open
        self._stock: AbstractContextManager[Any] | None = None
        self._stock_writer: Any = None
        self._recorder = ZipRecorder(path, target.describe)

    def __enter__(self) -> _RedirectedZip:
        return self

    def write_record(self, name: str, data: Any, size: int) -> None:
        if self._stock is None:
            try:
                self._recorder.write_record(name, data, size)
                return
            except CannotImage as reason:
                self._fall_back(str(reason))
        self._stock_writer.write_record(name, _on_host(data), size)

    def write_storages(self, storages: Storages) -> None:
        """The records that come last, if torch has not written them itself."""
        if self._stock is None:
            try:
                self._recorder.write_storages(storages)
                return
            except CannotImage as reason:
                self._fall_back(str(reason))
        for number, storage in enumerate(storages.storages):
            self._stock_writer.write_record(f"data/{number}", _on_host(storage), storages.sizes[number])

    def __getattr__(self, name: str) -> Any:
        """Whatever else torch's writer can do, only torch's writer can do."""
        if name.startswith("_"):
            raise AttributeError(name)
        if self._stock is None:
            self._fall_back(f"the writer was asked for {name}")
        return getattr(self._stock_writer, name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stock is None:
            try:
                self._recorder.__exit__(kind, error, trace)
            except CannotImage as reason:
                self._fall_back(str(reason))
        if self._stock is not None:
            self._stock.__exit__(kind, error, trace)
        elif self._recorder.image is not None:
            self._sink.accept(self._path, self._recorder.image)

    def _fall_back(self, reason: str) -> None:
        _tell(self._sink, reason)
        self._recorder.stop_holding()
        self._stock = self._stock_open(self._path)
        self._stock_writer = self._stock.__enter__()
        for name, payload in self._recorder.all_records():
            size = len(payload) if isinstance(payload, bytes) else payload.nbytes()
            self._stock_writer.write_record(name, _on_host(payload), size)


def _on_host(data: Any) -> Any:
    """What torch.save itself hands to its writer."""
    return data.cpu() if isinstance(data, torch.UntypedStorage) else data  # type: ignore[no-untyped-call]


# safetensors


class _Imaged:
    """Travels from the flatten function to ``serialize_file`` in place of the flattened tensors."""

    def __init__(self, path: str, target: Sink, image: FileImage) -> None:
        self.path = path
        self.target = target
        self.image = image


def _install_safetensors() -> None:
    library: Any = safetensors.torch
    stock_serialize_file = library.serialize_file
    save_file: CodeType = library.save_file.__code__

    def flatten(tensors: Any, *keep_alive: Any) -> Any:
        caller = sys._getframe(1)
        if _thread.sink is not None and caller.f_code is save_file:
            imaged = _image(tensors, caller.f_locals["filename"], caller.f_locals["metadata"])
            if imaged is not None:
                return imaged
        return safetensors_file.stock_flatten(tensors, *keep_alive)

    def serialize_file(tensor_dict: Any, filename: Any, metadata: Any = None) -> Any:
        if isinstance(tensor_dict, _Imaged):
            return tensor_dict.target.accept(tensor_dict.path, tensor_dict.image)
        return stock_serialize_file(tensor_dict, filename, metadata=metadata)

    setattr(library, safetensors_file.FLATTEN, flatten)
    library.serialize_file = serialize_file


def _image(tensors: Any, filename: Any, metadata: Any) -> _Imaged | None:
    path = os.fspath(filename) if isinstance(filename, os.PathLike) else filename
    target = _wanting_sink(path, self_check.safetensors_file)
    if target is None:
        return None
    try:
        return _Imaged(path, target, safetensors_file.image(tensors, metadata, target.describe))
    except CannotImage as reason:
        _tell(target, str(reason))
        return None


# torch.distributed.checkpoint


def _install_dcp() -> None:
    from torch.distributed.checkpoint import filesystem

    library: Any = filesystem._FileSystemWriter
    stock_write_data, stock_finish = library.write_data, library.finish

    @functools.wraps(stock_write_data)
    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        results = None if _thread.sink is None else _image_items(self, plan, planner)
        if results is None:
            return stock_write_data(self, plan, planner)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(results)
        return future

    @functools.wraps(stock_finish)
    def finish(self: Any, metadata: Any, results: Any) -> Any:
        target = _thread.sink
        if target is None or not target.wants(os.fspath(self._get_metadata_path())):
            return stock_finish(self, metadata, results)
        with _unsynced(self):
            return stock_finish(self, metadata, results)

    library.write_data = write_data
    library.finish = finish


def _image_items(writer: Any, plan: Any, planner: Any) -> list[Any] | None:
    """Hand the files of ``write_data`` to the sink; where their items lie, or None when the stock writer has to write them."""
    from datastates.formats import dcp

    if not dcp.is_plain(writer):
        return None
    found = dcp.files(writer, plan)
    targets = [_wanting_sink(file.path, self_check.distcp) for file in found]
    target = targets[0] if targets else None
    if target is None or None in targets:
        return None
    try:
        images = [dcp.image(writer, file, planner, target.describe) for file in found]
    except CannotImage as reason:
        _tell(target, str(reason))
        return None
    for file, (image, _) in zip(found, images, strict=True):
        target.accept(file.path, image)
    return [result for _, results in images for result in results]


@contextlib.contextmanager
def _unsynced(writer: Any) -> Iterator[None]:
    """The metadata are made durable with the files that they describe; to wait for the disk before those exist would be in vain."""
    synced, writer.sync_files = writer.sync_files, False
    try:
        yield
    finally:
        writer.sync_files = synced
