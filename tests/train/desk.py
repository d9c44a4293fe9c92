"""A working directory with everything that a script asks for: text, a model with its tokenizer, a data set cache."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

import processes
import pyarrow
import pyarrow.parquet
import pytest
import sharding
import tiny
import transformers
from as_is import Script
from processes import SCRIPTS, Training
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
TEMPLATES = Path(__file__).parents[2] / "templates"
FSDP_CONFIG = str(TEMPLATES / "fsdp_config.yaml")
ZERO_2 = {**sharding.ZERO, "zero_optimization": {"stage": 2}}
NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
NEEDS_FSDP = pytest.mark.skipif(
    transformers.__version__ < "5",
    reason="before transformers 5 a Trainer refuses FSDP where there is no accelerator",
)
WORDS = ["<unk>", "</s>", *(f"word{number}" for number in range(126))]


class Desk:
    """``path`` holds ``wikitext/``, ``texts/``, ``model/`` and whatever the scripts write; ``environment`` keeps caches there too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment = {
            "SPOT_MODEL": str(path / "model"),
            "SPOT_CACHE": str(path / "cache"),
            "HF_HOME": str(path / "hf"),
            "HF_DATASETS_CACHE": str(path / "hf/datasets"),
        }
        _wikitext(path / "wikitext")
        _texts(path / "texts")
        _model(path / "model")

    def launch(
        self, command: Sequence[str], log: Path, pythonpath: Sequence[str] = (), **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start a real command here; its ranks are CPU ranks. ``pythonpath`` goes in front."""
        path = os.pathsep.join([*pythonpath, str(SCRIPTS / "cpu_ranks")])
        return processes.launch(
            command, log, cwd=self.path, **{**self.environment, **environment, "PYTHONPATH": path}
        )

    def train(self, words: Sequence[str], log: Path, ranks: int = 1, **environment: str) -> Training:
        """Start the ranks of a script from the fork server."""
        environment = {**self.environment, **environment}
        return Training(Script(list(words), str(log), str(self.path), environment), ranks)


def _splits() -> dict[str, list[str]]:
    chance = random.Random(1)
    return {
        split: [" ".join(chance.choices(WORDS[2:], k=40)) for _ in range(rows)]
        for split, rows in (("train", 64), ("validation", 8))
    }


def _wikitext(folder: Path) -> None:
    """As the hub would give it."""
    folder.mkdir()
    (folder / "README.md").write_text(CARD)
    for split, rows in _splits().items():
        pyarrow.parquet.write_table(pyarrow.table({"text": rows}), folder / f"{split}.parquet")


def _texts(folder: Path) -> None:
    """As somebody writes it."""
    folder.mkdir()
    for split, rows in _splits().items():
        (folder / f"{split}.txt").write_text("\n".join(rows))


def _model(folder: Path) -> None:
    tiny.llama(max_position_embeddings=128).save_pretrained(folder)
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="</s>")
    tokenizer.save_pretrained(folder)


def fsdp_environment() -> dict[str, str]:
    """What ``accelerate launch`` tells two ranks that it starts with our template."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--config_file", FSDP_CONFIG, "--num_processes", "2", "script.py"]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    told = prepare_multi_gpu_env(args)
    return {name: value for name, value in told.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


def succeed(training: Training) -> str:
    """Wait for the end, which must be a good one; what rank 0 has printed."""
    codes = training.join()
    assert codes == [0] * training.ranks, f"exit codes {codes}\n{training.text()[-5000:]}"
    return training.text()
