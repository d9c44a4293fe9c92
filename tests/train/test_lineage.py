"""Which checkpoints belong to which training, when several share a directory, a script or a process."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import tiny
import torch
from accelerate.state import GradientState
from datastates.store.layout import Root
from datastates.store.runrecord import RunRecord
from transformers import Trainer, TrainerCallback

# -- other settings, same directory -------------------------------------------------------------------------------------


def test_a_second_run_with_other_settings_never_resumes_from_the_first(
    tmp_path: Path, relaunch: Callable[[], None]
) -> None:
    auto = {"resume": "auto"}
    runs.decorated(tmp_path, auto).train()
    relaunch()
    wider: dict[str, Any] = {"model": tiny.llama(hidden_size=64), "max_steps": 6}
    stopped = runs.decorated(tmp_path, auto, callbacks=[runs.StopAt(5)], **wider)
    with pytest.raises(runs.Stopped):
        stopped.train()
    assert runs.steps_done(stopped) == [1, 2, 3, 4, 5]
    for passed in (None, True):
        relaunch()
        again = runs.decorated(tmp_path, auto, callbacks=[runs.StopAt(5)], **wider)
        with pytest.raises(runs.Stopped):
            again.train(resume_from_checkpoint=passed)
        assert runs.steps_done(again) == [5]
    assert runs.committed(tmp_path) == [2, 4, 6, 8]
    assert runs.lineage_of(tmp_path, 2) == runs.lineage_of(tmp_path, 4) != runs.lineage_of(tmp_path, 6)


def test_the_limit_of_one_training_removes_nothing_of_another(
    tmp_path: Path, relaunch: Callable[[], None]
) -> None:
    runs.decorated(tmp_path).train()
    relaunch()
    runs.decorated(tmp_path, max_steps=5, save_steps=1, save_total_limit=1).train()
    assert runs.committed(tmp_path) == [5, 6, 8]
    aside = {path.name.split("-")[0] for path in (runs.root(tmp_path) / ".aside").iterdir()}
    assert aside == {"2", "4"}


# -- two trainings in one script ----------------------------------------------------------------------------------------


def two_stages(first: Path, second: Path, stop: tuple[int, int] = (0, 0)) -> list[list[int]]:
    """A script that trains for 4 steps, then goes on with other data for 6; the steps that each of the two did."""
    stage1 = runs.decorated(first, max_steps=4, callbacks=[runs.StopAt(stop[0])] if stop[0] else [])
    done = [runs.steps_done(stage1), []]
    try:
        stage1.train(resume_from_checkpoint=True)
        stage2 = runs.decorated(
            second,
            model=stage1.model,
            data=tiny.Tokens(seed=1),
            max_steps=6,
            callbacks=[runs.StopAt(stop[1])] if stop[1] else [],
        )
        try:
            stage2.train(resume_from_checkpoint=True)
        finally:
            done[1] = runs.steps_done(stage2)
    except runs.Stopped:
        pass
    done[0] = runs.steps_done(stage1)
    return done


@pytest.mark.parametrize("shared", [True, False], ids=["one directory", "a directory each"])
def test_a_script_with_two_trainings_resumes_in_the_one_that_was_interrupted(
    shared: bool, tmp_path: Path, relaunch: Callable[[], None]
) -> None:
    first = tmp_path / "a"
    second = first if shared else tmp_path / "b"
    assert two_stages(first, second, stop=(0, 5)) == [[1, 2, 3, 4], [1, 2, 3, 4, 5]]
    relaunch()
    assert two_stages(first, second) == [[], [5, 6]]
    relaunch()
    assert two_stages(first, second) == [[], []]


def test_a_script_with_two_trainings_interrupted_in_the_first_has_not_begun_the_second(
    tmp_path: Path, relaunch: Callable[[], None]
) -> None:
    assert two_stages(tmp_path, tmp_path, stop=(3, 0)) == [[1, 2, 3], []]
    relaunch()
    assert two_stages(tmp_path, tmp_path) == [[3, 4], [1, 2, 3, 4, 5, 6]]


def test_when_the_first_training_is_done_anew_the_second_is_as_well(
    tmp_path: Path, relaunch: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    two_stages(tmp_path, tmp_path, stop=(0, 5))
    relaunch()
    monkeypatch.setenv("CKPT_RUN_FRESH", "launch")
    assert two_stages(tmp_path, tmp_path, stop=(3, 0)) == [[1, 2, 3], []]
    monkeypatch.delenv("CKPT_RUN_FRESH")
    relaunch()
    assert two_stages(tmp_path, tmp_path) == [[3, 4], [1, 2, 3, 4, 5, 6]]


def test_a_run_of_two_trainings_is_unfinished_until_both_are_finished(
    tmp_path: Path, relaunch: Callable[[], None]
) -> None:
    two_stages(tmp_path, tmp_path, stop=(0, 3))
    record = RunRecord.read(Root.of(tmp_path))
    assert record is not None
    assert [lineage.state for lineage in record.lineages.values()] == ["finished", "running"]
    relaunch()
    two_stages(tmp_path, tmp_path)
    record = RunRecord.read(Root.of(tmp_path))
    assert record is not None
    assert record.state == "finished"


# -- trainers beside each other -----------------------------------------------------------------------------------------


class TrainsAnother(TrainerCallback):
    """Trains ``other`` to its end in the middle of a step of the Trainer that this belongs to."""

    def __init__(self, other: Trainer, step: int) -> None:
        self.other = other
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.other.train()


def test_a_trainer_that_trains_inside_anothers_step_keeps_its_checkpoints_apart(tmp_path: Path) -> None:
    alone = runs.decorated(tmp_path / "alone", model=tiny.llama(attention_dropout=0.0))
    alone.train()
    inner = runs.decorated(tmp_path / "inner", model=tiny.llama(seed=1), max_steps=4)
    outer = runs.decorated(
        tmp_path / "outer", model=tiny.llama(attention_dropout=0.0), callbacks=[TrainsAnother(inner, 2)]
    )
    outer.train()
    assert runs.committed(tmp_path / "inner") == [2, 4]
    assert runs.committed(tmp_path / "outer") == [2, 4, 6, 8]
    for step in (2, 4, 6, 8):
        weights = [
            (runs.checkpoint(tmp_path / name, step) / "model.safetensors").read_bytes()
            for name in ("alone", "outer")
        ]
        assert weights[0] == weights[1], step


def test_two_trainers_alive_at_once_save_where_each_belongs(tmp_path: Path) -> None:
    trainers = [
        runs.decorated(tmp_path / name, model=tiny.llama(seed=seed)) for seed, name in enumerate("ab")
    ]
    for trainer in trainers:
        trainer.train()
    for trainer, name in zip(trainers, "ab", strict=True):
        assert runs.committed(tmp_path / name) == [2, 4, 6, 8]
        saved = tiny.weights(tiny.llama().from_pretrained(runs.checkpoint(tmp_path / name, 8)))
        assert tiny.same(saved, tiny.weights(trainer.model))


def test_an_undecorated_trainer_beside_a_decorated_one_saves_as_stock(tmp_path: Path) -> None:
    runs.decorated(tmp_path / "ours", max_steps=2).train()
    tiny.trainer(tmp_path / "stock", max_steps=4, save_total_limit=1).train()
    assert sorted(path.name for path in (tmp_path / "stock").iterdir()) == ["checkpoint-4"]


# -- smaller batches ----------------------------------------------------------------------------------------------------


class NeedsMemory(Trainer):
    """Runs out of memory at ``at`` steps while a batch has more than ``most`` rows."""

    at, most = 3, 2

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == self.at and len(inputs["input_ids"]) > self.most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate much")
        return super().training_step(model, inputs, *args, **kwargs)


def test_what_was_saved_before_auto_find_batch_size_began_again_is_never_resumed_from(
    tmp_path: Path, relaunch: Callable[[], None]
) -> None:
    how: dict[str, Any] = {"cls": NeedsMemory, "auto_find_batch_size": True, "save_steps": 2}
    stopped = runs.decorated(tmp_path, **how)

    class StopsWhenSmall(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1 and stopped._train_batch_size <= NeedsMemory.most:
                raise runs.Stopped

    stopped.add_callback(StopsWhenSmall())
    with pytest.raises(runs.Stopped):
        stopped.train()
    assert runs.committed(tmp_path) == [2]

    relaunch()
    again = runs.decorated(tmp_path, per_device_train_batch_size=2, max_steps=4)
    again.train(resume_from_checkpoint=True)
    assert runs.steps_done(again) == [1, 2, 3, 4]


def test_what_auto_find_batch_size_saved_after_it_began_again_is_resumed_from(
    tmp_path: Path, relaunch: Callable[[], None]
) -> None:
    how: dict[str, Any] = {"cls": NeedsMemory, "auto_find_batch_size": True}
    runs.decorated(tmp_path, max_steps=6, **how).train()
    assert runs.committed(tmp_path) == [2, 4, 6]
    relaunch()
    again = runs.decorated(tmp_path, **how)
    again.train(resume_from_checkpoint=True)
    assert runs.steps_done(again) == [7, 8]


# -- hyperparameter search ----------------------------------------------------------------------------------------------

OPTUNA = '''
"""As much of optuna as Trainer's search uses: trials one after another."""
import types


