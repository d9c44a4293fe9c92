"""The .distcp files that torch.distributed.checkpoint would write, as file images.

A file holds the items of one rank back to back: first those that are bytes already, then the tensors, each as the archive that
``torch.save`` makes on a stream. Which items go into which file is decided by the library's own code; the place of every item in its
file, which the other ranks are told and ``.metadata`` records, is known as soon as the image is, long before the data are copied.

torch.save sees each tensor as the writer would have shown it, on the host and without the rest of a larger storage. No such copy is made:
torch.save is given an empty-handed storage of the right size, and the image has the memory of the tensor itself.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from datastates.engine.image import FileImage
from datastates.formats.builder import Describe, ImageBuilder
from datastates.formats.collection import without_garbage_collection
from datastates.formats.device import CannotImage
from datastates.formats.torch_zip import Archive


class ItemFile(NamedTuple):
    """One file of a rank: its path, its name in the metadata, and what it holds."""

    path: str
    key: str
    items: list[WriteItem]


def is_plain(writer: Any) -> bool:
    """Whether ``writer`` does nothing but what this module knows: subclasses, extensions and other formats or file systems do more."""
    return (
        type(writer) is FileSystemWriter
        and type(writer.fs) is FileSystem
        and not writer.transforms.extensions
        and _saves_by_torch(writer)
    )


def files(writer: FileSystemWriter, plan: SavePlan) -> list[ItemFile]:
    """The files that ``write_data(plan, ...)`` makes, in its order."""
    if writer.single_file_per_rank:
        parts = filesystem._split_by_size_and_type(writer.thread_count, plan.items)
    else:
        parts = [[item] for item in plan.items]
    found = []
    for number, items in enumerate(parts):
        key = f"{plan.storage_data.prefix}{number}{filesystem.DEFAULT_SUFFIX}"
        found.append(ItemFile(os.fspath(writer.fs.concat_path(writer.path, key)), key, items))
    return found


def image(
    writer: FileSystemWriter, file: ItemFile, planner: SavePlanner, describe: Describe
) -> tuple[FileImage, list[WriteResult]]:
    """The image of one of :func:`files`, and where its items lie in it.

    Args:
        describe: asked once for each storage that becomes a memory part.

    Raises:
        CannotImage: something here is beyond us; the library may still be able to save it.
        Exception: what the planner itself raises.
    """
    builder = ImageBuilder()
    results = []
    with without_garbage_collection():
        for item in _in_order(writer, file.items):
            start = builder.origin + builder.offset
            _add(builder, planner.resolve_data(item), describe)
            length = builder.origin + builder.offset - start
            place = filesystem._StorageInfo(file.key, start, length)
            results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=place))
        return builder.finish(), results


def _saves_by_torch(writer: Any) -> bool:
    kind = getattr(writer, "serialization_format", None)  # unknown before torch 2.7
    return kind is None or kind is filesystem.SerializationFormat.TORCH_SAVE


def _in_order(writer: FileSystemWriter, items: list[WriteItem]) -> Iterator[WriteItem]:
    """Bytes first; where the writer copies ahead from a device, tensors by size."""
    yield from (item for item in items if item.type == WriteItemType.BYTE_IO)
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    if _copies_ahead(writer):
        tensors.sort(key=filesystem._item_size)
    yield from tensors


def _copies_ahead(writer: FileSystemWriter) -> bool:
    custom = getattr(torch, torch._C._get_privateuse1_backend_name(), None)
    return (
        writer.thread_count == 1
        and writer.per_thread_copy_ahead > 0
        and (torch.cuda.is_available() or bool(custom and custom.is_available()))
    )


def _add(builder: ImageBuilder, data: torch.Tensor | io.BytesIO, describe: Describe) -> None:
    if isinstance(data, io.BytesIO):
        builder.begin_archive()
        builder.literal(data.getvalue())
        return
    tensor = data.detach()
    if _is_simple(tensor):
        stand_in = _stand_in(tensor)
        torch.save(stand_in, Archive(builder, describe, (stand_in.untyped_storage(), tensor)))  # type: ignore[arg-type]
    else:
        torch.save(_alone_on_host(tensor), Archive(builder, describe))  # type: ignore[arg-type]


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether a copy of it on the host is described by size, stride and type alone."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and tensor.is_contiguous()
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A host tensor of the same description; its memory is never touched, so it costs address space alone."""
    try:
        storage = torch.UntypedStorage(tensor.nbytes, device="cpu")  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise CannotImage(f"no address space for a tensor of {tensor.nbytes} bytes: {error}") from None
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(storage, 0, tensor.size(), tensor.stride())


def _alone_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """What the writer itself hands to torch.save."""
    tensor = tensor.cpu()
    return tensor if tensor.untyped_storage().size() == tensor.nbytes else tensor.clone()
