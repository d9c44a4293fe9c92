from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from datastates.store.heartbeat import Heartbeat
from datastates.store.journal import Journal
from datastates.store.layout import Root
from datastates.store.runrecord import Lineage, RunRecord
from datastates.store.summary import summarize
from store_files import FILES, record, save, uncommitted


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.of(tmp_path)


def test_where_nothing_ran_nothing_is_found(root: Root) -> None:
    summary = summarize(root)
    assert (summary.found, summary.state, summary.newest, summary.step) == (False, "none", None, None)


def test_a_run_is_told_with_its_stalls_commits_and_what_is_in_flight(root: Root) -> None:
    written = record(root, {0: Lineage(id="lineage1")})
    replace(written, step=10, max_steps=100, world_size=2).write(root)
    save(root, 10)
    save(root, 90, lineage="older")
    uncommitted(root, 20)
    Journal(root, 0, "run0", "attempt0").event("error", text="of an older run")
    ranks = [Journal(root, rank, "run1", "attempt1") for rank in (0, 1)]
    for rank, journal in enumerate(ranks):
        journal.event("hooked", rank=rank, world_size=2)
        journal.event("save", step=10, save=1, bytes=5, stall_s=0.1 + rank)
        journal.event("fence", step=10, stall_s=0.5)
    ranks[0].event("commit", step=10, seconds=3.0, bytes=10)
    for journal in ranks:
        journal.event("save", step=20, save=2, bytes=5, stall_s=0.4)
    ranks[1].event("wait", what="end of training", seconds=2.0)
    ranks[1].event("error", text="slow disk")
    summary = summarize(root)
    assert summary.found
    assert (summary.state, summary.step, summary.max_steps) == ("running", 20, 100)
    assert summary.newest and summary.newest.step == 10
    assert (summary.committed, summary.in_flight, summary.saves) == (2, (20,), 2)
    assert summary.stall_s == pytest.approx((1.6 + 0.4) / 2)
    assert summary.longest_stall_s == pytest.approx(1.6)
    assert (summary.commit_s, summary.wait_s) == (3.0, 2.0)
    assert (summary.hooked, summary.world_size, summary.last_error) == (2, 2, "slow disk")
    plain = json.loads(json.dumps(summary.to_json()))
    assert plain["newest"]["bytes"] == sum(map(len, FILES.values())) + len('{"global_step": 10}') + 2
    assert plain["run"]["lineages"]["0"]["id"] == "lineage1"


def test_between_saves_the_heartbeat_tells_the_step(root: Root) -> None:
    record(root, {0: Lineage(id="lineage1")})
    Journal(root, 0, "run1", "attempt1").event("save", step=10)
    Heartbeat(attempt="attempt1", step=17, max_steps=40, time=4e9).write(root)
    summary = summarize(root)
    assert (summary.step, summary.max_steps, summary.updated) == (17, 40, 4e9)


@pytest.mark.parametrize("step", [b"17", b'"17"', b"-1", b"1" * 30])
@pytest.mark.parametrize("attempt", [b"attempt0", b"attempt1"])
def test_a_heartbeat_of_another_attempt_or_that_makes_no_sense_tells_nothing(
    step: bytes, attempt: bytes, root: Root
) -> None:
    record(root, {0: Lineage(id="lineage1")})
    Journal(root, 0, "run1", "attempt1").event("save", step=10)
    root.heartbeat.write_bytes(
        b'{"version": 1, "attempt": "%s", "step": %s, "max_steps": 40, "time": 4e9}' % (attempt, step)
    )
    is_good = (step, attempt) == (b"17", b"attempt1")
    assert summarize(root).step == (17 if is_good else 10)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", bytes(1000)])
def test_a_damaged_heartbeat_tells_nothing(data: bytes, root: Root) -> None:
    record(root, {0: Lineage(id="lineage1")})
    Journal(root, 0, "run1", "attempt1").event("save", step=10)
    root.heartbeat.write_bytes(data)
    assert summarize(root).step == 10


