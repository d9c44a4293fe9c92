"""What a training is known again by when its script is started anew; :func:`datastates.store.lineage.ordinal_of` says how.

Asked on one rank alone: no collective, and no tensor is read. Left out is what may differ between two launches of one training: names
that a wrapper adds, the shape of a local shard, the precision that a framework casts to; and what each launch is free to choose: batch
sizes, ranks, devices, paths, logging.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from transformers.trainer_utils import has_length

from datastates.store.lineage import OPAQUE
from datastates.store.runrecord import Fingerprint

_HOLD_IN_MODULE = ("DeepSpeedEngine", "PipelineEngine")
_IN_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile, of activation checkpointing
_FLATTENED = ("_fsdp_wrapped_module", "_flat_param")  # FSDP's first version


def of(trainer: Any, trial: Any = None) -> Fingerprint | None:
    """Of the ``train()`` call that begins. None for a ``trial`` of a search: its model and arguments are made inside the call."""
    if trial is not None:
        return None
    model = getattr(trainer, "model", None)
    if not isinstance(model, torch.nn.Module) or getattr(trainer, "model_init", None) is not None:
        return Fingerprint(training=_training(trainer))  # train() will build the model
    model = unwrapped(model)
    parameters = _parameters(model)
    training = _training(trainer)
    if not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):  # they cast the model itself
        training["precision"] = ", ".join(sorted({_text(tensor.dtype) for tensor in parameters.values()}))
    return Fingerprint(model=_model(model, parameters), training=training)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model as the script built it, without what compiles it or spreads it over ranks."""
    while True:
        if type(model).__name__ == "OptimizedModule":
            model = model._orig_mod
        elif (
            isinstance(model, (DataParallel, DistributedDataParallel))
            or type(model).__name__ in _HOLD_IN_MODULE
        ):
            model = model.module
        else:
            return model


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By their plain names; tied ones under each of theirs, since a copy of the model may have lost the tie."""
    named = torch.nn.Module.named_parameters(model, remove_duplicate=False)
    return {_plain(name): tensor for name, tensor in named}


def _plain(name: str) -> str:
    for wrapper in _IN_NAMES:
        name = name.replace(wrapper, "")
    return name


def _model(model: torch.nn.Module, parameters: dict[str, torch.Tensor]) -> dict[str, str]:
    """Facts of the model; none while they cannot be told."""
    if any(is_lazy(tensor) for tensor in parameters.values()):
        return {}
    if any(flat in name for name in parameters for flat in _FLATTENED):
        return {}
    facts = {
        "class": _class(model),
        "parameters": str(len(parameters)),
        "names": _digest(parameters),
    }
    if (
        getattr(model, "_tp_size", None) or 1
    ) > 1:  # tensor parallel: the shapes are those of this rank's shards
        return facts
    shapes = {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in parameters.items()}
    return {
        **facts,
        "elements": str(sum(map(math.prod, shapes.values()))),
        "shapes": _digest(f"{name} {shape}" for name, shape in shapes.items()),
    }


def _class(model: torch.nn.Module) -> str:
    """Its name. FSDP puts a class of its own in front."""
    lineage = type(model).__mro__
    plain = (cls for cls in lineage if all(base.__name__ != "FSDPModule" for base in cls.__mro__))
    return next(plain).__qualname__


def _training(trainer: Any) -> dict[str, str]:
    args, data = trainer.args, getattr(trainer, "train_dataset", None)
    length = {"max_steps": args.max_steps} if args.max_steps > 0 else {"epochs": args.num_train_epochs}
    facts = {
        "trainer": type(trainer).__qualname__,
        **length,
        "learning_rate": args.learning_rate,
        "scheduler": args.lr_scheduler_type,
        "optimizer": args.optim,
        "seed": args.seed,
    }
    if data is not None and has_length(data):
        facts["rows"] = len(data)
    content = getattr(data, "_fingerprint", None)  # of a Hugging Face data set
    if isinstance(content, str):
        facts["data"] = OPAQUE + content
    return {name: _text(value) for name, value in facts.items()}


def _text(value: Any) -> str:
    return str(getattr(value, "value", value)).removeprefix("torch.")


def _digest(lines: Iterable[str]) -> str:
    return OPAQUE + hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]
