"""An imaged torch.save is the stock file, byte for byte."""

from __future__ import annotations

import functools
import io
import pickle
import random
import shutil
import subprocess
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dill
import numpy as np
import pytest
import torch
from datastates.engine.image import CPU
from datastates.formats import builder, intercept
from datastates.formats.render import render
from formats_bench import Bench, assert_same_bytes
from formats_tensors import DTYPES, any_layout, make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.serialization import config

KEYS = st.text(max_size=12) | st.integers() | st.tuples(st.integers(), st.text(max_size=3)) | st.none()
PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30) | st.binary(max_size=9000)
)


def saving(obj: Any, **options: Any) -> Callable[[str], None]:
    return functools.partial(_save, obj, options)


def _save(obj: Any, options: dict[str, Any], path: str) -> None:
    torch.save(obj, path, **options)


@st.composite
def objects(draw: st.DrawFn) -> Any:
    """Nested containers whose tensors partly share storages."""
    pool = draw(st.lists(any_layout(), min_size=1, max_size=4))
    pool += [tensor.detach()[..., :1] for tensor in pool if tensor.dim()]
    tensors = st.builds(lambda index: pool[index % len(pool)], st.integers(0, 99)) | any_layout()
    return draw(
        st.recursive(
            tensors | PLAIN,
            lambda inner: (
                st.lists(inner, max_size=5)
                | st.tuples(inner, inner)
                | st.dictionaries(KEYS, inner, max_size=5)
                | st.dictionaries(st.text(max_size=9), inner, max_size=3).map(OrderedDict)
            ),
            max_leaves=12,
        )
    )


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
@given(obj=objects(), name=st.sampled_from(["optimizer.pt", "pytorch_model.bin", "a.b c.pt", "größe.pt"]))
def test_any_nested_object_is_imaged_byte_for_byte(shared_bench: Bench, obj: Any, name: str) -> None:
    shared_bench.compare(saving(obj), name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (5000,)], ids=str)
def test_every_dtype_is_imaged_byte_for_byte(
    bench: Bench, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    bench.compare(saving({"t": make(dtype, shape, 7)}), "t.pt")


class Tagged(torch.Tensor):
    """A tensor subclass with an attribute of its own."""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 40)
        self.norm = torch.nn.BatchNorm1d(40)
        self.head = torch.nn.Linear(40, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens)))


