"""Decorated trainings in this process, and what they left on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny
from datastates.llm import DecoratedCheckpointing
from datastates.store.catalog import Catalog
from datastates.store.layout import Root
from datastates.store.manifest import read_vote
from transformers import Trainer, TrainerCallback


class Stopped(Exception):  # noqa: N818 - an ending, not a fault
    """Ends a training in the middle, as an error of the user's would."""


class StopAt(TrainerCallback):
    """Raises :class:`Stopped` when ``step`` is done and saved, if it was to be saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Stopped


class Watch(TrainerCallback):
    """Notes the steps as they are done."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


def decorate(trainer: Trainer, **settings: Any) -> Trainer:
    """``trainer`` itself, decorated as a script does it."""
    DecoratedCheckpointing({"trainer": trainer, **settings}, -1)
    return trainer


def wait(trainer: Trainer) -> None:
    """Until everything that was saved so far has its outcome."""
    assert DecoratedCheckpointing({"trainer": trainer}, -1).wait(60)


def decorated(
    output_dir: Path, settings: dict[str, Any] | None = None, callbacks: Sequence[Any] = (), **how: Any
) -> Trainer:
    """A decorated tiny Trainer; ``how`` goes to :func:`tiny.trainer`."""
    trainer = tiny.trainer(output_dir, callbacks=[Watch(), *callbacks], **how)
    return decorate(trainer, **(settings or {}))


def interrupted(output_dir: Path, step: int, settings: dict[str, Any] | None = None, **how: Any) -> Trainer:
    """A training that ended with an error after ``step`` steps; what it had saved is committed."""
    trainer = decorated(output_dir, settings, callbacks=[StopAt(step)], **how)
    try:
        trainer.train()
    except Stopped:
        return trainer
    raise AssertionError(f"the training did not reach step {step}")


def root(output_dir: Path) -> Path:
    return Root.of(output_dir).path


def checkpoint(output_dir: Path, step: int) -> Path:
    return Root.of(output_dir).checkpoint(step).path


def committed(output_dir: Path) -> list[int]:
    """The steps of the committed checkpoints that are in place, lowest first."""
    return sorted(item.step for item in Catalog(Root.of(output_dir)).checkpoints() if item.committed)


def lineage_of(output_dir: Path, step: int) -> str:
    manifest = Catalog(Root.of(output_dir)).get(step).manifest
    assert manifest is not None, f"checkpoint-{step} has no manifest"
    return manifest.lineage


def steps_done(trainer: Trainer) -> list[int]:
    """The steps that this Trainer did itself: [7, 8] after it was resumed at step 6 and went on to step 8."""
    watches = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Watch)]
    return [step for watch in watches for step in watch.steps]


def vote(output_dir: Path, step: int, rank: int) -> set[str]:
    """The files that a rank has voted for."""
    return {entry.path for entry in read_vote(Root.of(output_dir).checkpoint(step).vote(rank)).files}
