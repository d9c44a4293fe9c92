"""How long a resumed training takes from the start of its process to its first step.

The checkpoint is the same for all: ckpt-run's, whose files are those of the stock Trainer.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from datastates.store.layout import Root

from benchmarks import verifying
from benchmarks.starting import CKPT_RUN
from benchmarks.training import MODEL
from benchmarks.ways import OURS, STOCK

STARTS = 3
ROOT = Path(__file__).parents[1]


def visit(
    contestant: str, folder: str, model: Mapping[str, int] = MODEL, starts: int = STARTS
) -> dict[str, float]:
    """Seconds of ``starts`` starts with the checkpoint in the page cache, and of one with none of it there.

    Each start of ckpt-run's takes turns with one of the stock Trainer, as a machine is not equally fast all the time.
    """
    with tempfile.TemporaryDirectory(dir=folder) as output_dir:
        environment = {**os.environ, "XDG_STATE_HOME": output_dir}
        _run([CKPT_RUN, *_command(output_dir, model, None)], environment)
        checkpoint = Root.of(output_dir).checkpoint(1).path
        if not checkpoint.is_dir():
            raise AssertionError("ckpt-run is off: it has saved nothing")
        commands = {
            OURS: [CKPT_RUN, *_command(output_dir, model, True)],
            STOCK: _command(output_dir, model, str(checkpoint)),
        }
        stock = [] if contestant == STOCK else commands[STOCK]
        runs = [_Start.of(commands[contestant], environment, beside=stock) for _ in range(starts)]
        verifying.forget(checkpoint)
        cold = _Start.of(commands[contestant], environment)
        return {
            "first step": min(run.seconds for run in runs),
            "median": statistics.median(run.seconds for run in runs),
            "from disk": cold.seconds,
            "cpu": statistics.median(run.cpu for run in runs),
            "peak": float(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024),
            "verified": float(contestant == OURS),
            **(_ratios(runs) if stock else {}),
        }


@dataclass(frozen=True)
class _Start:
    """Seconds from the start to the first step, and of processor time; ``beside``: of the stock Trainer just before."""

    seconds: float
    cpu: float
    beside: _Start | None = None

    @classmethod
    def of(cls, command: list[str], environment: dict[str, str], beside: Sequence[str] = ()) -> _Start:
        other = cls.of([*beside], environment) if beside else None
        used, began = _used(), time.time()
        seconds = float(_run(command, environment)) - began
        return cls(seconds, _used() - used, other)


def _ratios(runs: list[_Start]) -> dict[str, float]:
    stock = [run.beside for run in runs if run.beside]
    return {
        "ratio": min(run.seconds for run in runs) / min(run.seconds for run in stock),
        "cpu ratio": min(run.cpu for run in runs) / min(run.cpu for run in stock),
    }


def _command(output_dir: str, model: Mapping[str, int], resume: bool | str | None) -> list[str]:
    """A training, at whose first step its process ends, unless it resumes from nothing: then it saves that step."""
    given = {"output_dir": output_dir, "model": dict(model), "resume": resume}
    return [sys.executable, "-m", "benchmarks.resumed", json.dumps(given)]


def _run(command: list[str], environment: dict[str, str]) -> str:
    """The last line of its output."""
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.rstrip().rpartition("\n")[2]


def _used() -> float:
    """Processor time of the processes that have ended."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime
