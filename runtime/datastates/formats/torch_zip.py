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
import io
import zipfile
from collections.abc import Hashable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

import torch

from datastates.engine._native import begins_with
from datastates.engine.image import CPU, FileImage, Memory
from datastates.formats import device
from datastates.formats.builder import Describe, ImageBuilder
from datastates.formats.collection import without_garbage_collection
from datastates.formats.device import CannotImage
from datastates.formats.kept_layout import KeptLayout, KeptLayouts
from datastates.formats.quick_pickle import Storages
from datastates.formats.zip_layout import DESCRIPTOR_MARK, ZipLayout

_MARKED = "data that looks like a zip descriptor"
_NO_MEMORY = "a storage has a size but no memory"
_SERIALIZATION_ID = ".data/serialization_id"


_layouts = KeptLayouts()


class _Memory(NamedTuple):
    """A memory part, wherever it will lie."""

    address: int
    nbytes: int
    owner: torch.UntypedStorage
    still: bool
    name: str
    device: int
    stream: int


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
        self._storages = Storages()
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

    def write_storages(self, storages: Storages) -> None:
        """The last records: data/0, data/1 and so on, one for each storage."""
        for where in set(storages.devices):
            self._place_of(where)
        if any(
            size and not address for address, size in zip(storages.addresses, storages.sizes, strict=True)
        ):
            raise CannotImage(_NO_MEMORY)
        self._storages = storages

    def all_records(self) -> Iterator[tuple[str, bytes | torch.UntypedStorage]]:
        """Those of :meth:`write_record`, then those of :meth:`write_storages`."""
        yield from self.records
        yield from ((f"data/{number}", storage) for number, storage in enumerate(self._storages.storages))

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
            raise CannotImage(_NO_MEMORY)
        self.records.append((name, storage))

    def _finish(self) -> None:
        with without_garbage_collection():
            key = self._shape()
            kept = None if key is None else _layouts.find(key)
            self.image = self._anew(key) if kept is None else self._again(kept)

    def _shape(self) -> Hashable:
        """All that decides where the parts of the image lie, and which parts they are; None where too much does."""
        known = tuple((name, len(data)) for name, data in self.records if isinstance(data, bytes))
        if len(known) != len(self.records):
            return None
        storages = self._storages
        return self._prefix, self._alignment, known, tuple(storages.sizes), tuple(storages.devices)

    def _anew(self, key: Hashable) -> FileImage:
        builder = ImageBuilder()
        layout, numbers = self._lay_out(builder)
        image = builder.finish()
        if key is not None:
            others = {number - len(self.records) for number in numbers}
            known = [
                number for number, size in enumerate(self._storages.sizes) if size and number not in others
            ]
            _layouts.keep(key, KeptLayout(image, layout.spots, known, sorted(others)))
        return image

    def _again(self, kept: KeptLayout) -> FileImage:
        storages = self._storages
        owners, addresses, sizes, devices = (
            storages.storages,
            storages.addresses,
            storages.sizes,
            storages.devices,
        )
        known = [data for _, data in self.records if isinstance(data, bytes) and data]
        for number in kept.known:
            known.append(ctypes.string_at(addresses[number], sizes[number]))
            _refuse_descriptor_mark(known[-1])
        places = {where: self._place_of(where) for where in set(devices)}
        memory = []
        for number, offset in kept.memory:
            address, size, place = addresses[number], sizes[number], places[devices[number]]
            still, label = self._describe(address, size)
            label = label or f"data/{number}"
            memory.append(
                Memory(offset, address, size, owners[number], still, label, place.device, place.stream)
            )
        if begins_with([part.address for part in memory if part.device == CPU], DESCRIPTOR_MARK):
            raise CannotImage(_MARKED)
        return kept.fill(known, memory)

    def _lay_out(self, builder: ImageBuilder) -> tuple[ZipLayout, list[int]]:
        """The layout, and which records are memory parts."""
        layout = ZipLayout(self._prefix, self._alignment, builder)
        names: list[str] = []
        late = []
        for name, content in self._contents(builder):
            if isinstance(content, _Memory):
                late.append(len(names))
                layout.begin(name, content.nbytes)
                builder.memory(*content)
                layout.end()
            else:
                layout.add(name, content)
            names.append(name)
        for name, data in _trailing_records(tuple(name for name in names if not name.startswith("data/"))):
            layout.add(name, data)
        _add_serialization_id(layout, _names_hash(tuple(names)))
        layout.finish()
        return layout, late

    def _contents(self, builder: ImageBuilder) -> Iterator[tuple[str, bytes | _Memory]]:
        """Name and content of every record; ``builder`` is told of small memory, of which it takes only so much."""
        for name, payload in self.records:
            if isinstance(payload, bytes):
                yield name, payload
            else:
                yield name, self._content(builder, name, *self._source_of(payload))
        storages = self._storages
        columns = zip(storages.storages, storages.addresses, storages.sizes, storages.devices, strict=True)
        for number, (storage, address, size, place) in enumerate(columns):
            name = f"data/{number}"
            yield name, self._content(builder, name, address, size, storage, self._place_of(place))

    def _source_of(
        self, storage: torch.UntypedStorage
    ) -> tuple[int, int, torch.UntypedStorage, device.Place]:
        """Where the bytes of a record lie: address, size, the storage that keeps the memory, and the place."""
        return storage.data_ptr(), storage.nbytes(), storage, self._place_of(storage.device)

    def _content(
        self,
        builder: ImageBuilder,
        name: str,
        address: int,
        nbytes: int,
        owner: torch.UntypedStorage,
        place: device.Place,
    ) -> bytes | _Memory:
        small = builder.small(address, nbytes, place)
        if small is not None:
            _refuse_descriptor_mark(small)
            return small
        if place.device == CPU:
            _refuse_descriptor_mark(ctypes.string_at(address, 4))
        still, label = self._describe(owner.data_ptr(), owner.nbytes())
        return _Memory(address, nbytes, owner, still, label or name, place.device, place.stream)


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

    def _source_of(
        self, storage: torch.UntypedStorage
    ) -> tuple[int, int, torch.UntypedStorage, device.Place]:
        if self._instead is None or self._instead[0]._cdata != storage._cdata:
            return super()._source_of(storage)
        tensor = self._instead[1]
        if not tensor.data_ptr():
            raise CannotImage("a tensor has elements but no memory of its own")
        return tensor.data_ptr(), storage.nbytes(), tensor.untyped_storage(), self._place_of(tensor.device)


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


def _refuse_descriptor_mark(data: bytes) -> None:
    """torch's writer takes anything that begins with this mark for a checksum and folds it into the serialization id."""
    if data.startswith(DESCRIPTOR_MARK):
        raise CannotImage(_MARKED)


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
