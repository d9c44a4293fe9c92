"""Files of torch.distributed.checkpoint: byte for byte the stock writer's, and items lie where the metadata say."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import formats_tensors
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from datastates.formats import intercept, self_check
from datastates.formats.render import render
from formats_bench import Bench, FolderSink, assert_same_bytes
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

METADATA = ".metadata"


def save(
    folder: Path, state: dict[str, Any], writer: type[FileSystemWriter] = FileSystemWriter, **options: Any
) -> None:
    dist_cp.save(state, storage_writer=writer(folder, **options), no_dist=True)


def stock_and_imaged(
    bench: Bench, state: dict[str, Any], **options: Any
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The .distcp files by name: what the stock writer wrote, and the images of the same save."""
    number = len(list(bench.stock.iterdir()))
    stock, imaged = bench.stock / f"dcp-{number}", bench.imaged / f"dcp-{number}"
    save(stock, state, **options)
    with intercept.sink(bench.sink):
        save(imaged, state, **options)
    assert [path.name for path in imaged.iterdir()] == [METADATA], bench.sink.notes
    assert described(stock) == described(imaged)
    files = {path.name: path.read_bytes() for path in stock.iterdir() if path.name != METADATA}
    images = {Path(name).name: render(bench.sink.images.pop(name)) for name in list(bench.sink.images)}
    for name, data in images.items():
        (imaged / name).write_bytes(data)
    return files, images


def described(folder: Path) -> Any:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    return list(metadata.storage_data.items()), metadata.state_dict_metadata, metadata.planner_data


def compare(bench: Bench, state: dict[str, Any], **options: Any) -> None:
    files, images = stock_and_imaged(bench, state, **options)
    assert files.keys() == images.keys()
    for name, data in images.items():
        assert_same_bytes(data, files[name])


def typical() -> dict[str, Any]:
    whole = torch.arange(30_000.0).reshape(100, 300)
    return {
        "model": {"weight": whole, "half": whole.bfloat16(), "part": whole[3:50], "few": torch.ones(7)},
        "optimizer": {"step": torch.tensor(3.0), "lr": 0.1, "betas": (0.9, 0.999), "name": "adamw"},
        "column": whole[:, 5],
        "turned": whole.t(),
        "empty": torch.empty(0, 4),
    }


@given(
    st.lists(formats_tensors.any_layout(), max_size=5),
    st.lists(st.binary() | st.floats() | st.text(), max_size=3),
)
def test_any_tensors_and_objects(
    shared_bench: Bench, tensors: list[torch.Tensor], objects: list[object]
) -> None:
    compare(shared_bench, {"tensors": dict(enumerate(tensors)), "objects": objects})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"thread_count": 3},
        {"single_file_per_rank": False},
        {"per_thread_copy_ahead": 0},
        {"sync_files": False},
    ],
    ids=str,
)
def test_the_writers_options(bench: Bench, options: dict[str, Any]) -> None:
    if options.get("thread_count", 1) > 1:
        with (
            pytest.MonkeyPatch.context() as patch
        ):  # one after the other, or the order in the metadata is up to the threads
            patch.setattr(threading.Thread, "start", threading.Thread.run)
            patch.setattr(threading.Thread, "join", lambda self: None)
            compare(bench, typical(), **options)
    else:
        compare(bench, typical(), **options)


def test_where_a_device_is_there_tensors_are_ordered_by_size(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Serial(filesystem._SerialCpuLoader):
        """The loader for devices, without one."""

        def __init__(self, resolve: Any, inflight_threshhold: int = 0) -> None:
            super().__init__(resolve)

        def start_loading(self) -> None:
            self.items.sort(key=lambda item: item[0])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", Serial)
    compare(bench, typical())


def test_torch_loads_what_the_images_say(bench: Bench) -> None:
    state = typical()
    stock_and_imaged(bench, state)
    loaded = {
        **typical(),
        "model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()},
    }
    dist_cp.load(loaded, storage_reader=dist_cp.FileSystemReader(bench.imaged / "dcp-0"), no_dist=True)
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in state["model"].items())
    assert loaded["optimizer"]["lr"] == 0.1


def test_memory_is_imaged_where_it_is(bench: Bench) -> None:
    """Whole tensors and contiguous parts of larger ones; what has to be gathered first is copied, as by the stock writer."""
    whole = torch.arange(30_000.0).reshape(100, 300)
    with intercept.sink(bench.sink):
        save(bench.imaged / "dcp", {"a": whole, "b": whole[3:50], "c": whole[:, ::2]})
    (image,) = bench.sink.images.values()
    addresses = {part.address for part in image.memory}
    assert len(image.memory) == 3
    assert addresses >= {whole.data_ptr(), whole[3:50].data_ptr()}
    owners = {part.owner.data_ptr() for part in image.memory}
    assert len(owners) == 2


def test_an_empty_rank_has_an_empty_file(bench: Bench) -> None:
    compare(bench, {})


class OtherWriter(FileSystemWriter):
    """Somebody's own."""