def trained(**options: Any) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(2):
        model(torch.arange(8)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def training_arguments() -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(output_dir="out", report_to=[], use_cpu=True)


def tagged() -> torch.Tensor:
    tensor = torch.randn(2000).as_subclass(Tagged)
    tensor.origin = "a test"
    return tensor


def base() -> torch.Tensor:
    return torch.arange(6000, dtype=torch.float32)


OBJECTS: dict[str, Callable[[], Any]] = {
    "state_dict_with_tied_weights_and_buffers": lambda: trained()[0].state_dict(),
    "whole_module": lambda: trained()[0],
    "fused_adamw_state": lambda: trained(fused=True)[1].state_dict(),
    "foreach_adamw_amsgrad_state": lambda: trained(foreach=True, amsgrad=True)[1].state_dict(),
    "rng_states": lambda: {
        "python": random.Random(5).getstate(),
        "numpy": np.random.RandomState(5).get_state(),
        "cpu": torch.Generator().manual_seed(5).get_state(),
    },
    "training_arguments": training_arguments,
    "parameter_that_requires_grad": lambda: torch.nn.Parameter(torch.randn(30, 70)),
    "gradient_hooks_and_backward_graph_leaf": lambda: torch.randn(2000, requires_grad=True),
    "tensor_subclass_with_attributes": tagged,
    "views_of_one_storage": lambda: [base()[:10], base()[5:], base().view(60, 100).t(), base()],
    "one_storage_many_views": lambda: (lambda b: [b[:10], b[5:], b.view(60, 100).t(), b])(base()),
    "one_storage_as_two_tensors_of_equal_dtype": lambda: (lambda b: [b, b.detach()])(base()),
    "tensor_that_is_there_twice": lambda: [base()] * 2,
    "overlapping_strides": lambda: base().as_strided((100, 50), (10, 1)),
    "expanded_scalar": lambda: torch.tensor(1.5).expand(1000),
    "negative_view": lambda: torch.randn(1500, dtype=torch.complex64).conj().imag,
    "untyped_storage": lambda: base().untyped_storage(),
    "typed_storage": lambda: torch.storage.TypedStorage(
        wrap_storage=base().untyped_storage(), dtype=torch.float32, _internal=True
    ),
    "empty_untyped_storage": lambda: torch.UntypedStorage(0),
    "storage_larger_than_its_tensor": lambda: base()[:3],
    "sparse_coo": lambda: torch.eye(70).to_sparse(),
    "sparse_csr": lambda: torch.eye(70).to_sparse_csr(),
    "quantized_per_tensor": lambda: torch.quantize_per_tensor(torch.randn(80, 80), 0.1, 3, torch.qint8),
    "nested_tensor": lambda: torch.nested.nested_tensor([torch.ones(3, 9), torch.ones(5, 9)]),
    "packed_sequence": lambda: torch.nn.utils.rnn.pack_sequence([torch.ones(4), torch.ones(2)]),
    "meta_tensor": lambda: torch.empty(3000, device="meta"),
    "channels_last": lambda: torch.randn(2, 30, 8, 8).to(memory_format=torch.channels_last),
    "shared_memory": lambda: base().share_memory_(),
    "numpy_memory": lambda: torch.from_numpy(np.arange(5000, dtype=np.int32)),
    "numpy_array": lambda: {"array": np.arange(5000, dtype=np.int32), "scalar": np.float64(3)},
    "inference_tensor": lambda: torch.inference_mode()(base)(),
    "two_thousand_small_tensors": lambda: {f"layer.{i}": torch.full((i % 90,), float(i)) for i in range(2000)},
    "more_small_memory_than_is_kept_as_bytes": lambda: [torch.full((1000,), float(i)) for i in range(4500)],
    "no_tensor_at_all": lambda: {"step": 5},
    "none": lambda: None,
    "large_pickle": lambda: [f"word {i}" for i in range(20000)],
}  # fmt: skip


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.filterwarnings("ignore")
def test_what_checkpoints_hold_is_imaged_byte_for_byte(bench: Bench, kind: str) -> None:
    bench.compare(saving(OBJECTS[kind]()), "model.pt")


@pytest.mark.parametrize(
    "options",
    [
        {"pickle_protocol": 4},
        {"pickle_protocol": pickle.HIGHEST_PROTOCOL},
        {"pickle_module": dill},
        {"_disable_byteorder_record": True},
    ],
    ids=str,
)
def test_options_of_torch_save_are_heeded(bench: Bench, options: dict[str, Any]) -> None:
    bench.compare(saving({"t": base()}, **options), "t.pt")


@pytest.mark.parametrize("alignment", [1, 2, 512, 4096])
def test_the_configured_storage_alignment_is_heeded(bench: Bench, alignment: int) -> None:
    with config.patch("save.storage_alignment", alignment):
        bench.compare(saving([base(), torch.ones(3), base()[1:]]), "t.pt")


NAMES = ["x.pt", "a.b.c.pt", "with space.pt", "ünïcödé.pt", "日本.bin", "noextension", "ends.", "..double.pt",
         "back\\slash.pt", "-dash.pt", "new\nline.pt", "a" * 200 + ".pt", "archive.pt"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_records_lie_in_the_folder_that_the_file_name_gives(bench: Bench, name: str) -> None:
    bench.compare(saving([base(), torch.ones(3)]), name)


def test_a_path_object_is_as_good_as_a_string(bench: Bench) -> None:
    bench.compare(lambda path: torch.save(base(), Path(path)), "t.pt")


@pytest.mark.parametrize("name", [".pt", "missing/folder/t.pt", "."])
def test_an_invalid_name_fails_as_it_does_without_us(bench: Bench, name: str) -> None:
    bench.fails_alike(saving(base()), name)


def test_an_object_that_cannot_be_pickled_fails_as_it_does_without_us(bench: Bench) -> None:
    bench.fails_alike(saving({"t": base(), "f": lambda: 0}), "t.pt")


def test_a_storage_that_cannot_be_copied_to_the_host_fails_as_it_does_without_us(bench: Bench) -> None:
    bench.fails_alike(saving([base(), torch.UntypedStorage(9000, device="meta")]), "t.pt")


def test_storages_of_one_memory_and_two_dtypes_fail_as_they_do_without_us(bench: Bench) -> None:
    tensor = base()
    bench.fails_alike(saving([tensor, tensor.view(torch.int32)]), "t.pt")


@pytest.mark.parametrize("size", [64, 100_000])
def test_bytes_that_look_like_a_zip_descriptor_are_left_to_the_stock_writer(bench: Bench, size: int) -> None:
    data = torch.zeros(size, dtype=torch.uint8)
    data[:8] = torch.tensor(list(b"PK\x07\x08crc!"), dtype=torch.uint8)
    bench.falls_back(saving([base(), data, torch.ones(9000)]), "t.pt")
    assert len(bench.sink.notes) == 1


def test_checksums_turned_off_is_left_to_the_stock_writer(bench: Bench) -> None:
    with config.patch("save.compute_crc32", False):
        bench.falls_back(saving(base()), "t.pt")


def test_a_skeleton_is_left_to_the_stock_writer(bench: Bench) -> None:
    with torch.serialization.skip_data():
        bench.falls_back(saving([base(), torch.ones(3)]), "t.pt")


def test_the_legacy_format_is_left_to_the_stock_writer(bench: Bench) -> None:
    with intercept.sink(bench.sink):
        torch.save(base(), bench.imaged / "t.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(torch.load(bench.imaged / "t.pt"), base())


def test_tensor_memory_is_not_copied(bench: Bench) -> None:
    tensor = base()
    image = bench.image(saving({"t": tensor}), "t.pt")
    (part,) = image.memory
    assert (part.address, part.nbytes, part.device) == (tensor.data_ptr(), tensor.nbytes, CPU)
    tensor.fill_(3)
    torch.save({"t": tensor}, bench.stock / "t.pt")
    assert_same_bytes(render(image), (bench.stock / "t.pt").read_bytes())


def test_memory_stays_alive_when_the_parameter_gets_other_data(bench: Bench) -> None:
    parameter = torch.nn.Parameter(base())
    torch.save(parameter, bench.stock / "t.pt")
    image = bench.image(saving(parameter), "t.pt")
    parameter.data = torch.zeros(6000)
    reuse = [torch.full((6000,), 9.0) for _ in range(50)]
    assert_same_bytes(render(image), (bench.stock / "t.pt").read_bytes())
    assert len(reuse) == 50


def test_each_storage_is_described_once_and_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = base(), base()
    known = {first.data_ptr(): (True, "weight"), second.data_ptr(): (False, "")}
    monkeypatch.setattr(bench.sink, "describe", lambda address, nbytes: known.pop(address))
    image = bench.image(saving([first, first[3:], second]), "t.pt")
    assert [(part.still, part.name) for part in image.memory] == [(True, "weight"), (False, "data/1")]


def test_small_memory_is_kept_as_bytes_within_a_budget(bench: Bench) -> None:
    count = builder.INLINE_BUDGET // 4000 + 10
    image = bench.image(saving([torch.zeros(1000) for _ in range(count)]), "t.pt")
    assert 0 < len(image.memory) < 20


def test_the_rendered_file_is_read_by_every_stock_tool(bench: Bench) -> None:
    state = trained(fused=True)[1].state_dict()
    data = render(bench.image(saving(state), "optimizer.pt"))
    path = bench.stock / "optimizer.pt"
    path.write_bytes(data)
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    if shutil.which("unzip"):
        subprocess.run(["unzip", "-tq", path], check=True, stdout=subprocess.DEVNULL)
    loaded = torch.load(path, weights_only=True, mmap=True)
    for index, moments in state["state"].items():
        assert all(torch.equal(moments[name], loaded["state"][index][name]) for name in moments)
