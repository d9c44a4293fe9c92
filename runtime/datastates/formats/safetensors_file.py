"""The file that safetensors.torch.save_file would write, as a file image.

The file is a length, a JSON header and the tensors' bytes back to back. Which tensor comes first, how names are escaped and how
metadata appear is the library's business, so the library itself writes the header, for empty tensors of the same names and
dtypes; only their shapes and offsets are replaced. safetensors 0.8 writes metadata of several keys in an order that differs from
call to call; then any of its orders is right, and so is the one that is found here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any

import safetensors
import safetensors.torch
import torch

from datastates.engine.image import FileImage
from datastates.formats import device
from datastates.formats.builder import Describe, ImageBuilder
from datastates.formats.device import CannotImage

_EMPTY = '"shape":[0],"data_offsets":[0,0]'
_PACKED_DTYPES = frozenset({getattr(torch, "float4_e2m1fn_x2", None)} - {None})

FLATTEN = "_flatten_as_ptr" if hasattr(safetensors.torch, "_flatten_as_ptr") else "_flatten"
"""The library's function from tensors to what its file writer takes: its name since 0.8, and before."""

stock_flatten = getattr(safetensors.torch, FLATTEN)


def image(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None, describe: Describe) -> FileImage:
    """The image of ``save_file(tensors, ..., metadata=metadata)``.

    Args:
        describe: asked once for each tensor that becomes a memory part.

    Raises:
        CannotImage: something here is beyond us; the library may still be able to save it.
        Exception: what the library itself raises for tensors that it refuses, or for names and metadata that are not text.
    """
    _check(tensors)
    header = _header_of_empty(tensors, metadata)
    names = _names_in_order(header)
    if sorted(names) != sorted(tensors):
        raise CannotImage("the library's header does not list the tensors by their names")
    return _lay_out([(name, tensors[name]) for name in names], header, describe)


def _check(tensors: dict[str, torch.Tensor]) -> None:
    """Let the library refuse what it refuses, with its own words, and refuse what only the library can do."""
    if not isinstance(tensors, dict):
        _let_library_refuse(tensors)
    for name, tensor in tensors.items():
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.layout != torch.strided
            or not tensor.is_contiguous()
        ):
            _let_library_refuse({name: tensor})
    if any(len(names) > 1 for names in safetensors.torch._find_shared_tensors(tensors)):
        _let_library_refuse(tensors)


def _let_library_refuse(tensors: Any) -> None:
    stock_flatten(tensors, *([[]] if FLATTEN == "_flatten_as_ptr" else []))
    raise CannotImage("tensors that only safetensors itself can save")


def _header_of_empty(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> str:
    """The library's JSON header for tensors of the same names and dtypes without elements, without its padding."""
    empty = {name: _empty(tensor.dtype) for name, tensor in tensors.items()}
    whole: bytes = safetensors.torch.save(empty, metadata)
    length = int.from_bytes(whole[:8], "little")
    if len(whole) != 8 + length:
        raise CannotImage("the library puts more than a header into a file without data")
    return whole[8:].decode().rstrip(" ")


@functools.cache
def _empty(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu")


def _names_in_order(header: str) -> list[str]:
    try:
        entries = json.loads(header, object_pairs_hook=list)
    except ValueError:
        raise CannotImage("the library's header is not valid JSON") from None
    names = [name for name, _ in entries if name != "__metadata__"]
    if header.count(_EMPTY) != len(names):
        raise CannotImage("the library's header has an unknown form")
    return names


def _lay_out(tensors: list[tuple[str, torch.Tensor]], header: str, describe: Describe) -> FileImage:
    header_bytes = _with_places(header, [tensor for _, tensor in tensors]).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    builder = ImageBuilder()
    builder.literal(len(header_bytes).to_bytes(8, "little") + header_bytes)
    place_of = functools.cache(device.place)
    for name, tensor in tensors:
        if tensor.numel():
            _add_tensor(builder, name, tensor, place_of(tensor.device), describe)
    return builder.finish()


def _with_places(header: str, tensors: Iterable[torch.Tensor]) -> str:
    """The header with the shape and offsets of each tensor, in the header's order. Inside a name the pattern's quotes are escaped."""
    pieces = iter(header.split(_EMPTY))
    out = [next(pieces)]
    start = 0
    for tensor, piece in zip(tensors, pieces, strict=True):
        end = start + _nbytes(tensor)
        shape = ",".join(map(str, _shape(tensor)))
        out.append(f'"shape":[{shape}],"data_offsets":[{start},{end}]{piece}')
        start = end
    return "".join(out)


def _shape(tensor: torch.Tensor) -> list[int]:
    if tensor.dtype not in _PACKED_DTYPES:
        return list(tensor.shape)
    if not hasattr(safetensors, "TensorSpec") or not tensor.dim():
        raise CannotImage(f"{tensor.dtype}: only safetensors itself knows whether it saves this")
    name = str(tensor.dtype).split(".")[-1]
    spec = safetensors.TensorSpec(dtype=name, shape=tensor.shape, data_ptr=0, data_len=_nbytes(tensor))
    return list(spec.shape)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _add_tensor(
    builder: ImageBuilder, name: str, tensor: torch.Tensor, place: device.Place, describe: Describe
) -> None:
    nbytes, address = _nbytes(tensor), tensor.data_ptr()
    if not address:
        raise CannotImage("a tensor has elements but no memory of its own")
    small = builder.small(address, nbytes, place)
    if small is not None:
        builder.literal(small)
        return
    storage = tensor.untyped_storage()
    still, label = describe(storage.data_ptr(), storage.nbytes())
    # The storage, not the tensor, keeps this memory: `parameter.data = ...` gives the tensor another one.
    builder.memory(address, nbytes, storage, still, label or name, place.device, place.stream)
