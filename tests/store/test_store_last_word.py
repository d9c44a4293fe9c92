"""A rank that cannot write its vote still ends the waits of the others."""

from __future__ import annotations

import os
from pathlib import Path

import disks
import pytest
from datastates.store import last_word
from datastates.store.layout import Root


def test_a_rank_that_gave_up_is_known_by_attempt_and_save(tmp_path: Path) -> None:
    root = Root.of(tmp_path)
    assert last_word.given_up(root, "a1", 3) == []
    last_word.give_up(root, "a1", 3, 12)
    last_word.give_up(root, "a1", 3, 2)
    assert last_word.given_up(root, "a1", 3) == [2, 12]
    assert last_word.given_up(root, "a1", 31) == []
    assert last_word.given_up(root, "a1-3", 3) == []
    assert last_word.given_up(root, "a2", 3) == []


def test_a_new_attempt_forgets_all_of_them_and_nothing_else(tmp_path: Path) -> None:
    root = Root.of(tmp_path)
    last_word.forget(root)
    last_word.give_up(root, "a1", 3, 0)
    root.run_record.write_text("kept")
    last_word.forget(root)
    assert last_word.given_up(root, "a1", 3) == []
    assert os.listdir(root.run_dir) == ["run.json"]


def test_a_directory_that_cannot_be_read_tells_nothing(tmp_path: Path) -> None:
    root = Root.of(tmp_path)
    root.path.mkdir()
    root.run_dir.write_text("a file")
    assert last_word.given_up(root, "a1", 3) == []


def test_the_last_word_needs_no_space_on_a_full_disk(tmp_path: Path) -> None:
    with disks.small(tmp_path / "disk", 64 << 10) as disk:
        root = Root.of(disk / "out")
        root.run_dir.mkdir(parents=True)
        with (
            pytest.raises(OSError, match="No space left"),
            open(disk / "ballast", "wb", buffering=0) as stream,
        ):
            while True:
                stream.write(bytes(4096))
        last_word.give_up(root, "a1", 1, 0)
        assert last_word.given_up(root, "a1", 1) == [0]
