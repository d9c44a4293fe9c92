"""The model of :mod:`benchmarks.scale` held against what happens: what it is told of a machine is measured on small saves, and it foretells others."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import raw, scale, states
from benchmarks.contestants import CkptRun

LIGHT_RANKS = Path(__file__).parents[1] / "tests/store/light_ranks.py"
SAVES = 3
MB = 10**6


@dataclass(frozen=True)
class Size:
    """``nbytes`` in ``tensors``, through a cache of ``cache`` times as many."""

    nbytes: int
    tensors: int
    cache: float = 1.25

    @property
    def cache_bytes(self) -> int:
        return max(int(self.nbytes * self.cache), 64 << 20)


SIZES: dict[str, Size | int] = {
    "100 MB in 300": Size(100 * MB, 300),
    "400 MB in 300": Size(400 * MB, 300),
    "400 MB in 300, a cache of a quarter": Size(400 * MB, 300, 0.25),
    "400 MB in 3,000": Size(400 * MB, 3000),
    "1.6 GB in 300": Size(1600 * MB, 300),
    "the commit of 64 ranks": 64,
    "the commit of 256 ranks": 256,
}


def visit(contestant: str, folder: str) -> dict[str, float]:
    """Seconds, and what the model foretells: ``stall`` of a save in which no time passes before the state changes, and ``durable``."""
    torch.set_num_threads(1)
    size = SIZES[contestant]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        if isinstance(size, int):
            return _compared(durable=(_commit(Path(place), size), _foretold_commit(Path(place), size)))
        machine = _look_at(Path(place), size.nbytes)
        job = scale.Job(size.nbytes, size.tensors, step=0, quiet=0, every=1, cache=size.cache_bytes)
        stall, durable = _save(Path(place), size)
        simulation = scale.Simulation(machine, job)
        simulation.save()
        simulation.fence()
        stalled = simulation.stalled
        simulation.finish()
        return _compared(stall=(stall, stalled), durable=(durable, simulation.durable[0]))


def _compared(**found: tuple[float, float]) -> dict[str, float]:
    figures = {}
    for name, (measured, foretold) in found.items():
        figures |= {name: measured, f"{name} foretold": foretold}
    return {**figures, "off": max(max(a / b, b / a) for a, b in found.values())}


def _look_at(place: Path, nbytes: int) -> scale.Machine:
    """From saves of next to nothing, of many tensors, and of 64 MB; and from a raw write."""
    save, commit = _save(place, Size(10 * 40, 10))
    many, _ = _save(place, Size(2000 * 40, 2000))
    tensor = max(many - save, 0.0) / 1990
    whole, _ = _save(place, Size(64 * MB, 64))
    return scale.Machine(
        copy=64 * MB / max(whole - save - 64 * tensor, 1e-6),
        disk=nbytes / min(raw.write(place / "raw", nbytes, threads) for threads in (1, 4)),
        save=save,
        tensor=tensor,
        commit=max(commit - save, 0.0),
        vote=0.0,
    )


def _save(place: Path, size: Size) -> tuple[float, float]:
    """Medians of the stall, and of the seconds until it is durable."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        contestant = CkptRun(Path(folder), states.alike(size.nbytes, size.tensors), size.cache_bytes)
        try:
            found = [_one_save(contestant, step) for step in range(1 + SAVES)][1:]
        finally:
            contestant.close()
    stalls, durables = zip(*found, strict=True)
    return statistics.median(stalls), statistics.median(durables)


def _one_save(contestant: CkptRun, step: int) -> tuple[float, float]:
    began = time.perf_counter()
    contestant.save(step)
    contestant.fence()
    stalled = time.perf_counter() - began
    contestant.wait()
    durable = time.perf_counter() - began
    contestant.remove(step)
    return stalled, durable


def _foretold_commit(place: Path, ranks: int) -> float:
    """By a line through what few ranks need."""
    few, more = _commit(place, 8), _commit(place, 32)
    vote = max(more - few, 0.0) / 24
    return few - 8 * vote + ranks * vote


def _commit(place: Path, ranks: int) -> float:
    """Seconds of a save of next to nothing, for the committing rank, of real processes that take part in the commit and do nothing else."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        job = {"output_dir": f"{folder}/out", "world": ranks, "steps": [10, 20, 30]}
        command = [sys.executable, str(LIGHT_RANKS), json.dumps(job)]
        told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return statistics.median(told[0]["seconds"][1:])
