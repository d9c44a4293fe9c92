"""The training of :mod:`benchmarks.training` under DeepSpeed's ZeRO-2, in one process on CPUs, with each of DeepSpeed's ways to write.

One process, since two would share the two cores that a small machine has, and most of what they would show is that. Their files, 840 MB a
checkpoint, are those that one rank of any number writes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.training import MODEL, Measurement, Schedule, trainer
from benchmarks.ways import ZERO_WAYS, Way


def visit(
    contestant: str, folder: str, save_steps: int, saves: int, model: Mapping[str, int] = MODEL
) -> dict[str, float]:
    """A training with ZeRO-2."""
    _prepare()
    from deepspeed.runtime.engine import DeepSpeedEngine

    way = ZERO_WAYS[contestant]
    with tempfile.TemporaryDirectory(dir=folder) as output_dir:
        measurement = Measurement(way, Schedule(save_steps, saves), output_dir)
        # Where the decoupled writer makes training wait: before the step that follows a save.
        measurement.stalls.watch(DeepSpeedEngine, "_commit_decoupled_checkpoint")
        measurement.train(
            lambda: trainer(
                output_dir,
                [measurement.clock],
                measurement.schedule.last,
                model,
                use_cpu=False,
                deepspeed=_configuration(way),
                optim="adamw_torch",
            )
        )
        return measurement.figures()


def _configuration(way: Way) -> dict[str, Any]:
    """torch's AdamW, since DeepSpeed's own would have to be compiled."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 2},
        **({"checkpoint": {"writer": dict(way.writer)}} if way.writer else {}),
    }


def _prepare() -> None:
    """What a launcher of DeepSpeed's would set for a single rank."""
    os.environ.update(
        DS_ACCELERATOR="cpu",
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        CROSS_RANK="0",
        CROSS_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
