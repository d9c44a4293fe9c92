from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from datastates.store.journal import Journal, read_events
from datastates.store.layout import Root


def kinds(root: Root) -> list[str]:
    return [event.kind for event in read_events(root)]


def test_events_are_read_back_with_their_fields_in_order_of_time(tmp_path: Path) -> None:
    root = Root.of(tmp_path)
    first, second = Journal(root, 0, "run1"), Journal(root, 11, "run1", "attempt1")
    first.event("hooked", rank=0, world_size=2, pid=os.getpid(), host="here")
    first.attempt = "attempt1"
    first.event("save", step=10, save=1, bytes=2**40, stall_s=0.25)
    second.event("fence", step=10, stall_s=0.5, kind="never this", time="nor this")
    first.event("error", text="disk full: Ünïcode\nnew line", odd=Path("/x"))
    events = read_events(root)
    assert [(event.kind, event.rank, event.attempt) for event in events] == [
        ("hooked", 0, ""),
        ("save", 0, "attempt1"),
        ("fence", 11, "attempt1"),
        ("error", 0, "attempt1"),
    ]
    assert (events[1].whole("bytes"), events[1].number("stall_s")) == (2**40, 0.25)
    assert events[3].text("text") == "disk full: Ünïcode\nnew line"
    assert (events[1].number("missing"), events[1].text("step"), events[3].whole("text", 7)) == (0.0, "", 7)


def test_a_torn_last_line_costs_only_itself(tmp_path: Path) -> None:
    root = Root.of(tmp_path)
    journal = Journal(root, 0, "run1")
    for step in (1, 2):
        journal.event("save", step=step)
    journal.close()
    path = root.events(0)
    os.truncate(path, path.stat().st_size - 9)
    assert kinds(root) == ["save"]
    journal = Journal(root, 0, "run1")
    journal.event("commit", step=1)
    journal.event("finish", step=1)
    assert kinds(root) == ["save", "commit", "finish"]


def test_lines_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    root = Root.of(tmp_path)
    root.run_dir.mkdir(parents=True)
    good = json.dumps({"time": 1, "kind": "save", "run_id": "r", "attempt": "a"}).encode()
    hostile = [
        b"",
        b"\0" * 100,
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"time": "x"}',
        b'{"time": 1, "kind": 3}',
        b"\xff\xfe",
        b"NaN",
    ]
    root.events(0).write_bytes(b"\n".join([*hostile, good, b"{"]))
    (root.run_dir / "events-rankX.jsonl").write_bytes(good)
    assert kinds(root) == ["save"]


def test_where_nothing_was_written_there_are_no_events(tmp_path: Path) -> None:
    assert read_events(Root.of(tmp_path)) == []


def test_many_processes_and_threads_append_whole_lines(tmp_path: Path) -> None:
    code = (
        "import sys, threading; from pathlib import Path; from datastates.store.journal import Journal, Root\n"
        "journal = Journal(Root(Path(sys.argv[1])), 0, 'run1')\n"
        "work = lambda: [journal.event('fence', step=n, text='x' * 300) for n in range(100)]\n"
        "threads = [threading.Thread(target=work) for _ in range(3)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
    )
    root = Root.of(tmp_path)
    processes = [subprocess.Popen([sys.executable, "-c", code, str(root.path)]) for _ in range(3)]
    assert [process.wait(100) for process in processes] == [0] * 3
    assert len(read_events(root)) == 900


def test_a_journal_that_cannot_be_written_tells_and_never_raises(tmp_path: Path) -> None:
    root = Root.of(tmp_path)
    root.path.mkdir()
    root.run_dir.write_text("a file where the folder should be")
    journal = Journal(root, 0, "run1")
    assert journal.event("save", step=1) is False
    assert "exists" in str(journal.problem)
    assert read_events(root) == []
    root.run_dir.unlink()
    assert journal.event("save", step=2) is True


def test_a_journal_that_grew_too_large_gives_way_to_a_new_one(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("datastates.store.journal.ROTATE_BYTES", 500)
    root = Root.of(tmp_path)
    for number in range(3):
        journal = Journal(root, 0, "run1")
        for _ in range(10):
            journal.event("save", step=number)
        journal.close()
    assert len(read_events(root)) == 10
    assert sorted(path.name for path in root.run_dir.iterdir()) == [
        "events-rank0.jsonl",
        "events-rank0.jsonl.old",
    ]


def test_an_open_journal_holds_one_file_descriptor_and_closes_it(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    journal = Journal(Root.of(tmp_path), 0, "run1")
    for _ in range(50):
        journal.event("save")
    assert len(os.listdir("/proc/self/fd")) == before + 1
    journal.close()
    journal.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() >= 1
