"""A save whose records are those of the save before is laid out as that one was; whatever has changed, the file is the stock file."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datastates.formats import intercept, kept_layout, quick_pickle, self_check, torch_zip
from datastates.formats.render import render
from formats_bench import Bench, FolderSink, assert_same_bytes

State = dict[str, Any]


def state() -> State:
    """Large and small tensors, two that share a storage, an empty one, and numbers beside them."""
    generator = torch.Generator().manual_seed(4)
    large = {f"w{i}": torch.randn(1100 + i, generator=generator) for i in range(40)}
    small = {f"step{i}": torch.tensor(float(i)) for i in range(40)}
    return {
        "large": large,
        "small": small,
        "empty": torch.empty(0, 3),
        "view": large["w3"][4:900],
        "two_dimensional": torch.randn(40, 50, generator=generator),
        "octets": torch.ones(3000, dtype=torch.int8),
        "half": torch.randn(3000, generator=generator).bfloat16(),
        "unsigned": torch.arange(3000, dtype=torch.int32).to(torch.uint16),
        "parameter": torch.nn.Parameter(torch.randn(2000, generator=generator)),
        "groups": [{"lr": 0.25, "step": 7, "name": "all", "betas": (0.9, 0.999)}],
    }


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What became of each image: "new" or "kept"."""
    assert self_check.torch_zip() is None  # now, or the first save makes an image more
    monkeypatch.setattr(torch_zip, "_layouts", kept_layout.KeptLayouts())
    seen: list[str] = []
    for name, how in (("_anew", "new"), ("_again", "kept")):
        monkeypatch.setattr(
            torch_zip.ZipRecorder, name, noting(getattr(torch_zip.ZipRecorder, name), how, seen)
        )
    return seen


def noting(method: Callable[..., Any], how: str, seen: list[str]) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        seen.append(how)
        return method(*args)

    return noted


def saving(obj: Any) -> Callable[[str], None]:
    return lambda path: torch.save(obj, path)


def moved(tensor: torch.Tensor) -> None:
    tensor.data = tensor.detach().clone()


def renamed(tensors: State) -> None:
    name, tensor = tensors.popitem()
    tensors[name.swapcase()] = tensor


def scale(saved: State) -> None:
    for tensor in (*saved["large"].values(), *saved["small"].values(), saved["two_dimensional"]):
        tensor.mul_(1.5)


def resized_storage(saved: State) -> None:
    saved["two_dimensional"].untyped_storage().resize_(9000)


SAME_RECORDS: dict[str, Callable[[State], object]] = {
    "nothing": lambda saved: None,
    "values": scale,
    "a_tensor_moved": lambda saved: moved(saved["large"]["w5"]),
    "many_tensors_moved": lambda saved: [moved(tensor) for tensor in [*saved["large"].values()][4:]],
    "a_float": lambda saved: saved["groups"][0].update(lr=0.125),
    "a_number": lambda saved: saved["groups"][0].update(step=8),
    "a_tensor_is_another": lambda saved: saved["large"].update(w5=torch.ones(1105)),
    "two_tensors_changed_places": lambda saved: saved["large"].update(w5=saved["large"]["w6"][:1105].clone()),
    "a_shape": lambda saved: saved.update(two_dimensional=saved["two_dimensional"].reshape(50, 40)),
    "strides": lambda saved: saved["two_dimensional"].t_(),
    "a_dtype_of_one_size": lambda saved: saved.update(octets=torch.ones(3000, dtype=torch.uint8)),
    "gradients": lambda saved: saved["large"]["w5"].requires_grad_(),
    "a_name": lambda saved: renamed(saved["large"]),
    "other_values_of_small_tensors": lambda saved: saved["small"].update(step3=torch.tensor(33.0)),
    "another_view": lambda saved: saved.update(view=saved["large"]["w3"][5:901]),
}  # fmt: skip

OTHER_RECORDS: dict[str, Callable[[State], object]] = {
    "a_key_more": lambda saved: saved["large"].update(more=torch.ones(2000)),
    "a_key_less": lambda saved: saved["large"].pop("w7"),
    "a_longer_shape": lambda saved: saved["large"].update(w5=torch.ones(1106)),
    "a_dtype": lambda saved: saved["large"].update(w5=saved["large"]["w5"].double()),
    "a_number_of_more_bytes": lambda saved: saved["groups"][0].update(step=70_000),
    "a_text": lambda saved: saved["groups"][0].update(name="everything"),
    "a_storage_shared_now": lambda saved: saved["large"].update(w5=saved["large"]["w6"]),
    "a_storage_shared_no_more": lambda saved: saved.update(view=saved["view"].clone()),
    "a_storage_larger_than_its_tensor": resized_storage,
    "a_small_tensor_grown": lambda saved: saved["small"].update(step3=torch.ones(1500)),
    "sizes_changed_places": lambda saved: saved["large"].update(w5=torch.ones(1106), w6=torch.ones(1105)),
    "other_order": lambda saved: saved.update(large=dict(reversed(saved["large"].items()))),
    "an_attribute": lambda saved: setattr(saved["large"]["w5"], "origin", "a test"),
}  # fmt: skip


