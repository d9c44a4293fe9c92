"""Ranks whose Trainers each believe to be alone: told once, and their files are written once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import runs
from processes import Job, Training, lines, losses
from sharding import misled

STEPS = {"max_steps": 6, "save_steps": 2, "average_tokens_across_devices": False}
"""Ranks that believe to be alone cannot average: transformers 4.57 would fail at it."""


def job(directory: Path, **changes: Any) -> Job:
    arguments = {**STEPS, **changes.pop("arguments", {})}
    return Job(
        str(directory / "out"), str(directory / "log"), **{"orderly": True, "arguments": arguments, **changes}
    )


def told(training: Training) -> list[list[str]]:
    return [
        [line for line in training.text(rank).splitlines() if "believes to be alone" in line]
        for rank in (0, 1)
    ]


def test_under_deepspeed_rank_0_saves_and_the_other_adds_its_shard(tmp_path: Path) -> None:
    training = Training(job(tmp_path, arguments=misled(2)), 2)
    training.finish()
    [line], none = told(training)
    assert "2 ranks are running" in line
    assert "Only rank 0 saves, and each rank its part of what DeepSpeed has spread over them" in line
    assert none == []
    assert checkpoints.whole(tmp_path / "out") == [2, 4, 6]
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    votes = [runs.vote(tmp_path / "out", 6, rank) for rank in (0, 1)]
    assert votes[1] == {"global_step6/zero_pp_rank_1_mp_rank_00_optim_states.pt"}
    assert {
        "model.safetensors",
        "rng_state.pth",
        "global_step6/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    } <= votes[0]
    again = Training(job(tmp_path, arguments={**misled(2), "max_steps": 8}), 2)
    again.finish()
    for rank in (0, 1):
        assert [step for step, _ in losses(again.job, rank)] == list(range(1, 9))
    assert lines(again.job, 0)[-1]["weights"] == lines(again.job, 1)[-1]["weights"]


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this process the given one of two ranks that a launcher has started and that cannot speak to each other."""

    def become(rank: int) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", str(rank))

    return become


def test_ranks_that_cannot_speak_train_alike_and_only_rank_0_saves(
    apart: Callable[[int], None],
    relaunch: Callable[[], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transformers.training_args.TrainingArguments.world_size", 1)
    monkeypatch.setattr("transformers.training_args.TrainingArguments.process_index", 0)
    first, other = runs.decorated(tmp_path, max_steps=4), runs.decorated(tmp_path, max_steps=8)
    apart(0)
    first.train()
    assert "Only rank 0 saves" in caplog.text
    assert runs.committed(tmp_path) == [2, 4]
    before = sorted(os.walk(tmp_path))
    caplog.clear()
    relaunch()
    apart(1)
    other.train(resume_from_checkpoint=True)
    assert runs.steps_done(other) == [5, 6, 7, 8]
    assert sorted(os.walk(tmp_path)) == before
    assert "Only rank 0" not in caplog.text
