"""Killed and resumed equals uninterrupted: every loss and the final weights, bit for bit."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import processes
import pytest
import runs
from processes import SCRIPTS, Job, Training, losses
from waiting import until

STEPS = 16
ROWS = 22
"""Of data: an epoch is 6 steps of one rank, the last one smaller, so that kills fall into later epochs and on their edges."""
PLAIN: dict[str, Any] = {"max_steps": STEPS, "save_steps": 2, "save_total_limit": 3}
ACCUMULATING = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
WORKERS = {"dataloader_num_workers": 1}

CASES = {
    "plain": {},
    "accumulation and workers": {**ACCUMULATING, **WORKERS},
}


def job(directory: Path, name: str, **changes: Any) -> Job:
    return Job(output_dir=str(directory / name), log=str(directory / f"{name}-log"), rows=ROWS, **changes)


def uninterrupted(
    directory: Path, ranks: int, arguments: dict[str, Any], kind: str = "llama"
) -> tuple[dict[int, float], str]:
    """The losses by step and the final weights of a stock Trainer that nobody disturbs."""
    arguments = {**arguments, "save_strategy": "no"}
    quiet = job(directory, "stock", decorated=False, resume=None, arguments=arguments, kind=kind)
    weights = Training(quiet, ranks).finish()["weights"]
    return dict(losses(quiet)), weights


def killed_and_resumed(
    directory: Path,
    ranks: int,
    arguments: dict[str, Any],
    kills: int,
    chance: random.Random,
    kind: str = "llama",
) -> tuple[Job, str]:
    """Train, with SIGKILL to all ranks at ``kills`` random moments; the job, and the final weights."""
    ours = job(directory, "ours", pause=0.01, arguments=arguments, kind=kind)
    for _ in range(kills):
        training = Training(ours, ranks)
        already = len(losses(ours))
        further = chance.randrange(1, STEPS // (kills + 1) + 2)
        until(lambda a=already, f=further: len(losses(ours)) >= a + f, f"step {further}", seen=training.text)
        until(lambda: runs.committed(Path(ours.output_dir)), "a commit", seen=training.text)
        time.sleep(chance.uniform(0, 0.06))
        training.kill()
    return ours, Training(replace(ours, pause=0.0), ranks).finish()["weights"]


def compare(ours: Job, weights: str, expected: tuple[dict[int, float], str]) -> None:
    done = losses(ours)
    assert {step: loss for step, loss in done if loss != expected[0][step]} == {}
    assert {step for step, _ in done} == set(expected[0])
    assert [step for step, _ in done].count(1) == 1, "it started over"
    assert weights == expected[1]


def exactly_resumed(
    directory: Path, ranks: int, changes: dict[str, Any], seed: int, kills: int = 2, kind: str = "llama"
) -> None:
    print(f"seed {seed}")
    arguments = {**PLAIN, **changes}
    expected = uninterrupted(directory, ranks, arguments, kind)
    ours, weights = killed_and_resumed(directory, ranks, arguments, kills, random.Random(seed), kind)
    compare(ours, weights, expected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_and_resumed_equals_uninterrupted(ranks: int, case: str, tmp_path: Path) -> None:
    exactly_resumed(tmp_path, ranks, CASES[case], random.randrange(10**6))


def test_the_first_loss_after_a_resume_depends_on_the_restored_random_numbers(tmp_path: Path) -> None:
    """Or else the comparisons above would see nothing of the RNG state."""
    ours = job(tmp_path, "ours", arguments={**PLAIN, "max_steps": 4})
    Training(ours).finish()
    newest = runs.checkpoint(Path(ours.output_dir), 4)
    for name in (newest / ".ckpt").iterdir():
        name.unlink()
    (newest / "rng_state.pth").unlink()
    longer = {**PLAIN, "max_steps": 5, "lr_scheduler_type": "constant"}
    with_rng = runs.checkpoint(Path(ours.output_dir), 2)
    seen = []
    for number, path in enumerate((newest, newest, with_rng)):
        other = job(tmp_path, f"other{number}", arguments=longer, resume=str(path))
        Training(other).finish()
        seen.append(dict(losses(other)))
    assert seen[0][5] == seen[1][5]
    assert seen[0][5] != seen[2][5]


def torchrun(ours: Job) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    return [*command, str(SCRIPTS / "train.py"), json.dumps(asdict(ours))]


def accelerate_launch(ours: Job) -> list[str]:
    options = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    port = str(processes.free_port())
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        *options.split(),
        "--main_process_port",
        port,
    ]
    return [*command, str(SCRIPTS / "train.py"), json.dumps(asdict(ours))]


def killed_then_resumed_by_launchers(
    directory: Path, first: Any, second: Any, changes: dict[str, Any], seed: int
) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    arguments = {**PLAIN, **changes}
    expected = uninterrupted(directory, 2, arguments)
    ours = job(directory, "ours", pause=0.01, arguments=arguments)
    output = directory / "launcher.out"
    process = processes.launch(first(ours), output)
    target = chance.randrange(3, STEPS - 2)
    try:
        until(lambda: len(losses(ours)) >= target, f"step {target} under the launcher")
        until(lambda: runs.committed(Path(ours.output_dir)), "a commit under the launcher")
    finally:
        processes.kill_tree(process)
    process = processes.launch(second(ours), output)
    assert process.wait(processes.PATIENCE) == 0, output.read_text()[-5000:]
    last = [line for line in processes.lines(ours) if "weights" in line][-1]
    compare(ours, last["weights"], expected)


def test_two_ranks_killed_under_torchrun_resume_under_accelerate_launch(tmp_path: Path) -> None:
    killed_then_resumed_by_launchers(tmp_path, torchrun, accelerate_launch, {}, random.randrange(10**6))


# -- campaign -----------------------------------------------------------------------------------------------------------

MATRIX: Sequence[dict[str, Any]] = (
    {},
    ACCUMULATING,
    WORKERS,
    {**ACCUMULATING, **WORKERS},
    {"save_strategy": "epoch", "save_total_limit": None},
    {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, "load_best_model_at_end": False},
    {"bf16": True},
    {"gradient_checkpointing": True, "optim": "adafactor"},
    {"lr_scheduler_type": "cosine", "warmup_steps": 5, "max_grad_norm": 0.1},
    {"save_steps": 1, "save_total_limit": 1},
)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("number", range(len(MATRIX)))
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_combination_killed_five_times_equals_uninterrupted(
    ranks: int, number: int, seed: int, tmp_path: Path
) -> None:
    exactly_resumed(tmp_path, ranks, MATRIX[number], seed * 1000 + number, kills=5)


@pytest.mark.campaign
@pytest.mark.parametrize("first", [torchrun, accelerate_launch])
@pytest.mark.parametrize("second", [torchrun, accelerate_launch])
@pytest.mark.parametrize("case", CASES)
def test_every_pair_of_launchers_resumes_exactly(first: Any, second: Any, case: str, tmp_path: Path) -> None:
    killed_then_resumed_by_launchers(tmp_path, first, second, CASES[case], random.randrange(10**6))
