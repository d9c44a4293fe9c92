"""The file on disk is the image, byte for byte, whatever its parts, the cache and the way of writing are."""

from __future__ import annotations

import os
import stat
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from datastates.engine import Checksum, Engine, FileImage, FileResult, Literal, Memory, PendingFile
from engine_support import (
    BLOCK,
    PATIENCE,
    ImageBuilder,
    finish,
    memory_image,
    names,
    pending,
    random_bytes,
    save,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PAGE = 4096
sizes = st.one_of(
    st.integers(0, 64),
    st.integers(1000, 1050),
    st.sampled_from([PAGE - 1, PAGE, PAGE + 1, 3 * PAGE]),
    st.integers(0, 30_000),
)
parts = st.tuples(
    st.sampled_from(["literal", "still", "moving", "checksum", "digest"]), sizes, st.integers(0, 2**32)
)


def build(layout: list[tuple[str, int, int]]) -> ImageBuilder:
    builder = ImageBuilder()
    for kind, size, seed in layout:
        here = len(builder.expected)
        start, end = sorted((seed % (here + 1), seed // 7 % (here + 1)))
        if kind == "literal":
            builder.literal(random_bytes(size, seed))
        elif kind == "checksum":
            builder.checksum(start, end)
        elif kind == "digest":
            builder.digest([(start, end), (0, here), (end, end)])
        else:
            builder.memory(random_bytes(size, seed), still=kind == "still", name=f"{kind} {here}")
    return builder


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layouts=st.lists(st.lists(parts, max_size=12), max_size=3),
    blocks=st.integers(2, 6),
    block_pages=st.integers(1, 5),
    io=st.sampled_from(["auto", "buffered"]),
    threads=st.integers(1, 3),
)
def test_a_file_is_its_image_for_any_layout_and_cache(layouts, blocks, block_pages, io, threads) -> None:
    block = block_pages * PAGE
    builders = [build(layout) for layout in layouts]
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine(blocks * block, block_bytes=block, io=io, threads=threads)
        ticket = save(engine, *((builder, Path(directory) / str(i)) for i, builder in enumerate(builders)))
        assert ticket.state == "persisted", ticket.error
        assert names(Path(directory)) == [str(i) for i in range(len(builders))]
        for i, builder in enumerate(builders):
            path = Path(directory) / str(i)
            assert path.read_bytes() == builder.expected
            assert ticket.files[i] == FileResult(
                str(path), len(builder.expected), zlib.crc32(builder.expected)
            )
        assert engine.close(PATIENCE)


@pytest.mark.parametrize("io", ["auto", "direct", "buffered"])
def test_a_file_many_times_the_cache_streams_through(
    make_engine: Callable[..., Engine], tmp_path: Path, io: str
) -> None:
    builder = memory_image(random_bytes(40 * BLOCK + 5))
    ticket = save(make_engine(2, io=io), (builder, tmp_path / "large"))
    assert ticket.state == "persisted", ticket.error
    assert (tmp_path / "large").read_bytes() == builder.expected


def test_empty_files_and_saves_without_files_are_persisted(engine: Engine, tmp_path: Path) -> None:
    ticket = save(engine, (ImageBuilder(), tmp_path / "empty"))
    assert ticket.state == "persisted"
    assert (tmp_path / "empty").read_bytes() == b""
    assert ticket.files == [FileResult(str(tmp_path / "empty"), 0, 0)]
    assert save(engine).state == "persisted"


def test_twenty_thousand_parts_take_no_quadratic_work(engine: Engine, tmp_path: Path) -> None:
    builder = ImageBuilder()
    ranges = []
    for i in range(20_000):
        builder.literal(b"header %5d " % i)
        start = len(builder.expected)
        builder.memory(i.to_bytes(4, "little") * (1 + i % 30), name=str(i))
        ranges.append((start, len(builder.expected)))
        builder.checksum(*ranges[-1])
    builder.digest(ranges)
    begun = time.process_time()
    ticket = save(engine, (builder, tmp_path / "parts"))
    # About 0.15 s; work that grows with the square would take minutes.
    assert time.process_time() - begun < 10
    assert (tmp_path / "parts").read_bytes() == builder.expected
    assert ticket.state == "persisted"


def test_derived_fields_may_lie_across_blocks(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    for shift in range(24):
        builder = memory_image(random_bytes(BLOCK - shift))
        builder.digest([(0, BLOCK - shift), (5, 10)])
        builder.checksum(3, len(builder.expected))
        builder.memory(random_bytes(BLOCK + 1))
        builder.checksum(0, len(builder.expected))
        save(make_engine(2), (builder, tmp_path / "file"))
        assert (tmp_path / "file").read_bytes() == builder.expected


def test_modes_follow_the_umask(engine: Engine, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save(engine, (memory_image(b"x" * 5000), tmp_path / "file"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_names_may_be_any_bytes(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "gewicht-\N{WEIGHT LIFTER}-\udcff.bin"
    ticket = save(engine, (memory_image(b"data" * 1000), path))
    assert path.read_bytes() == b"data" * 1000
    assert ticket.files[0].path == str(path)


def test_an_older_file_of_the_same_name_is_replaced_and_its_links_are_not_touched(
    engine: Engine, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    os.link(path, tmp_path / "link")
    save(engine, (memory_image(b"new" * 1000), path))
    assert path.read_bytes() == b"new" * 1000
    assert (tmp_path / "link").read_bytes() == b"old"


def test_a_temporary_that_a_dead_process_left_is_replaced_not_followed(
    engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "file.tmp").symlink_to(tmp_path / "precious")
    save(engine, (memory_image(b"new" * 1000), tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == b"new" * 1000
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_files_in_several_directories_belong_to_one_save(engine: Engine, tmp_path: Path) -> None:
    for directory in ("a", "b"):
        (tmp_path / directory).mkdir()
    files = [
        (memory_image(random_bytes(3000, i)), tmp_path / name) for i, name in enumerate(["a/1", "b/2", "a/3"])
    ]
    save(engine, *files)
    for builder, path in files:
        assert path.read_bytes() == builder.expected


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (FileImage(5, [Literal(0, b"abc")]), "no part covers bytes 3 to 5"),
        (FileImage(5, [Literal(1, b"abcd")]), "no part covers bytes 0 to 1"),
        (FileImage(2, [Literal(0, b"abc")]), "goes beyond the size"),
        (FileImage(4, [Literal(0, b"abc"), Literal(2, b"de")]), "two parts cover the byte at 2"),
        (FileImage(4, memory=[Memory(0, 0, 4, None, True, "w")]), "'w' has address 0"),
        (FileImage(4, checksums=[Checksum(0, 0, 1)]), "not a range before it"),
        (FileImage(2**63, memory=[Memory(0, 4096, 2**63 + 1, None)]), "goes beyond the size"),
    ],
)
def test_a_malformed_image_is_refused_with_its_file_and_reason(
    engine: Engine, tmp_path: Path, image: FileImage, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        engine.submit([PendingFile(image, str(tmp_path / "x.tmp"), str(tmp_path / "x"))])
    assert str(tmp_path / "x") in str(refused.value)
    assert names(tmp_path) == []


def test_what_is_no_image_is_a_type_error_not_a_crash(engine: Engine, tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    for image in (
        None,
        FileImage(3, [Literal(0, "abc")]),
        FileImage(-1),
        FileImage(4, [7]),
        FileImage(4, None),
    ):  # type: ignore[arg-type, list-item]
        with pytest.raises((TypeError, AttributeError, OverflowError)):
            engine.submit([PendingFile(image, path, path)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="null"):
        engine.submit([PendingFile(FileImage(0), "a\0b", path)])


def test_nothing_has_its_name_before_approval_and_all_of_it_is_on_disk_by_then(
    engine: Engine, tmp_path: Path
) -> None:
    builder = memory_image(random_bytes(3 * BLOCK + 11))
    ticket = engine.submit([pending(builder, tmp_path / "file")])
    assert ticket.wait_staged(PATIENCE)
    assert not ticket.wait(0.05)
    assert ticket.state == "staged"
    assert names(tmp_path) == ["file.tmp"]
    assert ticket.files == []
    finish(ticket)
    assert names(tmp_path) == ["file"]
