"""The benchmarks measure what they say: real saves, whose files hold what the state was at the call. How long they took is no test's affair."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import report, saving, states  # noqa: E402
from benchmarks.case import Case, Column, Measured, Target  # noqa: E402
from benchmarks.contestants import ALL, Contestant, TorchSave  # noqa: E402

SMALL = {"state": "alike", "nbytes": 4_000_000, "seconds": 0.02, "steps": 2, "saves": 1}
FIGURES = {"stall", "slowdown", "lost", "copy", "durable", "synced", "cpu", "first", "memory"}


def visited(module: str, contestant: str, folder: Path, **given: Any) -> dict[str, float]:
    """What a worker answers, which leaves nothing in ``folder``."""
    arguments = json.dumps({"contestant": contestant, "folder": str(folder), **given})
    command = [sys.executable, "-m", "benchmarks.worker", module, "visit", arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert list(folder.iterdir()) == []
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


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
    figures = visited("benchmarks.saving", contestant, tmp_path, **SMALL)
    assert figures.keys() == FIGURES
    assert figures["synced"] == ALL[contestant].durable


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_case_for_a_gpu_says_that_there_is_none_and_has_no_figure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--only", "cuda-train", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results.json").read_text())["cases"]["cuda-train"]
    assert found["rounds"] == {}
    assert set(found["left out"].values()) == {"skipped: no GPU"}
    assert "| ckpt-run | skipped: no GPU |  |" in (tmp_path / "results.md").read_text()


def test_a_benchmark_that_is_ended_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--only", "launch", "--folder", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as bench:
        main = psutil.Process(bench.pid)
        assert _comes_true(lambda: list(tmp_path.iterdir()) and main.children())
        workers = main.children(recursive=True)
        bench.terminate()
    assert bench.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    assert psutil.wait_procs(workers, timeout=30)[1] == []


def _comes_true(condition: Callable[[], object]) -> bool:
    for _ in range(6000):
        if condition():
            return True
        time.sleep(0.01)
    return False


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


def test_whoever_has_no_figures_stands_in_the_table_with_the_reason() -> None:
    case = Case(
        "a", "b", "", "", ("one", "two"), (Column("stall", "ms", "what it counts"), Column("synced", "yes"))
    )
    measured = Measured(case, {"one": [{"stall": 0.002, "synced": 1.0}]}, {"two": "failed: OSError"})
    text = report.markdown([measured], report.machine())
    assert "| one | 2.0 | yes |" in text
    assert "| two | failed: OSError |  |" in text
    assert "- stall: what it counts" in text


def test_an_absolute_target_is_shown_in_the_unit_of_its_figure() -> None:
    case = Case("a", "b", "", "", ("ckpt-run",), (Column("stall", "ms"),), (Target("stall", 0.02),))
    measured = Measured(case, {"ckpt-run": [{"stall": 0.0123}]})
    assert report.verdicts(measured) == ["ok stall of ckpt-run: at most 20.0 ms: 12.3"]
