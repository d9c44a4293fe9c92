"""Two hundred saves in a row: whether they leave memory behind, and how much there was at most."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback

from benchmarks import process
from benchmarks.training import decorate, trainer
from benchmarks.ways import OURS, WAYS

MODEL = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
"""Four million parameters: a checkpoint of 50 MB, larger than the host cache."""

CACHE = 32 << 20
SAVES = 200
EVERY = 10
"""Saves from one look at the process to the next."""


class Watch(TrainerCallback):
    """Steps without a save, and then one after each."""

    def __init__(self, quiet: int, settle: Callable[[], Any]) -> None:
        self.quiet = quiet
        self.settle = settle
        self.before = 0
        self.resident: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        step = state.global_step
        if step == 1:
            process.forget_peak()  # of imports and of building the model
        if step == self.quiet:
            self.before = process.peak()
            process.forget_peak()
            self.began = time.perf_counter()
        elif step > self.quiet and (step - self.quiet) % EVERY == 0:
            self.settle()  # what is looked at is what stays, not what is in flight
            gc.collect()
            self.resident.append(process.resident())
        control.should_save = step >= self.quiet and step < state.max_steps
        return control


def visit(
    contestant: str,
    folder: str,
    saves: int = SAVES,
    quiet: int = 20,
    model: Mapping[str, int] = MODEL,
    cache: int = CACHE,
) -> dict[str, float]:
    """``cache``: bytes of host cache; only ckpt-run has one."""
    ours = contestant == OURS
    with tempfile.TemporaryDirectory(dir=folder) as output_dir:
        watch = Watch(quiet, lambda: None)
        trained = trainer(output_dir, [watch], quiet + saves, model, per_device_train_batch_size=1)
        if ours:
            watch.settle = decorate(trained, host_cache_size=cache / (1 << 30)).wait
        trained.train()
        peak, seconds = process.peak(), time.perf_counter() - watch.began
    least = [min(part) for part in (_first_half(watch.resident), watch.resident[len(watch.resident) // 2 :])]
    return {
        "peak": float(peak),
        "over": float(peak - watch.before - (cache if ours else 0)),
        "growth": float(least[1] - least[0]),
        "seconds": seconds,
        "synced": float(WAYS[contestant].synced),
    }


def _first_half(resident: list[int]) -> list[int]:
    """Without the very first, when not everything was used once."""
    half = resident[: len(resident) // 2]
    return half[2:] or half
