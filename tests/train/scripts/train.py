"""One training in a process of its own; a rank of it where the environment says so.

Called with a job (see :class:`Job`) as JSON, or in a forked process through :func:`main`. What it did goes to ``<log>-rank<r>.jsonl``: a line
for the loss of each step, and in the end one for the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import faults  # noqa: E402
import models  # noqa: E402
import sharding  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402
from transformers import Trainer, TrainerCallback  # noqa: E402


@dataclass
class Job:
    """What to train; every field has a JSON form.

    ``orderly``: before each step with an even number everything saved so far has its outcome, so that it is known what is on disk when.
    ``kind``: of model, a function of :mod:`models` that takes ``model``.
    ``late``: memory is copied at the fence and never earlier; a last line tells how much (see :class:`late.LateEngine`).
    ``rows``: of data. ``pause``: seconds that each step takes longer, so that a kill finds something to hit. ``faults``: see :func:`faults.install`.
    """

    output_dir: str
    log: str
    decorated: bool = True
    resume: bool | str | None = True
    orderly: bool = False
    late: bool = False
    pause: float = 0.0
    rows: int = 64
    kind: str = "llama"
    arguments: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)


class Log(TrainerCallback):
    """Writes each loss as soon as it is known, so that a killed process has told what it did."""

    def __init__(self, path: str) -> None:
        self.stream = open(path, "a", buffering=1)  # noqa: SIM115 - lives as long as the process

    def write(self, **fields: Any) -> None:
        self.stream.write(json.dumps(fields) + "\n")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index:  # or else all ranks draw the same numbers, and a mix-up would not show
            torch.manual_seed(args.process_index)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.write(step=state.global_step, loss=float(logs["loss"]))


class Pace(TrainerCallback):
    """Slows steps down. Not part of :class:`Log`: a callback at the beginning of a step stands behind the fence, so nothing is late then."""

    def __init__(self, pause: float) -> None:
        self.pause = pause
        self.settle: Callable[[], Any] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(self.pause)
        if self.settle and state.global_step % 2:
            self.settle()


def fingerprint(trainer: Trainer) -> str:
    """Of every bit of the model, or of this rank's part of it where it is sharded."""
    digest = hashlib.sha256()
    for name, tensor in sorted(sharding.parts(trainer.model).items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def stage_late() -> Any:
    from datastates.llm import host_cache
    from late import LateEngine

    engine: Any = LateEngine()
    host_cache._engine = engine
    register_optimizer_step_post_hook(lambda *_: engine.note_step())
    return engine


def main(job: Job) -> None:
    rank = os.environ.get("RANK", "0")
    log = Log(f"{job.log}-rank{rank}.jsonl")
    pace = Pace(job.pause)
    sharding.prepare(job.arguments)
    trainer = tiny.trainer(
        Path(job.output_dir),
        model=models.build(job.kind, **job.model),
        data=tiny.Tokens(job.rows),
        callbacks=[log, pace] if job.pause or job.orderly else [log],
        **job.arguments,
    )
    sharding.finish(trainer)
    if job.decorated:
        from datastates.llm import DecoratedCheckpointing

        decorated = DecoratedCheckpointing({"trainer": trainer, **job.settings}, -1)
        pace.settle = decorated.wait if job.orderly else None
    for fault in job.faults:
        faults.install(**fault)
    engine = stage_late() if job.late else None
    trainer.train(resume_from_checkpoint=job.resume)
    if engine:
        log.write(
            late=engine.late,
            eager=engine.eager,
            late_bytes=engine.late_bytes,
            bytes=engine.bytes,
            passed=engine.passed,
        )
    state = {"state": sharding.digest(trainer)} if trainer.args.fsdp else {}
    log.write(weights=fingerprint(trainer), step=trainer.state.global_step, **state)


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
