"""FSDP on two ranks: shards and gathered models, saved concurrently and resumed exactly, in the files of stock code."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import runs
import sharding
import torch
import transformers
from accelerate.commands.merge import merge_command, merge_command_parser
from datastates.llm import fsdp
from processes import Job, Training, lines, losses
from safetensors.torch import load_file
from test_exact import exactly_resumed
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = pytest.mark.skipif(
    transformers.__version__ < "5",
    reason="before transformers 5 a Trainer refuses FSDP where there is no accelerator",
)

MODES: dict[str, dict[str, Any]] = {
    "fsdp2 sharded": sharding.fsdp(2),
    "fsdp2 full": sharding.fsdp(2, "FULL_STATE_DICT"),
    "fsdp1 sharded": sharding.fsdp(1),
    "fsdp2 per rank": sharding.fsdp(2, use_dcp=False),
}
PER_RANK = pytest.param(
    "fsdp2 per rank",
    marks=pytest.mark.skipif(
        not sharding.has_files_of_each_rank(), reason="accelerate has use_dcp=False since 1.15"
    ),
)
EVERY = [*(mode for mode in MODES if mode != "fsdp2 per rank"), PER_RANK]
STEPS = (2, 4)
LARGER = {"hidden_size": 128, "intermediate_size": 256}
"""Most parameters of the usual tiny model are below what is worth to be copied late."""


@dataclass(frozen=True)
class Trained:
    """The same training twice, in a directory of the same name each time: some files hold it."""

    stock: Path
    ours: Path
    job: Job
    end: dict[str, Any]

    def checkpoint(self, step: int) -> Path:
        return runs.checkpoint(self.ours, step)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Those of all ranks."""
        files = sorted((runs.root(self.ours) / ".run").glob("events-rank*.jsonl"))
        events = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [event for event in events if event["kind"] == kind]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """By mode; each is trained when it is asked for the first time."""
    known: dict[str, Trained] = {}

    def train(mode: str) -> Trained:
        if mode not in known:
            known[mode] = _train(tmp_path_factory.mktemp(mode.replace(" ", "-")), MODES[mode])
        return known[mode]

    return train


def _train(directory: Path, arguments: dict[str, Any]) -> Trained:
    stock, out = directory / "stock", directory / "out"
    job = Job(
        str(out),
        str(directory / "stock-log"),
        False,
        None,
        arguments={"max_steps": 4, "save_steps": 2, **arguments},
        model=LARGER,
    )
    Training(job, 2).finish()
    out.rename(stock)
    ours = replace(job, log=str(directory / "log"), decorated=True)
    Training(ours, 2).finish()
    for rank in (0, 1):
        assert lines(job, rank) == lines(ours, rank)
    return Trained(stock, out, ours, lines(ours)[-1])


@pytest.mark.parametrize("mode", EVERY)
def test_every_file_is_byte_for_byte_what_stock_code_writes(
    mode: str, trained: Callable[[str], Trained]
) -> None:
    both = trained(mode)
    assert checkpoints.whole(both.ours) == list(STEPS)
    for step in STEPS:
        expected, found = (
            checkpoints.tree(both.stock / f"checkpoint-{step}"),
            checkpoints.tree(both.checkpoint(step)),
        )
        assert found.keys() == expected.keys()
        if mode == "fsdp2 per rank":
            assert {"pytorch_model_fsdp_0_rank1.bin", "optimizer_0_rank1.bin"} <= found.keys()
        for name in expected:
            assert _comparable(name, found[name]) == _comparable(name, expected[name]), name


def _comparable(name: str, data: bytes) -> Any:
    """The metadata of a sharded state dict hold a random number and their own path."""
    if not name.endswith(".metadata"):
        return data
    metadata = pickle.loads(data)
    assert metadata.storage_meta.checkpoint_id.name in name
    metadata.storage_meta = None
    return pickle.dumps(metadata)


@pytest.mark.parametrize("mode", EVERY)
def test_nearly_all_of_it_is_copied_late(mode: str, trained: Callable[[str], Trained]) -> None:
    saves = trained(mode).events("save")
    assert len(saves) == 4
    assert [
        save for save in saves if save["bytes"] > 10**6 and save["late_bytes"] < 0.9 * save["bytes"]
    ] == []
    assert sum(save["late_bytes"] for save in saves) > 10**6


