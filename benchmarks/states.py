"""What is saved: states of tensors, the same for the same arguments."""

from __future__ import annotations

import torch

State = dict[str, torch.Tensor]

KIB = 1 << 10


def alike(nbytes: int, tensors: int = 300) -> State:
    """``tensors`` fp32 matrices of one size, ``nbytes`` bytes in all: what a mid-sized model and its optimizer look like."""
    elements = nbytes // tensors // 4
    return {f"layer.{number:04d}.weight": _filled(elements, number) for number in range(tensors)}


def many(tensors: int = 20_000, smallest: int = 4 * KIB, largest: int = 64 * KIB) -> State:
    """Many small tensors: sizes in bytes go evenly from ``smallest`` to ``largest``, in an order that looks random."""
    span = largest - smallest
    sizes = (smallest + span * (number * 7919 % tensors) // tensors for number in range(tensors))
    return {f"expert.{number:05d}.weight": _filled(size // 4, number) for number, size in enumerate(sizes)}


def nbytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def change(state: State) -> None:
    """What an optimizer does to saved memory, at next to no cost: every tensor is another one afterwards."""
    with torch.no_grad():
        for tensor in state.values():
            tensor[0] += 1


def _filled(elements: int, seed: int) -> torch.Tensor:
    """Random enough that no file system can compress it, and fast to make."""
    block = torch.randn(min(elements, 65_536), generator=torch.Generator().manual_seed(seed))
    return block.repeat(elements // len(block) + 1)[:elements].clone()
