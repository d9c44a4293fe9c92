"""The same promises on a real device, through torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from datastates.engine import Engine, Memory
from engine_support import BLOCK, ImageBuilder, finish, pending, save

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def tensor_part(offset: int, tensor, *, still: bool = True, name: str = "tensor") -> Memory:
    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    size = tensor.numel() * tensor.element_size()
    return Memory(offset, tensor.data_ptr(), size, tensor, still, name, tensor.device.index, stream)


def image_of(*parts: Memory):
    builder = ImageBuilder()
    builder.image.memory.extend(parts)
    builder.image.size = sum(part.nbytes for part in parts)
    return builder


def bytes_of(tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def test_a_tensor_on_the_device_is_saved_as_it_is_after_the_queued_work(tmp_path: Path) -> None:
    engine = Engine(64 << 20)
    weight = torch.zeros(30_000_000, device="cuda")
    for step in range(1, 4):
        for _ in range(50):
            weight += 1
        ticket = engine.submit([pending(image_of(tensor_part(0, weight)), tmp_path / "weight")])
        finish(ticket)
        assert ticket.state == "persisted", ticket.error
        assert ticket.stats["pinned"] == 1
        assert (tmp_path / "weight").read_bytes() == bytes_of(torch.full((30_000_000,), 50.0 * step))
    assert engine.close(60)


def test_tensors_of_a_side_stream_are_saved_behind_it(engine: Engine, tmp_path: Path) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        weight = torch.rand(1_000_000, device="cuda")
        for _ in range(100):
            weight = weight * 1.0001
        part = tensor_part(0, weight)
    assert save(engine, (image_of(part), tmp_path / "weight")).state == "persisted"
    assert (tmp_path / "weight").read_bytes() == bytes_of(weight)


def test_what_will_not_hold_still_is_the_saves(engine: Engine, tmp_path: Path) -> None:
    small, large = torch.rand(1000, device="cuda"), torch.rand(10 * BLOCK, device="cuda")
    expected = bytes_of(small) + bytes_of(large)
    parts = tensor_part(0, small, still=False), tensor_part(4000, large, still=False)
    ticket = engine.submit([pending(image_of(*parts), tmp_path / "file")])
    small.zero_()
    large.zero_()
    torch.cuda.synchronize()
    assert finish(ticket).state == "persisted"
    assert (tmp_path / "file").read_bytes() == expected


def test_a_torn_tensor_is_named(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    weight = torch.rand(100_000_000, device="cuda")
    ticket = make_engine(2).submit(
        [pending(image_of(tensor_part(0, weight, name="weight")), tmp_path / "file")]
    )
    torch.cuda.synchronize()  # the sample is taken; a cache of two blocks cannot hold the rest
    weight.zero_()
    torch.cuda.synchronize()
    assert finish(ticket).torn == ["weight"]


def test_saving_leaves_the_current_device_and_stream_alone(engine: Engine, tmp_path: Path) -> None:
    before = torch.cuda.current_device(), torch.cuda.current_stream()
    weight = torch.rand(1_000_000, device="cuda")
    save(engine, (image_of(tensor_part(0, weight)), tmp_path / "weight"))
    assert (torch.cuda.current_device(), torch.cuda.current_stream()) == before
    assert torch.allclose(weight + 0, weight)
