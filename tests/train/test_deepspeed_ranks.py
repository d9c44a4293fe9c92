"""DeepSpeed's checkpoints and the number of ranks: who may load them, how they are converted, what stock tools make of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import runs
import torch
from processes import Job, Training, lines, losses
from sharding import zero

GATHERED = {"stage3_gather_16bit_weights_on_model_save": True}
STAGES = {2: zero(2), 3: zero(3, **GATHERED)}
STEPS = {"max_steps": 6, "save_steps": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Job]:
    """A training on two ranks by stage, with checkpoints 2, 4 and 6."""
    known: dict[int, Job] = {}

    def train(stage: int) -> Job:
        if stage not in known:
            directory = tmp_path_factory.mktemp("trained")
            job = Job(
                str(directory / "out"),
                str(directory / "log"),
                resume=None,
                arguments={**STEPS, **STAGES[stage]},
            )
            Training(job, 2).finish()
            assert checkpoints.whole(directory / "out") == [2, 4, 6]
            known[stage] = job
        return known[stage]

    return train


def checkpoint(job: Job) -> Path:
    return runs.checkpoint(Path(job.output_dir), 4)


def resumed(
    directory: Path, path: Path, ranks: int, arguments: dict[str, Any], decorated: bool = True
) -> Job:
    directory.mkdir(exist_ok=True)
    job = Job(
        str(directory / "out"),
        str(directory / "log"),
        decorated,
        str(path),
        arguments={**STEPS, "save_strategy": "no", **arguments},
    )
    Training(job, ranks).finish()
    return job


@pytest.mark.parametrize("stage", STAGES)
def test_the_stock_trainer_resumes_from_a_committed_checkpoint(
    stage: int, trained: Callable[[int], Job], tmp_path: Path
) -> None:
    before = trained(stage)
    after = resumed(tmp_path, checkpoint(before), 2, STAGES[stage], decorated=False)
    assert losses(after) == losses(before)[4:]
    ends = [[lines(job, rank)[-1]["weights"] for rank in (0, 1)] for job in (before, after)]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("stage", STAGES)
def test_zero_to_fp32_finds_the_weights_that_the_trainer_saved(
    stage: int, trained: Callable[[int], Job]
) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint(trained(stage))))
    saved = checkpoints.weights(checkpoint(trained(stage)))
    assert saved
    assert [name for name in saved if not torch.equal(found[name], saved[name])] == []


@pytest.mark.parametrize("stage", STAGES)
def test_another_number_of_ranks_is_told_what_the_checkpoint_needs_and_how_to_convert_it(
    stage: int, trained: Callable[[int], Job], tmp_path: Path
) -> None:
    path = checkpoint(trained(stage))
    job = Job(
        str(tmp_path / "out"), str(tmp_path / "log"), resume=str(path), arguments={**STEPS, **STAGES[stage]}
    )
    for ranks in (1, 3):
        training = Training(job, ranks)
        assert training.join() == [1] * ranks
        for rank in range(ranks):
            last = training.text(rank).strip().splitlines()[-1]
            assert (
                "was saved by 2 ranks, and " + ("1 rank" if ranks == 1 else "3 ranks") + " would load it"
                in last
            )
            assert last.endswith(f"ckpt-run convert {path}")


@pytest.mark.parametrize("stage", STAGES)
def test_a_converted_checkpoint_is_resumed_by_as_many_ranks_and_by_fewer(
    stage: int, trained: Callable[[int], Job], tmp_path: Path
) -> None:
    before = trained(stage)
    path, target = checkpoint(before), tmp_path / "converted"
    untouched = checkpoints.digests(path)
    done = _convert(str(path), "--output", str(target))
    assert done.returncode == 0, done.stderr
    assert '"checkpoint": {"load_universal": true}' in done.stdout
    assert str(target) in done.stdout
    assert checkpoints.digests(path) == untouched
    universal = {"checkpoint": {"load_universal": True}}
    settings = {**STAGES[stage], "deepspeed": {**STAGES[stage]["deepspeed"], **universal}}
    same = resumed(tmp_path / "same", target, 2, settings)
    assert losses(same) == losses(before)[4:]
    fewer = resumed(tmp_path / "fewer", target, 1, {**settings, "per_device_train_batch_size": 8})
    assert [step for step, _ in losses(fewer)] == [5, 6]
    # The same rows, but one rank draws other dropout than two.
    assert [
        abs(one - other) < 0.05 for (_, one), (_, other) in zip(losses(fewer), losses(same), strict=True)
    ] == [True] * 2


def test_what_cannot_be_converted_is_refused_and_nothing_is_left_behind(
    trained: Callable[[int], Job], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "there").mkdir()
    done = _convert(str(tmp_path / "empty"))
    assert done.returncode == 1
    assert "is no checkpoint of DeepSpeed" in done.stderr
    done = _convert(str(checkpoint(trained(2))), "--output", str(tmp_path / "there"))
    assert done.returncode == 1
    assert "is there already" in done.stderr
    broken = tmp_path / "checkpoint-4"
    (broken / "global_step4").mkdir(parents=True)
    (broken / "latest").write_text("global_step4")
    done = _convert(str(broken))
    assert done.returncode == 1
    assert "could not convert" in done.stderr
    assert {entry.name for entry in tmp_path.iterdir()} == {"empty", "there", "checkpoint-4"}


def _convert(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ckpt_run", "convert", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
