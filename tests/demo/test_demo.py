"""``ckpt-run demo``: what it shows is true, and what is not right makes it fail."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from ckpt_run import demo as demo_module
from ckpt_run import environment
from ckpt_run.arguments import parse
from ckpt_run.demo_process import Training
from ckpt_run.demo_report import Comparison, Kill, Measured, verdict, weights_digest
from safetensors.numpy import save_file
from waiting import until


def demo(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt_run", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)


@pytest.fixture(scope="module")
def short_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("demo") / "kept"
    result = demo("--keep", str(folder), "--seed", "1", "--steps", "24", "--save-steps", "4")
    assert result.returncode == 0, result.stdout + result.stderr
    return folder, result.stdout


def test_killed_twice_and_relaunched_it_ends_with_identical_weights(short_demo: tuple[Path, str]) -> None:
    folder, output = short_demo
    assert "The final weights are identical, bit for bit." in output
    weights = [folder / name / "model.safetensors" for name in ("stock", "ckpt-run")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_the_table_tells_steps_lost_and_the_stall_of_both(short_demo: tuple[Path, str]) -> None:
    _, output = short_demo
    assert len(re.findall(r"kill \d: steps lost\W+\d+", output)) == 2
    stock, ours = re.search(r"stall per checkpoint, median\W+([\d.]+) ms\W+([\d.]+) ms", output).groups()
    assert float(stock) > 0
    assert float(ours) > 0


def test_the_relaunch_trains_the_step_after_the_newest_checkpoint(short_demo: tuple[Path, str]) -> None:
    _, output = short_demo
    carried_on = [int(step) for step in re.findall(r"carried on from step (\d+)", output)]
    assert len(carried_on) == 2
    assert all(step % 4 == 0 for step in carried_on)


def test_every_launch_under_ckpt_run_left_its_log_and_its_checkpoints(short_demo: tuple[Path, str]) -> None:
    folder, _ = short_demo
    assert {path.name for path in folder.glob("*.log")} == {
        "stock.log",
        *(f"ckpt-run-{n}.log" for n in (1, 2, 3)),
    }
    newest = folder / "ckpt-run" / "concurrent_checkpoint" / "checkpoint-24"
    assert json.loads((newest / "trainer_state.json").read_text())["global_step"] == 24


def test_the_moments_of_the_kills_repeat_with_the_seed_and_lie_apart() -> None:
    def moments(seed: int) -> list[tuple[int, float]]:
        return demo_module.Demo(Path(), 120, 12, seed, progress=None)._moments()

    assert moments(5) == moments(5)
    assert len({tuple(moments(seed)) for seed in range(50)}) > 40
    for seed in range(200):
        (first, _), (second, _) = moments(seed)
        assert 12 <= first < second < 119


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    result = demo("--keep", str(tmp_path))
    assert result.returncode == 1
    assert "not empty" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_too_few_steps_for_two_kills_are_refused() -> None:
    result = demo("--steps", "10", "--save-steps", "5")
    assert result.returncode == 1
    assert "leaves no room for two kills" in result.stderr


def test_help_shows_an_example() -> None:
    result = demo("--help")
    assert result.returncode == 0
    assert "Example: ckpt-run demo" in " ".join(result.stdout.split())


def test_weights_that_differ_in_one_bit_are_reported_as_different(tmp_path: Path) -> None:
    weights = numpy.zeros((4, 4), dtype=numpy.float32)
    save_file({"a": weights}, tmp_path / "one")
    save_file({"a": weights}, tmp_path / "same", metadata={"format": "pt"})
    weights.view(numpy.uint32)[2, 3] = 1
    save_file({"a": weights}, tmp_path / "other")
    one, same, other = (weights_digest(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same
    assert one != other
    comparison = Comparison(Measured([1.0], 0.0, 1, one), Measured([1.0], 0.0, 1, other), [])
    assert not comparison.identical
    assert "DIFFER" in verdict(comparison)


def test_steps_lost_count_from_the_start_when_there_was_no_checkpoint() -> None:
    assert Kill(reached=7, resumed=0).lost == 7
    assert Kill(reached=7, resumed=4).lost == 3


def test_a_kill_leaves_no_process_of_the_tree(tmp_path: Path) -> None:
    grandchild = "import time; print('up', flush=True); time.sleep(600)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}], start_new_session=True)"
    mark = f"demo-test-{random.random()}"
    training = Training([sys.executable, "-c", child], tmp_path / "log", {**os.environ, "MARK": mark})
    until(lambda: training.poll() is not None or "up" in training.tail(1), "the grandchild")
    training.kill()
    assert _marked(mark) == []


def _marked(mark: str) -> list[int]:
    """The processes that have `mark` in their environment."""
    environs = Path("/proc").glob("[0-9]*/environ")
    return [int(path.parent.name) for path in environs if mark.encode() in _environ(path)]


def _environ(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended, or is not ours to look at
        return b""


def test_the_stock_training_is_stock_even_below_ckpt_run() -> None:
    outside = {"HOME": "/home/somebody", "PYTHONPATH": "/a:/b"}
    below = environment.build(parse([]), outside, "a-run")
    environment.set_last_step(below, 20)
    assert below["PYTHONPATH"] != outside["PYTHONPATH"]
    offline = {name: "1" for name in environment.OFFLINE}
    assert demo_module.without_ckpt_run(below) == outside | offline


def test_a_training_that_fails_ends_the_demo_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "tokenizers.py").write_text("raise SystemExit('broken on purpose')")
    result = demo(env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert result.returncode == 1
    assert "ckpt-run: demo: the training ended at step 0, with exit code 1" in result.stderr
    assert "broken on purpose" in result.stderr


def test_an_interrupted_demo_leaves_no_training_behind(tmp_path: Path) -> None:
    mark = f"demo-test-{random.random()}"
    command = [sys.executable, "-m", "ckpt_run", "demo", "--keep", str(tmp_path / "kept")]
    environ = {**os.environ, "MARK": mark}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: len(_marked(mark)) >= 2, "a training of the demo")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    assert _marked(mark) == []


def test_the_script_that_the_demo_trains_is_where_the_package_says() -> None:
    assert (demo_module.templates() / demo_module.SCRIPT).is_file()
