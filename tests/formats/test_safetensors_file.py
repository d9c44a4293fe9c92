"""An imaged safetensors file is the library's file, byte for byte."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from datastates.formats.render import render
from formats_bench import Bench, assert_same_bytes
from formats_tensors import DTYPES, FLOAT4, contiguous, make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_model
from safetensors.torch import save_file as safe_save_file


def is_saved_by_the_library(dtype: torch.dtype) -> bool:
    if dtype is FLOAT4 and not hasattr(safetensors, "TensorSpec"):
        return False  # before 0.8 we leave it to the library
    try:
        safetensors.torch.save({"t": make(dtype, (2,), 0)})
    except (KeyError, safetensors.SafetensorError):
        return False
    return True


SUPPORTED = [dtype for dtype in DTYPES if is_saved_by_the_library(dtype)]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=15) | st.sampled_from(
    ['"shape":[0],"data_offsets":[0,0]', "model.layers.0.weight", "a\\b", "\0", "\x7f\u2028", "ü/日本"]
)


def saving(tensors: Any, metadata: Any = None) -> Callable[[str], None]:
    return lambda path: safe_save_file(tensors, path, metadata)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
@given(
    tensors=st.dictionaries(NAMES, contiguous(SUPPORTED), min_size=1, max_size=8),
    metadata=st.none() | st.dictionaries(NAMES, NAMES, max_size=1),
)
def test_any_tensors_are_imaged_byte_for_byte(
    shared_bench: Bench, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None
) -> None:
    shared_bench.compare(saving(tensors, metadata), "model.safetensors")


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 4), (3, 5), (90, 80)], ids=str)
def test_every_dtype_is_imaged_byte_for_byte(
    bench: Bench, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    save = saving({"t": make(dtype, shape, 7)}, {"format": "pt"})
    if dtype is FLOAT4 and shape == ():
        bench.fails_alike(save, "model.safetensors")
    else:
        bench.compare(save, "model.safetensors")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}], ids=str)
def test_no_tensors_at_all(bench: Bench, metadata: dict[str, str] | None) -> None:
    bench.compare(saving({}, metadata), "model.safetensors")


def test_two_thousand_tensors(bench: Bench) -> None:
    bench.compare(
        saving({f"layer.{i}": torch.full((i % 70, 30), float(i)) for i in range(2000)}), "model.safetensors"
    )


def test_parts_of_one_storage_that_do_not_overlap(bench: Bench) -> None:
    whole = torch.arange(9000.0)
    bench.compare(saving({"head": whole[:4000], "tail": whole[5000:]}), "model.safetensors")


@pytest.mark.skipif(torch.complex64 not in SUPPORTED, reason="no complex numbers in this safetensors")
def test_conjugate_views_and_parameters(bench: Bench) -> None:
    bench.compare(
        saving(
            {"conj": torch.randn(2000, dtype=torch.complex64).conj(), "p": torch.nn.Parameter(torch.ones(5))}
        ),
        "model.safetensors",
    )


def test_a_path_object_is_as_good_as_a_string(bench: Bench) -> None:
    bench.compare(lambda path: safe_save_file({"t": torch.ones(3)}, Path(path)), "model.safetensors")


def test_arguments_by_name(bench: Bench) -> None:
    bench.compare(
        lambda path: safe_save_file(filename=path, metadata={"a": "b"}, tensors={"t": torch.ones(3)}),
        "model.safetensors",
    )


def test_save_model_with_tied_weights(bench: Bench) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 40, bias=False), torch.nn.Linear(40, 40, bias=False))
    model[1].weight = model[0].weight
    bench.compare(lambda path: save_model(model, path), "model.safetensors")


def test_metadata_of_several_keys_come_in_one_of_the_orders_of_the_library(bench: Bench) -> None:
    metadata = {f"key {i}": str(i) for i in range(5)}
    tensors = {"b": torch.randn(3000), "a": torch.ones(7, dtype=torch.int64)}
    found = render(bench.image(saving(tensors, metadata), "model.safetensors"))
    saving(tensors, metadata)(str(bench.stock / "model.safetensors"))
    expected = (bench.stock / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", expected)
    assert found[:8] == expected[:8]
    assert json.loads(found[8 : 8 + length]) == json.loads(expected[8 : 8 + length])
    assert list(json.loads(found[8 : 8 + length])) == ["__metadata__", "a", "b"]
    assert_same_bytes(found[8 + length :], expected[8 + length :])


def test_the_rendered_file_is_read_by_the_library(bench: Bench) -> None:
    tensors = {"a": torch.randn(70, 70), "b": torch.arange(5), "c": torch.tensor(2.5, dtype=torch.bfloat16)}
    path = bench.stock / "model.safetensors"
    path.write_bytes(render(bench.image(saving(tensors, {"format": "pt"}), "model.safetensors")))
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(path).items())
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == ["a", "b", "c"]
        assert torch.equal(file.get_slice("a")[3:5], tensors["a"][3:5])


def test_tensor_memory_is_not_copied_and_carries_the_tensors_name(bench: Bench) -> None:
    tensor = torch.arange(6000.0)
    (part,) = bench.image(saving({"weight": tensor[2000:]}), "model.safetensors").memory
    assert (part.address, part.nbytes, part.name) == (tensor[2000:].data_ptr(), 16000, "weight")


def test_memory_stays_alive_when_the_parameter_gets_other_data(bench: Bench) -> None:
    parameter = torch.nn.Parameter(torch.arange(6000.0))
    saving({"p": parameter})(str(bench.stock / "model.safetensors"))
    image = bench.image(saving({"p": parameter}), "model.safetensors")
    parameter.data = torch.zeros(6000)
    reuse = [torch.full((6000,), 9.0) for _ in range(50)]
    assert_same_bytes(render(image), (bench.stock / "model.safetensors").read_bytes())
    assert len(reuse) == 50


def shared() -> dict[str, torch.Tensor]:
    whole = torch.arange(9000.0)
    return {"a": whole, "b": whole[10:]}


REFUSED: dict[str, Callable[[], Any]] = {
    "shared_memory": shared,
    "not_contiguous": lambda: {"fine": torch.ones(3), "t": torch.ones(30, 40).t()},
    "sparse": lambda: {"t": torch.eye(5).to_sparse()},
    "not_a_tensor": lambda: {"t": [1, 2]},
    "not_a_dictionary": lambda: [torch.ones(3)],
    "dtype_unknown_to_the_format": lambda: {"t": torch.ones(3, dtype=torch.complex128)},
    "key_that_is_no_text": lambda: {5: torch.ones(3)},
    "key_that_is_no_unicode": lambda: {"\ud800": torch.ones(3)},
    "meta_tensor": lambda: {"t": torch.empty(3000, device="meta")},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_library_refuses_is_refused_in_its_own_words(bench: Bench, kind: str) -> None:
    bench.fails_alike(saving(REFUSED[kind]()), "model.safetensors")


@pytest.mark.parametrize("metadata", [{"a": 1}, ["a"], {1: "a"}], ids=str)
def test_metadata_that_are_no_text_are_refused_in_the_librarys_own_words(bench: Bench, metadata: Any) -> None:
    bench.fails_alike(saving({"t": torch.ones(3)}, metadata), "model.safetensors")


@pytest.mark.parametrize("name", ["missing/model.safetensors", "."])
def test_an_invalid_name_fails_as_it_does_without_us(bench: Bench, name: str) -> None:
    bench.fails_alike(saving({"t": torch.ones(3)}), name)


def test_a_tensor_called_like_the_metadata_is_left_to_the_library(bench: Bench) -> None:
    bench.falls_back(saving({"__metadata__": torch.ones(3), "t": torch.ones(3)}), "model.safetensors")
