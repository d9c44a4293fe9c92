"""A Trainer trains a model of 42 million parameters, and saves or does not; :data:`benchmarks.cases.TRAINING` says what is measured.

Each process has steps with saves among them, and before and after those as many quiet ones as it takes to know what the same steps cost
without: what a machine does besides, and how fast it is just then, touches both alike.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from benchmarks import process
from benchmarks.ways import WAYS, Way

MODEL = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
}
"""42 million parameters."""

LENGTH = 128


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens, the same for the same index."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary = vocabulary
        self.length = length

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(0, self.vocabulary, (self.length,), generator=generator)
        return {"input_ids": row, "labels": row}


def trainer(
    folder: str,
    callbacks: Iterable[TrainerCallback],
    max_steps: int,
    model: Mapping[str, int] = MODEL,
    **arguments: Any,
) -> Trainer:
    """A stock Trainer that saves when a callback asks for it; ``model`` configures a Llama."""
    set_seed(0)
    given = {"per_device_train_batch_size": 4, "use_cpu": True, "save_strategy": "no", **arguments}
    args = TrainingArguments(
        output_dir=folder,
        max_steps=max_steps,
        save_total_limit=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **given,
    )
    rows = Rows(model["vocab_size"], min(LENGTH, model["max_position_embeddings"]))
    return Trainer(
        model=LlamaForCausalLM(LlamaConfig(**model)), args=args, train_dataset=rows, callbacks=[*callbacks]
    )


@dataclass(frozen=True)
class Schedule:
    """Steps, counted from 1: warm-up with a first save, quiet ones, those that are measured, quiet ones again.

    Args:
        save_steps: from one measured save to the next.
        saves: how many are measured.
    """

    save_steps: int
    saves: int
    warm_up: int = 3
    quiet: int = 3

    @property
    def cooling(self) -> int:
        """Steps after the last save that belong to it, since it may be in flight then."""
        return max(self.save_steps, 3)

    @property
    def saved(self) -> list[int]:
        """Steps that are followed by a measured save."""
        first = self.warm_up + self.quiet
        return [first + self.save_steps * number for number in range(self.saves)]

    @property
    def disturbed(self) -> list[int]:
        return [*range(self.saved[0] + 1, self.saved[-1] + self.cooling + 1)]

    @property
    def calm(self) -> list[int]:
        """Steps that nothing is in flight in."""
        return [*range(self.warm_up + 1, self.saved[0] + 1), *range(self.disturbed[-1] + 1, self.last + 1)]

    @property
    def last(self) -> int:
        return self.disturbed[-1] + self.quiet


@dataclass
class Clock(TrainerCallback):
    """Asks for the saves, and notes when each step ended and what the process had used by then.

    It has no event at the beginning of a step, which could stand behind the fence.
    """

    schedule: Schedule
    saves: bool
    ended: dict[int, float] = field(default_factory=dict)
    used: dict[int, float] = field(default_factory=dict)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ended[state.global_step] = time.perf_counter()
        self.used[state.global_step] = process.cpu_seconds()
        control.should_save = self.saves and state.global_step in (1, *self.schedule.saved)
        return control


class Stalls:
    """Times functions that training waits in; one that is called within another counts once."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []
        self._inside = False

    def watch(self, owner: Any, name: str) -> None:
        setattr(owner, name, self._timed(getattr(owner, name)))

    def between(self, begin: float, end: float) -> list[float]:
        """Seconds of each that began then."""
        return [seconds for began, seconds in self.found if begin <= began < end]

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            began, self._inside = time.perf_counter(), True
            try:
                return function(*args, **kwargs)
            finally:
                self.found.append((began, time.perf_counter() - began))
                self._inside = False

        return timed


class Measurement:
    """One training and what was noted about it."""

    def __init__(self, way: Way, schedule: Schedule, folder: str) -> None:
        self.way = way
        self.schedule = schedule
        self.folder = Path(folder)
        self.clock = Clock(schedule, way.saves)
        self.stalls = Stalls()
        self._called: dict[int, float] = {}
        self._durable: dict[int, float] = {}

    def train(self, build: Callable[[], Trainer]) -> None:
        trained = build()
        if self.way.decorated:
            decorate(trained)
            from datastates.llm.fence import FENCE

            self.stalls.watch(FENCE, "_settle")
        self.stalls.watch(trained, "_save_checkpoint")
        trained._save_checkpoint = self._noting(trained._save_checkpoint)
        trained.train()

    def _noting(self, save: Callable[..., None]) -> Callable[..., None]:
        """Notes when saves were called, and how long it took until they were done."""

        def noting(*args: Any, **kwargs: Any) -> None:
            self._note_done()
            step = max(self.clock.ended)
            self._called[step] = time.time()
            began = time.perf_counter()
            save(*args, **kwargs)
            if not self.way.last:
                self._durable[step] = time.perf_counter() - began

        return noting

    def _note_done(self) -> None:
        """When saves were done whose last file is there: the file system knows. One that a later save has removed since is left out."""
        for step in self._called.keys() - self._durable.keys():
            with contextlib.suppress(FileNotFoundError):
                done = (self.folder / self.way.last.format(step)).stat().st_ctime
                self._durable[step] = done - self._called[step]

    def figures(self) -> dict[str, float]:
        schedule, clock = self.schedule, self.clock
        self._note_done()
        lost = _excess(clock.ended, schedule)
        begin, end = clock.ended[schedule.saved[0]], clock.ended[schedule.disturbed[-1]]
        stall = sum(self.stalls.between(begin, end)) / schedule.saves
        quiet = _mean(clock.ended, schedule.calm)
        return {
            "step": quiet,
            "ratio": 1 + lost / (schedule.save_steps * quiet),
            "stall": stall,
            "slowdown": lost - stall,
            "lost": lost,
            "cpu": _excess(clock.used, schedule),
            "peak": float(process.peak()),
            **self._done(),
        }

    def _done(self) -> dict[str, float]:
        if not self.way.saves:
            return {}
        measured = [seconds for step, seconds in self._durable.items() if step in self.schedule.saved]
        return {"durable": statistics.median(measured), "synced": float(self.way.synced)}


def decorate(trained: Trainer, **settings: Any) -> Any:
    """By ckpt-run, which stays off with a warning where its native module cannot be loaded: nothing must be measured then."""
    from datastates.llm import DecoratedCheckpointing, attachment  # noqa: F401 - whose error says why

    return DecoratedCheckpointing({"trainer": trained, **settings}, -1)


def visit(
    contestant: str,
    folder: str,
    save_steps: int,
    saves: int,
    model: Mapping[str, int] = MODEL,
    batch: int = 4,
    device: str = "cpu",
) -> dict[str, float]:
    """A plain training on one device."""
    with tempfile.TemporaryDirectory(dir=folder) as output_dir:
        measurement = Measurement(WAYS[contestant], Schedule(save_steps, saves), output_dir)
        measurement.train(
            lambda: trainer(
                output_dir,
                [measurement.clock],
                measurement.schedule.last,
                model,
                use_cpu=device == "cpu",
                per_device_train_batch_size=batch,
            )
        )
        return measurement.figures()


def _mean(at: Mapping[int, float], steps: Iterable[int]) -> float:
    return statistics.fmean(at[step] - at[step - 1] for step in steps)


def _excess(at: Mapping[int, float], schedule: Schedule) -> float:
    """How much more of ``at`` each save made the disturbed steps use than calm ones use."""
    more = _mean(at, schedule.disturbed) - _mean(at, schedule.calm)
    return more * len(schedule.disturbed) / schedule.saves
