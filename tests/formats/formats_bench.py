"""Saves the same object twice, once by the stock writer and once as a rendered image, and compares the bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from datastates.engine.image import FileImage
from datastates.formats import intercept
from datastates.formats.render import render


class FolderSink:
    """Wants what is saved below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.images: dict[str, FileImage] = {}
        self.notes: list[str] = []

    def wants(self, path: str) -> bool:
        return Path(path).is_relative_to(self.folder)

    def describe(self, address: int, nbytes: int) -> tuple[bool, str]:
        return True, ""

    def accept(self, path: str, image: FileImage) -> None:
        self.images[str(Path(path).relative_to(self.folder))] = image

    def note(self, text: str) -> None:
        self.notes.append(text)


class Bench:
    """Two folders, ``stock`` and ``imaged``; what is saved into the second one inside :meth:`catch` becomes images."""

    def __init__(self, folder: Path) -> None:
        self.stock = folder / "stock"
        self.imaged = folder / "imaged"
        self.stock.mkdir()
        self.imaged.mkdir()
        self.sink = FolderSink(self.imaged)

    def image(self, save: Callable[[str], object], name: str) -> FileImage:
        with intercept.sink(self.sink):
            save(str(self.imaged / name))
        assert not (self.imaged / name).exists(), f"{name} was written: {self.sink.notes}"
        return self.sink.images.pop(name)

    def compare(self, save: Callable[[str], object], name: str) -> FileImage:
        """``save(path)`` as image and as stock file; they must be equal byte for byte."""
        image = self.image(save, name)
        save(str(self.stock / name))
        assert_same_bytes(render(image), (self.stock / name).read_bytes())
        return image

    def falls_back(self, save: Callable[[str], object], name: str) -> None:
        """``save(path)`` is left to the stock writer even inside the scope, and the file is the stock file."""
        with intercept.sink(self.sink):
            save(str(self.imaged / name))
        assert not self.sink.images
        save(str(self.stock / name))
        assert_same_bytes((self.imaged / name).read_bytes(), (self.stock / name).read_bytes())

    def fails_alike(self, save: Callable[[str], object], name: str) -> None:
        """``save(path)`` raises the same error inside the scope as outside."""
        path = str(self.imaged / name)
        with pytest.raises(Exception) as expected:
            save(path)
        with intercept.sink(self.sink), pytest.raises(type(expected.value)) as found:
            save(path)
        assert type(found.value) is type(expected.value)
        assert without_random_names(str(found.value)) == without_random_names(str(expected.value))
        assert not self.sink.images


def without_random_names(message: str) -> str:
    return re.sub(r"\.tmp\w+", ".tmp", message)


def assert_same_bytes(found: bytes, expected: bytes) -> None:
    """Like ``cmp``: names the first byte that differs instead of printing both."""
    if found != expected:
        pairs = enumerate(zip(found, expected, strict=False))
        first = next((at for at, (a, b) in pairs if a != b), min(len(found), len(expected)))
        around = slice(max(0, first - 16), first + 16)
        pytest.fail(
            f"byte {first} differs (sizes {len(found)} and {len(expected)}): {found[around]!r} is not {expected[around]!r}"
        )
