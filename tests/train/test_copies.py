"""A Trainer that is copied: the copy is a Trainer as its class has it, and the original saves on as before."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import runs
from datastates.llm.instance import InstanceMethod
from transformers import Trainer, TrainerCallback


class Reader(TrainerCallback):
    """Notes where ``on_save`` would look for the checkpoint, and what is there."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[str]]] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        there = sorted(path.name for path in Path(args.output_dir).glob("checkpoint-*/model.safetensors"))
        self.seen.append((args.output_dir, there))


def copied(trainer: Trainer, output_dir: Path) -> Trainer:
    """A shallow copy that saves elsewhere."""
    other = copy.copy(trainer)
    other.args = copy.copy(trainer.args)
    other.args.output_dir = str(output_dir)
    return other


def usual(output_dir: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in output_dir.glob("checkpoint-*"))


def test_a_shallow_copy_holds_nothing_of_ours_and_the_original_all(tmp_path: Path) -> None:
    trainer = runs.decorated(tmp_path)
    ours = {name for name, value in vars(trainer).items() if isinstance(value, InstanceMethod)}
    assert ours
    other = copy.copy(trainer)
    assert not ours & vars(other).keys()
    assert vars(other).keys() | ours | {"__getstate__"} == vars(trainer).keys()
    assert other.train.__func__ is Trainer.train
    assert other.model is trainer.model


@pytest.mark.parametrize("trained", [False, True])
def test_a_shallow_copy_trains_and_saves_as_stock_does_and_the_original_goes_on(
    trained: bool, tmp_path: Path
) -> None:
    reader = Reader()
    trainer = runs.decorated(tmp_path / "out", callbacks=[reader], max_steps=4)
    if trained:
        trainer.train()
    reader.seen.clear()
    other = copied(trainer, tmp_path / "copy")
    other.train()
    assert usual(tmp_path / "copy") == [2, 4]
    assert not runs.root(tmp_path / "copy").exists()
    assert {place for place, _ in reader.seen} == {str(tmp_path / "copy")}
    reader.seen.clear()
    trainer.train()
    assert runs.committed(tmp_path / "out") == [2, 4]
    assert usual(tmp_path / "out") == []
    assert [place for place, _ in reader.seen] == [str(runs.root(tmp_path / "out"))] * 2


def test_a_copy_can_be_decorated_for_itself(tmp_path: Path) -> None:
    reader = Reader()
    trainer = runs.decorated(tmp_path / "out", callbacks=[reader], max_steps=4)
    trainer.train()
    other = runs.decorate(copied(trainer, tmp_path / "copy"))
    reader.seen.clear()
    other.train()
    assert runs.committed(tmp_path / "copy") == [2, 4]
    assert [place for place, _ in reader.seen] == [str(runs.root(tmp_path / "copy"))] * 2
    reader.seen.clear()
    trainer.train(resume_from_checkpoint=True)
    assert runs.committed(tmp_path / "out") == [2, 4]


def test_a_class_with_a_state_of_its_own_keeps_it(tmp_path: Path) -> None:
    class Own(Trainer):
        def __getstate__(self) -> dict[str, Any]:
            return {**vars(self), "note": "mine"}

    other = copy.copy(runs.decorated(tmp_path, cls=Own))
    assert other.note == "mine"
    assert not [value for value in vars(other).values() if isinstance(value, InstanceMethod)]
