"""What the demo found out: stalls, steps lost, and whether the weights are the same."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from datastates.store.journal import Event, read_events
from datastates.store.layout import Root
from rich.table import Table
from safetensors import deserialize

WEIGHTS = "model.safetensors"


@dataclass
class Kill:
    """One SIGKILL: the last step trained before it, and the step that the relaunch carried on from (None: not known yet)."""

    reached: int
    resumed: int | None = None

    @property
    def lost(self) -> int:
        """Steps that had to be trained again."""
        return self.reached - (self.resumed or 0)


@dataclass(frozen=True)
class Measured:
    """One training: seconds of stall of each of its saves, seconds that it waited at its end for saves in flight, bytes of its
    newest checkpoint, digest of its final weights."""

    stalls: list[float]
    waited: float
    nbytes: int
    weights: str

    @property
    def usual_stall(self) -> float:
        """The median."""
        return median(self.stalls)

    @property
    def longest_stall(self) -> float:
        return max(self.stalls)


@dataclass(frozen=True)
class Comparison:
    stock: Measured
    ours: Measured
    kills: list[Kill]

    @property
    def identical(self) -> bool:
        """Every tensor of the final weights is the same, bit for bit."""
        return self.stock.weights == self.ours.weights


def measure_stock(output: Path, stalls: Path) -> Measured:
    """The stock training in `output`; `stalls` was written by :mod:`ckpt_run.demo_stock`."""
    seconds = [float(line) for line in stalls.read_text().splitlines()]
    return Measured(seconds, 0.0, _newest_size(output), weights_digest(output / WEIGHTS))


def measure_ours(output: Path) -> Measured:
    """The training under ckpt-run in `output`, all of its launches; the stalls are those of its own journal."""
    root = Root.of(output)
    events = read_events(root)
    waited = sum(event.number("seconds") for event in events if event.kind == "wait")
    return Measured(_stalls(events), waited, _newest_size(root.path), weights_digest(output / WEIGHTS))


def weights_digest(path: Path) -> str:
    """SHA-256 over name, type, shape and bytes of every tensor in a safetensors file; its header's layout does not count."""
    digest = hashlib.sha256()
    for name, tensor in sorted(deserialize(path.read_bytes())):
        digest.update(f"{name} {tensor['dtype']} {tensor['shape']} {len(tensor['data'])}\n".encode())
        digest.update(tensor["data"])
    return digest.hexdigest()


def table(comparison: Comparison) -> Table:
    """The two trainings side by side."""
    stock, ours = comparison.stock, comparison.ours
    result = Table("", "stock Trainer", "ckpt-run")
    for number, kill in enumerate(comparison.kills, start=1):
        result.add_row(
            f"kill {number}: reached, carried on from", "", f"step {kill.reached}, step {kill.resumed}"
        )
        result.add_row(f"kill {number}: steps lost", "", str(kill.lost))
    result.add_row("checkpoints saved", str(len(stock.stalls)), str(len(ours.stalls)))
    result.add_row("size of a checkpoint", _mebibytes(stock.nbytes), _mebibytes(ours.nbytes))
    result.add_row(
        "stall per checkpoint, median", _milliseconds(stock.usual_stall), _milliseconds(ours.usual_stall)
    )
    result.add_row(
        "stall per checkpoint, longest", _milliseconds(stock.longest_stall), _milliseconds(ours.longest_stall)
    )
    result.add_row(
        "wait for the last one at the end", _milliseconds(stock.waited), _milliseconds(ours.waited)
    )
    result.add_row("final weights, SHA-256", stock.weights[:16], ours.weights[:16])
    return result


def verdict(comparison: Comparison) -> str:
    """One sentence: are the final weights identical?"""
    if comparison.identical:
        return "The final weights are identical, bit for bit."
    return "The final weights DIFFER: what was killed and resumed is not what was trained undisturbed."


def _stalls(events: list[Event]) -> list[float]:
    """One number a save: the stall of the save call and of the fences that waited for it."""
    stalls: list[float] = []
    for event in events:
        if event.kind == "save":
            stalls.append(event.number("stall_s"))
        elif event.kind == "fence" and stalls:
            stalls[-1] += event.number("stall_s")
    return stalls


def _newest_size(root: Path) -> int:
    newest = max(root.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
