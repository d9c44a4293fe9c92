"""Which memory is known to hold still until the fence, and may therefore be copied late.

Only what an optimizer changes, and only when that optimizer has been seen to fire the fence: its parameters and its state. Everything
else (buffers, RNG states, frozen parameters that a callback may average into, temporaries of the writers) is copied before the save
call returns. Optimizers that change weights outside of ``step()`` are excluded: those that run inside backward, and schedule-free ones,
whose ``train()`` and ``eval()`` swap weights in place.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from datastates.llm import deepspeed, fsdp

SMALLEST = 4096
"""Bytes. A smaller storage is copied at once: that costs less than keeping account of it."""


@dataclass(slots=True)
class StillTensor:
    """One storage that is copied late, with what was true of it at the save. It is called after the first of the tensors that lie in it."""

    name: str
    storage: torch.UntypedStorage
    address: int
    nbytes: int
    versions: list[tuple[str, torch.Tensor, int | None]] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> StillTensor:
        storage = tensor.untyped_storage()
        return cls(name, storage, storage.data_ptr(), storage.nbytes(), [(name, tensor, _version(tensor))])

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """``tensor`` lies in this storage too. What changes it bumps its own counter: views that took another's ``data`` share none."""
        self.versions.append((name, tensor, _version(tensor)))

    def disturbed(self) -> str | None:
        """Why the late copy cannot be trusted: the memory moved, or a version counter did; None when neither."""
        if self.storage.data_ptr() != self.address or self.storage.nbytes() != self.nbytes:
            return "its memory was resized or moved"
        for name, tensor, version in self.versions:
            if _version(tensor) != version:
                return (
                    "it was changed in place" if name == self.name else f"{name} in it was changed in place"
                )
        return None


class SteppingOptimizers:
    """The optimizers of this process that fired the step pre-hook in the step that has just ended, and how.

    An earlier step is no proof: a script may replace an optimizer's ``step`` at any time.
    """

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._engines: weakref.WeakSet[Any] = weakref.WeakSet()
        self._inside_backward: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def begin_step(self) -> None:
        """A training step begins; what was seen in the last one no longer counts."""
        self._seen.clear()
        self._engines.clear()

    def note_engine(self, engine: Any) -> None:
        """A DeepSpeed engine is about to step. Of its own optimizers some never fire the hook, and all skip a step that overflows."""
        self._engines.add(engine)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._seen.add(optimizer)
        if torch._C._current_graph_task_id() != -1:
            self._inside_backward.add(optimizer)

    def trusted(self) -> list[torch.optim.Optimizer]:
        return [optimizer for optimizer in self._seen if self._changes_weights_in_step_only(optimizer)]

    def trusted_engines(self) -> list[Any]:
        """As :meth:`trusted`, for the engines and the optimizers below them."""
        return [
            engine
            for engine in self._engines
            if self._changes_weights_in_step_only(deepspeed.base_optimizer(engine))
        ]

    def _changes_weights_in_step_only(self, optimizer: Any) -> bool:
        return optimizer not in self._inside_backward and not _swaps_weights(optimizer)


def still_tensors(
    optimizers: Iterable[torch.optim.Optimizer],
    model: torch.nn.Module,
    never: set[str],
    engines: Iterable[Any] = (),
) -> dict[int, StillTensor]:
    """What may be copied late, by the address of its storage.

    Args:
        optimizers: those that fire the fence.
        model: gives names to parameters; storages that also hold one of its buffers are left out.
        never: names that were found torn before.
        engines: DeepSpeed engines that fire the fence.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    within = {id(optimizer) for optimizer in deepspeed.own_optimizers()}
    parts = [_tensors_of(optimizer, names) for optimizer in optimizers if id(optimizer) not in within]
    found: dict[int, StillTensor] = {}
    for name, whole in itertools.chain(*parts, *map(deepspeed.still_parts, engines)):
        tensor = fsdp.local_part(whole)
        if _plain(tensor):
            _add(found, name, tensor)
    for buffer in map(fsdp.local_part, model.buffers()):
        if _plain(buffer):
            found.pop(buffer.untyped_storage().data_ptr(), None)
    return {address: entry for address, entry in found.items() if entry.name not in never}


def _add(found: dict[int, StillTensor], name: str, tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    entry = found.get(storage.data_ptr())
    if entry is not None:
        entry.watch(name, tensor)
    elif storage.nbytes() >= SMALLEST:
        found[storage.data_ptr()] = StillTensor.of(name, tensor)


def _tensors_of(
    optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    index = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter), f"parameter {index} of the optimizer")
            index += 1
            if not parameter.requires_grad or _is_updated_in_backward(parameter):
                continue
            yield name, parameter
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{name}.{key}", value


def _plain(tensor: Any) -> bool:
    """An ordinary dense tensor of this process alone: subclasses may hold several storages, shared memory has other writers."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.device.type == "cpu" and tensor.untyped_storage().is_shared())
    )


def _swaps_weights(optimizer: torch.optim.Optimizer) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def _is_updated_in_backward(parameter: torch.Tensor) -> bool:
    """Such hooks exist to use a gradient at once: for an update of the parameter, before any step."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _version(tensor: torch.Tensor) -> int | None:
    # An inference tensor has no version counter; the engine's sample is then the only witness.
    try:
        return tensor._version
    except RuntimeError:
        return None
