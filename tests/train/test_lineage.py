"""Which checkpoints belong to which training, when several share a directory, a script or a process."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import tiny
import torch
from accelerate.state import GradientState
from datastates.llm import resume
from datastates.store import commit
from datastates.store.layout import Root
from datastates.store.runrecord import RunRecord
from processes import PATIENCE, SCRIPTS
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback

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


# -- a training that is left out when the script is started again -------------------------------------------------------

FIRST: dict[str, Any] = {"seed": 0, "rows": 64, "max_steps": 4, "learning_rate": 1e-3}
SECOND: dict[str, Any] = {"seed": 1, "rows": 48, "max_steps": 6}
AUTO = {"resume": "auto"}


def training(
    output_dir: Path, rows: int, seed: int, stop: int = 0, passed: Any = True, **how: Any
) -> Trainer:
    """One of the trainings of a script, ended with an error after ``stop`` steps (0: never)."""
    trainer = runs.decorated(
        output_dir,
        AUTO,
        callbacks=[runs.StopAt(stop)] if stop else [],
        **{"model": tiny.llama(seed), "data": tiny.Tokens(rows, seed=seed), **how},
    )
    with pytest.raises(runs.Stopped) if stop else contextlib.nullcontext():
        trainer.train(resume_from_checkpoint=passed)
    return trainer


def trained(output_dir: Path, **how: Any) -> dict[str, torch.Tensor]:
    """The weights after an undisturbed training."""
    return tiny.weights(training(output_dir, **how).model)


@pytest.fixture
def killed_in_the_second(tmp_path: Path, relaunch: Callable[[], None]) -> Path:
    """Where a script ended in the fifth step of its second training; the next one is a new process."""
    output_dir = tmp_path / "out"
    training(output_dir, **FIRST)
    training(output_dir, stop=5, **SECOND)
    assert runs.committed(output_dir) == [2, 4]
    relaunch()
    return output_dir


def last_lineages(output_dir: Path) -> list[str]:
    record = RunRecord.read(Root.of(output_dir))
    assert record is not None
    return [lineage.id for _, lineage in sorted(record.lineages.items())]


@pytest.mark.parametrize("passed", [True, None])
def test_a_training_goes_on_from_its_own_checkpoints_when_the_one_before_is_left_out(
    passed: bool | None, killed_in_the_second: Path, tmp_path: Path
) -> None:
    before = last_lineages(killed_in_the_second)
    again = training(killed_in_the_second, passed=passed, **SECOND)
    assert runs.steps_done(again) == [5, 6]
    assert runs.lineage_of(killed_in_the_second, 6) == runs.lineage_of(killed_in_the_second, 4) == before[1]
    assert last_lineages(killed_in_the_second) == before
    assert tiny.same(tiny.weights(again.model), trained(tmp_path / "alone", **SECOND))


@pytest.mark.parametrize("change", [{"max_steps": 8}, {"learning_rate": 1e-4}, {"seed": 5}], ids=str)
def test_a_training_is_known_again_although_an_argument_was_changed_by_hand(
    change: dict[str, Any], killed_in_the_second: Path
) -> None:
    """With the first left out, and with the first kept and changed likewise."""
    before = last_lineages(killed_in_the_second)
    again = training(killed_in_the_second, **{**SECOND, **change})
    last = again.state.global_step
    assert runs.steps_done(again) == list(range(5, last + 1))
    assert last_lineages(killed_in_the_second) == before
    resume._ordinals.clear()
    first = training(killed_in_the_second, **{**FIRST, **change, "max_steps": 5})
    second = training(killed_in_the_second, **{**SECOND, **change, "max_steps": 10})
    assert (runs.steps_done(first), runs.steps_done(second)) == ([5], list(range(last + 1, 11)))
    assert last_lineages(killed_in_the_second) == before


def test_two_trainings_of_different_models_are_told_apart_by_nothing_else(
    tmp_path: Path, relaunch: Callable[[], None]
) -> None:
    alike: dict[str, Any] = {"rows": 64, "seed": 0}
    training(tmp_path, model=tiny.llama(), **alike)
    training(tmp_path, model=tiny.llama(hidden_size=64), stop=5, **alike)
    relaunch()
    again = training(tmp_path, model=tiny.llama(hidden_size=64), **alike)
    assert runs.steps_done(again) == [5, 6, 7, 8]


def test_trainings_that_nothing_tells_apart_are_known_by_their_order(
    tmp_path: Path, relaunch: Callable[[], None]
) -> None:
    alike: dict[str, Any] = {"rows": 64, "seed": 0, "max_steps": 6}
    training(tmp_path, **alike)
    training(tmp_path, stop=5, **alike)
    before = last_lineages(tmp_path)
    relaunch()
    done = [runs.steps_done(training(tmp_path, **alike)) for _ in range(2)]
    assert done == [[], [5, 6]]
    assert last_lineages(tmp_path) == before


def test_a_training_after_one_that_went_on_begins_where_the_script_has_it(
    killed_in_the_second: Path, relaunch: Callable[[], None]
) -> None:
    before = last_lineages(killed_in_the_second)
    third: dict[str, Any] = {"seed": 2, "rows": 32, "max_steps": 3}
    training(killed_in_the_second, **SECOND)
    assert runs.steps_done(training(killed_in_the_second, stop=2, **third)) == [1, 2]
    assert last_lineages(killed_in_the_second)[:2] == before
    relaunch()
    assert runs.steps_done(training(killed_in_the_second, **third)) == [3]
    assert len(last_lineages(killed_in_the_second)) == 3


def test_a_training_that_raised_and_is_tried_again_is_the_same_although_another_was_left_out(
    killed_in_the_second: Path,
) -> None:
    before = last_lineages(killed_in_the_second)
    assert runs.steps_done(training(killed_in_the_second, stop=5, **SECOND)) == [5]
    assert runs.steps_done(training(killed_in_the_second, **SECOND)) == [5, 6]
    assert last_lineages(killed_in_the_second) == before


def test_starting_the_second_over_leaves_the_first_alone(
    killed_in_the_second: Path, relaunch: Callable[[], None]
) -> None:
    before = last_lineages(killed_in_the_second)
    assert runs.steps_done(training(killed_in_the_second, stop=3, passed=False, **SECOND)) == [1, 2, 3]
    now = last_lineages(killed_in_the_second)
    assert now[0] == before[0]
    assert now[1] != before[1]
    relaunch()
    assert runs.steps_done(training(killed_in_the_second, **FIRST)) == []
    assert runs.steps_done(training(killed_in_the_second, **SECOND)) == [3, 4, 5, 6]


def test_a_script_that_leaves_out_its_first_training_is_killed_and_ends_as_if_undisturbed(
    tmp_path: Path,
) -> None:
    def launch(output_dir: Path, die_at: int) -> list[tuple[str, int]]:
        script = [sys.executable, str(SCRIPTS / "two_trainings.py"), str(output_dir), str(die_at)]
        ended = subprocess.run(script, capture_output=True, text=True, timeout=PATIENCE)
        assert ended.returncode == (-signal.SIGKILL if die_at else 0), ended.stderr[-3000:]
        lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"training"')]
        return [(line["training"], line["step"]) for line in lines]

    first, second = ([(name, step) for step in range(1, 7)] for name in ("first", "second"))
    assert launch(tmp_path / "killed", 5) == first[:4] + second[:5]
    assert launch(tmp_path / "killed", 0) == second[4:]
    assert launch(tmp_path / "calm", 0) == first[:4] + second
    weights = [(tmp_path / name / "second" / "model.safetensors").read_bytes() for name in ("killed", "calm")]
    assert weights[0] == weights[1]


# -- a training that goes on with other arguments, and another model ----------------------------------------------------


@pytest.mark.parametrize("stop", [5, 0], ids=["interrupted", "finished"])
@pytest.mark.parametrize(
    "change",
    [
        {"max_steps": 10},
        {"learning_rate": 1e-5},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "run_name": "other"},
        {"max_steps": -1, "num_train_epochs": 1, "seed": 3, "data": tiny.Tokens(48, seed=4)},
        {"logging_steps": 7, "save_steps": 5, "save_total_limit": 9, "dataloader_num_workers": 1},
        {"bf16": True, "model": tiny.llama().to(torch.bfloat16)},
    ],
    ids=lambda change: "+".join(change),
)
def test_no_argument_keeps_a_training_from_going_on(
    stop: int, change: dict[str, Any], tmp_path: Path, relaunch: Callable[[], None]
) -> None:
    begun = training(tmp_path, rows=64, seed=0, stop=stop)
    before = last_lineages(tmp_path)
    relaunch()
    again = training(tmp_path, **{"rows": 64, "seed": 0, **change})
    assert not set(runs.steps_done(again)) & set(range(1, 5))
    assert again.state.global_step >= begun.state.global_step
    assert last_lineages(tmp_path) == before


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "class": (
        lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=128)),
        "class LlamaForCausalLM there and GPT2LMHeadModel here",
    ),
    "size": (lambda: tiny.llama(hidden_size=64), "elements 28832 there and 74048 here"),
    "layers": (
        lambda: tiny.llama(num_hidden_layers=3),
        "parameters 21 there and 30 here, elements 28832 there",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("passed", [True, None])
def test_the_checkpoints_of_another_model_are_told_and_neither_loaded_nor_deleted(
    passed: bool | None,
    other: str,
    tmp_path: Path,
    relaunch: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    training(tmp_path, rows=64, seed=0, stop=5)
    relaunch()
    build, difference = OTHERS[other]
    caplog.clear()
    again = training(tmp_path, rows=64, seed=0, model=build(), passed=passed, max_steps=3, save_steps=3)
    assert runs.steps_done(again) == [1, 2, 3]
    assert runs.committed(tmp_path) == [2, 3, 4]
    told, line = [text for name, level, text in caplog.record_tuples if level >= logging.ERROR]
    assert line == "[Concurrent Checkpoint] No Checkpoint found with step: -1"
    assert f"{runs.root(tmp_path)}: its checkpoints belong to another model ({difference}" in told


def test_where_there_is_only_another_models_checkpoint_none_is_announced(
    tmp_path: Path, relaunch: Callable[[], None]
) -> None:
    training(tmp_path, rows=64, seed=0, max_steps=2)
    relaunch()
    runs.decorated(tmp_path)
    assert os.environ["CKPT_LAST_STEP"] == "2"
    runs.decorated(tmp_path, model=tiny.llama(hidden_size=64))
    assert "CKPT_LAST_STEP" not in os.environ


def test_the_checkpoint_announced_is_that_of_the_training_that_will_go_on(killed_in_the_second: Path) -> None:
    training(killed_in_the_second, **SECOND)
    resume._ordinals.clear()
    runs.decorated(killed_in_the_second, data=tiny.Tokens(48), max_steps=6)
    assert os.environ["CKPT_LAST_STEP"] == "6"
    runs.decorated(killed_in_the_second, max_steps=4, learning_rate=1e-3)
    assert os.environ["CKPT_LAST_STEP"] == "4"


def test_another_model_does_not_go_on_where_resuming_is_required(
    tmp_path: Path, relaunch: Callable[[], None]
) -> None:
    training(tmp_path, rows=64, seed=0, max_steps=2)
    relaunch()
    trainer = runs.decorated(tmp_path, {"resume": "required"}, model=tiny.llama(hidden_size=64))
    with pytest.raises(resume.NothingToResumeError):
        trainer.train()
    assert runs.steps_done(trainer) == []


def test_a_record_without_fingerprints_is_resumed_by_the_order_of_trainings(
    killed_in_the_second: Path,
) -> None:
    file = Root.of(killed_in_the_second).run_record
    body = json.loads(file.read_bytes())
    for lineage in body["lineages"].values():
        assert lineage.pop("fingerprint")
    file.write_text(json.dumps(body))
    assert runs.steps_done(training(killed_in_the_second, **FIRST)) == []
    assert runs.steps_done(training(killed_in_the_second, **SECOND)) == [5, 6]


# -- trainers beside each other -----------------------------------------------------------------------------------------


class TrainsAnother(TrainerCallback):
    """Trains ``other`` to its end in the middle of a step of the Trainer that this belongs to."""

    def __init__(self, other: Trainer, step: int) -> None:
        self.other = other
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.other.train()


class Ends(TrainerCallback):
    """Sets ``event`` when its training has ended."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.event.set()


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


