"""Records and offsets of 4 GiB and more. Storages are sparse files and stay holes: nothing of that size is read or written."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import pytest
import torch
from datastates.engine.image import Checksum, FileImage, Literal
from datastates.formats.builder import ImageBuilder
from datastates.formats.render import fold, validate
from datastates.formats.zip_layout import ZipLayout
from formats_bench import Bench

GIB = 2**30
LIMIT = 2**32 - 1


def sparse(folder: Path, size: int) -> torch.UntypedStorage:
    """A storage of ``size`` zero bytes that takes no memory and no disk."""
    path = folder / f"storage-{size}"
    path.touch()
    with open(path, "r+b") as file:
        file.truncate(size)
    return torch.UntypedStorage.from_file(str(path), shared=True, nbytes=size)


def assert_equals_skeleton(image: FileImage, skeleton: Path) -> None:
    """All bytes but the storages'. In a skeleton the checksum of a storage is 0."""
    validate(image)
    assert skeleton.stat().st_size == image.size
    with open(skeleton, "rb") as file:
        for literal in image.literals:
            file.seek(literal.offset)
            assert file.read(len(literal.data)) == literal.data, f"literal at {literal.offset}"
        assert_skeleton_checksums(image, file)


def assert_skeleton_checksums(image: FileImage, file: io.BufferedReader) -> None:
    storages = {part.offset for part in image.memory}
    for checksum in image.checksums:
        if checksum.start in storages:
            file.seek(checksum.offset)
            assert file.read(4) == bytes(4)
    (digest,) = image.digests
    crcs = [0 if start in storages else crc_in_directory(image, start, end) for start, end in digest.ranges]
    file.seek(digest.offset)
    assert file.read(20) == fold(crcs)


def crc_in_directory(image: FileImage, start: int, end: int) -> int:
    """The CRC-32 behind a record whose bytes are literal: the layout has put it into the descriptor."""
    (literal,) = [part for part in image.literals if part.offset <= end < part.offset + len(part.data)]
    mark, crc = struct.unpack_from("<4sI", literal.data, end - literal.offset)
    assert mark == b"PK\x07\x08"
    return int(crc)


@pytest.mark.parametrize(
    "sizes",
    [
        [5 * GIB],
        [5 * GIB, 9000, 0, 9000],
        [9000, 3 * GIB, 3 * GIB, 9000],
        [LIMIT - 1, 9000],
        [LIMIT, 9000],
        [LIMIT + 1, 9000],
        [9000, 5 * GIB, 9 * GIB, 9000],
    ],
    ids=str,
)
def test_large_records_are_laid_out_as_torch_does(bench: Bench, tmp_path: Path, sizes: list[int]) -> None:
    compare_with_skeleton(
        bench, [sparse(tmp_path, size) for size in sizes if size] + [torch.UntypedStorage(0)]
    )


@pytest.mark.parametrize("distance", range(-3, 4))
def test_a_header_at_the_4_gib_limit_is_laid_out_as_torch_does(
    bench: Bench, tmp_path: Path, distance: int
) -> None:
    probe = bench.image(
        lambda path: torch.save([sparse(tmp_path, 3 * GIB), sparse(tmp_path, 9000)], path), "p.pt"
    )
    first, second = probe.memory
    descriptor = 16
    header = first.offset + first.nbytes + descriptor
    size = 3 * GIB + LIMIT - header + distance
    image = compare_with_skeleton(bench, [sparse(tmp_path, size), sparse(tmp_path, 9000)])
    assert image.memory[0].offset + size + descriptor == LIMIT + distance
    assert second.nbytes == 9000


def compare_with_skeleton(bench: Bench, storages: list[torch.UntypedStorage]) -> FileImage:
    image = bench.image(lambda path: torch.save(storages, path), "p.pt")
    skeleton = bench.stock / "p.pt"
    with torch.serialization.skip_data():
        torch.save(storages, skeleton)
    try:
        assert_equals_skeleton(image, skeleton)
    finally:
        skeleton.unlink()
    return image


def test_more_than_65535_records_are_laid_out_as_torch_does() -> None:
    names = [f"data/{i}" for i in range(66000)]
    buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer)
    for name in names:
        writer.write_record(name, b"x", 1)
    writer.write_end_of_file()
    layout = ZipLayout(b"archive", 64, ImageBuilder())
    for name in names:
        layout.add(name, b"x")
    layout.add("version", b"3\n")
    layout.add("byteorder", b"little")
    layout.add(".data/serialization_id", writer.serialization_id().encode())
    layout.finish()
    image = layout.builder.finish()
    assert image.literals == [Literal(0, buffer.getvalue())]


def test_checksums_of_small_storages_do_not_differ_from_those_of_large_ones() -> None:
    layout = ZipLayout(b"a", 64, ImageBuilder())
    layout.begin("data/0", 3)
    layout.builder.literal(b"abc")
    layout.end()
    layout.finish()
    image = layout.builder.finish()
    assert [type(part) for part in image.checksums] == [Checksum, Checksum]
    assert {(part.start, part.end) for part in image.checksums} == {(64, 67)}