@pytest.mark.parametrize("mode", EVERY)
def test_stock_code_resumes_from_it_as_from_its_own(
    mode: str, trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    """For FSDP2 that is as if nothing had happened. Stock FSDP1 on CPU ranks does not go on with exactly the state that it saved."""
    both = trained(mode)
    job = replace(both.job, output_dir=str(tmp_path / "out"), log=str(tmp_path / "log"), decorated=False)
    end = Training(replace(job, resume=str(both.checkpoint(2))), 2).finish()
    if mode == "fsdp1 sharded":
        stock = replace(job, resume=str(both.stock / "checkpoint-2"), log=str(tmp_path / "stock-log"))
        assert end == Training(stock, 2).finish()
    else:
        assert end == both.end
        assert losses(job) == losses(both.job)[2:]


def test_a_whole_model_is_gathered_once_for_both_of_its_files(tmp_path: Path) -> None:
    """Two saves, and the third gathering would fail."""
    third = {"at": "torch.distributed.checkpoint.state_dict:_get_model_state_dict", "do": "EIO", "nth": 3}
    arguments = {"max_steps": 4, "save_steps": 2, **MODES["fsdp2 full"]}
    job = Job(str(tmp_path / "out"), str(tmp_path / "log"), True, None, arguments=arguments, faults=[third])
    Training(job, 2).finish()
    assert checkpoints.whole(tmp_path / "out") == list(STEPS)
    newest = runs.checkpoint(tmp_path / "out", 4)
    whole = torch.load(newest / "pytorch_model_fsdp.bin", weights_only=True)
    assert checkpoints.same(whole, load_file(newest / "model.safetensors"))


@pytest.mark.parametrize(("mode", "passed"), [("fsdp2 full", [2, 2]), ("fsdp2 sharded", [0, 0])])
def test_no_step_waits_for_copies_that_nobody_can_change(
    mode: str, passed: list[int], trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    """Nothing is copied before somebody waits for it: the two steps after the first save go on before anything of it is copied, unless it is shards."""
    both = trained(mode)
    job = replace(both.job, output_dir=str(tmp_path / "out"), log=str(tmp_path / "log"), late=True)
    Training(job, 2).finish()
    assert [line["passed"] for rank in (0, 1) for line in lines(job, rank) if "passed" in line] == passed
    assert checkpoints.whole(tmp_path / "out") == list(STEPS)
    for step in STEPS:
        stock = both.stock / f"checkpoint-{step}"
        for file in stock.glob("*.bin") if mode == "fsdp2 full" else ():
            if file.name != "training_args.bin":
                assert (runs.checkpoint(tmp_path / "out", step) / file.name).read_bytes() == file.read_bytes()


def test_torch_and_accelerate_put_the_shards_together(
    trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    shards = trained("fsdp2 sharded").checkpoint(4)
    expected = load_file(trained("fsdp2 full").checkpoint(4) / "model.safetensors")
    dcp_to_torch_save(shards / "pytorch_model_fsdp_0", tmp_path / "by-torch.pt")
    found = torch.load(tmp_path / "by-torch.pt", weights_only=True)["model"]
    assert checkpoints.same({name: found[name] for name in expected}, expected)
    parser = merge_command_parser()
    merge_command(parser.parse_args([str(shards / "pytorch_model_fsdp_0"), str(tmp_path / "by-accelerate")]))
    assert checkpoints.same(load_file(tmp_path / "by-accelerate" / "model.safetensors"), expected)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_shards_are_loaded_by_another_number_of_ranks(
    before: int, after: int, trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    """The data differ from then on, so it is the state itself that is compared, with nothing left to train."""
    job = trained("fsdp2 sharded").job
    if before == 1:
        job = replace(job, output_dir=str(tmp_path / "out"), log=str(tmp_path / "log"))
        Training(job, 1).finish()
    resumed = replace(job, log=str(tmp_path / "resumed"), resume=True)
    end = Training(resumed, after).finish()
    assert losses(resumed) == []
    assert end["step"] == 4
    assert end["state"] == lines(job)[-1]["state"]


@pytest.mark.parametrize("mode", ["fsdp2 sharded", "fsdp2 full", PER_RANK])
def test_killed_and_resumed_equals_uninterrupted(mode: str, tmp_path: Path) -> None:
    exactly_resumed(tmp_path, 2, MODES[mode], seed=3)


@pytest.mark.parametrize("mode", [PER_RANK])
def test_files_of_each_rank_are_committed_with_those_of_all_ranks(
    mode: str, trained: Callable[[str], Trained]
) -> None:
    both = trained(mode)
    for rank in (0, 1):
        names = {f"{what}_0_rank{rank}.bin" for what in ("pytorch_model_fsdp", "optimizer")}
        assert names <= runs.vote(both.ours, 4, rank), "written by ourselves and not by stock code"


@pytest.mark.parametrize("mode", [PER_RANK])
def test_files_of_each_rank_are_refused_by_another_number_of_ranks(
    mode: str, trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    resumed = replace(trained(mode).job, log=str(tmp_path / "resumed"), resume=True)
    for ranks in (1, 3):
        training = Training(resumed, ranks)
        assert training.join() == [1] * ranks
        for rank in range(ranks):
            assert f"was saved by 2 rank(s), and {ranks} would load it" in training.text(rank)


def test_a_node_with_a_disk_of_its_own_is_not_taken_for_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        (tmp_path / f"pytorch_model_fsdp_0_rank{rank}.bin").touch()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    fsdp.check_world_size(tmp_path, 4)  # the files of ranks 2 and 3 are on the other node
    with pytest.raises(fsdp.WorldSizeError):
        fsdp.check_world_size(tmp_path, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(fsdp.WorldSizeError):
        fsdp.check_world_size(tmp_path, 4)


WRITER = "torch.distributed.checkpoint.filesystem:FileSystem"
SHARD_FAULTS: list[dict[str, Any]] = [
    {"at": "builtins:open", "about": "checkpoint-4/pytorch_model_fsdp_0/__1_0", "do": "ENOSPC", "rank": 1},
    {"at": f"{WRITER}.rename", "about": "checkpoint-6/pytorch_model_fsdp_0", "do": "ENOSPC", "rank": 0},
    {"at": f"{WRITER}.mkdir", "about": "checkpoint-8/optimizer_0", "do": "EIO", "rank": 1},
    {"at": "os:makedirs", "about": "checkpoint-10/pytorch_model_fsdp_0", "do": "EIO", "rank": 1},
    {"at": "datastates.store.layout:CheckpointDir.prepare", "about": "checkpoint-12", "do": "EIO", "rank": 1},
    {"at": "datastates.llm.session:Session._move_aside", "about": "checkpoint-14", "do": "EIO", "rank": 0},
]
WHOLE_FAULTS: list[dict[str, Any]] = [
    {"at": "transformers.trainer:Trainer._save", "about": "checkpoint-4", "do": "ENOSPC", "rank": 0},
    {"at": "builtins:open", "about": "checkpoint-6/pytorch_model_fsdp.bin", "do": "ENOSPC", "rank": 0},
    {"at": "builtins:open", "about": "checkpoint-8/config.json", "do": "EIO", "rank": 0},
    {"at": "os:makedirs", "about": "checkpoint-10", "do": "EIO", "rank": 0},
    {"at": "transformers.trainer:Trainer._save_rng_state", "about": "checkpoint-12", "do": "EIO", "rank": 1},
    {"at": "datastates.llm.session:Session._move_aside", "about": "checkpoint-14", "do": "EIO", "rank": 0},
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The end of a stock training that does not save; how a checkpoint is written leaves no trace in it."""
    directory = tmp_path_factory.mktemp("undisturbed")
    arguments = {"max_steps": 16, "save_strategy": "no", **sharding.fsdp(2)}
    return Training(
        Job(str(directory / "out"), str(directory / "log"), False, None, arguments=arguments), 2
    ).finish()


@pytest.mark.parametrize(
    ("mode", "faults"),
    [("fsdp2 sharded", SHARD_FAULTS), ("fsdp2 full", WHOLE_FAULTS)],
    ids=["sharded", "full"],
)
def test_a_rank_whose_disk_fails_costs_that_checkpoint_and_no_rank_waits_for_it(
    mode: str, faults: list[dict[str, Any]], undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """One save after the other fails at another point, on one of the ranks, between their meetings; the first and the last do not."""
    arguments = {"max_steps": 16, "save_steps": 2, **MODES[mode]}
    job = Job(
        str(tmp_path / "out"), str(tmp_path / "log"), True, None, True, arguments=arguments, faults=faults
    )
    training = Training(job, 2)
    assert training.finish() == undisturbed
    assert checkpoints.whole(Path(job.output_dir)) == [2, 16]
    for step in range(4, 16, 2):
        told = [
            f"checkpoint-{step} " in line
            for rank in (0, 1)
            for line in training.text(rank).splitlines()
            if "[ERROR]" in line
        ]
        assert sum(told) == 2, step


@pytest.mark.parametrize("mode", ["fsdp2 sharded", "fsdp2 full"])
def test_the_best_model_is_loaded_at_the_end(mode: str, tmp_path: Path) -> None:
    """The one with the largest loss: hardly the last one."""
    best = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    }
    ends = []
    for name, decorated in (("stock", False), ("ours", True)):
        arguments = {"max_steps": 6, "save_steps": 2, "learning_rate": 1e-3, **best, **MODES[mode]}
        job = Job(str(tmp_path / name), str(tmp_path / f"{name}-log"), decorated, None, arguments=arguments)
        ends.append(Training(job, 2).finish())
    assert ends[0]["weights"] == ends[1]["weights"]
    assert checkpoints.whole(tmp_path / "ours") == [2, 4, 6]
    state = json.loads((runs.checkpoint(tmp_path / "ours", 6) / "trainer_state.json").read_text())
    assert Path(state["best_model_checkpoint"]).name == "checkpoint-2"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_on_a_gpu_every_file_is_byte_for_byte_what_stock_code_writes(
    version: int, kind: str, tmp_path: Path
) -> None:
    """Above all FSDP1's whole state, which torch cannot gather on CPU ranks: it ends with a segmentation fault."""
    arguments = {"max_steps": 4, "save_steps": 2, **sharding.fsdp(version, kind), "use_cpu": False}
    job = Job(str(tmp_path / "out"), str(tmp_path / "log"), False, None, arguments=arguments, model=LARGER)
    expected = Training(job).finish()
    (tmp_path / "out").rename(tmp_path / "stock")
    assert Training(replace(job, decorated=True)).finish() == expected
    assert checkpoints.whole(tmp_path / "out") == list(STEPS)
    for step in STEPS:
        stock = checkpoints.tree(tmp_path / "stock" / f"checkpoint-{step}")
        found = checkpoints.tree(runs.checkpoint(tmp_path / "out", step))
        assert {name: _comparable(name, data) for name, data in found.items()} == {
            name: _comparable(name, data) for name, data in stock.items()
        }
