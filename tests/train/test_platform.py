"""A spot training script as a cloud platform documents it (scripts/spot_train.py) runs as it is, is killed, relaunched, and ends as stock.

What that platform's documentation promises, by the numbers of its lines, and where the test of each is:

==  ==================================================================  ===============================================================
 1  saves run while training does; what a kill loses is saved by itself  test_still.py, test_kill.py, and the kill of the first test here
 2  spot: CKPT_LAST_STEP is set when there is a checkpoint               the first test here
    on demand: ``False``, ``True``, ``from_pretrained(<checkpoint>)``    test_templates.py, and the first test here
 3  Trainer's own save methods beside the concurrent ones                test_trainers_own_save_methods_work_beside_the_concurrent_ones
 4  checkpoints lie under ``<output_dir>/concurrent_checkpoint``         every test here
 5  four lines in a script; spot and on demand differ in the last        test_templates.py
 6  ``PYTHONPATH=$CHECKPOINT_VENDOR`` in front of three command forms    the first test here
 7  the log of a job that gets ready                                     test_the_log_says_once_that_the_library_is_there
 8  nothing to resume from is told twice, at error level                 test_resume_with_nothing_there_says_the_line_in_both_forms...
 9  the versions that it was tested with                                 test_the_tests_run_with_the_platforms_versions_or_newer
10  Llama under FSDP and under DeepSpeed, bf16, wikitext-2               the first test here, a small Llama
==  ==================================================================  ===============================================================
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import checkpoints
import processes
import pytest
import runs
import tiny
from desk import FSDP_CONFIG, NEEDS_DEEPSPEED, NEEDS_FSDP, ZERO_2, Desk, fsdp_environment, succeed
from packaging.version import Version
from processes import SCRIPTS, Job
from transformers import AutoModelForCausalLM
from waiting import until

SCRIPT = str(SCRIPTS / "spot_train.py")
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
BIN = Path(sysconfig.get_path("scripts"))
START = 240.0  # seconds that a launcher may take
STEPS = 40
SAVE = 4


@dataclass(frozen=True)
class Form:
    """A command form of the platform: the words before the script, and what tells the ranks how to shard."""

    words: list[str]
    port: str = ""
    ranks: int = 1
    environment: dict[str, str] = field(default_factory=dict)

    def command(self) -> list[str]:
        port = [f"--{self.port}={processes.free_port()}"] if self.port else []
        return [*self.words, *port, SCRIPT]


FORMS = {
    "python": Form([sys.executable]),
    "deepspeed": Form(
        [str(BIN / "deepspeed"), "--num_gpus=2"],
        "master_port",
        2,
        {"SPOT_DS": "zero2.json", "DS_ACCELERATOR": "cpu"},
    ),
    "accelerate": Form(
        [str(BIN / "accelerate"), "launch", "--config_file", FSDP_CONFIG, "--num_processes", "2"],
        "main_process_port",
        2,
    ),
}
LENGTH = {"SPOT_STEPS": str(STEPS), "SPOT_SAVE": str(SAVE)}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    desk = Desk(tmp_path_factory.mktemp("desk"))
    (desk.path / "zero2.json").write_text(json.dumps(ZERO_2))
    return desk


@pytest.fixture(scope="module")
def undisturbed(desk: Desk) -> Callable[[str], Path]:
    """By command form: the last checkpoint of the script under stock Trainer."""
    known: dict[str, Path] = {}

    def train(name: str) -> Path:
        if name not in known:
            form = FORMS[name]
            told = fsdp_environment() if name == "accelerate" else form.environment
            output_dir = desk.path / f"stock-{name}"
            training = desk.train(
                [SCRIPT], output_dir, form.ranks, **told, **LENGTH, NO_DECORATE="1", SPOT_OUT=str(output_dir)
            )
            succeed(training)
            known[name] = output_dir / f"checkpoint-{STEPS}"
        return known[name]

    return train


def under_ckpt_run(desk: Desk, form: Form, output_dir: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ckpt_run", *form.command()]
    return desk.launch(
        command, Path(f"{output_dir}.log"), **form.environment, **LENGTH, SPOT_OUT=str(output_dir)
    )


def under_pythonpath(desk: Desk, form: Form, output_dir: Path) -> subprocess.Popen[bytes]:
    told = subprocess.run(
        [sys.executable, "-m", "ckpt_run", "env", "--json"], capture_output=True, check=True
    )
    vendor = json.loads(told.stdout)["set"]["CHECKPOINT_VENDOR"]
    return desk.launch(
        form.command(),
        Path(f"{output_dir}.log"),
        [vendor],
        **form.environment,
        **LENGTH,
        SPOT_OUT=str(output_dir),
        HF_DATASETS_OFFLINE="1",
    )


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("python", under_ckpt_run),
        ("python", under_pythonpath),
        pytest.param("deepspeed", under_ckpt_run, marks=NEEDS_DEEPSPEED),
        pytest.param("deepspeed", under_pythonpath, marks=[NEEDS_DEEPSPEED, pytest.mark.campaign]),
        pytest.param("accelerate", under_ckpt_run, marks=NEEDS_FSDP),
        pytest.param("accelerate", under_pythonpath, marks=[NEEDS_FSDP, pytest.mark.campaign]),
    ],
)
def test_the_platforms_script_is_killed_relaunched_and_ends_as_under_stock_trainer(
    name: str,
    start: Callable[[Desk, Form, Path], subprocess.Popen[bytes]],
    desk: Desk,
    undisturbed: Callable[[str], Path],
) -> None:
    form, output_dir = FORMS[name], desk.path / f"{name}-{start.__name__}"
    log = Path(f"{output_dir}.log")
    process = start(desk, form, output_dir)
    try:
        until(
            lambda: runs.committed(output_dir) or process.poll() is not None, "a commit", seen=log.read_text
        )
    finally:
        processes.kill_tree(process)
    assert log.read_text().count("resume False None") == form.ranks
    newest = checkpoints.whole(output_dir)[-1]
    assert newest < STEPS, "it was too fast to be killed"

    process = start(desk, form, output_dir)
    until(lambda: process.poll() is not None, "the end", START, log.read_text)
    assert process.returncode == 0, log.read_text()[-5000:]
    assert log.read_text().count(f"resume True {newest}\n") == form.ranks
    assert checkpoints.whole(output_dir) == list(range(SAVE, STEPS + 1, SAVE))
    assert not list(output_dir.glob("checkpoint-*"))
    last, stock = runs.checkpoint(output_dir, STEPS), undisturbed(name)
    assert checkpoints.digests_anywhere(last) == checkpoints.digests_anywhere(stock)
    if (last / "model.safetensors").exists():
        model = AutoModelForCausalLM.from_pretrained(last, dtype="auto")
        assert checkpoints.same(dict(model.state_dict()), checkpoints.weights(stock) | _tied(model))


def _tied(model: AutoModelForCausalLM) -> dict[str, object]:
    """Names that a file of tied weights leaves out."""
    return {name: tensor for name, tensor in model.state_dict().items() if "lm_head" in name}


def test_trainers_own_save_methods_work_beside_the_concurrent_ones(tmp_path: Path) -> None:
    trainer = runs.decorated(tmp_path / "out", max_steps=4)
    trainer.train()
    trainer.save_model(tmp_path / "by-hand")
    trainer.save_model()
    trainer.save_state()
    assert runs.committed(tmp_path / "out") == [2, 4]
    weights = tiny.weights(trainer.model)
    for place in (tmp_path / "by-hand", tmp_path / "out", runs.checkpoint(tmp_path / "out", 4)):
        assert checkpoints.same(checkpoints.weights(place), weights)
    assert (tmp_path / "out/trainer_state.json").exists()


def test_the_log_says_once_that_the_library_is_there(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "out"), str(tmp_path / "log"), resume=None, arguments={"max_steps": 2})
    training = processes.Training(job, 2)
    training.finish()
    said = [
        line for line in training.text().splitlines() if "Concurrent Checkpoint library is installed" in line
    ]
    assert len(said) == 1
    assert "[INFO]" in said[0]
    assert "library is installed" not in training.text(1)


PLATFORM = {
    "transformers": "5.10.2",
    "numpy": "2.4.6",
    "pybind11": "3.0.4",
    "safetensors": "0.8.0",
    "torch": "2.12.1",
    "datasets": "4.8.4",
    "deepspeed": "0.18.9",
    "accelerate": "1.13.0",
}
"""What touches a checkpoint; no part of this project uses torchvision or cuda-bindings."""


def test_the_tests_run_with_the_platforms_versions_or_newer() -> None:
    lines = CONSTRAINTS.read_text().splitlines()
    pinned = dict(line.partition(";")[0].split("==") for line in lines if "==" in line.partition(";")[0])
    assert [name for name in PLATFORM if Version(pinned[name]) < Version(PLATFORM[name])] == []


def test_resume_with_nothing_there_says_the_line_in_both_forms_under_the_launcher(tmp_path: Path) -> None:
    script = processes.train_after(tmp_path, "import logging; logging.basicConfig()")
    job = Job(str(tmp_path / "out"), str(tmp_path / "log"), decorated=False, arguments={"max_steps": 1})
    command = [sys.executable, "-m", "ckpt_run", sys.executable, str(script), json.dumps({**asdict(job)})]
    process = processes.launch(command, tmp_path / "out.txt")
    assert process.wait(processes.PATIENCE) == 0, (tmp_path / "out.txt").read_text()[-5000:]
    text = (tmp_path / "out.txt").read_text()
    line = "[Concurrent Checkpoint] No Checkpoint found with step: -1"
    forms = [found for found in text.splitlines() if line in found]
    assert len(forms) == 2
    assert forms[0].startswith("[20")
    assert "[ERROR]" in forms[0]
    assert forms[1] == f"ERROR:datastates.llm.decorator:{line}"
    assert os.listdir(tmp_path / "out") == ["concurrent_checkpoint"]
