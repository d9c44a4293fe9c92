"""One contestant saves a state a few times, in a process of its own: what that cost.

======== ==========================================================================================================
stall    seconds that the training thread stood still: in the call, and at the fence before the state changes
lost     seconds that a save makes a fixed piece of training longer: its stall, and what steps took longer meanwhile
durable  seconds from the call until the contestant says that the checkpoint is done, with nothing else running
cpu      seconds of processor time of one such save, of all processes of the contestant
memory   bytes by which the process's peak is above what it had before the first save
======== ==========================================================================================================
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import raw, states
from benchmarks.contestants import ALL, Contestant

SIZE = 512
"""Of the matrices that stand for forward and backward."""


@dataclass(frozen=True)
class Work:
    """What is to be saved, where, and how the training beside it looks.

    Args:
        state: a function of :mod:`benchmarks.states`, and ``nbytes`` for it, unless 0.
        cache: part of the state's size that may be staged in.
        seconds: of training after a save, in ``steps`` steps.
        saves: measured ones of each kind.
    """

    state: str
    nbytes: int
    folder: str
    cache: float = 1.25
    seconds: float = 1.0
    steps: int = 4
    saves: int = 3

    def build(self) -> states.State:
        make = getattr(states, self.state)
        built: states.State = make(self.nbytes) if self.nbytes else make()
        return built


def visit(contestant: str, **given: Any) -> dict[str, float]:
    """The medians of this process; ``given`` as :class:`Work` has it."""
    torch.set_num_threads(1)
    work = Work(**given)
    state = work.build()
    total = states.nbytes(state)
    with tempfile.TemporaryDirectory(dir=work.folder) as folder:
        if contestant == "raw write":
            return {"durable": min(raw.write(Path(folder) / "raw", total, threads) for threads in (1, 4))}
        before = psutil.Process().memory_info().rss
        taking_part = ALL[contestant](Path(folder), state, max(int(total * work.cache), 64 << 20))
        try:
            return _measure(taking_part, work, before)
        finally:
            taking_part.close()


def _measure(contestant: Contestant, work: Work, before: int) -> dict[str, float]:
    training = Training(contestant, work)
    first = training.stall(0)
    contestant.wait()
    _settle(contestant, 0)
    undisturbed = statistics.median(training.seconds(None) for _ in range(3))
    peak = 0
    figures: dict[str, list[float]] = {"stall": [], "lost": [], "durable": [], "cpu": []}
    for step in range(1, work.saves + 1):
        stalled: list[float] = []
        figures["lost"].append(training.seconds(step, stalled) - undisturbed)
        figures["stall"].append(sum(stalled))
        contestant.wait()
        _settle(contestant, step)
    for step in range(work.saves + 1, 2 * work.saves + 1):
        cpu, began = _cpu_seconds(), time.perf_counter()
        training.stall(step)
        contestant.wait()
        figures["durable"].append(time.perf_counter() - began)
        figures["cpu"].append(_cpu_seconds() - cpu)
        if step == 2 * work.saves:
            peak = _peak()
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
        self.matrix = torch.randn(SIZE, SIZE)
        self.result = torch.empty(SIZE, SIZE)
        self.saved: states.State = {}
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
        return time.perf_counter() - began

    def stall(self, step: int) -> float:
        """Save, and change the state as soon as that is allowed; the seconds that this had to wait for."""
        self.saved = {
            name: self.state[name][:1].clone() for name in (*list(self.state)[:3], *list(self.state)[-3:])
        }
        began = time.perf_counter()
        self.contestant.save(step)
        self.contestant.fence()
        seconds = time.perf_counter() - began
        states.change(self.state)
        return seconds

    def check(self, step: int) -> None:
        """The checkpoint has to hold what the state was at the call."""
        loaded = self.contestant.load(step)
        wrong = [name for name, value in self.saved.items() if not torch.equal(loaded[name][:1], value)]
        if wrong or loaded.keys() != self.state.keys():
            raise AssertionError(f"{self.contestant.name} saved other values of {wrong}")

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self.matrix, self.matrix, out=self.result)


def _note(stalled: list[float] | None, seconds: float) -> None:
    if stalled is not None:
        stalled.append(seconds)


def _settle(contestant: Contestant, step: int) -> None:
    """What one save leaves to the kernel is not the next one's burden."""
    contestant.remove(step)
    os.sync()


def _cpu_seconds() -> float:
    """Of this process and all that are below it, living ones as well."""
    found = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(times.user + times.system for times in (process.cpu_times() for process in found))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
