"""Whether this version of torch and of safetensors writes what we think it writes.

Each check saves a small sample twice through the function that programs call, once imaged and once by the stock writer, and
compares the bytes, in memory. It runs once in a process, when the first file of the format is wanted.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable

import safetensors
import safetensors.torch
import torch

from datastates.engine.image import FileImage
from datastates.formats.render import render


class Collector:
    """A sink that wants every file and keeps its image."""

    def __init__(self) -> None:
        self.images: list[FileImage] = []

    def wants(self, path: str) -> bool:
        return True

    def describe(self, memory: torch.UntypedStorage | torch.Tensor) -> tuple[bool, str]:
        return False, ""

    def accept(self, path: str, image: FileImage) -> None:
        self.images.append(image)

    def note(self, text: str) -> None:
        raise AssertionError(text)


@functools.cache
def torch_zip() -> str | None:
    """None if ``torch.save`` can be imaged, else the reason why not."""
    sample = _sample()

    def stock() -> bytes:
        buffer = io.BytesIO()
        torch.save(sample, buffer)
        return buffer.getvalue()

    # A stream has no name, so torch calls it "archive". Were the path not intercepted, nothing could be written there.
    return _compare(f"torch {torch.__version__}", stock, lambda: torch.save(sample, "/dev/null/archive.pt"))


@functools.cache
def safetensors_file() -> str | None:
    """None if ``safetensors.torch.save_file`` can be imaged, else the reason why not."""
    sample = {name: tensor for name, tensor in _sample().items() if name != "view"}
    metadata = {"format": "pt"}
    return _compare(
        f"safetensors {safetensors.__version__}",
        lambda: safetensors.torch.save(sample, metadata),
        lambda: safetensors.torch.save_file(sample, "/dev/null/archive.safetensors", metadata),
    )


def _sample() -> dict[str, torch.Tensor]:
    host = torch.device("cpu")  # whatever the program's default device is
    large = torch.arange(5000, dtype=torch.float32, device=host).reshape(50, 100)
    return {
        "large": large,
        "view": large[3:7],
        "small": torch.arange(7, dtype=torch.int16, device=host),
        "empty": torch.empty(0, 3, device=host),
        "scalar": torch.tensor(2.5, dtype=torch.float64, device=host),
        "half": torch.arange(3000, dtype=torch.float32, device=host).to(torch.bfloat16),
    }


def _compare(writer: str, stock: Callable[[], bytes], imaged: Callable[[], None]) -> str | None:
    from datastates.formats.intercept import sink

    collector = Collector()
    try:
        with sink(collector):
            expected = stock()
            imaged()
        found = render(collector.images[0])
    except Exception as error:  # noqa: BLE001 - an unknown version may fail in any way; the reason is passed on
        return f"{writer} cannot be intercepted ({type(error).__name__}: {error})"
    if found != expected:
        return f"{writer} writes another layout than the known ones"
    return None
