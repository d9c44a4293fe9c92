"""What a training is known again by: the same in every launch of it, whatever the model is wrapped in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import tiny
import torch
from datastates.llm import fingerprint
from datastates.store.runrecord import Fingerprint
from processes import PATIENCE, SCRIPTS, free_port
from transformers import Trainer

Facts = dict[str, str]


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    """The facts of the model by what it is wrapped in, from a process whose rank has a process group."""
    script = [
        sys.executable,
        str(SCRIPTS / "fingerprints.py"),
        str(tmp_path_factory.mktemp("out")),
        str(free_port()),
    ]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr[-3000:]
    facts: dict[str, Facts] = json.loads(ended.stdout.splitlines()[-1])
    return facts


@pytest.mark.parametrize(
    "wrapper",
    [
        "torch.compile",
        "torch.compile of layers",
        "DataParallel",
        "DistributedDataParallel",
        "ZeRO-3",
        "fully_shard",
        "frozen",
        "half",
    ],
)
def test_a_model_is_the_same_whatever_wraps_shards_freezes_or_casts_it(
    wrapper: str, wrapped: dict[str, Facts]
) -> None:
    assert wrapped[wrapper] == wrapped["nothing"]
    assert wrapped[wrapper]["class"] == "LlamaForCausalLM"


def test_an_adapted_model_is_another_and_the_same_compiled_or_not(wrapped: dict[str, Facts]) -> None:
    assert wrapped["PEFT"] == wrapped["PEFT, compiled"] == wrapped["PEFT of a compiled one"]
    assert wrapped["PEFT"]["class"] == "PeftModel"
    assert wrapped["PEFT"]["names"] != wrapped["nothing"]["names"]


@pytest.mark.parametrize("wrapper", ["FSDP", "FSDP, flat", "lazy"])
def test_a_model_whose_parameters_cannot_be_told_is_unknown(wrapper: str, wrapped: dict[str, Facts]) -> None:
    assert wrapped[wrapper] == {}


def of(output_dir: Path, **how: Any) -> Fingerprint:
    found = fingerprint.of(tiny.trainer(output_dir, **how))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("change", "fact", "text"),
    [
        ({"max_steps": 9}, "max_steps", "9"),
        ({"max_steps": -1, "num_train_epochs": 2}, "epochs", "2"),
        ({"learning_rate": 0.25}, "learning_rate", "0.25"),
        ({"lr_scheduler_type": "cosine"}, "scheduler", "cosine"),
        ({"optim": "adamw_torch"}, "optimizer", "adamw_torch"),
        ({"seed": 7}, "seed", "7"),
        ({"data": tiny.Tokens(48)}, "rows", "48"),
        ({"model": tiny.llama().bfloat16()}, "precision", "bfloat16"),
        ({"cls": type("Distilling", (Trainer,), {})}, "trainer", "Distilling"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_script_trains_with_is_in_the_fingerprint(
    change: dict[str, Any], fact: str, text: str, tmp_path: Path
) -> None:
    before, after = of(tmp_path), of(tmp_path, **change)
    assert after.model == before.model
    assert after.training[fact] == text
    assert before.training.get(fact) != text
    assert {name for name, known in before.training.items() if after.training.get(name, known) != known} <= {
        fact
    }


def test_what_each_launch_is_free_to_choose_is_not_in_the_fingerprint(tmp_path: Path) -> None:
    chosen = of(
        tmp_path / "elsewhere",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        save_steps=3,
        logging_steps=9,
        save_total_limit=2,
        run_name="again",
        dataloader_num_workers=1,
        eval_strategy="steps",
        torch_compile=True,
        bf16=True,
    )
    assert chosen == of(tmp_path)


def test_the_content_of_a_hugging_face_data_set_counts(tmp_path: Path) -> None:
    rows = [datasets.Dataset.from_dict({"input_ids": [[number] * 4] * 8}) for number in (1, 2, 1)]
    first, second, same = (of(tmp_path, data=data).training for data in rows)
    assert first == same
    assert first["rows"] == second["rows"] == "8"
    assert first["data"] != second["data"]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(tiny.Tokens())


def test_a_stream_of_data_has_no_length_to_be_known_by(tmp_path: Path) -> None:
    assert "rows" not in of(tmp_path, data=Stream()).training


def test_a_model_that_the_call_will_build_is_unknown_and_so_is_all_of_a_trial(tmp_path: Path) -> None:
    trainer = Trainer(
        model_init=lambda: tiny.llama(),
        args=tiny.arguments(tmp_path, max_steps=4),
        train_dataset=tiny.Tokens(),
    )
    found = fingerprint.of(trainer)
    assert found is not None
    assert found.model == {}
    assert found.training["max_steps"] == "4"
    assert fingerprint.of(trainer, trial={"learning_rate": 1e-3}) is None