@pytest.mark.parametrize("change", SAME_RECORDS)
def test_the_layout_is_kept_and_the_file_is_the_stock_file(
    bench: Bench, layouts: list[str], change: str
) -> None:
    saved = state()
    bench.compare(saving(saved), "optimizer.pt")
    for _ in range(2):
        SAME_RECORDS[change](saved)
        bench.compare(saving(saved), "optimizer.pt")
    assert layouts[:2] == ["new", "kept"]


@pytest.mark.parametrize("change", OTHER_RECORDS)
def test_records_that_differ_are_laid_out_anew(bench: Bench, layouts: list[str], change: str) -> None:
    saved = state()
    bench.compare(saving(saved), "optimizer.pt")
    before = copy.deepcopy(saved)
    OTHER_RECORDS[change](saved)
    bench.compare(saving(saved), "optimizer.pt")
    bench.compare(saving(before), "optimizer.pt")
    bench.compare(saving(saved), "optimizer.pt")
    assert layouts == ["new", "new", "kept", "kept"]


def test_a_kept_layout_holds_the_memory_of_the_save_and_no_other(bench: Bench, layouts: list[str]) -> None:
    saved = state()
    first = bench.image(saving(saved), "optimizer.pt")
    expected = render(first)
    old = [tensor.data_ptr() for tensor in saved["large"].values()]
    moved(saved["large"]["w5"])
    saved["large"]["w5"].zero_()
    second = bench.image(saving(saved), "optimizer.pt")
    assert layouts == ["new", "kept"]
    assert_same_bytes(render(first), expected)
    addresses = {part.address for part in second.memory}
    assert saved["large"]["w5"].data_ptr() in addresses
    assert old[5] not in addresses
    assert {part.address for part in first.memory} - addresses == {old[5]}


def test_a_kept_layout_keeps_no_tensor_alive(bench: Bench, layouts: list[str]) -> None:
    tensors = [torch.randn(2000) for _ in range(40)]
    for _ in range(2):
        bench.image(saving(tensors), "t.pt")
    uses = [torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) for tensor in tensors]
    assert layouts == ["new", "kept"]
    assert set(uses) == {2}  # the tensor's own, and the one in hand


def test_files_of_one_stem_or_another_do_not_mix(bench: Bench, layouts: list[str]) -> None:
    first, second = state(), state()
    second["large"].pop("w5")
    for name in ("a.pt", "a.bin", "b.pt", "a.pt"):
        bench.compare(saving(first), name)
        bench.compare(saving(second), name)
    assert layouts == ["new", "new", "kept", "kept", "new", "new", "kept", "kept"]


def test_another_alignment_is_another_layout(bench: Bench, layouts: list[str]) -> None:
    from torch.utils.serialization import config

    saved = state()
    bench.compare(saving(saved), "a.pt")
    with config.patch("save.storage_alignment", 32):
        bench.compare(saving(saved), "a.pt")
    assert layouts == ["new", "new"]


def test_memory_that_looks_like_a_zip_descriptor_is_left_to_the_stock_writer_later_too(
    bench: Bench, layouts: list[str]
) -> None:
    saved = state()
    bench.compare(saving(saved), "a.pt")
    for name in ("two_dimensional", "small"):
        tensor = saved[name]["step3"] if name == "small" else saved[name]
        before = tensor.clone()
        tensor.view(-1).view(torch.uint8)[:4] = torch.tensor(list(b"PK\x07\x08"), dtype=torch.uint8)
        bench.falls_back(saving(saved), "a.pt")
        tensor.copy_(before)
        (bench.imaged / "a.pt").unlink()
    bench.compare(saving(saved), "a.pt")
    assert layouts == ["new", "kept", "kept", "kept"]


def test_small_objects_are_not_kept(bench: Bench, layouts: list[str]) -> None:
    for _ in range(2):
        bench.compare(saving({"t": torch.ones(3000)}), "t.pt")
    assert layouts == ["new", "new"]


