"""How a Trainer's checkpoints are saved: the contestants of the cases that train. Imports nothing that takes long."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Way:
    """How a Trainer's checkpoints are saved.

    Args:
        saves: False: none are, and what is measured is the noise.
        decorated: by ckpt-run.
        writer: ``checkpoint.writer`` of DeepSpeed's configuration.
        synced: whether the files have been through fsync when the save is done.
        last: a file of the checkpoint that appears when the save is done; empty: it is when its call returns.
    """

    saves: bool = True
    decorated: bool = False
    writer: Mapping[str, Any] | None = None
    synced: bool = False
    last: str = ""


WITHOUT, OURS, STOCK = "without saves", "ckpt-run", "stock Trainer"
WAYS = {
    WITHOUT: Way(saves=False),
    OURS: Way(decorated=True, synced=True, last="concurrent_checkpoint/checkpoint-{}/.ckpt/manifest.json"),
    STOCK: Way(),
}

REPLICA = {"data_parallel": "replica"}  # without it, DeepSpeed 0.18 fails at stages below 3
ZERO_WAYS = {
    WITHOUT: WAYS[WITHOUT],
    OURS: WAYS[OURS],
    "DeepSpeed torch": Way(),
    "DeepSpeed python writer": Way(writer={"type": "python", **REPLICA}),
    "DeepSpeed fast writer": Way(writer={"type": "fast", **REPLICA}),
    "DeepSpeed decoupled": Way(
        writer={"type": "python", "decoupled": True, **REPLICA}, last="checkpoint-{}/latest"
    ),
    "DeepSpeed decoupled, fast writer": Way(
        writer={"type": "fast", "decoupled": True, **REPLICA}, last="checkpoint-{}/latest"
    ),
}


def missing_for_zero(contestant: str) -> str:
    """Why a contestant cannot run here."""
    if not importlib.util.find_spec("deepspeed"):
        return "deepspeed is not installed"
    if (ZERO_WAYS[contestant].writer or {}).get("type") != "fast":
        return ""
    import torch

    if not torch.cuda.is_available():
        return "its buffer is pinned memory: no GPU"
    return "" if _has_libaio() else "libaio's headers are not installed"


def _has_libaio() -> bool:
    return any(Path(folder, "libaio.h").exists() for folder in ("/usr/include", "/usr/local/include"))