def test_a_launch_that_is_started_again_tells_nothing_of_the_attempt_before(root: Root) -> None:
    before = record(root, {0: Lineage(id="lineage1")})
    journal = Journal(root, 0, "run1", "attempt1")
    journal.event("save", step=10)
    Heartbeat(attempt="attempt1", step=17, max_steps=40).write(root)
    replace(before, attempt="attempt2", started=time.time(), step=8).write(root)
    summary = summarize(root)
    assert (summary.state, summary.step, summary.in_flight) == ("running", 8, ())
    journal.attempt = "attempt2"
    journal.event("save", step=12)
    summary = summarize(root)
    assert (summary.step, summary.in_flight) == (12, (12,))


def test_a_save_given_up_is_in_flight_no_more_and_its_reason_is_the_last_error(root: Root) -> None:
    record(root, {0: Lineage(id="lineage1")})
    journal = Journal(root, 0, "run1", "attempt1")
    journal.event("save", step=10)
    assert summarize(root).in_flight == (10,)
    journal.event("abandon", step=10, reason="no vote from rank 1")
    summary = summarize(root)
    assert (summary.in_flight, summary.last_error) == ((), "no vote from rank 1")


def test_a_run_whose_process_was_killed_is_interrupted_and_has_nothing_in_flight(root: Root) -> None:
    code = (
        "import sys, os, signal; from pathlib import Path; from datastates.store.journal import *; from datastates.store.layout import Root\n"
        "root = Root(Path(sys.argv[1]))\n"
        "run = RunRecord.here(run_id='run1', attempt='attempt1', output_dir='/out')\n"
        "run.with_lineage(0, Lineage(id='lineage1')).write(root)\n"
        "Journal(root, 0, 'run1', 'attempt1').event('save', step=30)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(root.path)], check=False).returncode == -9
    summary = summarize(root)
    assert (summary.state, summary.step, summary.in_flight) == ("interrupted", 30, ())
    finished = summary.run
    assert finished
    finished.finished(0).write(root)
    assert summarize(root).state == "finished"


def test_a_run_on_another_host_is_believed(root: Root) -> None:
    replace(record(root, {0: Lineage(id="lineage1")}), host="elsewhere", pid=2**22).write(root)
    assert summarize(root).state == "running"


def test_an_unreadable_record_and_damaged_checkpoints_are_told_not_raised(root: Root) -> None:
    save(root, 10)
    save(root, 20).directory.manifest.write_bytes(b"{")
    root.run_dir.mkdir()
    root.run_record.write_bytes(bytes(100))
    summary = summarize(root)
    assert summary.found
    assert "run.json: is not whole" in str(summary.problem)
    assert summary.newest and summary.newest.step == 10
    assert len(summary.damaged) == 1
    assert "checkpoint-20" in summary.damaged[0]


def test_a_record_that_cannot_be_used_names_its_file_and_reason(root: Root) -> None:
    written = record(root, {})
    body = json.loads(written.encode())
    for change, reason in (
        ({"pid": "x"}, "pid is not a whole number"),
        ({"state": "sleeping"}, "state cannot be 'sleeping'"),
        ({"lineages": {"one": {}}}, "ordinal 'one'"),
        ({"lineages": {"0": {"id": "a/b"}}}, r"lineages\['0'\].id cannot be"),
        ({"version": 2}, "newer version"),
    ):
        root.run_record.write_text(json.dumps({**body, **change}))
        with pytest.raises(ValueError, match=rf"run\.json.*{reason}"):
            RunRecord.read(root)


def test_status_starts_without_torch_and_without_anything_outside_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import datastates.store.summary, datastates.store.commit, datastates.store.retention\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names) - {'datastates'}))\n"
        "print(sorted(name for name in sys.modules if name.startswith('datastates.') and not name.startswith('datastates.store')))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.splitlines() == ["[]", "[]"]