def test_no_more_is_kept_than_the_bound(
    bench: Bench, layouts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bench.image(saving(state()), "a.pt")
    parts = len(first.literals) + len(first.memory) + len(first.checksums)
    monkeypatch.setattr(kept_layout, "MOST", 2 * parts)
    for name in ("a.pt", "b.pt", "c.pt", "c.pt", "b.pt", "a.pt"):
        bench.compare(saving(state()), name)
    assert layouts[1:] == ["kept", "new", "new", "kept", "kept", "new"]


def test_threads_that_save_at_once_do_not_disturb_each_other(bench: Bench) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        sink = FolderSink(bench.imaged)
        saved = state()
        try:
            for turn in range(6):
                saved["large"]["w0"].fill_(number * 10 + turn)
                with intercept.sink(sink):
                    torch.save(saved, bench.imaged / "a.pt")
                path = bench.stock / str(number) / "a.pt"
                path.parent.mkdir(exist_ok=True)
                torch.save(saved, path)
                assert_same_bytes(render(sink.images.pop("a.pt")), path.read_bytes())
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# What the pickle of a tensor consists of


@pytest.mark.parametrize("word", ["storage", "cpu", "0", "1", "12", "FloatStorage", "_rebuild_tensor_v2"])
def test_words_of_the_users_that_torch_writes_as_well(bench: Bench, word: str) -> None:
    bench.compare(
        saving([word, {word: torch.ones(20)}, word, *(torch.ones(5) for _ in range(14)), word]), "t.pt"
    )


def test_one_storage_or_tensor_or_dictionary_in_many_places(bench: Bench) -> None:
    tensor, hooks = torch.arange(3000.0), OrderedDict()
    bench.compare(
        saving(
            [tensor, tensor, tensor[1:], tensor.view(50, 60), tensor.untyped_storage().nbytes(), hooks, hooks]
        ),
        "t.pt",
    )


def test_storages_beside_tensors(bench: Bench) -> None:
    octets = torch.arange(5000).to(torch.uint8)
    bench.compare(saving([octets.untyped_storage(), octets, torch.ones(3)._typed_storage()]), "t.pt")


def test_a_tensor_with_hooks_or_attributes_or_a_conjugate_bit(bench: Bench) -> None:
    hooked, tagged = torch.ones(2000, requires_grad=True), torch.ones(2000)
    hooked.register_hook(torch.utils.hooks.unserializable_hook(lambda gradient: gradient))
    tagged.origin = "a test"
    bench.compare(
        saving([hooked, tagged, torch.ones(900, dtype=torch.complex64).conj(), torch.ones(2)]), "t.pt"
    )


def test_a_changed_way_to_pickle_tensors_is_followed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = torch.Tensor._reduce_ex_internal

    def reversed_strides(self: torch.Tensor, protocol: int) -> Any:
        function, arguments = stock(self, protocol)
        return function, (*arguments[:3], arguments[3][::-1], *arguments[4:])

    monkeypatch.setattr(torch.Tensor, "_reduce_ex_internal", reversed_strides)
    bench.compare(saving([torch.ones(40, 50), torch.ones(3, 4)]), "t.pt")


def test_a_way_to_pickle_tensors_that_the_program_has_registered_is_followed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    import copyreg

    monkeypatch.setitem(copyreg.dispatch_table, torch.Tensor, lambda tensor: (len, (f"{tensor.shape}",)))
    bench.compare(saving([torch.ones(40, 50), torch.ones(3, 4)]), "t.pt")


def test_a_location_that_the_program_has_registered_is_followed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = torch.serialization._package_registry
    monkeypatch.setattr(torch.serialization, "_package_registry", [*registry])
    torch.serialization.register_package(1, lambda storage: "here", lambda storage, location: storage)
    bench.compare(saving([torch.ones(40, 50), torch.ones(3, 4)]), "t.pt")


@pytest.mark.parametrize("difference", ["hooks", "error"])
def test_where_the_shorter_way_differs_from_torchs_it_is_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, difference: str
) -> None:
    monkeypatch.setattr(quick_pickle, "usable", True)
    if difference == "hooks":
        monkeypatch.setattr(quick_pickle, "_NO_HOOKS", (dict, ()))
    else:
        monkeypatch.setattr(quick_pickle, "_kind_of", lambda tensor: tensor.nothing)
    self_check.torch_zip.cache_clear()
    try:
        assert self_check.torch_zip() is None
        assert not quick_pickle.usable
        bench.compare(saving(state()), "t.pt")
    finally:
        self_check.torch_zip.cache_clear()
    assert not bench.sink.notes
