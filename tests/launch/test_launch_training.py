"""A real training below ckpt-run: killed, started again, resumed, and told about by status."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from datastates.llm import heartbeat
from launch_tools import Sandbox, commit_checkpoint, finish, lines
from waiting import until

# A tiny Trainer that saves every 2 of 8 steps, on data loader workers, and is killed once after step 5.
TRAIN = """
import os, signal, sys
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput

def fail():
    raise RuntimeError("the evaluation failed")

TAILS = {
    "fails": fail,
    "exits": lambda: sys.exit(3),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits well": lambda: sys.exit(0),
}

print("last step", os.environ.get("CKPT_LAST_STEP"), flush=True)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
    def forward(self, x, labels):
        logits = self.linear(x)
        return SequenceClassifierOutput(loss=torch.nn.functional.cross_entropy(logits, labels), logits=logits)

class Die(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        with open("steps", "a") as file:
            file.write(f"{state.global_step}\\n")
        if state.global_step == 5 and sys.argv[1] == "die" and not os.path.exists("died"):
            open("died", "w").close()
            while not os.path.exists("out/concurrent_checkpoint/checkpoint-4/.ckpt/manifest.json"):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        while sys.argv[1] == "wait" and state.global_step == 5:
            signal.pause()

rows = [{"x": torch.ones(4) * i, "labels": torch.tensor(i % 2)} for i in range(64)]
args = TrainingArguments(output_dir="out", max_steps=8, save_steps=2, report_to="none", use_cpu=True,
                         per_device_train_batch_size=4, dataloader_num_workers=2, disable_tqdm=True)
Trainer(model=Model(), args=args, train_dataset=rows, callbacks=[Die()]).train()
if sys.argv[1] in TAILS and not os.path.exists("ended"):
    open("ended", "w").close()
    TAILS[sys.argv[1]]()
"""


ALL_STEPS = [str(step) for step in range(1, 9)]


@pytest.fixture
def train(sandbox: Sandbox) -> str:
    return sandbox.script("train.py", TRAIN)


def test_a_killed_training_goes_on_from_its_newest_checkpoint(sandbox: Sandbox, train: str) -> None:
    done = sandbox.run("--max-restarts", "1", sys.executable, train, "die", timeout=240)
    assert done.returncode == 0, done.stderr
    assert "killed by SIGKILL" in done.stderr
    assert "starting it again from step 4 (restart 1 of 1)" in done.stderr
    assert done.stdout.splitlines()[0] == "last step None"
    assert "last step 4" in done.stdout.splitlines()
    assert lines(sandbox.path / "steps") == ["1", "2", "3", "4", "5", "5", "6", "7", "8"]
    status = json.loads(sandbox.run("status", "--json").stdout)
    assert (status["state"], status["newest"]["step"], status["launch"]["restarts"]) == ("finished", 8, 1)
    assert (status["hooked"], status["ranks"]) == (1, 1)
    assert sandbox.run("verify", "out").returncode == 0
    # The same command again finds the output directory without being told.
    again = sandbox.run(sys.executable, train, "die", timeout=240)
    assert again.stdout.splitlines()[0] == "last step 8"


@pytest.mark.parametrize("tail", ["fails", "exits"])
def test_a_program_that_fails_after_its_training_does_not_train_again(
    tail: str, sandbox: Sandbox, train: str
) -> None:
    done = sandbox.run("--max-restarts", "1", sys.executable, train, tail, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "starting it again from step 8 (restart 1 of 1)" in done.stderr
    assert lines(sandbox.path / "steps") == ALL_STEPS


def test_a_program_that_is_killed_after_its_training_does_not_train_again(
    sandbox: Sandbox, train: str
) -> None:
    assert sandbox.run(sys.executable, train, "is killed", timeout=240).returncode == 137
    assert "the program did not end well after it" in sandbox.run("status").stdout
    assert sandbox.run(sys.executable, train, "is killed", timeout=240).returncode == 0
    assert lines(sandbox.path / "steps") == ALL_STEPS
    assert "did not end well" not in sandbox.run("status").stdout


def test_a_run_that_is_over_is_not_gone_on_with_and_its_checkpoints_move_aside_which_is_told(
    sandbox: Sandbox, train: str
) -> None:
    for _ in range(2):
        done = sandbox.run(sys.executable, train, "exits well", timeout=240)
        assert done.returncode == 0, done.stderr
    assert lines(sandbox.path / "steps") == ALL_STEPS * 2
    assert "finished: this one starts from the beginning" in done.stderr
    assert "checkpoint-8 was in the way, and is now" in done.stderr
    assert status(sandbox)["aside"] == 4
    assert "aside       4 checkpoints" in sandbox.run("status").stdout


def test_resume_never_sets_no_last_step(sandbox: Sandbox, train: str) -> None:
    commit_checkpoint(sandbox.path / "out", 100)
    code = f"import sys; sys.argv[1:] = ['']; exec(open({train!r}).read()); print('then', os.environ.get('CKPT_LAST_STEP'))"
    assert "CKPT_LAST_STEP=100" in sandbox.run("env", "--output-dir", "out").stdout
    words = ["--output-dir", "out", sys.executable, "-c", code]
    shown = sandbox.run("--resume", "never", *words, timeout=240)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[0] == "last step None"
    assert shown.stdout.splitlines()[-1] == "then None"


def test_status_tells_why_trainer_saved_by_itself(sandbox: Sandbox, train: str) -> None:
    (sandbox.path / "out").mkdir()
    (sandbox.path / "out/concurrent_checkpoint").write_text("no directory")
    assert sandbox.run(sys.executable, train, "", timeout=240).returncode == 0
    told = sandbox.run("status").stdout
    assert "Trainer saved by itself, since ckpt-run could not: " in told
    assert "sitecustomize" not in told


def test_status_tells_the_step_between_saves_and_when_training_last_moved(
    sandbox: Sandbox, train: str
) -> None:
    process = sandbox.start(sys.executable, train, "wait")  # in step 5 for good; the last save was of step 4
    try:
        until(lambda: status(sandbox)["step"] == 5, "status to tell of step 5", 240)
        at_first = status(sandbox)
        assert (at_first["state"], at_first["max_steps"]) == ("running", 8)
        assert "step        5 of 8" in sandbox.run("status").stdout
        time.sleep(2 * heartbeat.SECONDS)
        assert status(sandbox)["updated"] == at_first["updated"]
    finally:
        os.kill(trainer_below(process.pid), signal.SIGKILL)
        finish(process)
    assert (status(sandbox)["state"], status(sandbox)["step"]) == ("interrupted", 5)


def test_sigterm_reaches_the_trainer_and_not_its_data_loader(sandbox: Sandbox, train: str) -> None:
    process = sandbox.start(sys.executable, train, "wait")
    until(lambda: "5" in lines(sandbox.path / "steps"), "step 5", 240)
    trainer = trainer_below(process.pid)
    workers = below(trainer)
    assert workers
    os.kill(workers[0], 0)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 143
    assert "DataLoader worker" not in err
    assert "SIGTERM: handed to the training process" in err


def status(sandbox: Sandbox) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sandbox.run("status", "--json").stdout)
    return {"step": None, **found}


def below(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def trainer_below(pid: int) -> int:
    return below(pid)[0]
