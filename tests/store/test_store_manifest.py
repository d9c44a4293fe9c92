from __future__ import annotations

import contextlib
import json
import os
import socket
import tracemalloc
import zlib
from pathlib import Path

import pytest
from datastates.store import manifest
from datastates.store.document import seal
from datastates.store.manifest import (
    Abandonment,
    FileEntry,
    Manifest,
    ManifestError,
    Vote,
    parse_abandonment,
    parse_manifest,
    parse_vote,
)
from datastates.store.runrecord import Fingerprint, Lineage, RunRecord, parse_run_record
from hypothesis import given, settings
from hypothesis import strategies as st

FILE = Path("/x/manifest.json")

names = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20
).filter(lambda name: name not in (".", "..", ".ckpt"))
paths = st.lists(names, min_size=1, max_size=4).map("/".join)
entries = st.builds(FileEntry, paths, st.integers(0, 2**62), st.integers(0, 2**32 - 1))
file_lists = st.lists(entries, max_size=5, unique_by=lambda entry: entry.path).map(tuple)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


def a_manifest(**facts: object) -> Manifest:
    plain = {
        "attempt": "a1",
        "save": 3,
        "step": 200,
        "rank": 0,
        "world_size": 2,
        "lineage": "l1",
        "ordinal": 0,
        "created": 1.5,
    }
    files = (FileEntry("model.safetensors", 10, 0xDEADBEEF), FileEntry("sub/x.pt", 0, 0))
    return Manifest(**{"files": files, **plain, **facts})  # type: ignore[arg-type]


def changed(**members: object) -> bytes:
    """A manifest with other members, under a checksum that is right."""
    body = json.loads(a_manifest().encode())
    del body["checksum"]
    return seal({**body, **members})


@settings(deadline=None)
@given(
    file_lists, st.integers(0, 2**62), st.floats(0, 1e12), st.none() | st.text(st.characters(), max_size=50)
)
def test_what_is_written_is_read_back(
    files: tuple[FileEntry, ...], step: int, created: float, error: str | None
) -> None:
    whole = a_manifest(files=files, step=step, created=created)
    assert parse_manifest(whole.encode(), FILE) == whole
    vote = Vote(
        attempt="a",
        save=0,
        step=step,
        rank=1,
        world_size=2,
        lineage="l",
        ordinal=1,
        files=files,
        created=created,
        error=error,
    )
    assert parse_vote(vote.encode(), FILE) == vote
    word = Abandonment(attempt="a", save=step, reason=error or "", created=created)
    assert parse_abandonment(word.encode(), FILE) == word


def test_votes_and_manifests_of_format_1_look_on_disk_as_they_always_did() -> None:
    common = {
        "version": 1,
        "attempt": "a1",
        "save": 3,
        "step": 200,
        "rank": 0,
        "world_size": 2,
        "lineage": "l1",
        "ordinal": 0,
        "created": 1.5,
    }
    files = [
        {"path": "model.safetensors", "size": 10, "crc32": "deadbeef"},
        {"path": "sub/x.pt", "size": 0, "crc32": "00000000"},
    ]
    manifest = a_manifest()
    assert manifest.encode() == seal({**common, "files": files})
    facts = {name: value for name, value in common.items() if name != "version"}
    ballot = Vote(files=manifest.files, error="disk full", **facts)  # type: ignore[arg-type]
    assert ballot.encode() == seal({**common, "error": "disk full", "files": files})


@pytest.mark.parametrize("parse", [parse_manifest, parse_vote, parse_abandonment, parse_run_record])
@settings(deadline=None)
@given(data=st.binary(max_size=300) | json_values.map(lambda value: json.dumps(value).encode()))
def test_hostile_bytes_raise_nothing_but_manifest_error(parse: object, data: bytes) -> None:
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        parse(data, FILE)  # type: ignore[operator]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(json.loads(a_manifest().encode()))), json_values)
def test_a_hostile_member_under_a_right_checksum_raises_nothing_but_manifest_error(
    name: str, value: object
) -> None:
    data = changed(**{name: value}) if name != "checksum" else changed()
    for parse in (parse_manifest, parse_vote, parse_abandonment):
        try:
            parse(data, FILE)
        except ManifestError as error:
            assert str(FILE) in str(error)


@settings(deadline=None)
@given(st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject) -> None:
    whole = bytearray(a_manifest().encode())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ManifestError):
        parse_manifest(bytes(whole), FILE)


def test_every_truncation_is_noticed() -> None:
    whole = a_manifest().encode()
    for length in range(len(whole)):
        with pytest.raises(ManifestError):
            parse_manifest(whole[:length], FILE)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/etc/passwd", "is absolute"),
        ("../other/model.bin", "leads out"),
        ("sub/../../x", "leads out"),
        ("", "is not a file name"),
        ("a//b", "is not a file name"),
        ("./a", "is not a file name"),
        ("a/", "is not a file name"),
        ("a\0b", "is not a file name"),
        ("n" * 256, "is not a file name"),
        ("\ud800", "is not a file name"),
        (".ckpt/manifest.json", "lies in .ckpt"),
        ("p/" * 3000 + "x", "cannot be"),
    ],
)
def test_a_path_that_leads_elsewhere_is_refused(path: str, reason: str) -> None:
    with pytest.raises(ManifestError, match=reason):
        parse_manifest(changed(files=[{"path": path, "size": 1, "crc32": "00000000"}]), FILE)


