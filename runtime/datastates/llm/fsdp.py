"""FSDP: where the memory of sharded tensors lies."""

from __future__ import annotations

import sys

import torch


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, sharing its memory and its version counter; any other tensor is all there itself."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        return tensor._local_tensor  # type: ignore[no-any-return] # to_local() may record an autograd node
    return tensor