class BaseTrial:
    def __init__(self, number):
        self.number, self.params, self.value = number, {}, None

    def suggest_float(self, name, low, high, **how):
        self.params[name] = low + (high - low) / (self.number + 2)
        return self.params[name]


class TrialPruned(Exception):
    pass


class Study:
    _is_multi_objective = staticmethod(lambda: False)

    def optimize(self, objective, n_trials, **how):
        trials = [BaseTrial(number) for number in range(n_trials)]
        for trial in trials:
            trial.value = objective(trial)
        self.best_trial = min(trials, key=lambda trial: trial.value)


trial = types.SimpleNamespace(BaseTrial=BaseTrial)
Trial = BaseTrial


def create_study(**how):
    return Study()
'''


@pytest.fixture
def optuna(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path_factory.mktemp("packages") / "optuna"
    package.mkdir()
    (package / "__init__.py").write_text(OPTUNA)
    monkeypatch.syspath_prepend(str(package.parent))
    yield
    sys.modules.pop("optuna", None)


def search(
    output_dir: Path, callbacks: tuple[Any, ...] = (), settings: dict[str, Any] | None = None
) -> Trainer:
    """A search of two trials, decorated; not started yet."""
    trainer = Trainer(
        model_init=lambda: tiny.llama(),
        args=tiny.arguments(output_dir, max_steps=4),
        train_dataset=tiny.Tokens(),
        eval_dataset=tiny.Tokens(),
        callbacks=[runs.Watch(), *callbacks],
    )
    return runs.decorate(trainer, **(settings or {}))


def space(trial: Any) -> dict[str, float]:
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2)}


def test_every_trial_of_a_search_keeps_its_own_checkpoints(optuna: None, tmp_path: Path) -> None:
    trainer = search(tmp_path)
    best = trainer.hyperparameter_search(hp_space=space, n_trials=2, backend="optuna")
    assert best.run_id in ("0", "1")
    for run in ("run-0", "run-1"):
        assert runs.committed(tmp_path / run) == [2, 4]
    assert runs.lineage_of(tmp_path / "run-0", 4) != runs.lineage_of(tmp_path / "run-1", 4)
    assert not runs.root(tmp_path).exists()


def test_the_trials_of_a_search_that_is_started_again_start_fresh(
    optuna: None, tmp_path: Path, relaunch: Callable[[], None]
) -> None:
    stopped = search(tmp_path, (runs.StopAt(3),))
    with pytest.raises(runs.Stopped):
        stopped.hyperparameter_search(hp_space=space, n_trials=2, backend="optuna")
    assert runs.committed(tmp_path / "run-0") == [2]
    relaunch()
    for resume in ("auto", "required"):
        again = search(tmp_path, settings={"resume": resume})
        again.hyperparameter_search(hp_space=space, n_trials=2, backend="optuna")
        assert runs.steps_done(again) == [1, 2, 3, 4] * 2
        relaunch()


# -- no training --------------------------------------------------------------------------------------------------------


def test_a_trainer_that_only_evaluates_and_predicts_leaves_nothing_behind(tmp_path: Path) -> None:
    trainer = runs.decorated(tmp_path / "out")
    trainer.evaluate()
    trainer.predict(tiny.Tokens(8))
    assert list((tmp_path / "out").iterdir()) == []


def test_evaluating_beside_a_checkpoint_changes_nothing_there(
    tmp_path: Path, relaunch: Callable[[], None]
) -> None:
    runs.decorated(tmp_path, max_steps=2).train()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    relaunch()
    runs.decorated(tmp_path).evaluate()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


# -- pickle -------------------------------------------------------------------------------------------------------------


def pickled(trainer: Trainer) -> bytes:
    """Every Trainer pickles accelerate's shared state with it, and a training leaves a weak reference to its data loader there."""
    GradientState().dataloader_references = [None]
    return pickle.dumps(trainer)


def copied(kind: str, trainer: Trainer) -> Trainer:
    return pickle.loads(pickled(trainer)) if kind == "pickle" else copy.deepcopy(trainer)


def ours(trainer: Trainer) -> list[str]:
    """Where something of ours hangs on a Trainer."""
    return [
        f"{type(owner).__name__}.{name}"
        for owner in (trainer, trainer.callback_handler)
        for name, value in vars(owner).items()
        if type(value).__module__.startswith("datastates")
    ]


# A stock Trainer that has trained cannot be pickled: accelerate's optimizer cannot.
@pytest.mark.parametrize(("kind", "trained"), [("pickle", False), ("deepcopy", False), ("deepcopy", True)])
def test_a_copied_trainer_is_a_stock_trainer(kind: str, trained: bool, tmp_path: Path) -> None:
    trainer = runs.decorated(tmp_path / "ours", max_steps=4)
    if trained:
        trainer.train()
    copy_of_it = copied(kind, trainer)
    assert ours(trainer) != []
    assert ours(copy_of_it) == []
    copy_of_it.args.output_dir = str(tmp_path / "copy")
    copy_of_it.train()
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    assert runs.root(tmp_path / "ours").exists() == trained


def test_a_pickled_trainer_needs_nothing_of_ours_to_be_read(tmp_path: Path) -> None:
    assert b"datastates" not in pickled(runs.decorated(tmp_path))


@pytest.mark.parametrize("kind", ["pickle", "deepcopy"])
def test_a_copied_trainer_can_be_decorated_again(kind: str, tmp_path: Path) -> None:
    first = runs.decorated(tmp_path / "first", max_steps=2)
    second = runs.decorate(copied(kind, first))
    second.args.output_dir = str(tmp_path / "second")
    second.train()
    assert runs.committed(tmp_path / "second") == [2]
    assert not runs.root(tmp_path / "first").exists()


def test_a_decorated_trainer_can_be_collected(tmp_path: Path) -> None:
    reference = weakref.ref(runs.decorated(tmp_path, max_steps=2))
    gc.collect()
    assert reference() is None
    trainer = runs.decorated(tmp_path, max_steps=2)
    trainer.train()
    reference = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert reference() is None
