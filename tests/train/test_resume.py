"""What ``train()`` starts from, for everything that a script can pass and everything that can lie on disk."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import tiny
import transformers
from datastates.llm.resume import NothingToResumeError
from datastates.store.layout import Root
from datastates.store.runrecord import RunRecord
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

NOTHING = (
    "datastates.llm.decorator",
    logging.ERROR,
    "[Concurrent Checkpoint] No Checkpoint found with step: -1",
)

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
)


def lose(path: Path) -> str:
    path.unlink()
    return "is missing"


def shorten(path: Path) -> str:
    size = path.stat().st_size
    os.truncate(path, size - 1)
    return f"has {size - 1} bytes instead of {size}"


def flip(path: Path) -> str:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return "has checksum"


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output directory with the checkpoints 2, 4, 6 and 8 of a run that finished. Copy it."""
    output_dir = tmp_path_factory.mktemp("finished") / "out"
    runs.decorated(output_dir).train()
    assert runs.committed(output_dir) == [2, 4, 6, 8]
    return output_dir


@pytest.fixture
def output_dir(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run. Output directories may be moved."""
    return Path(shutil.copytree(finished_run, tmp_path / "moved"))


# -- True ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [True, False], ids=["empty directory", "no directory"])
def test_true_with_nothing_there_says_the_line_once_and_starts_fresh(
    exists: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output_dir = tmp_path / "never" / "was"
    if exists:
        output_dir.mkdir(parents=True)
    trainer = runs.decorated(output_dir)
    trainer.train(resume_from_checkpoint=True)
    assert [entry for entry in caplog.record_tuples if "No Checkpoint" in entry[2]] == [NOTHING]
    assert runs.steps_done(trainer) == list(range(1, 9))
    assert runs.committed(output_dir) == [2, 4, 6, 8]


def test_true_goes_on_from_the_newest_checkpoint(output_dir: Path) -> None:
    trainer = runs.decorated(output_dir, max_steps=10)
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [9, 10]
    assert runs.lineage_of(output_dir, 10) == runs.lineage_of(output_dir, 8)


def test_a_finished_run_started_again_trains_no_further_step(output_dir: Path) -> None:
    before = tiny.weights(tiny.llama().from_pretrained(runs.checkpoint(output_dir, 8)))
    trainer = runs.decorated(output_dir)
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == []
    assert trainer.state.global_step == 8
    assert tiny.same(tiny.weights(trainer.model), before)
    assert runs.committed(output_dir) == [2, 4, 6, 8]


# -- damage -------------------------------------------------------------------------------------------------------------


DAMAGE = pytest.mark.parametrize("damage", [lose, shorten, flip], ids=["missing", "short", "flipped"])


@DAMAGE
@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_with_any_file_damaged_is_named_and_the_next_older_one_given(
    name: str, damage: Callable[[Path], str], output_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = runs.checkpoint(output_dir, 8)
    reason = damage(newest / name)
    assert get_last_checkpoint(str(output_dir)) == str(runs.checkpoint(output_dir, 6))
    told = [text for _, level, text in caplog.record_tuples if level == logging.ERROR]
    assert len(told) == 1
    assert told[0].startswith(f"[Concurrent Checkpoint] skipping {newest}: {name} {reason}")


@DAMAGE
def test_training_goes_on_from_the_next_older_checkpoint_when_the_newest_is_damaged(
    damage: Callable[[Path], str], output_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reason = damage(runs.checkpoint(output_dir, 8) / "model.safetensors")
    trainer = runs.decorated(output_dir, max_steps=7, save_strategy="no")
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [7]
    told = [text for _, level, text in caplog.record_tuples if level == logging.ERROR]
    assert len(told) == 1
    assert f"model.safetensors {reason}" in told[0]


def test_every_file_of_a_checkpoint_is_among_those_that_the_damage_is_tried_on(output_dir: Path) -> None:
    newest = runs.checkpoint(output_dir, 8)
    assert sorted(path.name for path in newest.iterdir() if path.name != ".ckpt") == sorted(FILES)


def test_two_damaged_checkpoints_are_both_named_and_the_third_taken(
    output_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lose(runs.checkpoint(output_dir, 8) / "optimizer.pt")
    flip(runs.checkpoint(output_dir, 6) / "model.safetensors")
    trainer = runs.decorated(output_dir, max_steps=5, save_strategy="no")
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [5]
    skipped = [text for _, _, text in caplog.record_tuples if "skipping" in text]
    assert "checkpoint-8: optimizer.pt" in skipped[0]
    assert "checkpoint-6: model.safetensors" in skipped[1]


def test_with_every_checkpoint_damaged_training_starts_from_the_beginning_and_deletes_none(
    output_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (2, 4, 6, 8):
        flip(runs.checkpoint(output_dir, step) / "model.safetensors")
    trainer = runs.decorated(output_dir, max_steps=2)
    trainer.train(resume_from_checkpoint=True)
    assert NOTHING in caplog.record_tuples
    assert runs.steps_done(trainer) == [1, 2]
    assert all(runs.checkpoint(output_dir, step).exists() for step in (4, 6, 8))
    assert [path.name.split("-")[0] for path in (runs.root(output_dir) / ".aside").iterdir()] == ["2"]


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_reached_again_and_kept_aside(
    output_dir: Path,
) -> None:
    flip(runs.checkpoint(output_dir, 8) / "optimizer.pt")
    trainer = runs.decorated(output_dir)
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [7, 8]
    assert runs.committed(output_dir) == [2, 4, 6, 8]
    assert [path.name.split("-")[0] for path in (runs.root(output_dir) / ".aside").iterdir()] == ["8"]
    assert get_last_checkpoint(str(output_dir)) == str(runs.checkpoint(output_dir, 8))


@DAMAGE
def test_without_a_sound_manifest_there_is_no_checkpoint(
    damage: Callable[[Path], str], output_dir: Path
) -> None:
    damage(runs.checkpoint(output_dir, 8) / ".ckpt" / "manifest.json")
    trainer = runs.decorated(output_dir, max_steps=7, save_strategy="no")
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [7]


@DAMAGE
def test_a_lost_or_damaged_run_record_costs_no_checkpoint(
    damage: Callable[[Path], str], output_dir: Path
) -> None:
    damage(Root.of(output_dir).run_record)
    trainer = runs.decorated(output_dir, max_steps=9)
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [9]


# -- a path, False, nothing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_is_used_as_given_and_begins_a_lineage(
    kind: Callable[[Path], str | Path], output_dir: Path
) -> None:
    old = runs.lineage_of(output_dir, 8)
    trainer = runs.decorated(output_dir, max_steps=6)
    trainer.train(resume_from_checkpoint=kind(runs.checkpoint(output_dir, 4)))
    assert runs.steps_done(trainer) == [5, 6]
    assert runs.lineage_of(output_dir, 6) != old
    assert runs.lineage_of(output_dir, 8) == old


def test_the_path_of_the_newest_checkpoint_continues_its_lineage(output_dir: Path) -> None:
    trainer = runs.decorated(output_dir, max_steps=10)
    trainer.train(resume_from_checkpoint=str(runs.checkpoint(output_dir, 8)))
    assert runs.steps_done(trainer) == [9, 10]
    assert runs.lineage_of(output_dir, 10) == runs.lineage_of(output_dir, 8)


def test_a_path_elsewhere_is_the_origin_until_the_new_training_has_a_checkpoint(
    output_dir: Path, tmp_path: Path, relaunch: Callable[[], None]
) -> None:
    elsewhere = str(runs.checkpoint(output_dir, 8))
    fine_tuned = tmp_path / "fine"
    trainer = runs.decorated(fine_tuned, max_steps=12, save_steps=50, callbacks=[runs.StopAt(9)])
    with pytest.raises(runs.Stopped):
        trainer.train(resume_from_checkpoint=elsewhere)
    relaunch()
    trainer = runs.decorated(fine_tuned, max_steps=10, save_steps=50)
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [9, 10]


def test_a_path_without_a_checkpoint_fails_as_stock_does_tells_the_way_out_and_leaves_no_trace(
    tmp_path: Path,
) -> None:
    trainer = runs.decorated(tmp_path / "out")
    with pytest.raises(ValueError, match="Can't find a valid checkpoint at") as failure:
        trainer.train(resume_from_checkpoint=str(tmp_path / "nowhere"))
    message = str(failure.value)
    assert f"{tmp_path}/nowhere" in message
    assert "no such directory" in message
    assert "False starts from the beginning" in message
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("given", ["", "concurrent_checkpoint", "concurrent_checkpoint/checkpoint-9"])
def test_a_path_that_misses_the_checkpoint_by_a_little_is_told_which_one_was_meant(
    given: str, output_dir: Path
) -> None:
    before = runs.committed(output_dir)
    trainer = runs.decorated(output_dir)
    with pytest.raises(ValueError, match=rf"Did you mean '{runs.checkpoint(output_dir, 8)}'"):
        trainer.train(resume_from_checkpoint=output_dir / given)
    assert runs.committed(output_dir) == before
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == []


def test_a_trainer_that_fetches_its_checkpoint_itself_is_given_whatever_the_script_passed(
    output_dir: Path, tmp_path: Path
) -> None:
    class Fetching(Trainer):
        def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
            assert resume_from_checkpoint == "bucket://checkpoint-8"
            return super().train(str(runs.checkpoint(output_dir, 8)), **kwargs)

    trainer = runs.decorated(tmp_path / "out", cls=Fetching, max_steps=10)
    trainer.train("bucket://checkpoint-8")
    assert runs.steps_done(trainer) == [9, 10]


def test_false_starts_fresh_and_keeps_the_older_checkpoints_until_their_step_is_saved_again(
    output_dir: Path,
) -> None:
    old = runs.lineage_of(output_dir, 8)
    trainer = runs.decorated(output_dir, max_steps=2)
    trainer.train(resume_from_checkpoint=False)
    assert runs.steps_done(trainer) == [1, 2]
    assert runs.lineage_of(output_dir, 2) != old
    assert runs.lineage_of(output_dir, 8) == old
    assert [path.name.split("-")[0] for path in (runs.root(output_dir) / ".aside").iterdir()] == ["2"]


def test_false_starts_fresh_also_when_resuming_is_required(output_dir: Path) -> None:
    trainer = runs.decorated(output_dir, {"resume": "required"}, max_steps=1)
    trainer.train(resume_from_checkpoint=False)
    assert runs.steps_done(trainer) == [1]


def test_nothing_passed_resumes_a_run_that_did_not_finish_and_says_how_to_start_over(
    tmp_path: Path, relaunch: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    runs.interrupted(tmp_path, 5)
    relaunch()
    trainer = runs.decorated(tmp_path, {"resume": "auto"})
    trainer.train()
    assert runs.steps_done(trainer) == [5, 6, 7, 8]
    [told] = [text for _, _, text in caplog.record_tuples if "resuming at step" in text]
    assert "resuming at step 4" in told
    assert "--fresh" in told


def test_nothing_passed_starts_fresh_after_a_run_that_finished(output_dir: Path) -> None:
    trainer = runs.decorated(output_dir, {"resume": "auto"}, max_steps=1)
    trainer.train()
    assert runs.steps_done(trainer) == [1]


def test_nothing_passed_starts_fresh_without_the_launcher(
    tmp_path: Path, relaunch: Callable[[], None]
) -> None:
    runs.interrupted(tmp_path, 5)
    relaunch()
    trainer = runs.decorated(tmp_path, max_steps=1)
    trainer.train()
    assert runs.steps_done(trainer) == [1]


def test_nothing_passed_and_nothing_there_starts_fresh_without_the_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = runs.decorated(tmp_path, {"resume": "auto"}, max_steps=1)
    trainer.train()
    assert runs.steps_done(trainer) == [1]
    assert NOTHING not in caplog.record_tuples


@pytest.mark.parametrize("passed", [None, True])
def test_required_with_nothing_there_refuses_to_train(passed: bool | None, tmp_path: Path) -> None:
    trainer = runs.decorated(tmp_path, {"resume": "required"})
    with pytest.raises(NothingToResumeError, match=f"no checkpoint to resume from in {runs.root(tmp_path)}"):
        trainer.train(resume_from_checkpoint=passed)
    assert runs.steps_done(trainer) == []
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_catches_the_refusal_and_starts_fresh_trains_its_first_training(tmp_path: Path) -> None:
    trainer = runs.decorated(tmp_path, {"resume": "required"}, max_steps=2)
    with pytest.raises(NothingToResumeError):
        trainer.train()
    trainer.train(resume_from_checkpoint=False)
    assert [lineage.state for lineage in RunRecord.read(Root.of(tmp_path)).lineages.values()] == ["finished"]
    assert list(RunRecord.read(Root.of(tmp_path)).lineages) == [0]


def test_required_resumes_also_a_run_that_finished(output_dir: Path) -> None:
    trainer = runs.decorated(output_dir, {"resume": "required"}, max_steps=9)
    trainer.train()
    assert runs.steps_done(trainer) == [9]


# -- --fresh ------------------------------------------------------------------------------------------------------------


def test_fresh_is_applied_once_so_that_a_restart_within_the_launch_resumes(
    output_dir: Path, relaunch: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_RUN_FRESH", "launch-1")
    stopped = runs.decorated(output_dir, callbacks=[runs.StopAt(3)])
    assert "CKPT_LAST_STEP" not in os.environ
    assert get_last_checkpoint(str(output_dir)) is None
    with pytest.raises(runs.Stopped):
        stopped.train(resume_from_checkpoint=True)
    assert runs.steps_done(stopped) == [1, 2, 3]

    relaunch()
    restarted = runs.decorated(output_dir, max_steps=4)
    assert os.environ["CKPT_LAST_STEP"] == "2"
    restarted.train(resume_from_checkpoint=True)
    assert runs.steps_done(restarted) == [3, 4]

    relaunch()
    monkeypatch.setenv("CKPT_RUN_FRESH", "launch-2")
    again = runs.decorated(output_dir, max_steps=1)
    again.train(resume_from_checkpoint=True)
    assert runs.steps_done(again) == [1]
    assert runs.checkpoint(output_dir, 8).exists()


def test_fresh_wins_over_required(output_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_RUN_FRESH", "launch-1")
    trainer = runs.decorated(output_dir, {"resume": "required"}, max_steps=1)
    trainer.train()
    assert runs.steps_done(trainer) == [1]


# -- CKPT_LAST_STEP and get_last_checkpoint -----------------------------------------------------------------------------


def test_ckpt_last_step_is_set_when_a_trainer_is_built(
    output_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_LAST_STEP", "3")
    runs.decorated(output_dir)
    assert os.environ["CKPT_LAST_STEP"] == "8"


def test_ckpt_last_step_is_removed_when_there_is_nothing_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_LAST_STEP", "3")
    runs.decorated(tmp_path)
    assert "CKPT_LAST_STEP" not in os.environ


def test_get_last_checkpoint_passes_over_a_damaged_checkpoint(output_dir: Path) -> None:
    assert get_last_checkpoint(str(output_dir)) == str(runs.checkpoint(output_dir, 8))
    shorten(runs.checkpoint(output_dir, 8) / "optimizer.pt")
    assert get_last_checkpoint(str(output_dir)) == str(runs.checkpoint(output_dir, 6))


def test_get_last_checkpoint_answers_as_stock_where_nothing_is_ours(tmp_path: Path) -> None:
    runs.decorated(tmp_path / "other")
    assert get_last_checkpoint(str(tmp_path)) is None
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-12").mkdir()
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-12")
    with pytest.raises(FileNotFoundError):
        get_last_checkpoint(str(tmp_path / "nowhere"))


def test_get_last_checkpoint_bound_before_anything_of_ours_was_imported_answers_from_the_catalog(
    output_dir: Path,
) -> None:
    script = Path(__file__).parent / "scripts" / "ask_last_checkpoint.py"
    output = subprocess.run(
        [sys.executable, str(script), str(output_dir)], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(output.splitlines()[-1]) == [str(runs.checkpoint(output_dir, 8))] * 3


def test_get_last_checkpoint_after_a_training_gives_what_that_training_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs.decorated(tmp_path, max_steps=4).train()
    assert get_last_checkpoint(str(tmp_path)) == str(runs.checkpoint(tmp_path, 4))
    assert not [text for _, _, text in caplog.record_tuples if "skipping" in text]


def test_what_get_last_checkpoint_answered_can_be_passed_to_train(output_dir: Path) -> None:
    trainer = runs.decorated(output_dir, max_steps=9)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(output_dir)))
    assert runs.steps_done(trainer) == [9]
    assert runs.lineage_of(output_dir, 9) == runs.lineage_of(output_dir, 8)


# -- stock Trainer's own checkpoints ------------------------------------------------------------------------------------


@pytest.fixture
def stock_run(tmp_path: Path) -> Path:
    """An output directory in which stock Trainer left the checkpoints 2 and 4."""
    tiny.trainer(tmp_path / "stock", max_steps=4).train()
    return tmp_path / "stock"


def test_a_stock_checkpoint_will_do_where_we_have_none(stock_run: Path) -> None:
    trainer = runs.decorated(stock_run, max_steps=6)
    assert os.environ["CKPT_LAST_STEP"] == "4"
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [5, 6]
    assert runs.committed(stock_run) == [6]
    record = RunRecord.read(Root.of(stock_run))
    assert record is not None
    assert record.lineages[0].origin == str(stock_run / "checkpoint-4")


def test_a_training_that_went_on_from_a_stock_checkpoint_goes_on_from_its_own(
    stock_run: Path, relaunch: Callable[[], None]
) -> None:
    runs.decorated(stock_run, max_steps=6).train(resume_from_checkpoint=True)
    relaunch()
    trainer = runs.decorated(stock_run, max_steps=8)
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [7, 8]
    assert runs.lineage_of(stock_run, 8) == runs.lineage_of(stock_run, 6)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
)
def test_a_stock_checkpoint_that_a_kill_cut_short_is_passed_over(
    name: str, stock_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = stock_run / "checkpoint-4" / name
    os.truncate(path, path.stat().st_size // 2)
    trainer = runs.decorated(stock_run, max_steps=3)
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [3]
    assert any(
        f"skipping {stock_run / 'checkpoint-4'}: {name}" in text for _, _, text in caplog.record_tuples
    )


def test_a_stock_checkpoint_without_its_last_file_is_passed_over(stock_run: Path) -> None:
    (stock_run / "checkpoint-4" / "trainer_state.json").unlink()
    trainer = runs.decorated(stock_run, max_steps=3)
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [3]


def test_a_stock_checkpoint_with_trainers_own_mark_of_an_interrupted_save_is_passed_over(
    stock_run: Path,
) -> None:
    (stock_run / "checkpoint-4" / "checkpoint-is-incomplete.txt").write_text("in progress")
    trainer = runs.decorated(stock_run, max_steps=3)
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [3]


def test_false_passes_over_a_stock_checkpoint_and_so_does_the_training_that_follows(
    stock_run: Path, relaunch: Callable[[], None]
) -> None:
    trainer = runs.decorated(stock_run, max_steps=8, save_steps=50, callbacks=[runs.StopAt(1)])
    with pytest.raises(runs.Stopped):
        trainer.train(resume_from_checkpoint=False)
    relaunch()
    trainer = runs.decorated(stock_run, max_steps=1)
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [1]


# -- Trainer's own save on SIGTERM --------------------------------------------------------------------------------------


@pytest.mark.skipif(
    not hasattr(transformers.TrainingArguments, "enable_jit_checkpoint"),
    reason="transformers before 5 has none",
)
def test_trainers_own_save_on_a_signal_is_committed_without_its_mark(
    tmp_path: Path, relaunch: Callable[[], None]
) -> None:
    class Ask(runs.Watch):
        """Asks for the checkpoint as Trainer's own handler of SIGTERM does."""

        def on_step_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            if state.global_step == 3:
                [jit] = [cb for cb in trainer.callback_handler.callbacks if hasattr(cb, "jit_manager")]
                jit.jit_manager.is_checkpoint_requested = True

    trainer = runs.decorated(tmp_path, callbacks=[Ask()], enable_jit_checkpoint=True, save_steps=50)
    trainer.train()
    assert trainer.state.global_step < 8
    assert runs.committed(tmp_path) == [3]
    assert not (runs.checkpoint(tmp_path, 3) / "checkpoint-is-incomplete.txt").exists()
    assert not (runs.root(tmp_path) / ".aside").exists()
    relaunch()
    resumed = runs.decorated(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert runs.steps_done(resumed) == [4, 5, 6, 7, 8]
