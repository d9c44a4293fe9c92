"""One contestant saves a state a few times, in a process of its own: what that cost.

:data:`benchmarks.cases.SAVING` says what each figure counts.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import process, raw, states
from benchmarks.contestants import ALL, Contestant

SIZE = 512
SIZE_ON_DEVICE = 4096
"""Of the matrices that stand for forward and backward."""


@dataclass(frozen=True)
class Work:
    """What is to be saved, where, and how the training beside it looks.

    Args:
        state: a function of :mod:`benchmarks.states`, and ``nbytes`` for it, unless 0.
        cache: part of the state's size that may be staged in.
        seconds: of training after a save, in ``steps`` steps.
        saves: measured ones of each kind.
        device: that the state is on, and the training.
    """

    state: str
    nbytes: int
    folder: str
    cache: float = 1.25
    seconds: float = 1.0
    steps: int = 4
    saves: int = 3
    device: str = "cpu"

    def build(self) -> states.State:
        make = getattr(states, self.state)
        built: states.State = make(self.nbytes) if self.nbytes else make()
        return {name: tensor.to(self.device) for name, tensor in built.items()}


def visit(contestant: str, **given: Any) -> dict[str, float]:
    """The medians of this process; ``given`` as :class:`Work` has it."""
    torch.set_num_threads(1)
    work = Work(**given)
    state = work.build()
    total = states.nbytes(state)
    with tempfile.TemporaryDirectory(dir=work.folder) as folder:
        if contestant == "raw write":
            return {
                "durable": min(raw.write(Path(folder) / "raw", total, threads) for threads in (1, 4)),
                "synced": 1.0,
            }
        if contestant == "pinned copy":
            return {"copy": raw.copy_from_device(total)}
        before = process.resident()
        taking_part = ALL[contestant](Path(folder), state, max(int(total * work.cache), 64 << 20))
        try:
            return {**_measure(taking_part, work, before), "synced": float(taking_part.durable)}
        finally:
            taking_part.close()


def _measure(contestant: Contestant, work: Work, before: int) -> dict[str, float]:
    training = Training(contestant, work)
    first = training.stall(0)
    contestant.wait()
    _settle(contestant, 0)
    undisturbed = statistics.median(training.seconds(None) for _ in range(3))
    peak = 0
    figures: dict[str, list[float]] = {
        name: [] for name in ("stall", "slowdown", "lost", "copy", "durable", "cpu")
    }
    for step in range(1, work.saves + 1):
        stalled: list[float] = []
        figures["lost"].append(training.seconds(step, stalled) - undisturbed)
        figures["stall"].append(sum(stalled))
        figures["slowdown"].append(figures["lost"][-1] - figures["stall"][-1])
        contestant.wait()
        _settle(contestant, step)
    for step in range(work.saves + 1, 2 * work.saves + 1):
        cpu, began = process.cpu_seconds(), time.perf_counter()
        figures["copy"].append(training.stall(step))
        contestant.wait()
        figures["durable"].append(time.perf_counter() - began)
        figures["cpu"].append(process.cpu_seconds() - cpu)
        if step == 2 * work.saves:
            peak = process.peak()
            training.check(step)
        _settle(contestant, step)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    return {**medians, "first": first, "memory": float(peak - before)}


class Training:
    """Stands in for a training: multiplications that leave the state alone, then a change of all of it, again and again."""

    def __init__(self, contestant: Contestant, work: Work) -> None:
        self.contestant = contestant
        self.state = contestant.state
        self.steps = work.steps
        size = SIZE if work.device == "cpu" else SIZE_ON_DEVICE
        self.device = work.device
        self.matrix = torch.randn(size, size, device=work.device)
        self.result = torch.empty_like(self.matrix)
        self.saved: states.State = {}
        self._multiply(10)
        began = time.perf_counter()
        self._multiply(50)
        self.multiplications = int(work.seconds / work.steps / ((time.perf_counter() - began) / 50))

    def seconds(self, step: int | None, stalled: list[float] | None = None) -> float:
        """How long a piece of training takes that begins with a save of ``step``, if one is named."""
        began = time.perf_counter()
        if step is not None:
            self.contestant.save(step)
            _note(stalled, time.perf_counter() - began)
        for _ in range(self.steps):
            self._multiply(self.multiplications)
            fenced = time.perf_counter()
            self.contestant.fence()
            _note(stalled, time.perf_counter() - fenced)
            states.change(self.state)
        self._synchronize()
        return time.perf_counter() - began

    def stall(self, step: int) -> float:
        """Save, and change the state as soon as that is allowed; the seconds that this had to wait for."""
        self.saved = {
            name: self.state[name][:1].clone() for name in (*list(self.state)[:3], *list(self.state)[-3:])
        }
        self._synchronize()
        began = time.perf_counter()
        self.contestant.save(step)
        self.contestant.fence()
        seconds = time.perf_counter() - began
        states.change(self.state)
        return seconds

    def check(self, step: int) -> None:
        """The checkpoint has to hold what the state was at the call."""
        loaded = self.contestant.load(step)
        wrong = [
            name
            for name, value in self.saved.items()
            if not torch.equal(loaded[name][:1].to(value.device), value)
        ]
        if wrong or loaded.keys() != self.state.keys():
            raise AssertionError(f"{self.contestant.name} saved other values of {wrong}")

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self.matrix, self.matrix, out=self.result)
        self._synchronize()

    def _synchronize(self) -> None:
        """What is measured next begins now, and not when the device has caught up."""
        if self.device != "cpu":
            torch.cuda.synchronize()


def _note(stalled: list[float] | None, seconds: float) -> None:
    if stalled is not None:
        stalled.append(seconds)


def _settle(contestant: Contestant, step: int) -> None:
    """What one save leaves to the kernel is not the next one's burden."""
    contestant.remove(step)
    os.sync()
