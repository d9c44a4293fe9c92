"""Whether this version of torch and of safetensors writes what we think it writes.

Each check saves a small sample twice through the function that programs call, once imaged and once by the stock writer, and
compares the bytes, in memory. It runs once in a process: at the start of the training (:func:`run`), or else when the first file of the
format is wanted.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from typing import Any

import safetensors
import safetensors.torch
import torch

from datastates.engine.image import FileImage
from datastates.formats import quick_pickle
from datastates.formats.render import render


class Collector:
    """A sink that wants every file and keeps its image."""

    def __init__(self) -> None:
        self.images: list[FileImage] = []

    def wants(self, path: str) -> bool:
        return True

    def describe(self, address: int, nbytes: int) -> tuple[bool, str]:
        return False, ""

    def accept(self, path: str, image: FileImage) -> None:
        self.images.append(image)

    def note(self, text: str) -> None:
        raise AssertionError(text)


def run(*, sharded: bool) -> None:
    """Check now what the first save call would check, about ten milliseconds a format; ``sharded``: also what FSDP alone writes."""
    torch_zip()
    safetensors_file()
    if sharded:
        distcp()


@functools.cache
def torch_zip() -> str | None:
    """None if ``torch.save`` can be imaged, else the reason why not."""
    sample = _sample()

    def stock() -> bytes:
        buffer = io.BytesIO()
        torch.save(sample, buffer)
        return buffer.getvalue()

    def check() -> str | None:
        # A stream has no name, so torch calls it "archive". Were the path not intercepted, nothing could be written there.
        return _compare(
            f"torch {torch.__version__}", stock, lambda: torch.save(sample, "/dev/null/archive.pt")
        )

    problem = check()
    if problem is None:
        return None
    quick_pickle.usable = False
    if check() is None:
        return None
    quick_pickle.usable = True
    return problem


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


@functools.cache
def distcp() -> str | None:
    """None if the files of torch.distributed.checkpoint can be imaged, else the reason why not."""
    name = f"torch.distributed.checkpoint of torch {torch.__version__}"
    try:
        expected, found = _distcp_files(_sample())
    except Exception as error:  # noqa: BLE001 - as in _compare
        return f"{name} cannot be intercepted ({type(error).__name__}: {error})"
    return None if found == expected else f"{name} writes another layout than the known ones"


def _distcp_files(sample: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    """The bytes of a file of a single rank and the places of its items, by the stock writer and as an image."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from datastates.formats import dcp

    planner = DefaultSavePlanner()
    planner.set_up_planner({**sample, "bytes": ["some", "object"]}, is_coordinator=True)
    writer = FileSystemWriter("/dev/null/checkpoint", sync_files=False)
    (plan,), _ = planner.create_global_plan([planner.create_local_plan()])
    (plan,) = writer.prepare_global_plan([planner.finish_plan(plan)])
    (file,) = dcp.files(writer, plan)
    image, results = dcp.image(writer, file, planner, Collector().describe)
    memory = _InMemory()
    writer.fs = memory  # type: ignore[assignment]
    stock_results = writer.write_data(plan, planner).wait()
    ((path, stock),) = memory.files.items()
    return (path, stock, stock_results), (file.path, render(image), results)


class _InMemory:
    """As much of a file system as a writer of torch.distributed.checkpoint asks for."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.BytesIO]:
        stream = _Stream()
        yield stream
        self.files[str(path)] = stream.content

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix


class _Stream(io.BytesIO):
    """Keeps its content when it is closed."""

    content = b""

    def close(self) -> None:
        if not self.closed:
            self.content = self.getvalue()
        super().close()


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
