"""What lies in a checkpoint, read by others' tools."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from datastates.store.catalog import Catalog
from datastates.store.layout import PRIVATE, Root
from safetensors.torch import load_file

WHERE_IT_WAS_TRAINED = ("training_args.bin", "trainer_state.json", ".metadata")
"""Files that hold the output directory, or how fast the evaluation was."""


def whole(output_dir: Path) -> list[int]:
    """The steps that are committed, lowest first; every byte of them has been checked."""
    catalog = Catalog(Root.of(output_dir))
    found = [checkpoint for checkpoint in catalog.checkpoints() if checkpoint.committed]
    for checkpoint in found:
        assert [verdict for verdict in catalog.verify(checkpoint) if not verdict.ok] == []
    return sorted(checkpoint.step for checkpoint in found)


def tree(directory: Path) -> dict[str, bytes]:
    """Contents of all files below ``directory`` by relative path, without what is only ours."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and PRIVATE not in path.relative_to(directory).parts
    }


def digests(directory: Path) -> dict[str, str]:
    """As :func:`tree`, but short enough for a failing comparison to be readable."""
    return {name: hashlib.sha256(data).hexdigest()[:12] for name, data in tree(directory).items()}


def digests_anywhere(directory: Path) -> dict[str, str]:
    """As :func:`digests`, of files that tell where it was trained only the names."""
    return {
        name: "" if name.endswith(WHERE_IT_WAS_TRAINED) else digest
        for name, digest in digests(directory).items()
    }


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of all safetensors files of a checkpoint."""
    return {
        name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()
    }


def optimizer(directory: Path) -> Any:
    return torch.load(directory / "optimizer.pt", weights_only=True)


def same(first: Any, second: Any) -> bool:
    """Whether two nests of dicts, lists and tensors are equal, tensors bit for bit."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)
