from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from datastates.store.stock import global_step, stock_checkpoints, stock_problem
from store_files import stock, write

DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no state": (lambda path: (path / "trainer_state.json").unlink(), "trainer_state.json is missing"),
    "an empty state": (
        lambda path: (path / "trainer_state.json").write_bytes(b""),
        "trainer_state.json is damaged",
    ),
    "a zeroed state": (
        lambda path: (path / "trainer_state.json").write_bytes(bytes(90)),
        "trainer_state.json is damaged",
    ),
    "a state without a step": (
        lambda path: (path / "trainer_state.json").write_bytes(b"[]"),
        "trainer_state.json is damaged",
    ),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "has no file with weights"),
    "Trainer's own mark": (
        lambda path: (path / "checkpoint-is-incomplete.txt").write_text(""),
        "interrupted",
    ),
    "empty weights": (
        lambda path: (path / "model.safetensors").write_bytes(b""),
        "model.safetensors has only 0 bytes",
    ),
    "weights cut": (lambda path: cut(path / "model.safetensors", -1), "model.safetensors has "),
    "weights cut in the header": (lambda path: cut(path / "model.safetensors", 20), "has no whole header"),
    "weights zeroed": (lambda path: zero(path / "model.safetensors"), "has no whole header"),
    "optimizer cut": (lambda path: cut(path / "optimizer.pt", -1), "optimizer.pt does not end"),
    "optimizer halved": (lambda path: cut(path / "optimizer.pt", 30), "optimizer.pt does not end"),
    "optimizer empty": (lambda path: cut(path / "optimizer.pt", 0), "optimizer.pt is empty"),
    "optimizer zeroed": (lambda path: zero(path / "optimizer.pt"), "optimizer.pt begins with zeros"),
    "optimizer with zeros behind": (
        lambda path: append(path / "optimizer.pt", bytes(9)),
        "optimizer.pt does not end",
    ),
    "a nested file cut": (lambda path: nested(path), "does not end"),
    "a shard missing": (
        lambda path: (path / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "model-1.safetensors"}}'
        ),
        "model-1.safetensors is missing",
    ),
    "an index damaged": (
        lambda path: (path / "model.safetensors.index.json").write_text("{"),
        "the list of weights is missing",
    ),
}


def cut(path: Path, size: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:size])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def append(path: Path, data: bytes) -> None:
    path.write_bytes(path.read_bytes() + data)


def nested(path: Path) -> None:
    write(path, {"global_step10/mp_rank_00_model_states.pt": b"PK\x03\x04 cut"})


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_an_interrupted_stock_save_leaves_is_named(tmp_path: Path, kind: str) -> None:
    path = stock(tmp_path, 10)
    DAMAGES[kind][0](path)
    assert DAMAGES[kind][1] in str(stock_problem(path))


def test_nothing_speaks_against_a_whole_stock_checkpoint(tmp_path: Path) -> None:
    path = stock(tmp_path, 10, **{"scheduler.pt": b"\x80\x02 a pickle of old", "config.json": b"{}"})
    assert stock_problem(path) is None
    assert global_step(path) == 10


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "adapter_model.bin",
        "adapter/adapter_model.safetensors",
        "pytorch_model_fsdp_0/__0_0.distcp",
        "global_step10/zero_pp_rank_0_mp_rank_00_model_states.pt",
    ],
)
def test_weights_of_every_mode_are_recognised(tmp_path: Path, name: str) -> None:
    path = stock(tmp_path, 10)
    content = (
        (path / "model.safetensors").read_bytes()
        if name.endswith(".safetensors")
        else (path / "optimizer.pt").read_bytes()
    )
    (path / "model.safetensors").unlink()
    assert stock_problem(path) is not None
    write(path, {name: content})
    assert stock_problem(path) is None


def test_only_directories_with_trainers_names_are_stock_checkpoints(tmp_path: Path) -> None:
    for name in (
        "checkpoint-9",
        "checkpoint-10",
        "checkpoint-11.tmp",
        "tmp-checkpoint-12",
        "concurrent_checkpoint",
        "checkpoint-x",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-13").write_text("")
    assert [step for step, _ in stock_checkpoints(tmp_path)] == [10, 9]
    assert stock_checkpoints(tmp_path / "nowhere") == []


def test_a_path_that_is_no_directory_is_a_problem_not_an_exception(tmp_path: Path) -> None:
    assert stock_problem(tmp_path / "nothing") == "is no directory"
