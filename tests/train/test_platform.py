"""A spot training script as a cloud platform documents it (scripts/spot_train.py) runs as it is, is killed, relaunched, and ends as stock."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import checkpoints
import processes
import pyarrow
import pyarrow.parquet
import pytest
import runs
import tiny
from processes import SCRIPTS, Job
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from waiting import until

STEPS = 40
SAVE = 4
CARD = """---
configs:
- config_name: wikitext-2-raw-v1
  data_files:
  - split: train
    path: train.parquet
  - split: validation
    path: validation.parquet
---
"""
WORDS = ["<unk>", "</s>", *(f"word{number}" for number in range(126))]


@dataclass
class Desk:
    """A working directory with everything that the script asks for: ``wikitext/``, a model with its tokenizer, a data set cache."""

    path: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.environment = {
            "SPOT_MODEL": str(self.path / "model"),
            "SPOT_CACHE": str(self.path / "cache"),
            "SPOT_STEPS": str(STEPS),
            "SPOT_SAVE": str(SAVE),
            "HF_HOME": str(self.path / "hf"),
        }

    def command(self) -> list[str]:
        return [sys.executable, str(SCRIPTS / "spot_train.py")]

    def launch(self, command: list[str], output_dir: Path, **environment: str) -> subprocess.Popen[bytes]:
        return processes.launch(
            command,
            Path(f"{output_dir}.log"),
            cwd=self.path,
            **self.environment,
            SPOT_OUT=str(output_dir),
            **environment,
        )


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    desk = Desk(tmp_path_factory.mktemp("desk"))
    chance = random.Random(1)
    (desk.path / "wikitext").mkdir()
    (desk.path / "wikitext" / "README.md").write_text(CARD)
    for split, rows in (("train", 64), ("validation", 8)):
        texts = [" ".join(chance.choices(WORDS[2:], k=40)) for _ in range(rows)]
        pyarrow.parquet.write_table(
            pyarrow.table({"text": texts}), desk.path / "wikitext" / f"{split}.parquet"
        )
    tiny.llama(max_position_embeddings=128).save_pretrained(desk.path / "model")
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="</s>").save_pretrained(
        desk.path / "model"
    )
    return desk


@pytest.fixture(scope="module")
def stock(desk: Desk) -> Path:
    """The last checkpoint of the script under stock Trainer."""
    output_dir = desk.path / "stock"
    process = desk.launch(desk.command(), output_dir, NO_DECORATE="1")
    assert process.wait(processes.PATIENCE) == 0, Path(f"{output_dir}.log").read_text()[-5000:]
    return output_dir / f"checkpoint-{STEPS}"


def under_ckpt_run(desk: Desk, output_dir: Path) -> subprocess.Popen[bytes]:
    return desk.launch([sys.executable, "-m", "ckpt_run", *desk.command()], output_dir)


def under_pythonpath(desk: Desk, output_dir: Path) -> subprocess.Popen[bytes]:
    told = subprocess.run(
        [sys.executable, "-m", "ckpt_run", "env", "--json"], capture_output=True, check=True
    )
    vendor = json.loads(told.stdout)["set"]["CHECKPOINT_VENDOR"]
    return desk.launch(desk.command(), output_dir, PYTHONPATH=vendor, HF_DATASETS_OFFLINE="1")


@pytest.mark.parametrize("start", [under_ckpt_run, under_pythonpath])
def test_the_platforms_script_is_killed_relaunched_and_ends_as_under_stock_trainer(
    start: Callable[[Desk, Path], subprocess.Popen[bytes]], desk: Desk, stock: Path
) -> None:
    output_dir = desk.path / start.__name__
    log = Path(f"{output_dir}.log")
    process = start(desk, output_dir)
    try:
        until(lambda: runs.committed(output_dir) or process.poll() is not None, "a commit or the end")
    finally:
        processes.kill_tree(process)
    assert "resume False None" in log.read_text()
    newest = checkpoints.whole(output_dir)[-1]
    assert newest < STEPS, "it was too fast to be killed"

    process = start(desk, output_dir)
    assert process.wait(processes.PATIENCE) == 0, log.read_text()[-5000:]
    assert f"resume True {newest}\n" in log.read_text()
    last = runs.checkpoint(output_dir, STEPS)
    assert checkpoints.whole(output_dir) == list(range(SAVE, STEPS + 1, SAVE))
    assert (last / "model.safetensors").read_bytes() == (stock / "model.safetensors").read_bytes()
    assert checkpoints.same(checkpoints.optimizer(last), checkpoints.optimizer(stock))
    assert checkpoints.tree(last).keys() == checkpoints.tree(stock).keys()
    model = AutoModelForCausalLM.from_pretrained(last)
    assert checkpoints.same(dict(model.state_dict()), checkpoints.weights(stock) | _tied(model))


def _tied(model: AutoModelForCausalLM) -> dict[str, object]:
    """Names that a file of tied weights leaves out."""
    return {name: tensor for name, tensor in model.state_dict().items() if "lm_head" in name}


def test_resume_with_nothing_there_says_the_line_in_both_forms_under_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import logging, runpy, sys\n"
        "logging.basicConfig()\n"
        f"sys.argv[0] = {str(SCRIPTS / 'train.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
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
