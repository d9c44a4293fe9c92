"""A launch in which Trainer had to save by itself, or in which we were not there: the next one goes on from what it saved."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checkpoints
import disks
import pytest
import runs
from ckpt_run import resume as launcher
from processes import Job, Training, losses, occupied

KILLED_AT_6 = {"at": "datastates.store.commit:publish", "do": "kill", "nth": 3}
"""Steps 2 and 4 are committed."""
KILLED_AFTER_6 = {
    "at": "transformers.trainer_callback:TrainerState.save_to_json",
    "do": "kill",
    "when": "after",
}
"""In a launch that begins with step 5 and in which Trainer saves: it writes its state last."""


def job(directory: Path, log: str = "log", **changes: Any) -> Job:
    return Job(
        output_dir=str(directory / "out"),
        log=str(directory / log),
        **{"resume": True, "orderly": True, **changes},
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    weights: str = Training(job(tmp_path_factory.mktemp("undisturbed"))).finish()["weights"]
    return weights


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The output directory of a training that was killed with steps 2 and 4 committed."""
    assert Training(job(tmp_path, faults=[KILLED_AT_6])).join() == [-9]
    assert checkpoints.whole(tmp_path / "out") == [2, 4]
    return tmp_path / "out"


# -- why we could not save ----------------------------------------------------------------------------------------------


@contextmanager
def nothing(output_dir: Path) -> Iterator[None]:
    yield


NO_MEMORY = {"at": "datastates.llm.host_cache:engine", "do": "ENOMEM"}
OFF: dict[str, tuple[Any, dict[str, Any]]] = {
    "another process has it": (occupied, {}),
    "it is read-only": (lambda output_dir: disks.read_only(runs.root(output_dir)), {}),
    "no memory for the engine": (nothing, {"faults": [NO_MEMORY, KILLED_AFTER_6]}),
    "not decorated": (nothing, {"decorated": False}),
}


@pytest.mark.parametrize(("obstacle", "how"), OFF.values(), ids=list(OFF))
def test_the_next_launch_goes_on_from_what_trainer_saved_by_itself(
    obstacle: Any, how: dict[str, Any], killed: Path, undisturbed: str
) -> None:
    if how.get("decorated") is False:
        how = {**how, "resume": str(runs.checkpoint(killed, 4))}
    with obstacle(killed):
        off = Training(job(killed.parent, **{"faults": [KILLED_AFTER_6], **how}))
        assert off.join() == [-9], off.text()
    assert (killed / "checkpoint-6").is_dir()
    assert checkpoints.whole(killed) == [2, 4]
    assert launcher.step(str(killed)) == 6
    runs.decorated(killed)
    assert os.environ["CKPT_LAST_STEP"] == "6"

    done = len(losses(off.job))
    again = Training(job(killed.parent))
    assert again.finish()["weights"] == undisturbed
    assert [step for step, _ in losses(again.job)[done:]] == [7, 8]
    assert checkpoints.whole(killed) == [2, 4, 8]
    assert runs.lineage_of(killed, 8) == runs.lineage_of(killed, 4)
    assert launcher.step(str(killed)) == 8


def test_where_trainers_own_is_cut_short_ours_is_taken_and_that_is_said(
    killed: Path, undisturbed: str
) -> None:
    assert Training(job(killed.parent, faults=[NO_MEMORY, KILLED_AFTER_6])).join() == [-9]
    os.truncate(killed / "checkpoint-6" / "optimizer.pt", 1000)
    again = Training(job(killed.parent))
    done = len(losses(again.job))
    assert again.finish()["weights"] == undisturbed
    assert losses(again.job)[done][0] == 5
    assert f"skipping {killed / 'checkpoint-6'}: optimizer.pt" in again.text()


# -- what is not taken --------------------------------------------------------------------------------------------------


def test_the_leftovers_of_an_older_stock_run_never_win(tmp_path: Path) -> None:
    Training(job(tmp_path, "older", decorated=False, resume=None, arguments={"max_steps": 12})).finish()
    assert Training(job(tmp_path, resume=False, faults=[KILLED_AT_6])).join() == [-9]
    again = Training(job(tmp_path))
    done = len(losses(again.job))
    again.finish()
    assert losses(again.job)[done][0] == 5
    assert f"skipping {tmp_path / 'out' / 'checkpoint-'}" not in again.text()


def test_a_stock_run_that_began_anew_in_the_directory_is_another_training_and_is_named(killed: Path) -> None:
    Training(job(killed.parent, "other", decorated=False, resume=None, arguments={"seed": 1})).finish()
    done = len(losses(job(killed.parent)))
    again = Training(job(killed.parent))
    again.finish()
    assert losses(again.job)[done][0] == 5
    [line] = [line for line in again.text().splitlines() if f"skipping {killed / 'checkpoint-'}" in line]
    assert f"skipping {killed / 'checkpoint-8'}: was saved later than" in line
    assert "name it: resume_from_checkpoint=<path>" in line


def test_trainers_copies_of_damaged_checkpoints_are_never_taken_for_trainers_own(tmp_path: Path) -> None:
    kept = {"keep_trainer_saves": True}
    assert Training(job(tmp_path, settings=kept, faults=[KILLED_AT_6])).join() == [-9]
    assert (tmp_path / "out" / "checkpoint-4").is_dir()
    damaged = runs.checkpoint(tmp_path / "out", 4) / "optimizer.pt"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    done = len(losses(job(tmp_path)))
    again = Training(job(tmp_path, settings=kept))
    again.finish()
    assert losses(again.job)[done][0] == 3


def test_without_our_directory_trainers_own_is_taken(killed: Path) -> None:
    assert Training(job(killed.parent, faults=[NO_MEMORY, KILLED_AFTER_6])).join() == [-9]
    shutil.rmtree(runs.root(killed))
    done = len(losses(job(killed.parent)))
    Training(job(killed.parent)).finish()
    assert losses(job(killed.parent))[done][0] == 7
