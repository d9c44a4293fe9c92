"""A script with several trainings: one that is done anew takes with it what was built on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from datastates.store import lineage
from datastates.store.lineage import OURS, ResumePoint
from datastates.store.runrecord import Lineage, RunRecord


def record(*ids: str) -> RunRecord:
    """Of a script whose ``train()`` calls began the lineages ``ids``."""
    here = RunRecord.here(run_id="run1", attempt="attempt1", output_dir="/out")
    for ordinal, identity in enumerate(ids):
        here = here.with_lineage(ordinal, Lineage(id=identity))
    return here


def begin(previous: RunRecord | None, ordinal: int, decision: ResumePoint | None) -> dict[int, str]:
    """The ids of the lineages in the record that ``train()`` call ``ordinal`` writes; its own is named ``new`` if it is."""
    mine, written = lineage.begin(previous, ordinal, decision, record())
    old = {known.id for known in previous.lineages.values()} if previous else set()
    return {
        number: "new" if known.id == mine.id and mine.id not in old else known.id
        for number, known in written.lineages.items()
    }


def test_a_fresh_start_forgets_the_trainings_after_it() -> None:
    assert begin(record("a", "b", "c"), 0, None) == {0: "new"}
    assert begin(record("a", "b", "c"), 1, None) == {0: "a", 1: "new"}
    assert begin(record("a", "b", "c"), 2, None) == {0: "a", 1: "b", 2: "new"}


def test_a_start_from_another_checkpoint_forgets_them_too() -> None:
    elsewhere = ResumePoint(Path("/elsewhere/checkpoint-3"), 3, OURS, None)
    assert begin(record("a", "b"), 0, elsewhere) == {0: "new"}


@pytest.mark.parametrize("ordinal", [0, 1])
def test_a_resume_keeps_them(ordinal: int) -> None:
    previous = record("a", "b", "c")
    own = ResumePoint(Path("/out/checkpoint-3"), 3, OURS, previous.lineages[ordinal].id)
    assert begin(previous, ordinal, own) == {0: "a", 1: "b", 2: "c"}


def test_the_first_record_has_the_new_lineage_alone() -> None:
    assert begin(None, 0, None) == {0: "new"}
