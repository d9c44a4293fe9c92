"""Events with timings: ``.run/events-rank<r>.jsonl``, one JSON object a line, appended.

Every line has ``time`` (seconds since 1970), ``kind``, ``run_id`` and ``attempt``; seconds and bytes are numbers. The kinds:

=============== ================================================ ===========================================================
hooked          rank, world_size, pid, host                      a process was decorated
train_begin     lineage, ordinal, resume_step                    a ``train()`` call begins
resume, skip    step, path; path, reason                         the checkpoint taken; one passed over
save            step, save, bytes, stall_s                       a save call returned
fence           step, stall_s                                    a fence had to wait
wait            what, seconds                                    training waited at its end, or for a reader of the files
staged          step, seconds                                    since the save
persisted       step, seconds                                    since the save
commit          step, seconds, bytes                             since the save
abandon         step, reason                                     a save was given up
finish          step                                             ``train()`` returned
error           text                                             anything that went wrong
=============== ================================================ ===========================================================

A line is written with one system call and not fsynced: a power cut may cost the last ones, and a torn line is passed over. A journal that
cannot be written never stops training.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from datastates.store.launches import LaunchRecord, note_output_dir
from datastates.store.layout import Root
from datastates.store.regular import open_descriptor, open_regular
from datastates.store.runrecord import Lineage, RunRecord

__all__ = [
    "Event",
    "Journal",
    "LaunchRecord",
    "Lineage",
    "RunRecord",
    "events",
    "note_output_dir",
    "read_events",
]

ROTATE_BYTES = 16 << 20
"""A journal larger than this gives way to a new one when it is opened; one old one is kept."""

_EVENTS = re.compile(r"events-rank([0-9]{1,9})\.jsonl")


@dataclass(frozen=True, slots=True)
class Event:
    """One line. ``rank`` is the journal's; ``fields`` is the whole object."""

    time: float
    kind: str
    run_id: str
    attempt: str
    rank: int
    fields: dict[str, object]

    def number(self, name: str) -> float:
        """A numeric field, 0 when it is missing or is none."""
        value = self.fields.get(name)
        return float(value) if isinstance(value, (int, float)) else 0.0

    def whole(self, name: str, default: int = 0) -> int:
        value = self.fields.get(name)
        return value if isinstance(value, int) else default

    def text(self, name: str) -> str:
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""


class Journal:
    """Appends to one rank's events; any thread may call it. ``attempt`` may be set when it is drawn."""

    def __init__(self, root: Root, rank: int, run_id: str, attempt: str = "") -> None:
        self.attempt = attempt
        self.problem: OSError | None = None
        """The first reason why an event could not be written."""
        self._path = root.events(rank)
        self._run_id = run_id
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._torn = False

    def event(self, kind: str, /, **fields: object) -> bool:
        """Append one event; False when it could not be written (``problem`` tells why)."""
        head = {"time": time.time(), "kind": kind, "run_id": self._run_id, "attempt": self.attempt}
        line = json.dumps({**head, **fields, **head}, default=str).encode() + b"\n"
        with self._lock:
            try:
                self._append(line)
            except OSError as error:
                self.problem = self.problem or error
                return False
        return True

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _append(self, line: bytes) -> None:
        if self._descriptor is None:
            self._descriptor = self._open()
        if self._torn:
            line = b"\n" + line
        self._torn = True
        self._torn = os.write(self._descriptor, line) != len(line)

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_size > ROTATE_BYTES:
                self._path.replace(self._path.with_suffix(".jsonl.old"))
        descriptor = open_descriptor(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        size = os.fstat(descriptor).st_size
        self._torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        return descriptor


def read_events(root: Root) -> list[Event]:
    """Every rank's events in order of time. What is no event, or no file, is passed over; empty when there is no journal.

    Raises:
        OSError: a journal is there but cannot be read.
    """
    found = [event for rank, path in _journals(root) for event in events(path, rank)]
    return sorted(found, key=lambda event: event.time)


def events(path: Path, rank: int) -> Iterator[Event]:
    """The events of one file."""
    with open_regular(path) as stream:
        for line in stream:
            event = _parse(line, rank)
            if event:
                yield event


def _journals(root: Root) -> list[tuple[int, Path]]:
    try:
        matches = [(_EVENTS.fullmatch(path.name), path) for path in root.run_dir.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((int(match[1]), path) for match, path in matches if match and path.is_file())


def _parse(line: bytes, rank: int) -> Event | None:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("time"), (int, float)):
        return None
    words = [fields.get(name) for name in ("kind", "run_id", "attempt")]
    if not all(isinstance(word, str) for word in words):
        return None
    return Event(float(fields["time"]), str(words[0]), str(words[1]), str(words[2]), rank, fields)
