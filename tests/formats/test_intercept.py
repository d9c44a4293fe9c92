"""Only what a sink wants is intercepted, under whatever name the program knows the function."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from datastates.engine.image import FileImage
from datastates.formats import intercept, self_check, zip_layout
from datastates.formats.render import render
from formats_bench import Bench, FolderSink, assert_same_bytes

BOUND_BEFORE_INSTALL = """
import sys
import torch
from safetensors.torch import save_file as safe_save_file
from torch import save

def checkpoint(obj, path, save=torch.save):
    save(obj, path)

from datastates.formats import intercept
from datastates.formats.render import render

class Sink:
    def wants(self, path): return True
    def describe(self, address, nbytes): return False, ""
    def accept(self, path, image): open(path, "wb").write(render(image)); print(path)
    def note(self, text): raise AssertionError(text)

intercept.install()
intercept.install()
folder = sys.argv[1]
state = {"t": torch.arange(5000.0)}
with intercept.sink(Sink()):
    checkpoint(state, folder + "/default.pt")
    save(state, folder + "/name.pt")
    safe_save_file(state, folder + "/model.safetensors")
"""


def test_functions_bound_before_the_installation_are_intercepted(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BOUND_BEFORE_INSTALL, tmp_path], capture_output=True, text=True, check=True
    )
    assert len(done.stdout.split()) == 3
    assert torch.equal(torch.load(tmp_path / "default.pt")["t"], torch.arange(5000.0))
    assert torch.equal(torch.load(tmp_path / "name.pt")["t"], torch.arange(5000.0))
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded["t"], torch.arange(5000.0))


def state() -> dict[str, torch.Tensor]:
    return {"t": torch.arange(5000.0), "s": torch.ones(3)}


def save_both(folder: Path) -> None:
    torch.save(state(), folder / "t.pt")
    safetensors.torch.save_file(state(), folder / "t.safetensors")


def test_streams_and_bytes_pass_through(bench: Bench) -> None:
    expected = io.BytesIO()
    torch.save(state(), expected)
    with intercept.sink(bench.sink):
        found = io.BytesIO()
        torch.save(state(), found)
        with open(bench.imaged / "stream.pt", "wb") as file:
            torch.save(state(), file)
        in_memory = safetensors.torch.save(state())
    assert_same_bytes(found.getvalue(), expected.getvalue())
    assert_same_bytes((bench.imaged / "stream.pt").read_bytes(), expected.getvalue())
    assert torch.equal(safetensors.torch.load(in_memory)["t"], state()["t"])
    assert not bench.sink.images


def test_paths_that_are_not_wanted_pass_through(bench: Bench) -> None:
    with intercept.sink(bench.sink):
        save_both(bench.stock)
    assert not bench.sink.images
    assert torch.equal(torch.load(bench.stock / "t.pt")["t"], state()["t"])
    assert torch.equal(safetensors.torch.load_file(bench.stock / "t.safetensors")["t"], state()["t"])


def test_nothing_is_intercepted_outside_the_scope(bench: Bench) -> None:
    with intercept.sink(bench.sink):
        pass
    save_both(bench.imaged)
    assert not bench.sink.images
    assert sorted(path.name for path in bench.imaged.iterdir()) == ["t.pt", "t.safetensors"]


def test_other_threads_are_not_intercepted(bench: Bench) -> None:
    with intercept.sink(bench.sink):
        thread = threading.Thread(target=save_both, args=[bench.imaged])
        thread.start()
        thread.join()
    assert not bench.sink.images
    assert (bench.imaged / "t.pt").exists()


def test_scopes_nest(bench: Bench, tmp_path: Path) -> None:
    inner = FolderSink(tmp_path)
    with intercept.sink(bench.sink):
        with intercept.sink(inner):
            save_both(bench.imaged)
        torch.save(state(), bench.imaged / "outer.pt")
    assert sorted(inner.images) == ["imaged/t.pt", "imaged/t.safetensors"]
    assert list(bench.sink.images) == ["outer.pt"]


def test_a_save_inside_a_pickle_is_intercepted_like_any_other(bench: Bench) -> None:
    class Nested:
        def __reduce__(self) -> Any:
            buffer = io.BytesIO()
            torch.save(state(), buffer)
            return bytes, (buffer.getvalue(),)

    bench.compare(lambda path: torch.save([Nested(), state()], path), "t.pt")


def test_storages_can_be_copied_to_the_host_again_after_a_failed_save(bench: Bench) -> None:
    class Failing(FolderSink):
        def describe(self, address: int, nbytes: int) -> tuple[bool, str]:
            raise RuntimeError("no description")

    with intercept.sink(Failing(bench.imaged)), pytest.raises(RuntimeError, match="no description"):
        torch.save(state(), bench.imaged / "t.pt")
    assert intercept.device._thread.uncopied == 0


@pytest.fixture
def unknown_layout(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A torch whose files differ from what we think: the other way round, but no less different."""
    monkeypatch.setattr(zip_layout, "DESCRIPTOR_MARK", b"PK\x07\x09")
    self_check.torch_zip.cache_clear()
    yield
    self_check.torch_zip.cache_clear()


@pytest.mark.usefixtures("unknown_layout")
def test_an_unknown_layout_leads_to_the_stock_writer_and_one_note(bench: Bench) -> None:
    bench.falls_back(lambda path: torch.save(state(), path), "a.pt")
    bench.falls_back(lambda path: torch.save(state(), path), "b.pt")
    assert len(bench.sink.notes) == 1
    assert "another layout" in bench.sink.notes[0]
    bench.compare(lambda path: safetensors.torch.save_file(state(), path), "t.safetensors")


def test_the_checks_pass_with_the_installed_versions_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    self_check.torch_zip.cache_clear()
    self_check.safetensors_file.cache_clear()
    assert self_check.torch_zip() is None
    assert self_check.safetensors_file() is None
    assert list(tmp_path.iterdir()) == []


def test_the_checks_pass_whatever_the_default_device_is() -> None:
    self_check.torch_zip.cache_clear()
    self_check.safetensors_file.cache_clear()
    with torch.device("meta"):
        assert self_check.torch_zip() is None
        assert self_check.safetensors_file() is None


def test_without_the_installation_a_check_fails_and_writes_nothing(tmp_path: Path) -> None:
    code = "from datastates.formats import self_check as s; print(s.torch_zip()); print(s.safetensors_file())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.count("cannot be intercepted") == 2
    assert list(tmp_path.iterdir()) == []


def test_transformers_saves_a_sharded_model_through_the_sink(bench: Bench) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(bench.stock, max_shard_size="20KB")
    with intercept.sink(bench.sink):
        model.save_pretrained(bench.imaged, max_shard_size="20KB")
    shards = sorted(path.name for path in bench.stock.glob("*.safetensors"))
    assert len(shards) > 1
    assert sorted(bench.sink.images) == shards
    for shard in shards:
        image: FileImage = bench.sink.images[shard]
        assert_same_bytes(render(image), (bench.stock / shard).read_bytes())
