"""DeepSpeed: which of an engine's tensors hold still until the fence, and where else it changes them.

``deepspeed`` is never imported here. :func:`install` looks whether ``deepspeed.runtime.engine`` is loaded; where it is not, nothing costs
anything. What an engine's optimizer keeps between two steps has a name of its own in each of DeepSpeed's optimizers:

===================== =================================== ==========================================================
optimizer             masters in 32 bits                  what module parameters are views of
===================== =================================== ==========================================================
ZeRO-1, ZeRO-2        single_partition_of_fp32_groups     bit16_groups
ZeRO-3                fp32_partitioned_groups_flat        (partitions, which no file holds unless they are frozen)
BF16_Optimizer        fp32_groups_flat_partition          bf16_groups
FP16_Optimizer        fp32_groups_flat                    fp16_groups
FP16_UnfusedOptimizer fp32_groups                         fp16_groups
===================== =================================== ==========================================================

The base optimizer's state hangs on the masters. ZeRO-3 empties the base optimizer's ``param_groups`` outside of its step, so they say nothing.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from datastates.llm import deepspeed_load, log

logger = log.logger("datastates.llm.decorator")

_MASTERS = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
    "fp32_groups",
)
_MODULE_PARAMETERS = ("bit16_groups", "bf16_groups", "fp16_groups")

_CHANGES: dict[str, dict[str, tuple[str, ...]]] = {
    "deepspeed.runtime.engine": {
        "DeepSpeedEngine": ("offload_states", "reload_states", "destroy"),
    },
    "deepspeed.runtime.zero.stage3": {
        "DeepSpeedZeroOptimizer_Stage3": ("set_full_hp_param", "set_local_hp_param"),
    },
    "deepspeed.utils.tensor_fragment": {
        "tensor_fragment": ("get_hp_fragment", "get_optim_state_fragment", "set_optim_state_fragment"),
    },
}
"""Methods besides the step that change what was saved: the engine's own, and those behind ``safe_set_full_fp32_param`` and its like."""

_told: set[str] = set()
_engines: weakref.WeakSet[Any] = weakref.WeakSet()


def install(wait: Callable[[], None], note_engine: Callable[[Any], None]) -> None:
    """Put the fence before every step of every DeepSpeed engine, and before whatever else changes its tensors. Idempotent.

    Args:
        wait: returns when no save has memory left to copy that could change.
        note_engine: is told each engine that is about to step.
    """
    module = sys.modules.get("deepspeed.runtime.engine")
    engine_class = getattr(module, "DeepSpeedEngine", None)
    if engine_class is None or hasattr(engine_class, "_ckpt_run_fence"):
        return

    def before_step(engine: Any, *_: Any, **__: Any) -> None:
        _engines.add(engine)
        note_engine(engine)
        wait()

    def before_load(engine: Any, load_dir: Any, tag: Any = None, *_: Any, **__: Any) -> None:
        wait()
        deepspeed_load.use_plain_files(engine)
        deepspeed_load.check_world_size(engine, load_dir, tag)

    def before_change(*_: Any, **__: Any) -> None:
        wait()

    def after_gathered_block(block: Any, *_: Any) -> None:
        if (
            getattr(block, "src_rank", None) is not None
        ):  # the parameters are partitioned anew: the block may have changed them
            wait()

    engine_class._ckpt_run_fence = True
    _precede(engine_class, "_take_model_step", before_step)
    _precede(engine_class, "load_checkpoint", before_load)
    _precede(engine_class, "save_checkpoint", lambda engine, *_, **__: deepspeed_load.use_plain_files(engine))
    for name, classes in _CHANGES.items():
        for class_name, methods in classes.items():
            owner = getattr(sys.modules.get(name), class_name, None)
            for method in methods:
                _precede(owner, method, before_change)
    partitions = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    _precede(getattr(partitions, "GatheredParameters", None), "__exit__", after_gathered_block)


def _precede(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Do ``action`` with the arguments before each call of ``owner.name``, if there is such a method."""
    method = getattr(owner, name, None)
    if method is None:
        return

    @functools.wraps(method)
    def preceded(*args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(owner, name, preceded)


# -- what holds still -----------------------------------------------------------------------------------------------------


def base_optimizer(engine: Any) -> Any:
    """The optimizer that does the arithmetic, below whatever DeepSpeed has wrapped around it; None when there is none."""
    outer = getattr(engine, "optimizer", None)
    return getattr(outer, "optimizer", outer)


def own_optimizers() -> list[Any]:
    """Base optimizers for which :func:`still_parts` answers, and not their ``param_groups``."""
    return [
        base_optimizer(engine)
        for engine in _engines
        if base_optimizer(engine) is not engine.optimizer or why_eager(engine)
    ]


def still_parts(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of all that only the next step of ``engine`` changes; nothing where that cannot be said."""
    obstacle = why_eager(engine) or _why_by_stock(engine)
    if obstacle:
        _tell(engine, obstacle)
        return
    outer = engine.optimizer
    base = base_optimizer(engine)
    for index, master in enumerate(_flat(_first(outer, _MASTERS))):
        yield f"fp32 partition {index}", master
        for key, value in base.state.get(master, {}).items():
            if isinstance(value, torch.Tensor):
                yield f"fp32 partition {index}.{key}", value
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    for parameter in _flat(_first(outer, _MODULE_PARAMETERS)):
        if not hasattr(parameter, "ds_id"):
            yield names.get(id(parameter), "a parameter of the optimizer"), parameter


def why_eager(engine: Any) -> str:
    """Why nothing of ``engine`` may be copied late, with what to change to have it; "" when it may."""
    zero = engine._config.zero_config
    offload = zero.offload_optimizer
    if _device(offload) == "nvme" or _device(zero.offload_param) == "nvme":
        return "the optimizer or the parameters live on NVMe (offload to cpu, or not at all, to save concurrently)"
    if getattr(offload, "super_offload", False):
        return "SuperOffload steps in another process (set super_offload to false to save concurrently)"
    if getattr(zero, "zenflow", None) is not None:
        return "ZenFlow changes weights outside of the step (leave zenflow out to save concurrently)"
    if type(engine).__name__ == "DeepSpeedHybridEngine":
        return "the hybrid engine changes weights in train() and eval() (turn hybrid_engine off to save concurrently)"
    if getattr(engine, "is_deepcompile_enabled", bool)():
        return "DeepCompile moves optimizer state about (turn compile.deepcompile off to save concurrently)"
    return ""


def _why_by_stock(engine: Any) -> str:
    """Why torch's own writer writes the files of ``engine`` within the save call, with what to change; "" when it does not."""
    if not getattr(engine.checkpoint_engine, "zipfile_serialization", True):
        return "checkpoint_serialization is false, which is torch's legacy format (leave it out to save concurrently)"
    return ""


def _tell(engine: Any, obstacle: str) -> None:
    if obstacle not in _told:
        _told.add(obstacle)
        if engine.global_rank == 0:
            logger.warning("%s DeepSpeed's state is saved synchronously: %s", log.PREFIX, obstacle)


def _device(offload: Any) -> str:
    device = getattr(offload, "device", None)
    return str(getattr(device, "value", device))


def _first(owner: Any, names: Iterable[str]) -> Any:
    return next((getattr(owner, name) for name in names if getattr(owner, name, None)), ())


def _flat(nested: Any) -> Iterator[torch.Tensor]:
    """The tensors of a list, or of a list of lists."""
    for item in nested:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _flat(item)
