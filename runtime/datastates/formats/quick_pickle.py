"""The pickle that torch.save writes, in a fraction of the time.

torch pickles with a ``persistent_id`` in Python that is asked about every object, some twenty for each tensor, and describes each tensor
and each storage in Python. Here a native function is asked instead, which describes ordinary tensors by a few questions to them.

What torch writes is not taken for granted. In each save the first tensor of a kind (its dtype, device and layout) is described by torch
itself, and the kind counts as ordinary only if our shorter way gives the same. Whatever is not ordinary is left to torch's own code.
"""

from __future__ import annotations

import _pickle
import copyreg
import io
import pickle
import types
from collections import OrderedDict
from typing import Any

import torch
from torch.storage import TypedStorage, UntypedStorage

from datastates.engine._native import TensorPickling

usable = True
"""False where the shorter way was found to give another pickle than torch's."""


class NotPlain(Exception):  # noqa: N818 - it is a verdict, not a fault
    """torch has to pickle this object by itself."""


class Storages:
    """The storages that a pickle names, in the order of their keys, which count from 0.

    ``addresses``, ``sizes`` (bytes) and ``devices`` are those of ``storages``.
    """

    def __init__(self) -> None:
        self.storages: list[UntypedStorage] = []
        self.addresses: list[int] = []
        self.sizes: list[int] = []
        self.devices: list[torch.device] = []

    def take(self, pickling: TensorPickling) -> None:
        self.storages, self.addresses = pickling.storages, pickling.addresses
        self.sizes, self.devices = pickling.sizes, pickling.devices


def pickle_module(storages: Storages) -> Any:
    """Takes the place of the module ``pickle`` as an argument of torch's code, for one object; its storages go to ``storages``.

    If torch has to pickle the object by itself, ``storages`` stays empty and torch learns of them as ever.
    """
    return types.SimpleNamespace(Pickler=type("Pickler", (_Pickler,), {"waiting": [storages]}))


class _Pickler:
    """Base of the class that torch makes to pickle an object; ``persistent_id`` is torch's."""

    waiting: list[Storages]
    persistent_id: Any = None

    def __init__(self, file: Any, protocol: int) -> None:
        self._file = file
        self._protocol = protocol
        # A class lives until the next garbage collection, and must not keep tensors alive.
        self._storages = self.waiting.pop()

    def dump(self, obj: Any) -> None:
        try:
            data = dumps(obj, self._protocol, self._storages)
        except NotPlain:
            stock = pickle.Pickler(self._file, self._protocol)
            stock.persistent_id = self.persistent_id  # type: ignore[method-assign]
            stock.dump(obj)
        else:
            self._file.write(data)


class _Hooks:
    """Is pickled like an empty OrderedDict, of which torch.save makes one for every tensor."""

    __slots__ = ()


_NO_HOOKS = (OrderedDict, ())

_NO_STORAGES = (
    str, int, type(torch.FloatStorage), tuple, types.FunctionType, bool, torch.Tensor, _Hooks, type,
    type(None), float, list, dict, set, bytes, OrderedDict, type(torch.Tensor), torch.Size, torch.dtype, types.BuiltinFunctionType,
)  # fmt: skip
"""Types of which torch.save asks in vain whether they are storages, frequent ones first."""


def dumps(obj: Any, protocol: int, storages: Storages) -> bytes:
    """The pickle.

    Raises:
        NotPlain: torch would write another one, or none.
    """
    if not _is_usual():
        raise NotPlain
    metadata_of = torch._C._get_tensor_metadata  # type: ignore[attr-defined]
    pickling = TensorPickling(_NO_STORAGES, _kind_of, _storage_of, _Hooks, metadata_of, NotPlain, protocol)
    buffer = io.BytesIO()
    pickler: Any = _pickle.Pickler(buffer, protocol)
    pickler.persistent_id = pickling.persistent_id
    own = {torch.Tensor: pickling.reduce, _Hooks: lambda hooks: _NO_HOOKS}
    pickler.dispatch_table = {**copyreg.dispatch_table, **own}
    pickler.dump(obj)
    storages.take(pickling)
    return buffer.getvalue()


def _is_usual() -> bool:
    """Whether tensors are pickled as they were when the self check was made."""
    modes = getattr(torch.serialization, "_serialization_tls", None)
    return (
        usable
        and pickle.Pickler is _pickle.Pickler
        and copyreg.dispatch_table.keys().isdisjoint((torch.Tensor, OrderedDict))
        and not getattr(modes, "skip_data", False)
        and not getattr(modes, "materialize_fake_tensors", False)
    )


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """How torch pickles tensors like this one; None if not as what an ordinary tensor is.

    Returns:
        The function that rebuilds it from ``(storage, offset, size, stride, requires_grad, hooks, *extra)``, the tuple ``extra``, and
        from there on what :func:`_storage_of` has from its second place on.
    """
    how: Any = tensor
    reduced = how.__reduce_ex__(2)
    arguments: tuple[Any, ...] = reduced[1] if len(reduced) == 2 else ()
    if len(arguments) < 6 or type(arguments[0]) not in (TypedStorage, UntypedStorage):
        return None
    storage, extra = arguments[0], arguments[6:]
    untyped, *described = _storage_of(storage)  # type: ignore[misc]
    ordinary: tuple[Any, ...] = (
        tensor.storage_offset(),
        tuple(tensor.size()),
        tensor.stride(),
        tensor.requires_grad,
        OrderedDict(),
    )
    as_expected = (
        untyped._cdata == tensor.untyped_storage()._cdata
        and arguments[1:6] == ordinary
        and [type(value) for value in arguments[1:6]] == [type(value) for value in ordinary]
        and all(type(value) is torch.dtype for value in extra)
    )
    return (reduced[0], extra, *described) if as_expected else None


def _storage_of(obj: Any) -> tuple[Any, ...] | None:
    """None if ``obj`` is no storage.

    Returns:
        The untyped storage, and of what torch writes for it ``("storage", type, key, location, nbytes // itemsize)``: the dtype that it
        takes the storage for, the type, the location, and the itemsize in bytes.
    """
    library: Any = torch
    if not isinstance(obj, TypedStorage) and not library.is_storage(obj):
        return None
    if getattr(obj, "_fake_device", None) is not None:
        raise NotPlain
    serialization = library.serialization
    if type(obj) is TypedStorage:
        typed: Any = obj
        storage = typed._untyped_storage
        kind = getattr(library, typed._pickle_storage_type())
        return storage, obj.dtype, kind, serialization.location_tag(storage), typed._element_size()
    if type(obj) is UntypedStorage:
        kind = serialization.normalize_storage_type(type(obj))
        return obj, torch.uint8, kind, serialization.location_tag(obj), 1
    raise NotPlain
