"""Promise 1: a committed checkpoint has exactly the files, and the bytes, that the stock Trainer writes for the same state."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import tiny
import torch
from checkpoints import digests, same, tree, weights, whole
from datastates.formats import self_check
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainerCallback, set_seed

STEPS = (2, 4)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["<unk>", "</s>", "let", "there", "be", "light"])}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", pad_token="</s>", eos_token="</s>"
    )


class Regression(torch.nn.Module):
    """No PreTrainedModel: a plain module with buffers, one of them large."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(128, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.head = torch.nn.Linear(64, 128)
        self.register_buffer("table", torch.arange(4096, dtype=torch.float64))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class AddsFiles(Trainer):
    """As TRL's trainers do: one file before super(), others after it."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        directory = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "before.json").write_text(json.dumps({"step": self.state.global_step}))
        super()._save_checkpoint(model, trial)
        (directory / "extra").mkdir()
        (directory / "extra" / "after.txt").write_text("after")
        torch.save({"queue": torch.arange(3000.0)}, directory / "extra" / "queue.pt")


def sharded() -> LlamaForCausalLM:
    model = tiny.llama()
    model.save_pretrained = functools.partial(model.save_pretrained, max_shard_size="60KB")
    return model


def lora() -> torch.nn.Module:
    set_seed(0)
    return get_peft_model(tiny.llama(), LoraConfig(r=16, target_modules=["q_proj", "v_proj", "gate_proj"]))


def plain() -> Regression:
    set_seed(0)
    return Regression()


def with_scaler(output_dir: Path) -> Trainer:
    """fp16 needs a GPU, but its gradient scaler does not."""
    trainer = tiny.trainer(output_dir, max_steps=4, max_grad_norm=0.0)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    return trainer


MODES: dict[str, Callable[[Path], Trainer]] = {
    "llama with tokenizer": lambda out: tiny.trainer(out, processing_class=tokenizer(), max_steps=4),
    "sharded weights": lambda out: tiny.trainer(out, sharded(), max_steps=4),
    "lora adapter": lambda out: tiny.trainer(out, lora(), max_steps=4),
    "plain module": lambda out: tiny.trainer(out, plain(), max_steps=4),
    "save_only_model": lambda out: tiny.trainer(out, max_steps=4, save_only_model=True),
    "bfloat16": lambda out: tiny.trainer(out, tiny.llama().to(torch.bfloat16), max_steps=4),
    "tied weights": lambda out: tiny.trainer(out, tiny.llama(tie_word_embeddings=True), max_steps=4),
    "subclass adds files": lambda out: tiny.trainer(out, cls=AddsFiles, max_steps=4),
    "gradient scaler": with_scaler,
    "adafactor": lambda out: tiny.trainer(out, max_steps=4, optim="adafactor"),
}

EXPECTED = {
    "llama with tokenizer": {"tokenizer.json", "tokenizer_config.json"},
    "sharded weights": {"model.safetensors.index.json", "model-00001-of-00002.safetensors"},
    "lora adapter": {"adapter_model.safetensors", "adapter_config.json", "README.md"},
    "subclass adds files": {"before.json", "extra/after.txt", "extra/queue.pt"},
    "gradient scaler": {"scaler.pt"},
}
"""What a mode is there for; the rest is compared anyway."""


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of transformers before 5 hold the name of a log directory with the time in it."""
    monkeypatch.setattr("transformers.training_args.default_logdir", lambda: "runs", raising=False)


@contextlib.contextmanager
def working_in(directory: Path) -> Iterator[Path]:
    """Both trainings call their output directory ``out``, since some files hold its path."""
    directory.mkdir()
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield directory / "out"
    finally:
        os.chdir(before)


@pytest.mark.parametrize("mode", MODES)
def test_every_file_is_byte_for_byte_what_the_stock_trainer_writes(mode: str, tmp_path: Path) -> None:
    with working_in(tmp_path / "stock") as stock:
        MODES[mode](Path("out")).train()
    with working_in(tmp_path / "ours") as ours:
        runs.decorate(MODES[mode](Path("out"))).train()
    assert whole(ours) == list(STEPS)
    for step in STEPS:
        expected = digests(stock / f"checkpoint-{step}")
        assert EXPECTED.get(mode, set()) <= expected.keys()
        assert digests(runs.checkpoint(ours, step)) == expected


