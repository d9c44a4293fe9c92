"""FSDP: where the memory of sharded tensors lies, how often a whole model is gathered, and whose files fit which ranks."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_BETWEEN = ("save_model", "_save", "_save_checkpoint", "_save_optimizer_and_scheduler")
"""What runs between the two times when Trainer gathers the whole model, and could change it."""

_OF_ONE_RANK = re.compile(r"(?:pytorch_model_fsdp|optimizer)(?:_\d+)?_rank(\d+)\.bin")
"""accelerate's ``use_dcp=False``, and the local state of FSDP's first version."""


class WorldSizeError(ValueError):
    """The files of a checkpoint fit another number of ranks than would load them."""


def check_world_size(directory: Path, ranks: int) -> None:
    """Refuse files that hold one rank's shards each and were written by another number of ranks: stock code would let the ranks part.

    Fewer than ``ranks`` may be all that there is to see, where each of several nodes has a disk of its own.

    Raises:
        WorldSizeError: on every rank, with both numbers.
    """
    if not directory.is_dir() or any(directory.glob("*/.metadata")):
        return  # torch.distributed.checkpoint cuts shards anew
    found = (_OF_ONE_RANK.fullmatch(path.name) for path in directory.iterdir())
    saved = max((int(match[1]) + 1 for match in found if match), default=ranks)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if saved > ranks or (saved < ranks and here >= ranks):
        raise WorldSizeError(
            f"{directory} was saved by {saved} rank(s), and {ranks} would load it: files of each rank (use_dcp=False) fit only as many ranks "
            f"as have written them. Train with {saved}; what torch.distributed.checkpoint writes (use_dcp=True) any number can load"
        )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, sharing its memory and its version counter; any other tensor is all there itself."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        return tensor._local_tensor  # type: ignore[no-any-return] # to_local() may record an autograd node
    return tensor


def install(wait: Callable[[], None]) -> None:
    """Put the fence before torch.distributed.checkpoint loads, straight into the memory of a state dict. Idempotent.

    Args:
        wait: returns when no save has memory left to copy that could change.
    """
    if not torch.distributed.is_available():
        return
    library: Any = importlib.import_module("torch.distributed.checkpoint.state_dict_loader")
    stock = library._load_state_dict
    if hasattr(stock, "_ckpt_run_fence"):
        return

    @functools.wraps(stock)
    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        wait()
        return stock(*args, **kwargs)

    load_state_dict._ckpt_run_fence = True  # type: ignore[attr-defined]
    library._load_state_dict = load_state_dict


@contextmanager
def gathered_once(trainer: Any) -> Iterator[None]:
    """While open, the whole model is gathered on the host once, where stock code writes it into two files with nothing in between.

    All ranks decide alike: by their code, never by what is in their memory. Where a script has a say between the two files, it may write
    averaged weights into the first; no version counter would tell.
    """
    if not (trainer.is_fsdp_enabled and _is_stock(trainer)):
        yield
        return
    library: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")
    stock = library.get_model_state_dict
    known: list[tuple[Any, Any, dict[str, Any]]] = []

    @functools.wraps(stock)
    def get_model_state_dict(model: Any, *, submodules: Any = None, options: Any = None) -> Any:
        if submodules or not (options and options.full_state_dict and options.cpu_offload):
            return stock(model, submodules=submodules, options=options)
        for one, how, state in known:
            if one is model and how == options:
                return copy.copy(state)
        known.append((model, options, stock(model, options=options)))
        return copy.copy(known[-1][2])

    library.get_model_state_dict = get_model_state_dict
    try:
        yield
    finally:
        library.get_model_state_dict = stock


def _is_stock(trainer: Any) -> bool:
    from transformers import (
        PreTrainedModel,
        Trainer,
    )  # a training loop without transformers comes here as little as it has them

    writers = all(getattr(type(trainer), name) is getattr(Trainer, name) for name in _BETWEEN)
    saves_model = getattr(type(trainer.model), "save_pretrained", None)
    replaced = {*vars(trainer)} & {"save_model", "_save", "_save_optimizer_and_scheduler"}
    return (
        writers
        and not replaced
        and saves_model is PreTrainedModel.save_pretrained
        and "save_pretrained" not in vars(trainer.model)
    )