@pytest.mark.parametrize(
    "options",
    [{"writer": OtherWriter}, {"serialization_format": SerializationFormat.SAFETENSORS}],
    ids=["subclass", "safetensors"],
)
def test_unknown_writers_write_by_themselves(bench: Bench, options: dict[str, Any]) -> None:
    with intercept.sink(bench.sink):
        save(bench.imaged / "dcp", {"t": torch.arange(5000.0)}, **options)
    assert not bench.sink.images
    assert (bench.imaged / "dcp/__0_0.distcp").stat().st_size > 20_000


def test_extensions_write_by_themselves(bench: Bench) -> None:
    class Plain(filesystem.StreamTransformExtension):
        @staticmethod
        def registry_name() -> str:
            return "plain"

        @staticmethod
        def from_descriptor(version: str) -> Any:
            return Plain()

        def get_descriptor(self) -> str:
            return "plain/1"

        def transform_to(self, output: Any) -> Any:
            return output

        def transform_from(self, input: Any) -> Any:
            return input

    with intercept.sink(bench.sink):
        save(bench.imaged / "dcp", {"t": torch.arange(5000.0)}, _extensions=[Plain()])
    assert not bench.sink.images


def test_nothing_is_intercepted_elsewhere(bench: Bench) -> None:
    with intercept.sink(bench.sink):
        save(bench.stock / "dcp", {"t": torch.arange(5000.0)})
    save(bench.imaged / "dcp", {"t": torch.arange(5000.0)})
    assert not bench.sink.images
    assert_same_bytes(
        (bench.imaged / "dcp/__0_0.distcp").read_bytes(), (bench.stock / "dcp/__0_0.distcp").read_bytes()
    )


def test_an_unknown_layout_leads_to_the_stock_writer_and_one_note(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = filesystem._write_item

    def write_item(transforms: Any, stream: Any, *rest: Any) -> Any:
        stream.write(b"another version")
        return stock(transforms, stream, *rest)

    monkeypatch.setattr(filesystem, "_write_item", write_item)
    self_check.distcp.cache_clear()
    try:
        with intercept.sink(bench.sink):
            save(bench.imaged / "a", typical())
            save(bench.imaged / "b", typical())
    finally:
        self_check.distcp.cache_clear()
    assert not bench.sink.images
    assert len(bench.sink.notes) == 1
    assert "another layout" in bench.sink.notes[0]
    assert (bench.imaged / "b/__0_0.distcp").read_bytes().startswith(b"another version")


def test_the_check_passes_with_the_installed_version_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    self_check.distcp.cache_clear()
    with torch.device("meta"):
        assert self_check.distcp() is None
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_not_waited_for_inside_the_save(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the items nor for the metadata; outside of the scope the writer waits as it always did."""
    synced: list[str] = []
    monkeypatch.setattr(filesystem.os, "fsync", lambda descriptor: synced.append("file"))
    monkeypatch.setattr(filesystem.os, "sync", lambda: synced.append("all"))
    writer = FileSystemWriter(bench.imaged / "dcp")
    with intercept.sink(bench.sink):
        dist_cp.save({"t": torch.arange(5000.0)}, storage_writer=writer, no_dist=True)
    assert synced == []
    assert writer.sync_files
    save(bench.stock / "dcp", {"t": torch.arange(5000.0)})
    assert synced == ["file", "file"]


def test_a_planner_that_fails_fails_alike(bench: Bench) -> None:
    class Failing(dist_cp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            raise LookupError("no such tensor")

    for sink in (bench.sink, FolderSink(bench.stock / "elsewhere")):
        with intercept.sink(sink), pytest.raises(dist_cp.CheckpointException) as caught:
            dist_cp.save(
                {"t": torch.arange(5000.0)},
                storage_writer=FileSystemWriter(bench.imaged / "dcp"),
                planner=Failing(),
                no_dist=True,
            )
        assert isinstance(caught.value.failures[0][0], LookupError)
    assert not bench.sink.images


def test_a_stream_that_torch_save_is_given_is_left_alone_inside_the_scope(bench: Bench) -> None:
    buffer = io.BytesIO()
    with intercept.sink(bench.sink):
        torch.save(typical(), buffer)
    assert torch.equal(torch.load(io.BytesIO(buffer.getvalue()))["column"], typical()["column"])


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A group of one rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_shards_are_imaged_where_they_are_by_either_writer(bench: Bench, mesh: DeviceMesh) -> None:
    """Newer versions of accelerate can also write each rank's shards with torch.save."""
    shard = distribute_tensor(torch.arange(6000.0).reshape(60, 100), mesh, [Shard(0)])
    image = bench.compare(lambda path: torch.save({"weight": shard}, path), "model_rank0.bin")
    assert [part.address for part in image.memory] == [shard.to_local().data_ptr()]
    with intercept.sink(bench.sink):
        save(bench.imaged / "dcp", {"weight": shard})
    (image,) = bench.sink.images.values()
    assert [part.address for part in image.memory] == [shard.to_local().data_ptr()]