def test_the_state_differs_from_the_stock_one_only_in_the_path_of_the_best_model(tmp_path: Path) -> None:
    options: dict[str, Any] = dict(
        max_steps=4, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True
    )
    with working_in(tmp_path / "stock") as stock:
        tiny.trainer(Path("out"), **options).train()
    with working_in(tmp_path / "ours") as ours:
        runs.decorate(tiny.trainer(Path("out"), **options)).train()
    for step in STEPS:
        expected, found = tree(stock / f"checkpoint-{step}"), tree(runs.checkpoint(ours, step))
        assert _without_clock(found.pop("trainer_state.json")) == _without_clock(
            expected.pop("trainer_state.json").replace(b"out/", b"out/concurrent_checkpoint/")
        )
        assert found == expected


def _without_clock(state: bytes) -> Any:
    """trainer_state.json without how long evaluations took."""
    parsed = json.loads(state)
    for entry in parsed["log_history"]:
        for name in ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second"):
            entry.pop(name, None)
    return parsed


@pytest.mark.parametrize("umask", [0o027, 0o002])
def test_modes_follow_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        runs.decorate(tiny.trainer(tmp_path, max_steps=2, processing_class=tokenizer())).train()
    finally:
        os.umask(before)
    for path in runs.checkpoint(tmp_path, 2).rglob("*"):
        expected = (0o777 if path.is_dir() else 0o666) & ~umask
        assert path.stat().st_mode & 0o777 == expected, path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a decorated training with checkpoints 2, 4, 6 and 8."""
    output_dir = tmp_path_factory.mktemp("trained")
    runs.decorate(tiny.trainer(output_dir, processing_class=tokenizer())).train()
    assert whole(output_dir) == [2, 4, 6, 8]
    return output_dir


def test_from_pretrained_reads_a_committed_checkpoint(trained: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(runs.checkpoint(trained, 8))
    assert same(tiny.weights(model), weights(runs.checkpoint(trained, 8)))
    words = PreTrainedTokenizerFast.from_pretrained(runs.checkpoint(trained, 8))
    assert words("let there be light")["input_ids"] == [2, 3, 4, 5]


def test_the_stock_trainer_resumes_from_a_committed_checkpoint(trained: Path, tmp_path: Path) -> None:
    resumed = tiny.trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(runs.checkpoint(trained, 4)))
    assert resumed.state.global_step == 8
    assert same(tiny.weights(resumed.model), weights(runs.checkpoint(trained, 8)))


def test_unzip_finds_no_fault_in_torch_files(trained: Path) -> None:
    names = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin")
    for file in [runs.checkpoint(trained, step) / name for step in (2, 8) for name in names]:
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
            assert archive.namelist()


def test_a_root_holds_nothing_but_checkpoints_and_our_own_records(trained: Path) -> None:
    found = {path.name for path in runs.root(trained).iterdir()}
    assert found <= {"checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8", ".run", ".aside"}
    assert {path.name for path in trained.iterdir()} == {"concurrent_checkpoint"}
    assert not list(runs.root(trained).rglob("*.part"))


class SavesByItself(TrainerCallback):
    """A script that saves the model on its own, while a checkpoint is in flight."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.trainer: Any = None
        self.found: list[bool] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (2, 4):
            for name, save in (
                ("trainer", self.trainer.save_model),
                ("model", self.trainer.model.save_pretrained),
            ):
                directory = self.directory / f"{name}-{state.global_step}"
                save(str(directory))
                self.found.append(same(weights(directory), tiny.weights(self.trainer.model)))


def test_save_model_and_save_pretrained_are_complete_when_they_return(tmp_path: Path) -> None:
    saves = SavesByItself(tmp_path / "exported")
    saves.trainer = runs.decorate(tiny.trainer(tmp_path / "out", callbacks=[saves], max_steps=6))
    saves.trainer.train()
    assert saves.found == [True] * 4
    saves.trainer.save_model(str(tmp_path / "exported" / "last"))
    assert same(weights(tmp_path / "exported" / "last"), tiny.weights(saves.trainer.model))
    assert (tmp_path / "exported" / "last" / "training_args.bin").stat().st_size > 0
    assert not list((tmp_path / "exported").rglob(".ckpt"))
    assert whole(tmp_path / "out") == [2, 4, 6]


class FormatsChecked(TrainerCallback):
    """Whether the formats were checked when training began."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.checks = [check.cache_info().misses for check in CHECKS]


CHECKS = (self_check.torch_zip, self_check.safetensors_file)


def test_no_save_call_pays_for_the_check_of_the_formats(tmp_path: Path) -> None:
    for check in CHECKS:
        check.cache_clear()
    seen = FormatsChecked()
    runs.decorated(tmp_path, callbacks=[seen], max_steps=2).train()
    assert seen.checks == [1, 1]
    assert [check.cache_info().misses for check in CHECKS] == [1, 1]
