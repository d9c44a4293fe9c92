"""Two ranks: what each of them votes, and what the other does when one fails, hangs or dies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkpoints
import psutil
import pytest
import runs
import torch
from processes import Job, Training, lines, losses
from waiting import until

ARGUMENTS: dict[str, Any] = {"max_steps": 8, "save_steps": 2}
BEST: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
}
STOCK = "transformers.trainer:Trainer"
SESSION = "datastates.llm.session:Session"
SUBMIT = "datastates.llm.saver:Saver._submit"


def job(directory: Path, **changes: Any) -> Job:
    return Job(
        output_dir=str(directory / "out"),
        log=str(directory / "log"),
        **{"arguments": ARGUMENTS, "orderly": True, **changes},
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, dict[str, Any]]:
    """A decorated training of two ranks without any fault, and what rank 0 told in the end."""
    training = Training(job(tmp_path_factory.mktemp("undisturbed")), 2)
    return training, training.finish()


def disturbed(
    directory: Path,
    faults: Sequence[dict[str, Any]],
    undisturbed: tuple[Training, dict[str, Any]],
    **changes: Any,
) -> Training:
    """A training with faults, which has to end well and with the same weights and losses as without."""
    training = Training(job(directory, faults=list(faults), **changes), 2)
    end = training.finish()
    if "arguments" not in changes:
        assert losses(training.job) == losses(undisturbed[0].job)
        assert end["weights"] == undisturbed[1]["weights"]
    return training


def told(training: Training, rank: int, step: int) -> list[str]:
    """The errors of ours that a rank has logged about a step."""
    return [
        line
        for line in training.text(rank).splitlines()
        if "[ERROR]" in line and f"checkpoint-{step} " in line
    ]


def test_each_rank_votes_for_the_files_that_it_wrote(undisturbed: tuple[Training, dict[str, Any]]) -> None:
    output_dir = Path(undisturbed[0].job.output_dir)
    assert checkpoints.whole(output_dir) == [2, 4, 6, 8]
    newest = runs.checkpoint(output_dir, 8)
    votes = [json.loads((newest / ".ckpt" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [vote["attempt"] for vote in votes] == [votes[0]["attempt"]] * 2
    files = [{file["path"] for file in vote["files"]} for vote in votes]
    assert files[1] == {"rng_state_1.pth"}
    assert {"rng_state_0.pth", "model.safetensors", "optimizer.pt"} <= files[0]
    manifest = json.loads((newest / ".ckpt" / "manifest.json").read_text())
    assert manifest["world_size"] == 2
    assert files[0] | files[1] < {file["path"] for file in manifest["files"]}


def test_every_file_is_byte_for_byte_what_stock_code_writes_and_what_is_large_is_copied_late(
    tmp_path: Path,
) -> None:
    arguments = {**ARGUMENTS, "max_steps": 4}
    stock = job(tmp_path, decorated=False, orderly=False, resume=None, arguments=arguments)
    Training(stock, 2).finish()
    (tmp_path / "out").rename(tmp_path / "stock")
    ours = job(tmp_path, late=True, orderly=False, resume=None, arguments=arguments)
    Training(ours, 2).finish()
    assert checkpoints.whole(tmp_path / "out") == [2, 4]
    for step in (2, 4):
        expected = checkpoints.digests(tmp_path / f"stock/checkpoint-{step}")
        assert checkpoints.digests(runs.checkpoint(tmp_path / "out", step)) == expected
    [late] = [line for line in lines(ours) if "late_bytes" in line]
    assert late["eager"] == [{}, {}]
    assert late["late_bytes"] > 0


def test_each_ranks_random_numbers_are_its_own(undisturbed: tuple[Training, dict[str, Any]]) -> None:
    newest = runs.checkpoint(Path(undisturbed[0].job.output_dir), 8)
    states = [torch.load(newest / f"rng_state_{rank}.pth", weights_only=False)["cpu"] for rank in (0, 1)]
    assert not torch.equal(*states)


def test_both_ranks_do_the_same_steps_and_end_with_the_same_weights(
    undisturbed: tuple[Training, dict[str, Any]],
) -> None:
    assert lines(undisturbed[0].job, rank=1)[-1]["weights"] == undisturbed[1]["weights"]


FAILURES: dict[str, list[dict[str, Any]]] = {
    "the engine of rank 1": [
        {"at": "datastates.engine.engine:Engine.submit", "do": "EIO", "nth": 2, "times": 1, "rank": 1}
    ],
    "the native writer of rank 1": [
        {"at": SUBMIT, "do": "limit", "amount": 5000, "nth": 2, "times": 1, "rank": 1},
        {"at": SUBMIT, "do": "unlimit", "nth": 3, "rank": 1},
    ],
    "stock code on rank 1": [
        {"at": f"{STOCK}._save_rng_state", "do": "ENOSPC", "nth": 2, "times": 1, "rank": 1}
    ],
    "the directory on rank 1": [
        {
            "at": "datastates.store.layout:CheckpointDir.prepare",
            "do": "EIO",
            "nth": 4,
            "times": 1,
            "rank": 1,
        }
    ],
    "the vote of rank 1": [
        {"at": "datastates.store.commit:cast_vote", "do": "ENOSPC", "nth": 2, "times": 1, "rank": 1}
    ],
    "rank 0, which cannot say so": [
        {"at": f"{STOCK}._save", "do": "ENOSPC", "nth": 2, "times": 1, "rank": 0},
        {"at": "datastates.store.commit:abandon", "do": "ENOSPC", "times": 1, "rank": 0},
    ],
    "moving aside on rank 0": [
        {"at": f"{SESSION}._move_aside", "do": "EROFS", "nth": 2, "times": 1, "rank": 0}
    ],
    "stock code on rank 0": [{"at": f"{STOCK}._save", "do": "ENOSPC", "nth": 2, "times": 1, "rank": 0}],
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_rank_that_fails_costs_one_checkpoint_and_is_told_on_both(
    failure: str, tmp_path: Path, undisturbed: tuple[Training, dict[str, Any]]
) -> None:
    training = disturbed(tmp_path, FAILURES[failure], undisturbed)
    assert checkpoints.whole(Path(training.job.output_dir)) == [2, 6, 8]
    for rank in (0, 1):
        assert len(told(training, rank, 4)) == 1, training.text(rank)
        assert told(training, rank, 2) + told(training, rank, 6) == []


def test_the_other_rank_is_told_which_rank_failed_and_why(
    tmp_path: Path, undisturbed: tuple[Training, dict[str, Any]]
) -> None:
    training = disturbed(tmp_path, FAILURES["the native writer of rank 1"], undisturbed)
    [line] = told(training, 0, 4)
    assert "rank 1" in line
    assert "File too large" in line


@pytest.mark.parametrize(
    "failure", ["stock code on rank 0", "moving aside on rank 0", "stock code on rank 1"]
)
def test_a_rank_that_fails_before_the_barrier_for_the_best_model_does_not_leave_the_other_waiting(
    failure: str, tmp_path: Path, undisturbed: tuple[Training, dict[str, Any]]
) -> None:
    training = disturbed(tmp_path, FAILURES[failure], undisturbed, arguments={**ARGUMENTS, **BEST})
    assert checkpoints.whole(Path(training.job.output_dir)) == [2, 6, 8]


def test_a_best_model_that_the_resumed_checkpoint_names_brings_no_failing_rank_to_a_barrier_too_many(
    tmp_path: Path,
) -> None:
    """transformers 4 meets for the best model with the save strategies "steps" and "epoch", not with "best"."""
    best = {**BEST, "max_steps": 4, "save_steps": 2}
    Training(job(tmp_path, arguments=best), 2).finish()
    best = {**BEST, "max_steps": 10, "save_strategy": "best"}
    failing = {"at": f"{STOCK}._save", "do": "ENOSPC", "times": 1, "rank": 0}
    training = Training(job(tmp_path, arguments=best, faults=[failing]), 2)
    training.finish()
    assert checkpoints.whole(Path(training.job.output_dir)) == [2, 4, 8, 10]
    assert len(told(training, 0, 6)) == len(told(training, 1, 6)) == 1


def test_a_rank_that_never_votes_costs_one_checkpoint_after_the_time_limit(
    tmp_path: Path, undisturbed: tuple[Training, dict[str, Any]]
) -> None:
    silent = {"at": "datastates.store.commit:cast_vote", "do": "sleep", "amount": 10**6, "nth": 2, "times": 1}
    training = disturbed(
        tmp_path,
        [{**silent, "rank": 1}],
        undisturbed,
        settings={"commit_timeout": 1, "exit_timeout": 2},
        orderly=False,
    )
    assert checkpoints.whole(Path(training.job.output_dir)) == [2, 6, 8]
    [line] = told(training, 0, 4)
    assert "no vote from rank 1 within 1 s" in line
    assert "gave up waiting" in training.text(1)


def test_a_rank_that_dies_ends_the_waits_of_the_other(tmp_path: Path) -> None:
    training = Training(job(tmp_path, pause=0.02, orderly=False, settings={"commit_timeout": 1}), 2)
    until(lambda: len(losses(training.job)) >= 3, "step 3", seen=training.text)
    psutil.Process(training.pids[1]).kill()
    codes = training.join()
    assert codes[1] == -9
    assert codes[0] == 1, "the error of the broken connection is the training's own"
    assert set(checkpoints.whole(Path(training.job.output_dir))) <= {2, 4, 6, 8}


@pytest.mark.campaign
@pytest.mark.parametrize(("at", "rank"), [("cast_vote", 1), ("publish", 0)])
def test_a_rank_that_nobody_ends_waits_a_minute_for_one_that_died_between_save_and_commit(
    at: str, rank: int, tmp_path: Path
) -> None:
    """As where they are on two nodes. With the limits as they are: exit_timeout is more than a test waits for the end of a rank."""
    dies = {"at": f"datastates.store.commit:{at}", "do": "kill", "nth": 2, "rank": rank}
    training = Training(job(tmp_path, faults=[dies], pause=0.02, orderly=False), 2)
    codes = training.join()
    assert (codes[rank], codes[1 - rank]) == (-9, 1)
    assert checkpoints.whole(Path(training.job.output_dir)) == [2]
    [line] = told(training, 1 - rank, 4)
    assert f"rank {rank}" in line
    assert "said nothing within 60 s after training had failed here" in line


@pytest.mark.parametrize(("at", "rank"), [("cast_vote", 1), ("publish", 0)])
def test_after_a_rank_died_between_save_and_commit_the_next_launch_resumes_from_the_checkpoint_before(
    at: str, rank: int, tmp_path: Path, undisturbed: tuple[Training, dict[str, Any]]
) -> None:
    dies = {"at": f"datastates.store.commit:{at}", "do": "kill", "nth": 2, "rank": rank}
    limits = {"commit_timeout": 2, "exit_timeout": 30}  # rank 1 hears of it after twice commit_timeout
    training = Training(job(tmp_path, faults=[dies], settings=limits), 2)
    codes = training.join()
    assert (codes[rank], codes[1 - rank]) == (-9, 1)
    output_dir = Path(training.job.output_dir)
    assert checkpoints.whole(output_dir) == [2]
    [line] = told(training, 1 - rank, 4)
    assert f"rank {rank}" in line
    assert Training(job(tmp_path), 2).finish()["weights"] == undisturbed[1]["weights"]
    assert checkpoints.whole(output_dir) == [2, 4, 6, 8]


def test_where_every_rename_takes_long_all_checkpoints_are_committed(
    tmp_path: Path, undisturbed: tuple[Training, dict[str, Any]]
) -> None:
    slow = [{"at": f"os:{name}", "do": "sleep", "amount": 0.2} for name in ("rename", "replace")]
    training = disturbed(tmp_path, slow, undisturbed)
    assert checkpoints.whole(Path(training.job.output_dir)) == [2, 4, 6, 8]
    assert told(training, 0, 2) + told(training, 1, 2) == []


def test_where_one_rank_cannot_save_at_all_none_does_and_trainer_saves_by_itself(
    tmp_path: Path, undisturbed: tuple[Training, dict[str, Any]]
) -> None:
    fault = {"at": "datastates.store.journal:Journal.__init__", "do": "EIO", "rank": 1}
    training = disturbed(tmp_path, [fault], undisturbed)
    output_dir = Path(training.job.output_dir)
    assert checkpoints.whole(output_dir) == []
    assert sorted(path.name for path in output_dir.glob("checkpoint-*")) == [
        f"checkpoint-{n}" for n in (2, 4, 6, 8)
    ]
    [line] = [line for line in training.text(0).splitlines() if "is off for this training" in line]
    assert "rank 1" in line


def test_a_checkpoint_of_two_ranks_is_resumed_by_one_process(
    undisturbed: tuple[Training, dict[str, Any]],
) -> None:
    trainer = runs.decorated(Path(undisturbed[0].job.output_dir), max_steps=9, save_strategy="no")
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [9]