def test_a_training_around_another_in_one_directory_is_known_to_have_finished(tmp_path: Path) -> None:
    inner = runs.decorated(tmp_path, model=tiny.llama(hidden_size=64), max_steps=1, save_strategy="no")
    runs.decorated(tmp_path, callbacks=[TrainsAnother(inner, 2)]).train()
    record = RunRecord.read(Root.of(tmp_path))
    assert record is not None
    assert [lineage.state for lineage in record.lineages.values()] == ["finished", "finished"]
    assert record.state == "finished"


def test_a_training_that_begins_inside_another_in_its_directory_leaves_what_is_in_flight_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = runs.decorated(tmp_path, model=tiny.llama(hidden_size=64), max_steps=1, save_strategy="no")
    outer = runs.decorated(tmp_path, callbacks=[TrainsAnother(inner, 2)])
    inner_is_over, publish = threading.Event(), commit.publish
    inner.add_callback(Ends(inner_is_over))
    monkeypatch.setattr(
        commit, "publish", lambda *args, **how: (inner_is_over.wait(60), publish(*args, **how))
    )
    outer.train()
    assert runs.committed(tmp_path) == [2, 4, 6, 8]


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
    for setting in ("auto", "required"):
        again = search(tmp_path, settings={"resume": setting})
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
