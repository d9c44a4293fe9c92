"""Copies that stock code has made for a file and let go of: copied late, whoever else held them until a moment ago."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datastates.formats import intercept
from datastates.llm.scope import SaveScope
from safetensors.torch import save_file

WRITERS: dict[str, tuple[str, Callable[..., None]]] = {
    "torch.save": ("state.pt", lambda state, path: torch.save(state, path)),
    "safetensors": ("model.safetensors", lambda state, path: save_file(state, path)),
}


@pytest.fixture(autouse=True)
def no_collection_by_chance() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def copied_late(folder: Path, kind: str, keep: Callable[[dict[str, torch.Tensor]], Any]) -> list[bool]:
    """Whether each tensor of a copy is, when the code that made and wrote it has returned; ``keep`` gets the copy."""
    name, write = WRITERS[kind]
    intercept.install()
    scope = SaveScope(folder, {})

    def stock() -> None:
        copy = {f"weight{number}": torch.randn(5000) for number in range(2)}
        write(copy, str(folder / name))
        keep(copy)

    with intercept.sink(scope):
        stock()
    [(_, image)] = scope.collect()
    return [part.still for part in image.memory]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_copy_that_nobody_holds_is_copied_late(kind: str, tmp_path: Path) -> None:
    assert copied_late(tmp_path, kind, lambda copy: None) == [True, True]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_copy_that_was_left_in_a_cycle_is_copied_late(kind: str, tmp_path: Path) -> None:
    def left_in_a_cycle(copy: dict[str, Any]) -> None:
        copy["itself"] = copy

    assert copied_late(tmp_path, kind, left_in_a_cycle) == [True, True]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_copy_that_somebody_holds_is_copied_at_once(kind: str, tmp_path: Path) -> None:
    held: list[torch.Tensor] = []
    assert copied_late(tmp_path, kind, lambda copy: held.append(copy["weight1"])) == [True, False]
