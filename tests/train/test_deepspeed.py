"""DeepSpeed under the Trainer, on two ranks: what is saved, how late it is copied, and what reads it."""

from __future__ import annotations

import inspect
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import runs
import torch
import transformers
from processes import Job, Training, lines, losses
from sharding import zero
from test_exact import exactly_resumed

BF16 = {"bf16": True}
SCALED = {"fp16": {"enabled": "auto", "initial_scale_power": 22, "hysteresis": 1}}
"""The loss scale is too high for the first three steps, which are skipped: the third stands behind a save."""
GATHERED = {"stage3_gather_16bit_weights_on_model_save": True}
OFFLOADED = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
BLOCKS = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 4}},
}
OWN = {**zero(2, BLOCKS), "learning_rate": 1e-3, "warmup_steps": 4}


@dataclass(frozen=True)
class Mode:
    """A way to train, and files of rank 0 and 1 by which it is known."""

    arguments: dict[str, Any]
    files: set[str] = field(default_factory=set)
    kind: str = "llama"
    model: dict[str, Any] = field(default_factory=dict)


def shards(prefix: str = "zero") -> set[str]:
    return {f"global_step4/{prefix}_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)}


MODES = {
    "stage 0 in bf16": Mode({**zero(0), **BF16}, {"global_step4/mp_rank_00_model_states.pt"}),
    "stage 1": Mode(zero(1), shards()),
    "stage 2": Mode(zero(2), shards()),
    "stage 2 in fp16": Mode({**zero(2, SCALED), "fp16": True}, shards()),
    "stage 2 in bf16": Mode({**zero(2), **BF16, "gradient_accumulation_steps": 4}, shards("bf16_zero")),
    "stage 2 offloaded": Mode(zero(2, **OFFLOADED), shards()),
    "stage 2 with an adapter": Mode(zero(2), shards() | {"adapter_model.safetensors"}, "lora"),
    "stage 2 with own optimizer and scheduler": Mode(OWN, shards()),
    "stage 3": Mode(zero(3), shards()),
    "stage 3 in fp16": Mode({**zero(3, SCALED), "fp16": True}, shards()),
    "stage 3 gathered in bf16": Mode(
        {**zero(3, **GATHERED), **BF16}, shards("bf16_zero") | {"model.safetensors"}
    ),
    "stage 3 offloaded": Mode(zero(3, **OFFLOADED, offload_param={"device": "cpu"}), shards()),
    "stage 3 with an adapter": Mode(zero(3, **GATHERED), shards() | {"adapter_model.safetensors"}, "lora"),
    "stage 2 overwritten": Mode(zero(2), shards(), "overwriting"),
    "stage 3 overwritten": Mode(zero(3), shards(), "overwriting"),
    "experts": Mode(OWN, {"global_step4/layer_0_expert_1_mp_rank_00_model_states.pt"}, "experts"),
}
SELDOM = {
    "stage 1",
    "stage 2",
    "stage 2 offloaded",
    "stage 2 with own optimizer and scheduler",
    "stage 3 in fp16",
    "stage 3 offloaded",
    "stage 3 with an adapter",
}
"""Close relatives of other modes: trained in the campaign only."""
EACH = [pytest.param(mode, marks=[pytest.mark.campaign] if mode in SELDOM else []) for mode in MODES]
STEPS = (2, 4)


@dataclass(frozen=True)
class Pair:
    """The same training by stock code and by ours, into a directory of the same name: some files hold it."""

    stock: Path
    ours: Path
    job: Job

    def last_line(self, rank: int) -> dict[str, Any]:
        return [line for line in lines(self.job, rank) if "late_bytes" in line][-1]


def job(directory: Path, mode: str, **changes: Any) -> Job:
    how = MODES[mode]
    if how.kind == "lora" and transformers.__version__ < "5":
        # Its schedule has two groups of parameters, of which DeepSpeed drops the one that the adapter leaves empty.
        pytest.skip("stock transformers 4.57 cannot train an adapter under DeepSpeed with torch 2.13")
    arguments = {"max_steps": 4, "save_steps": 2, **how.arguments}
    return Job(
        **{
            "output_dir": str(directory / "out"),
            "log": str(directory / "log"),
            "resume": None,
            "kind": how.kind,
            "model": how.model,
            "arguments": arguments,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """By mode; ours copies as late as possible."""
    known: dict[str, Pair] = {}

    def train(mode: str) -> Pair:
        if mode not in known:
            directory = tmp_path_factory.mktemp("mode")
            stock = job(directory, mode, decorated=False, log=str(directory / "stock"))
            Training(stock, 2).finish()
            shutil.move(directory / "out", directory / "by-stock")
            ours = job(directory, mode, late=True)
            Training(ours, 2).finish()
            assert losses(ours) == losses(stock)
            known[mode] = Pair(directory / "by-stock", directory / "out", ours)
        return known[mode]

    return train


@pytest.mark.parametrize("mode", EACH)
def test_every_file_is_byte_for_byte_what_stock_code_writes(
    mode: str, trained: Callable[[str], Pair]
) -> None:
    pair = trained(mode)
    assert checkpoints.whole(pair.ours) == list(STEPS)
    for step in STEPS:
        expected = checkpoints.digests(pair.stock / f"checkpoint-{step}")
        assert checkpoints.digests(runs.checkpoint(pair.ours, step)) == expected
    assert MODES[mode].files <= expected.keys()


@pytest.mark.parametrize("mode", EACH)
def test_whatever_is_large_is_copied_late_on_both_ranks(mode: str, trained: Callable[[str], Pair]) -> None:
    for rank in (0, 1):
        last = trained(mode).last_line(rank)
        assert last["eager"] == [{}, {}]
        assert last["late_bytes"] > 0


def test_in_fp16_a_save_stands_before_a_step_that_is_skipped(trained: Callable[[str], Pair]) -> None:
    """Or else the comparisons above would see nothing of that."""
    ours = trained("stage 2 in fp16").ours
    names = [f"checkpoint-{step}/global_step{step}/mp_rank_00_model_states.pt" for step in STEPS]
    states = [torch.load(runs.root(ours) / name, weights_only=False) for name in names]
    assert [state["skipped_steps"] for state in states] == [2, 3]


@pytest.mark.parametrize("through", ["in place", "data"])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_a_weight_changed_between_save_and_step_costs_one_checkpoint_and_is_copied_at_once_from_then_on(
    stage: int, through: str, tmp_path: Path
) -> None:
    training = Training(
        Job(
            str(tmp_path / "out"),
            str(tmp_path / "log"),
            late=True,
            resume=None,
            kind="restless",
            model={"through": through},
            arguments={"max_steps": 4, "save_steps": 2, **zero(stage)},
        ),
        2,
    )
    training.finish()
    assert checkpoints.whole(tmp_path / "out") == [4]
    [line] = [line for line in training.text().splitlines() if "[ERROR]" in line]
    assert "checkpoint-2 was not committed" in line
    assert (
        "lm_head.weight in it was changed in place" if through == "in place" else "memory changed"
    ) in line
    eager = lines(training.job)[-2]["eager"]
    assert [len(parts) for parts in eager] == [0, 1]


@pytest.mark.parametrize(
    "mode", ["stage 1", "stage 2 in bf16", "stage 2 in fp16", "stage 3 gathered in bf16"]
)
def test_killed_and_resumed_equals_uninterrupted(mode: str, tmp_path: Path) -> None:
    how = MODES[mode]
    exactly_resumed(tmp_path, 2, how.arguments, random.randrange(10**6), kills=1, kind=how.kind)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "mode",
    [mode for mode in MODES if MODES[mode].kind != "overwriting"],  # that model counts its passes anew
)
def test_every_mode_killed_three_times_equals_uninterrupted(mode: str, seed: int, tmp_path: Path) -> None:
    how = MODES[mode]
    exactly_resumed(tmp_path, 2, how.arguments, seed, kills=3, kind=how.kind)


STOCK = "transformers.trainer:Trainer"
WRITER = "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine:TorchCheckpointEngine"
FAILURES: list[dict[str, Any]] = [
    {"at": f"{STOCK}.save_model", "rank": 0},
    {"at": f"{STOCK}._save", "rank": 0},
    {"at": f"{STOCK}._save_optimizer_and_scheduler", "rank": 1},
    {"at": f"{WRITER}.save", "rank": 1},
    {"at": f"{WRITER}.save", "rank": 0},
    {"at": f"{WRITER}.commit", "rank": 0},
    {"at": "deepspeed.runtime.engine:DeepSpeedEngine._copy_recovery_script", "rank": 0},
    {"at": f"{STOCK}._save_rng_state", "rank": 1},
]
"""In the order in which a save comes to them; between them the ranks meet."""
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "load_best_model_at_end": False,
    "metric_for_best_model": "loss",
}


@pytest.mark.parametrize(
    "mode", [pytest.param("stage 2", marks=pytest.mark.campaign), "stage 3", "stage 3 gathered in bf16"]
)
def test_wherever_a_rank_fails_at_the_disk_the_other_goes_on_and_one_checkpoint_is_lost(
    mode: str, tmp_path: Path
) -> None:
    """One fault strikes at each save with an even number; those between are undisturbed."""
    faults = [
        {"do": "ENOSPC", "times": 1, "about": f"checkpoint-{2 * number}", **fault}
        for number, fault in enumerate(FAILURES, start=1)
    ]
    steps = 2 * len(FAILURES) + 1
    training = Training(
        job(
            tmp_path,
            mode,
            orderly=True,
            faults=faults,
            arguments={**MODES[mode].arguments, **BEST, "max_steps": steps, "save_steps": 1},
        ),
        2,
    )
    training.finish()
    assert checkpoints.whole(tmp_path / "out") == list(range(1, steps + 1, 2))
    for rank in (0, 1):
        told = [line for line in training.text(rank).splitlines() if "[ERROR]" in line]
        assert len(told) == len(FAILURES), told


# -- what DeepSpeed writes by other means ----------------------------------------------------------------------------------


def _tensors(nested: Any) -> list[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        return [nested]
    items = nested.values() if isinstance(nested, dict) else nested if isinstance(nested, list) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def told(training: Training, what: str) -> list[str]:
    return [line for line in training.text().splitlines() if "[WARNING]" in line and what in line]


def test_the_legacy_format_is_written_at_once_and_committed_with_the_rest(tmp_path: Path) -> None:
    legacy = {**zero(2, {"checkpoint": {"checkpoint_serialization": False}}), "max_steps": 4, "save_steps": 2}
    stock = job(tmp_path, "stage 2", decorated=False, log=str(tmp_path / "stock"), arguments=legacy)
    Training(stock, 2).finish()
    shutil.move(tmp_path / "out", tmp_path / "by-stock")
    training = Training(job(tmp_path, "stage 2", late=True, arguments=legacy), 2)
    training.finish()
    assert checkpoints.whole(tmp_path / "out") == list(STEPS)
    stock_files, files = tmp_path / "by-stock" / "checkpoint-4", runs.checkpoint(tmp_path / "out", 4)
    assert checkpoints.tree(files).keys() == checkpoints.tree(stock_files).keys()
    # The format has memory addresses in it, so bytes cannot be compared.
    for name in (*sorted(shards()), "global_step4/mp_rank_00_model_states.pt"):
        expected, found = (torch.load(path / name, weights_only=False) for path in (stock_files, files))
        for part in ("module", "optimizer_state_dict"):
            assert checkpoints.same(_tensors(found.get(part)), _tensors(expected.get(part))), name
    [line] = told(training, "checkpoint_serialization")
    assert "DeepSpeed's state is saved synchronously" in line
    assert "leave it out to save concurrently" in line


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_writer_of_deepspeeds_own_is_left_out_told_once_and_resumed_from(
    decoupled: bool, tmp_path: Path
) -> None:
    writer = {"type": "python", "decoupled": decoupled, "data_parallel": "replica"}
    own = zero(3, {"checkpoint": {"writer": writer}})
    plain = job(tmp_path, "stage 3", decorated=False, log=str(tmp_path / "stock"))
    plain.arguments.update(max_steps=6, save_strategy="no")
    Training(plain, 2).finish()
    ours = job(
        tmp_path, "stage 3", arguments={**own, "max_steps": 6, "save_steps": 2}, faults=[LEAVE], orderly=True
    )
    assert Training(ours, 2).join() == [-9, -9]
    assert checkpoints.whole(tmp_path / "out") == [2, 4]
    ours.faults = []
    ours.resume = True
    training = Training(ours, 2)
    training.finish()
    assert dict(losses(ours)) == dict(losses(plain))
    [first, second] = told(training, "is left out")
    assert ("DecoupledCheckpointEngine" if decoupled else "FastCheckpointEngine") in first
    assert "take it out of the DeepSpeed configuration" in second


LEAVE = {"at": "transformers.trainer:Trainer.training_step", "do": "kill", "nth": 6}


def test_where_deepspeed_changes_memory_the_fence_stands_once_and_signatures_stay() -> None:
    from datastates.llm import fence
    from deepspeed.runtime.engine import DeepSpeedEngine

    names = ("_take_model_step", "load_checkpoint", "offload_states", "reload_states", "destroy")
    stock = {name: inspect.unwrap(getattr(DeepSpeedEngine, name)) for name in names}
    fence.install()
    fenced = {name: getattr(DeepSpeedEngine, name) for name in names}
    fence.install()
    for name in names:
        assert getattr(DeepSpeedEngine, name) is fenced[name]
        assert fenced[name].__wrapped__ is stock[name]
        assert inspect.signature(fenced[name]) == inspect.signature(stock[name])
