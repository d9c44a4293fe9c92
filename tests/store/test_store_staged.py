"""One checkpoint takes the place of another: killed at any point, one of the two is there, whole."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from datastates.store import commit, staged
from datastates.store.catalog import Checkpoint, damage, verify
from datastates.store.layout import CheckpointDir
from datastates.store.manifest import FileEntry, Vote


def save(path: Path, number: int, files: dict[str, str], until: str = "settled") -> CheckpointDir:
    """A save of one rank into ``path``, which gets as far as ``until``."""
    directory = staged.open_directory(path, number, "a", number)
    for name, text in files.items():
        file = directory.files / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    entries = tuple(
        FileEntry(name, len(text), zlib.crc32(text.encode())) for name, text in sorted(files.items())
    )
    vote = Vote(
        attempt="a", save=number, step=number, rank=0, world_size=1, lineage="l", ordinal=0, files=entries
    )
    if until == "written":
        return directory
    commit.cast_vote(directory, vote)
    if directory.staged:
        staged.replace(directory)
    if until == "voted":
        return directory
    commit.publish(directory, [vote], others=[])
    if until == "settled":
        staged.settle(path)
    return directory


def read(path: Path) -> dict[str, str]:
    """What lies in the checkpoint, which has to be a whole one."""
    assert damage(Checkpoint.load(path)) is None
    return {
        str(file.relative_to(path)): file.read_text()
        for file in sorted(path.rglob("*"))
        if file.is_file() and ".ckpt" not in file.relative_to(path).parts
    }


OLD = {"model": "old", "shard/0": "old 0", "shard/1": "old 1"}
NEW = {"model": "newer", "shard/0": "new 0"}


def test_the_first_save_writes_where_the_files_belong(tmp_path: Path) -> None:
    directory = save(tmp_path / "last", 1, OLD)
    assert directory.staged == ""
    assert read(tmp_path / "last") == OLD


def test_the_second_takes_its_place_and_leaves_no_shard_too_many(tmp_path: Path) -> None:
    save(tmp_path / "last", 1, OLD)
    save(tmp_path / "last", 2, NEW)
    assert read(tmp_path / "last") == NEW
    assert Checkpoint.load(tmp_path / "last").step == 2
    assert sorted(path.name for path in (tmp_path / "last/.ckpt").iterdir()) == [
        "manifest.json",
        "rank-0.json",
    ]


@pytest.mark.parametrize("until", ["written", "voted"])
def test_until_the_commit_the_old_one_is_whole(tmp_path: Path, until: str) -> None:
    save(tmp_path / "last", 1, OLD)
    save(tmp_path / "last", 2, NEW, until)
    assert read(tmp_path / "last") == OLD
    staged.settle(tmp_path / "last")
    assert read(tmp_path / "last") == OLD
    save(tmp_path / "last", 3, NEW)
    assert read(tmp_path / "last") == NEW


def interruptions(act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Do it again and again, each time interrupted one step later."""
    for allowed in range(100):
        left = [allowed]

        def interrupted(original, left=left):  # type: ignore[no-untyped-def]
            def operation(*args, **kwargs):  # type: ignore[no-untyped-def]
                if not left[0]:
                    raise KeyboardInterrupt
                left[0] -= 1
                return original(*args, **kwargs)

            return operation

        with monkeypatch.context() as patch:
            for name in ("replace", "unlink", "rmdir"):
                patch.setattr(os, name, interrupted(getattr(os, name)))
            try:
                act()
            except KeyboardInterrupt:
                yield allowed
            else:
                return


def test_interrupted_anywhere_after_the_commit_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "last", 1, OLD)
    save(tmp_path / "last", 2, NEW, "published")
    assert staged.waits(tmp_path / "last")
    assert len(list(interruptions(lambda: staged.settle(tmp_path / "last"), monkeypatch))) > 3
    assert read(tmp_path / "last") == NEW
    assert not staged.waits(tmp_path / "last")


def test_between_the_commit_and_the_move_every_file_is_found_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = tmp_path / "last"
    save(last, 1, OLD)
    save(last, 2, NEW, "published")
    for _ in interruptions(lambda: staged.settle(last), monkeypatch):
        verdicts = [verdict for verdict in verify(Checkpoint.load(last)) if verdict.path in NEW]
        assert [(verdict.path, verdict.ok) for verdict in verdicts] == [(name, True) for name in sorted(NEW)]


def test_damage_to_a_file_that_waits_is_found(tmp_path: Path) -> None:
    last = tmp_path / "last"
    save(last, 1, OLD)
    directory = save(last, 2, NEW, "published")
    (directory.files / "model").write_text("NEWER")
    assert [verdict.path for verdict in verify(Checkpoint.load(last)) if not verdict.ok] == ["model"]


def test_what_the_user_put_there_stays(tmp_path: Path) -> None:
    save(tmp_path / "last", 1, OLD)
    (tmp_path / "last/notes.txt").write_text("mine")
    save(tmp_path / "last", 2, NEW)
    assert read(tmp_path / "last") == NEW | {"notes.txt": "mine"}


def test_what_stock_code_left_counts_until_the_commit(tmp_path: Path) -> None:
    last = tmp_path / "last"
    last.mkdir()
    (last / "model").write_text("stock")
    directory = save(last, 1, NEW, "written")
    assert directory.staged
    assert not staged.uncommitted(last)
    assert (last / "model").read_text() == "stock"
    save(last, 2, NEW)
    assert read(last) == NEW


def test_a_first_save_that_was_never_committed_counts_for_nothing(tmp_path: Path) -> None:
    save(tmp_path / "last", 1, OLD, "voted")
    assert staged.uncommitted(tmp_path / "last")
    save(tmp_path / "last", 2, NEW)
    assert not staged.uncommitted(tmp_path / "last")
    found = Checkpoint.load(tmp_path / "last")
    assert damage(found) is None
    assert found.step == 2


def test_no_shard_of_a_save_that_was_never_committed_is_left_and_what_the_user_put_beside_it_stays(
    tmp_path: Path,
) -> None:
    last = tmp_path / "last"
    save(last, 1, OLD, "voted")
    (last / "mine").write_text("mine")
    save(last, 2, NEW)
    assert read(last) == {**NEW, "mine": "mine"}


@pytest.mark.parametrize("kind", ["committed", "never committed", "stock"])
def test_a_checkpoint_whose_removal_was_interrupted_passes_for_none(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = tmp_path / "last"
    if kind == "stock":
        (last / "shard").mkdir(parents=True)
        (last / "model").write_text("stock")
        (last / "shard/0").write_text("stock")
    else:
        save(last, 1, OLD, "voted" if kind == "never committed" else "settled")
    seen = 0
    for _ in interruptions(lambda: staged.remove(last), monkeypatch):
        assert staged.uncommitted(last) or read_anything(last) == kind, sorted(last.rglob("*"))
        seen += 1
    assert seen > 3
    assert not last.exists()


def read_anything(path: Path) -> str:
    """What a checkpoint counts for while nothing has been removed of it."""
    if (path / ".ckpt/manifest.json").exists():
        return "committed" if read(path) == OLD else ""
    return "stock" if {file.name for file in path.rglob("*") if file.is_file()} >= {"model", "0"} else ""


def test_a_directory_in_which_nothing_has_been_written_yet_is_no_checkpoint(tmp_path: Path) -> None:
    assert staged.uncommitted(tmp_path)
    assert not staged.uncommitted(tmp_path / "missing")
    (tmp_path / "model").write_text("stock")
    assert not staged.uncommitted(tmp_path)