def test_file_names_that_are_not_utf8_survive() -> None:
    whole = a_manifest(files=(FileEntry("odd\udcff", 1, 2),))
    assert parse_manifest(whole.encode(), FILE) == whole


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"files": [{"path": "a", "size": 1, "crc32": "00000000"}] * 2}, "occurs twice"),
        ({"files": [{"path": "a", "size": -1, "crc32": "00000000"}]}, "size cannot be -1"),
        ({"files": [{"path": "a", "size": 1.0, "crc32": "00000000"}]}, "size is not a whole number"),
        ({"files": [{"path": "a", "size": True, "crc32": "00000000"}]}, "size is not a whole number"),
        ({"files": [{"path": "a", "size": 2**63, "crc32": "00000000"}]}, "size cannot be"),
        ({"files": [{"path": "a", "size": 1, "crc32": "DEADBEEF"}]}, "crc32 cannot be"),
        ({"files": [{"path": "a", "size": 1, "crc32": "0"}]}, "crc32 cannot be"),
        ({"files": {"a": 1}}, "files is not a list"),
        ({"files": ["a"]}, r"files\[0\] is not an object"),
        ({"step": -1}, "step cannot be"),
        ({"step": "200"}, "step is not a whole number"),
        ({"rank": 2}, "rank cannot be 2"),
        ({"world_size": 0}, "world_size cannot be 0"),
        ({"attempt": "../x"}, "attempt cannot be"),
        ({"lineage": ""}, "lineage cannot be"),
        ({"created": "now"}, "created is not a number"),
        ({"version": 0}, "version cannot be 0"),
        ({"version": 2}, "written by a newer version of ckpt-run"),
        ({"step": 10**30}, "too large"),
    ],
)
def test_every_wrong_member_has_a_reason(members: dict[str, object], reason: str) -> None:
    with pytest.raises(ManifestError, match=reason):
        parse_manifest(changed(**members), FILE)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b"[1]", "is not a JSON object"),
        (b"\xff\xfe", "is not whole"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"version": NaN}', "NaN"),
        (b'{"version": 1, "version": 1}', "occurs twice"),
        (bytes(500), "is not whole"),
    ],
)
def test_what_is_no_document_has_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ManifestError, match=reason):
        parse_manifest(data, FILE)


def test_a_newer_format_is_named_even_when_it_is_sealed_otherwise() -> None:
    with pytest.raises(ManifestError, match=r"format 7; this one reads up to 1"):
        parse_manifest(b'{"version": 7, "blake3": "x"}', FILE)


def test_members_that_a_later_release_adds_are_no_error() -> None:
    assert parse_manifest(changed(comment="hello"), FILE) == a_manifest()


def test_the_checksum_is_the_crc32_of_every_byte_before_it() -> None:
    data = a_manifest().encode()
    head, _, tail = data.rpartition(b',\n "checksum": "')
    assert int(tail[:8], 16) == zlib.crc32(head)


def test_a_document_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datastates.store.document.MAX_BYTES", 1 << 20)
    path = tmp_path / "manifest.json"
    path.write_bytes(bytes(2 << 20))
    with pytest.raises(ManifestError, match="larger than 1 MiB"):
        manifest.read_manifest(path)


def test_reading_a_document_takes_memory_for_that_document_alone(tmp_path: Path) -> None:
    """Where memory is limited, room for the largest document there may be cannot be had."""
    path = tmp_path / "manifest.json"
    path.write_bytes(a_manifest().encode())
    tracemalloc.start()
    try:
        manifest.read_manifest(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_document_that_is_not_there_is_told_apart_from_one_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        manifest.read_manifest(tmp_path / "manifest.json")
    with pytest.raises(ManifestError, match="Is a directory"):
        manifest.read_manifest(tmp_path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "terminal", "device", "socket"])
def test_what_is_no_regular_file_is_named_and_never_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket has to be short
    path = tmp_path / "manifest.json"
    with contextlib.ExitStack() as opened:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "terminal":
            master, slave = os.openpty()
            opened.callback(os.close, master)
            opened.callback(os.close, slave)
            path.symlink_to(os.ttyname(slave))
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            opened.enter_context(socket.socket(socket.AF_UNIX)).bind(path.name)
        with pytest.raises(ManifestError, match=r"manifest\.json: (is not a regular file|cannot be read)"):
            manifest.read_manifest(path)


FACTS = st.dictionaries(st.text(), st.text(), max_size=3)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 99),
        st.builds(
            Lineage,
            id=st.just("l1"),
            origin=st.none() | st.text(),
            began=st.floats(0, 1e12),
            fingerprint=st.none() | st.builds(Fingerprint, model=FACTS, training=FACTS),
        ),
    )
)
def test_a_run_record_is_read_back_as_written(lineages: dict[int, Lineage]) -> None:
    here = RunRecord.here(run_id="r1", attempt="a1", output_dir="/out", world_size=4, step=7, max_steps=9)
    for ordinal, lineage in lineages.items():
        here = here.with_lineage(ordinal, lineage)
    assert parse_run_record(here.encode(), FILE) == here
