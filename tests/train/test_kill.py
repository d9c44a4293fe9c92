"""SIGKILL at every point of a save's life: the next launch resumes from the last commit, whole, and cleans up."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import runs
import tiny
from processes import Job, Training, losses

MODEL = {"hidden_size": 128, "intermediate_size": 256}
ARGUMENTS: dict[str, Any] = {"max_steps": 10, "save_steps": 2, "save_total_limit": 2}

COMMIT = "datastates.store.commit"
TICKET = "datastates.engine.engine:Ticket"

# Where the process dies at the third save, the one of step 6; and the newest commit then.
PHASES: dict[str, tuple[dict[str, Any], int]] = {
    "before anything of it is written": ({"at": "datastates.llm.saver:Saver.save"}, 4),
    "while stock code writes": ({"at": "transformers.trainer:Trainer._save_rng_state"}, 4),
    "when the images are collected": ({"at": "datastates.llm.scope:SaveScope.collect", "when": "after"}, 4),
    "staging": ({"at": "datastates.engine.engine:Engine.submit", "when": "after"}, 4),
    "persisting, nothing is renamed": ({"at": f"{TICKET}.approve"}, 4),
    "persisted, not voted": ({"at": f"{COMMIT}:cast_vote"}, 4),
    "voted": ({"at": f"{COMMIT}:cast_vote", "when": "after"}, 4),
    "votes collected": ({"at": f"{COMMIT}:publish"}, 4),
    "before the manifest": ({"at": f"{COMMIT}:_fsync_directories"}, 4),
    "committed": ({"at": f"{COMMIT}:publish", "when": "after"}, 6),
    "before retention": ({"at": "datastates.store.retention:expendable"}, 6),
    "retention, out of its place and not deleted": ({"at": f"{COMMIT}:_delete_tree", "nth": 1}, 6),
}


def job(directory: Path, **changes: Any) -> Job:
    return Job(
        output_dir=str(directory / "out"),
        log=str(directory / "log"),
        model=MODEL,
        arguments=ARGUMENTS,
        orderly=True,
        **changes,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], dict[str, Any]]:
    """The losses by step and the final weights of a stock training."""
    trainer = tiny.trainer(
        tmp_path_factory.mktemp("stock"), model=tiny.llama(**MODEL), **{**ARGUMENTS, "save_strategy": "no"}
    )
    trainer.train()
    history = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return history, tiny.weights(trainer.model)


def die(ours: Job, fault: dict[str, Any]) -> None:
    assert Training(replace(ours, faults=[{"do": "kill", **fault}])).join() == [-9]


def resume(output_dir: Path, undisturbed: tuple[dict[int, float], dict[str, Any]]) -> list[int]:
    """Resume in this process and compare; the steps that were done."""
    trainer = runs.decorated(output_dir, model=tiny.llama(**MODEL), **ARGUMENTS)
    trainer.train(resume_from_checkpoint=True)
    history = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    assert history == undisturbed[0]
    assert tiny.same(tiny.weights(trainer.model), undisturbed[1])
    return runs.steps_done(trainer)


def unfinished(output_dir: Path) -> Iterator[Path]:
    """What lies among the checkpoints and is not one."""
    for path in runs.root(output_dir).glob("checkpoint-*"):
        if not (path / ".ckpt" / "manifest.json").exists():
            yield path
    yield from runs.root(output_dir).glob("checkpoint-*/**/*.part")


@pytest.mark.parametrize("phase", PHASES)
def test_killed_in_a_phase_of_the_save_the_next_launch_resumes_from_the_last_commit(
    phase: str, tmp_path: Path, undisturbed: tuple[dict[int, float], dict[str, Any]]
) -> None:
    fault, newest = PHASES[phase]
    ours = job(tmp_path)
    die(ours, {"nth": 3, **fault})
    output_dir = Path(ours.output_dir)
    assert checkpoints.whole(output_dir)[-1] == newest
    left = {path.name.split("-")[1] for path in unfinished(output_dir) if path.is_dir()}
    assert left <= {"6"}
    assert resume(output_dir, undisturbed) == list(range(newest + 1, 11))
    assert checkpoints.whole(output_dir) == [8, 10]
    assert list(unfinished(output_dir)) == []
    aside = runs.root(output_dir) / ".aside"
    assert {path.name.split("-")[0] for path in aside.glob("*")} == left


def test_killed_again_and_again_the_run_still_ends_as_if_undisturbed(
    tmp_path: Path, undisturbed: tuple[dict[int, float], dict[str, Any]]
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    ours = job(tmp_path)
    newest = 0
    for _ in range(4):
        phase = chance.choice([name for name in PHASES if not name.startswith("retention")])
        print(phase)
        die(ours, {**PHASES[phase][0], "nth": chance.choice([1, 2] if newest else [2])})
        steps = checkpoints.whole(Path(ours.output_dir))
        assert steps[-1] >= newest
        newest = steps[-1]
        if newest >= 6:
            break
    assert resume(Path(ours.output_dir), undisturbed) == list(range(newest + 1, 11))
    assert {step: loss for step, loss in losses(ours) if loss != undisturbed[0][step]} == {}
    leftovers = list((runs.root(Path(ours.output_dir)) / ".aside").glob("*"))
    assert len(leftovers) <= 1, "only the newest of what was never committed is kept"


@pytest.mark.parametrize(
    "fault",
    [
        {"at": f"{COMMIT}:_move_aside"},
        {"at": f"{COMMIT}:_move_aside", "when": "after"},
        {"at": f"{COMMIT}:_delete_leftovers"},
        {"at": "datastates.store.runrecord:RunRecord.write"},
        {"at": "datastates.store.runrecord:RunRecord.write", "when": "after"},
    ],
    ids=lambda fault: " ".join(fault.values()).replace("datastates.store.", ""),
)
def test_killed_while_the_next_launch_cleans_up_the_one_after_it_resumes_all_the_same(
    fault: dict[str, Any], tmp_path: Path, undisturbed: tuple[dict[int, float], dict[str, Any]]
) -> None:
    ours = job(tmp_path)
    die(ours, {"at": f"{COMMIT}:publish", "nth": 3})
    die(ours, fault)
    assert checkpoints.whole(Path(ours.output_dir))[-1] == 4
    assert resume(Path(ours.output_dir), undisturbed) == [5, 6, 7, 8, 9, 10]


def test_killed_while_a_checkpoint_of_another_training_is_moved_out_of_the_way_both_keep_theirs(
    tmp_path: Path,
) -> None:
    ours = job(tmp_path)
    first = replace(ours, arguments={**ARGUMENTS, "max_steps": 4})
    Training(first).finish()
    die(replace(ours, resume=False), {"at": f"{COMMIT}:set_aside", "when": "after"})
    output_dir = Path(ours.output_dir)
    [moved] = (runs.root(output_dir) / ".aside").iterdir()
    assert moved.name.startswith("2-")
    assert (moved / ".ckpt" / "manifest.json").exists()
    assert runs.committed(output_dir) == [4]
    trainer = runs.decorated(output_dir, model=tiny.llama(**MODEL), **{**ARGUMENTS, "max_steps": 2})
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [1, 2]
    assert moved.exists()
