"""The file that torch.save would write, as a file image.

``torch.save`` writes through an object that it gets from ``torch.serialization._open_zipfile_writer``. A :class:`ZipRecorder` in
its place leaves to torch which records there are, in which order and with which pickle, and keeps the *storage* of each data
record instead of its bytes.

What is not in the records is learnt from torch's own writer, by letting it write empty records of the same names to memory: the
records that it appends at the end, and the first twenty digits of ``.data/serialization_id``, a hash of the record names. The
last twenty digits fold the checksums of all records.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import io
import zipfile
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple

import torch

from datastates.engine.image import CPU, FileImage
from datastates.formats import device
from datastates.formats.builder import Describe, ImageBuilder
from datastates.formats.device import CannotImage
from datastates.formats.zip_layout import DESCRIPTOR_MARK, ZipLayout

_SERIALIZATION_ID = ".data/serialization_id"


class _Source(NamedTuple):
    """Where the bytes of a record lie: host or device address, the storage that keeps the memory, and the place."""

    address: int
    owner: torch.UntypedStorage
    place: device.Place


class ZipRecorder:
    """Stands in for torch's zip writer and makes a file image of what it is given.

    A context manager; after an exit without exception ``image`` is the :class:`FileImage`. The storages are read neither before
    nor after that, except those small enough to be kept as bytes.

    Args:
        path: as given to torch.save; the stem of its name is the folder of all records.
        describe: asked once for each storage that becomes a memory part.

    Raises:
        CannotImage: from any method, before anything has been written anywhere.
    """

    def __init__(self, path: str, describe: Describe) -> None:
        self.image: FileImage | None = None
        self.records: list[tuple[str, bytes | torch.UntypedStorage]] = []
        self._describe = describe
        self._place_of = functools.cache(device.place)
        self._prefix = record_prefix(path)
        self._alignment = _alignment()
        self._uncopied = contextlib.ExitStack()
        if not _checksums_wanted():
            raise CannotImage("checksums of records are turned off in torch.utils.serialization.config")

    def __enter__(self) -> ZipRecorder:
        return self

    def write_record(self, name: str, data: Any, size: int) -> None:
        """Same arguments as torch's writer: ``data`` is text, bytes or a storage of ``size`` bytes."""
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, bytes):
            self._take_bytes(name, data, size)
        elif isinstance(data, torch.UntypedStorage):
            self._take_storage(name, data, size)
        else:
            raise CannotImage(f"record {name} is given as {type(data).__name__}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_holding()
        if error is None:
            self._finish()

    def stop_holding(self) -> None:
        """From now on ``storage.cpu()`` copies again."""
        self._uncopied.close()

    def _take_bytes(self, name: str, data: bytes, size: int) -> None:
        if size > len(data):
            raise CannotImage(f"record {name} is shorter than its size")
        self.records.append((name, data[:size]))
        if name == "data.pkl":
            # Pickling is over; from here on torch.save calls storage.cpu() for the data records only.
            self._uncopied.enter_context(device.uncopied())

    def _take_storage(self, name: str, storage: torch.UntypedStorage, size: int) -> None:
        if size != storage.nbytes():
            raise CannotImage(f"record {name} is not the whole of its storage")
        self._place_of(storage.device)
        if size and not storage.data_ptr():
            raise CannotImage("a storage has a size but no memory")
        self.records.append((name, storage))

    def _finish(self) -> None:
        with without_garbage_collection():
            builder = ImageBuilder()
            self._lay_out(builder)
            self.image = builder.finish()

    def _lay_out(self, builder: ImageBuilder) -> None:
        names = tuple(name for name, _ in self.records)
        layout = ZipLayout(self._prefix, self._alignment, builder)
        for name, payload in self.records:
            if isinstance(payload, bytes):
                layout.add(name, payload)
            else:
                self._add_storage(layout, name, payload.nbytes(), self._source_of(payload))
        for name, data in _trailing_records(tuple(name for name in names if not name.startswith("data/"))):
            layout.add(name, data)
        _add_serialization_id(layout, _names_hash(names))
        layout.finish()

    def _source_of(self, storage: torch.UntypedStorage) -> _Source:
        return _Source(storage.data_ptr(), storage, self._place_of(storage.device))

    def _add_storage(self, layout: ZipLayout, name: str, nbytes: int, source: _Source) -> None:
        address, owner, place = source
        small = layout.builder.small(address, nbytes, place)
        if small is not None:
            _refuse_descriptor_mark(small)
            layout.add(name, small)
            return
        if place.device == CPU:
            _refuse_descriptor_mark(ctypes.string_at(address, 4))
        still, label = self._describe(owner)
        layout.begin(name, nbytes)
        layout.builder.memory(address, nbytes, owner, place, (still, label or name))
        layout.end()


class Archive(ZipRecorder):
    """An archive on a stream: one of several that lie back to back in a file.

    It is given to ``torch.save`` in place of the stream; the replaced opener of zip writers finds the recorder in it.

    Args:
        builder: where the archive is appended when it is complete.
        describe: see :class:`ZipRecorder`.
        instead: a pair of a storage and a contiguous tensor: wherever torch.save is given the storage, which is never read, the image has
            the tensor's memory.
    """

    def __init__(
        self,
        builder: ImageBuilder,
        describe: Describe,
        instead: tuple[torch.UntypedStorage, torch.Tensor] | None = None,
    ) -> None:
        super().__init__("archive", describe)  # torch's own name for streams, which have none
        self._builder = builder
        self._instead = instead

    def write(self, data: bytes) -> int:
        """``torch.save`` asks whether this is there. It never calls it."""
        raise CannotImage("torch.save writes around its zip writer")

    def _finish(self) -> None:
        self._builder.begin_archive()
        self._lay_out(self._builder)

    def _source_of(self, storage: torch.UntypedStorage) -> _Source:
        if self._instead is None or self._instead[0]._cdata != storage._cdata:
            return super()._source_of(storage)
        tensor = self._instead[1]
        if not tensor.data_ptr():
            raise CannotImage("a tensor has elements but no memory of its own")
        return _Source(tensor.data_ptr(), tensor.untyped_storage(), self._place_of(tensor.device))


def record_prefix(path: str) -> bytes:
    """The folder of all records: the stem of the file name, as torch's writer finds it.

    Raises:
        CannotImage: there is none; torch's own writer then says that the name is invalid.
    """
    if not path.isascii():
        return b"archive"  # torch hands such files to its writer as an open stream, which has no name
    name = path[max(path.rfind("/"), path.rfind("\\")) + 1 :]
    stem = name[: name.rfind(".")] if "." in name else name
    if not stem or "\0" in path:
        raise CannotImage(f"invalid file name: {path}")
    prefix = stem.encode()
    _refuse_descriptor_mark(prefix)
    return prefix


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Tens of thousands of parts without any cycle would set off full collections, each as long as all the rest."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _refuse_descriptor_mark(data: bytes) -> None:
    """torch's writer takes anything that begins with this mark for a checksum and folds it into the serialization id."""
    if data.startswith(DESCRIPTOR_MARK):
        raise CannotImage("data that looks like a zip descriptor")


def _checksums_wanted() -> bool:
    get = getattr(torch.serialization, "get_crc32_options", None)
    return get is None or bool(get())


def _alignment() -> int:
    get = getattr(torch.serialization, "_get_storage_alignment", None)
    return 64 if get is None else int(get())


def _add_serialization_id(layout: ZipLayout, names_hash: bytes) -> None:
    ranges = layout.digested_ranges()
    layout.begin(_SERIALIZATION_ID, 40)
    layout.builder.literal(names_hash)
    layout.builder.digest(ranges)
    layout.end()


@functools.lru_cache(maxsize=16)
def _trailing_records(names: tuple[str, ...]) -> tuple[tuple[str, bytes], ...]:
    """What torch's writer appends after records of these names, before the serialization id: name and content of each."""
    buffer, _ = _stock_skeleton(names)
    with zipfile.ZipFile(buffer) as archive:
        trailing = [
            (info.filename.partition("/")[2], archive.read(info)) for info in archive.infolist()[len(names) :]
        ]
    if not trailing or trailing.pop()[0] != _SERIALIZATION_ID:
        raise CannotImage("torch's writer does not end with a serialization id")
    return tuple(trailing)


@functools.lru_cache(maxsize=16)
def _names_hash(names: tuple[str, ...]) -> bytes:
    """Twenty digits. The hash walks a C++ hash set, so only the writer itself knows the order."""
    _, serialization_id = _stock_skeleton(names)
    return serialization_id[:20].encode()


def _stock_skeleton(names: tuple[str, ...]) -> tuple[io.BytesIO, str]:
    buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer)
    for name in names:
        writer.write_record(name, b"", 0)
    writer.write_end_of_file()
    return buffer, writer.serialization_id()
