from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from datastates.store.lineage import ResumePoint, begin, new_id, unfinished, wants_fresh
from datastates.store.manifest import IDENTIFIER
from datastates.store.runrecord import Lineage, RunRecord, process_alive, process_started

PATH = Path("/out/concurrent_checkpoint/checkpoint-10")


def here(run_id: str = "run2", **lineages: Lineage) -> RunRecord:
    record = RunRecord.here(run_id=run_id, attempt="attempt2", output_dir="/out")
    for name, lineage in lineages.items():
        record = record.with_lineage(int(name.removeprefix("of_")), lineage)
    return record


OLD = Lineage(id="old", state="finished", fresh_token="launch1", began=1.0)


def test_a_fresh_start_begins_a_new_lineage_without_an_origin() -> None:
    lineage, record = begin(None, 0, None, here())
    assert (lineage.origin, lineage.state, lineage.fresh_token) == (None, "running", None)
    assert IDENTIFIER.fullmatch(lineage.id)
    assert record.lineages == {0: lineage}


def test_a_fresh_start_leaves_no_trace_of_the_lineage_before() -> None:
    lineage, record = begin(here(of_0=OLD), 0, None, here())
    assert lineage.id != "old"
    assert record.lineages == {0: lineage}


def test_resuming_the_newest_of_the_current_lineage_continues_it() -> None:
    lineage, record = begin(here(of_0=OLD), 0, ResumePoint(PATH, 10, "ours", "old"), here())
    assert (lineage.id, lineage.state, lineage.began, lineage.fresh_token) == (
        "old",
        "running",
        1.0,
        "launch1",
    )
    assert record.lineages[0] == lineage


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_resuming_anything_else_begins_a_lineage_with_that_origin(kind: str) -> None:
    lineage, _ = begin(here(of_0=OLD), 0, ResumePoint(PATH, 10, kind, None), here())
    assert lineage.id != "old"
    assert lineage.origin == str(PATH)


def test_a_lineage_whose_record_was_lost_keeps_its_id() -> None:
    lineage, _ = begin(None, 0, ResumePoint(PATH, 10, "ours", "found"), here())
    assert (lineage.id, lineage.origin) == ("found", None)


def test_earlier_ordinals_are_taken_over_untouched() -> None:
    second = Lineage(id="second", began=2.0)
    _, record = begin(here(of_0=OLD, of_1=second), 1, None, here("run3"))
    assert record.lineages[0] == OLD
    assert (record.run_id, record.state) == ("run3", "running")


def test_a_run_is_finished_when_every_begun_ordinal_is() -> None:
    _, record = begin(None, 0, None, here())
    _, record = begin(record, 1, None, record)
    assert unfinished(record)
    record = record.finished(0)
    assert (record.state, unfinished(record)) == ("running", True)
    record = record.finished(1)
    assert (record.state, unfinished(record)) == ("finished", False)
    assert not unfinished(None)


def test_a_failed_run_is_unfinished() -> None:
    _, record = begin(None, 0, None, here())
    assert unfinished(record.failed())


def test_a_fresh_launch_starts_each_ordinal_over_once_and_resumes_it_in_its_own_restarts() -> None:
    record: RunRecord | None = here(of_0=OLD)
    assert wants_fresh(record, 0, "launch2")
    _, record = begin(record, 0, None, here(), fresh_token="launch2")
    assert not wants_fresh(record, 0, "launch2")
    assert wants_fresh(record, 1, "launch2")
    assert wants_fresh(record, 0, "launch3")
    assert wants_fresh(None, 0, "launch2")
    assert not wants_fresh(record, 0, None)


def test_a_resumed_lineage_remembers_the_launch_that_asked_for_it() -> None:
    lineage, _ = begin(here(of_0=OLD), 0, ResumePoint(PATH, 10, "ours", "old"), here(), fresh_token="launch1")
    assert lineage.fresh_token == "launch1"


def test_ids_are_short_and_differ() -> None:
    ids = {new_id() for _ in range(1000)}
    assert len(ids) > 990
    assert all(IDENTIFIER.fullmatch(one) and len(one) == 8 for one in ids)


def test_a_living_process_is_told_from_a_dead_one_a_zombie_and_another_with_its_number() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = process_started(process.pid)
    assert started
    assert process_alive(process.pid, started)
    assert not process_alive(process.pid, started + 1)
    assert process.stdin
    process.stdin.close()
    with open(f"/proc/{process.pid}/stat", "rb") as stat:
        while b") Z " not in stat.read():
            stat.seek(0)
    assert not process_alive(process.pid, started)
    process.wait()
    assert not process_alive(process.pid, None)
    assert not process_alive(2**40, None)
