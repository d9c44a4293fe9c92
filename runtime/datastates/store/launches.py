"""The launcher's own memory: which output directory a command in a directory used last.

One JSON file for each working directory and command under ``$XDG_STATE_HOME/ckpt-run`` (default ``~/.local/state/ckpt-run``), readable by
the user alone, since commands may hold secrets. The process inside knows the output directory for certain and notes it in a file of its
own, so that launcher and trainer never write the same file. Without a writable home everything here does nothing and answers None.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from datastates.store.document import Fields, ManifestError, decode, read_bytes
from datastates.store.durable import write_durably
from datastates.store.manifest import IDENTIFIER

LAUNCH_VERSION = 1
KEPT = 200
"""Older records are forgotten."""

_PRIVATE_FILE = 0o600
_PRIVATE_DIRECTORY = 0o700


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """One launch. Times are in seconds since 1970; ``state`` is "running", "finished" or "failed"; ``exit_code`` is the command's.

    ``decorated``: a Trainer of it was. ``off``: why nothing was saved concurrently all the same.
    """

    run_id: str
    cwd: str
    command: tuple[str, ...]
    started: float
    output_dir: str | None = None
    ended: float | None = None
    state: str = "running"
    exit_code: int | None = None
    restarts: int = 0
    decorated: bool = False
    off: str | None = None

    @classmethod
    def begin(cls, run_id: str, command: Sequence[str], output_dir: str | None = None) -> LaunchRecord:
        """A launch from the current directory, now."""
        return cls(
            run_id=run_id, cwd=os.getcwd(), command=tuple(command), started=time.time(), output_dir=output_dir
        )

    def over(self, exit_code: int) -> LaunchRecord:
        """The same after the command ended for good."""
        return replace(
            self, ended=time.time(), exit_code=exit_code, state="failed" if exit_code else "finished"
        )

    def write(self) -> Path | None:
        """Remember this launch as the last of its command and directory; None when there is no place for it."""
        home = state_home()
        if home is None:
            return None
        path = home / f"{_key(self.cwd, self.command)}.json"
        if not _write(path, self._encode()):
            return None
        _forget_old(home)
        return path

    @classmethod
    def find(cls, cwd: str, command: Sequence[str]) -> LaunchRecord | None:
        """The last launch of this command in this directory, with the output directory that its process noted."""
        home = state_home()
        return _read(home / f"{_key(cwd, command)}.json") if home else None

    @classmethod
    def newest(cls, cwd: str) -> LaunchRecord | None:
        """The last launch of any command in this directory."""
        found = [record for record in _records() if record.cwd == cwd]
        return max(found, key=lambda record: record.started, default=None)

    def _encode(self) -> bytes:
        body = {
            "version": LAUNCH_VERSION,
            "run_id": self.run_id,
            "cwd": self.cwd,
            "command": list(self.command),
            "output_dir": self.output_dir,
            "started": self.started,
            "ended": self.ended,
            "state": self.state,
            "exit_code": self.exit_code,
            "restarts": self.restarts,
        }
        return json.dumps(body, indent=1).encode("ascii") + b"\n"


def note_output_dir(run_id: str, path: str | os.PathLike[str], off: str | None = None) -> Path | None:
    """Called in the process inside: the output directory of a launch, for certain. None when it could not be noted.

    Args:
        off: why nothing is saved concurrently there.
    """
    home = state_home()
    if home is None or not IDENTIFIER.fullmatch(run_id):
        return None
    note = _note(home, run_id)
    body = {"version": LAUNCH_VERSION, "output_dir": os.path.abspath(path), "off": off}
    return note if _write(note, json.dumps(body).encode("ascii") + b"\n") else None


def state_home() -> Path | None:
    """Where the records lie; None without a home. The directory need not exist."""
    configured = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(configured):
        return Path(configured) / "ckpt-run"
    home = os.path.expanduser("~")
    return Path(home) / ".local/state/ckpt-run" if os.path.isabs(home) else None


def _key(cwd: str, command: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([cwd, *command]).encode("ascii")).hexdigest()[:24]


def _note(home: Path, run_id: str) -> Path:
    return home / f"output-{run_id}.json"


def _write(path: Path, data: bytes) -> bool:
    try:
        path.parent.mkdir(mode=_PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        write_durably(path, data, _PRIVATE_FILE)
    except OSError:
        return False  # by design: no writable home, no memory
    return True


def _read(path: Path) -> LaunchRecord | None:
    try:
        fields = decode(read_bytes(path), path, LAUNCH_VERSION)
        run_id = fields.text("run_id", IDENTIFIER)
        noted = _noted(path.parent, run_id)
        return LaunchRecord(
            run_id=run_id,
            cwd=fields.text("cwd"),
            command=fields.texts("command"),
            output_dir=(noted.optional_text("output_dir") if noted else None)
            or fields.optional_text("output_dir"),
            decorated=noted is not None,
            off=noted.optional_text("off") if noted else None,
            started=fields.number("started"),
            ended=fields.optional_number("ended"),
            state=fields.choice("state", "running", "finished", "failed"),
            exit_code=fields.optional_whole("exit_code", low=-(1 << 31)),
            restarts=fields.whole("restarts"),
        )
    except (FileNotFoundError, ManifestError):
        return None


def _noted(home: Path, run_id: str) -> Fields | None:
    """What :func:`note_output_dir` has noted last."""
    note = _note(home, run_id)
    try:
        return decode(read_bytes(note), note, LAUNCH_VERSION)
    except (FileNotFoundError, ManifestError):
        return None


def _records() -> Iterator[LaunchRecord]:
    for path in _record_files(state_home()):
        record = _read(path)
        if record:
            yield record


def _record_files(home: Path | None) -> list[Path]:
    try:
        return [path for path in home.iterdir() if path.suffix == ".json"] if home else []
    except OSError:
        return []


def _forget_old(home: Path) -> None:
    files = _record_files(home)
    if len(files) <= 2 * KEPT:
        return
    try:
        files.sort(key=lambda path: path.stat().st_mtime)
        for path in files[: len(files) - 2 * KEPT]:
            path.unlink(missing_ok=True)
    except OSError:
        return  # another launch forgets too, or the home became read-only: nothing depends on it
