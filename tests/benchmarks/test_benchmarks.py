"""The benchmarks measure what they say: real saves, whose files hold what the state was at the call. How long they took is no test's affair."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import saving, states  # noqa: E402
from benchmarks.case import Target  # noqa: E402
from benchmarks.contestants import ALL, Contestant, TorchSave  # noqa: E402

SMALL = {"state": "alike", "nbytes": 4_000_000, "seconds": 0.02, "steps": 2, "saves": 1}
FIGURES = {"stall", "lost", "durable", "cpu", "first", "memory"}


@pytest.mark.parametrize(
    "contestant",
    [
        pytest.param(name, marks=[] if name in ("ckpt-run", "torch.save") else [pytest.mark.campaign])
        for name in ALL
    ],
)
def test_each_contestant_saves_what_the_state_was_at_the_call(contestant: str, tmp_path: Path) -> None:
    if ALL[contestant].missing():
        pytest.skip(f"{ALL[contestant].needs} is not installed")
    given = json.dumps({"contestant": contestant, "folder": str(tmp_path), **SMALL})
    command = [sys.executable, "-m", "benchmarks.worker", "benchmarks.saving", "visit", given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout).keys() == FIGURES
    assert list(tmp_path.iterdir()) == []


def test_a_contestant_whose_files_hold_something_else_is_found_out(tmp_path: Path) -> None:
    class Late(TorchSave):
        def save(self, step: int) -> None:
            self.step = step

        def wait(self) -> None:
            super().save(self.step)

    training = saving.Training(Late(tmp_path, states.alike(40_000, 10), 0), saving.Work(folder="", **SMALL))
    training.stall(1)
    training.contestant.wait()
    with pytest.raises(AssertionError, match="saved other values"):
        training.check(1)


def test_one_command_measures_compares_and_writes_it_down(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--only", "launch", "--rounds", "1"]
    command += ["--contestant", "python", "--contestant", "ckpt-run", "--output", str(tmp_path / "results")]
    done = subprocess.run([*command, "--folder", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results/results.json").read_text())
    assert found["machine"]["cores"] >= 1
    rounds = found["cases"]["launch"]["rounds"]
    assert {name: len(each) for name, each in rounds.items()} == {"python": 1, "ckpt-run": 1}
    assert "| ckpt-run |" in (tmp_path / "results/results.md").read_text()


def test_a_case_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    command = [sys.executable, "-m", "benchmarks", "--only", "sav"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is no case sav" in done.stderr
    assert "save" in done.stderr


def test_a_target_is_a_ratio_to_the_best_of_the_others_that_took_part() -> None:
    medians = {"ckpt-run": {"stall": 1.0}, "slow": {"stall": 8.0}, "fast": {"stall": 4.0}}
    assert Target("stall", 0.1, ("slow", "fast", "absent")).reached(medians) == 0.25
    assert Target("stall", 0.1, ("absent",)).reached(medians) is None
    assert Target("stall", 2.0).reached(medians) == 1.0


def test_every_contestant_says_what_its_done_means() -> None:
    assert all(issubclass(one, Contestant) and isinstance(one.durable, bool) for one in ALL.values())
