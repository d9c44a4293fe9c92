"""Tensors on a GPU are imaged where they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import safetensors.torch
import torch
from formats_bench import Bench
from torch.utils.serialization import config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def state() -> dict[str, torch.Tensor]:
    whole = torch.arange(90_000.0, device="cuda")
    return {
        "half": whole[:45_000].bfloat16(),
        "step": torch.ones((), device="cuda"),
        "host": torch.ones(9000),
    }


@pytest.mark.parametrize("save", [torch.save, safetensors.torch.save_file])
def test_gpu_memory_becomes_parts_and_the_file_is_the_stock_file(
    bench: Bench, save: Callable[[object, str], None]
) -> None:
    tensors = state()
    image = bench.compare(lambda path: save(tensors, path), "t.bin")
    on_device = [part for part in image.memory if part.device == torch.cuda.current_device()]
    assert {part.address for part in on_device} == {tensors["half"].data_ptr(), tensors["step"].data_ptr()}
    assert {part.stream for part in on_device} == {torch.cuda.current_stream().cuda_stream}


def test_no_device_memory_is_copied_while_imaging(bench: Bench) -> None:
    tensors = {"t": torch.zeros(2**26, device="cuda")}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        bench.image(lambda path: torch.save(tensors, path), "t.pt")
        torch.cuda.synchronize()
    assert not [event for event in profile.events() if "Memcpy DtoH" in event.name]


def test_copies_through_pinned_memory_are_avoided_as_well(bench: Bench) -> None:
    tensors = state()
    with config.patch("save.use_pinned_memory_for_d2h", True):
        image = bench.compare(lambda path: torch.save(tensors, path), "t.pt")
        assert config.save.use_pinned_memory_for_d2h
    assert any(part.device >= 0 for part in image.memory)
