"""``.run/run.json``: the newest run in an output directory, and the lineages of its ``train()`` calls.

The *ordinal* of a ``train()`` call is how many calls of this process into the same root came before it. A run is finished when every ordinal
that was ever begun is finished.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from datastates.store.document import Fields, ManifestError, decode, read_bytes
from datastates.store.durable import make_directories, write_durably
from datastates.store.layout import Root
from datastates.store.manifest import IDENTIFIER

RECORD_VERSION = 1

RUNNING = "running"
FINISHED = "finished"
FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a training is known again by: facts by name, as texts that are only compared.

    ``model`` are those of the model, empty when it is not known before ``train()`` builds it; ``training`` are those of the arguments and
    the data. A fact that cannot be told is left out.
    """

    model: Mapping[str, str] = field(default_factory=dict)
    training: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """One training from its fresh start through all its resumes.

    ``origin`` is the checkpoint it began from when that was not its own (None: from the beginning); ``began`` is in seconds since 1970;
    ``fresh_token`` is that of the launch which asked for a fresh start, so that a restart within that launch does not start fresh again;
    ``fingerprint`` is of the newest launch, None when that could not be told.
    """

    id: str
    origin: str | None = None
    state: str = RUNNING
    fresh_token: str | None = None
    began: float = field(default_factory=time.time)
    fingerprint: Fingerprint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What ``run.json`` says. Times are in seconds since 1970; ``pid_started`` tells apart two processes with one pid.

    ``ended_well``: the program that trained has ended, without an error as far as is known. Much may come after the last training.
    """

    run_id: str
    attempt: str
    host: str
    pid: int
    command: tuple[str, ...]
    cwd: str
    world_size: int
    started: float
    updated: float
    state: str
    step: int
    max_steps: int
    output_dir: str
    lineages: Mapping[int, Lineage] = field(default_factory=dict)
    pid_started: int | None = None
    ended_well: bool = False

    @classmethod
    def here(
        cls,
        *,
        run_id: str,
        attempt: str,
        output_dir: str,
        world_size: int = 1,
        step: int = 0,
        max_steps: int = 0,
    ) -> RunRecord:
        """A record of this process, running, without lineages."""
        now = time.time()
        return cls(
            run_id=run_id,
            attempt=attempt,
            host=os.uname().nodename,
            pid=os.getpid(),
            pid_started=process_started(os.getpid()),
            command=tuple(sys.orig_argv),
            cwd=os.getcwd(),
            world_size=world_size,
            started=now,
            updated=now,
            state=RUNNING,
            step=step,
            max_steps=max_steps,
            output_dir=output_dir,
        )

    @classmethod
    def read(cls, root: Root) -> RunRecord | None:
        """The record of a root, None when there is none.

        Raises:
            ManifestError: there is one that cannot be used.
        """
        try:
            return parse_run_record(read_bytes(root.run_record), root.run_record)
        except FileNotFoundError:
            return None

    def write(self, root: Root) -> None:
        """Make this the record of ``root``, atomically and durably. Raises OSError."""
        make_directories(root.run_dir)
        write_durably(root.run_record, self.encode())

    def encode(self) -> bytes:
        body = {
            "version": RECORD_VERSION,
            "run_id": self.run_id,
            "attempt": self.attempt,
            "state": self.state,
            "step": self.step,
            "max_steps": self.max_steps,
            "host": self.host,
            "pid": self.pid,
            "pid_started": self.pid_started,
            "world_size": self.world_size,
            "command": list(self.command),
            "cwd": self.cwd,
            "output_dir": self.output_dir,
            "started": self.started,
            "updated": self.updated,
            "ended_well": self.ended_well,
            "lineages": {
                str(ordinal): _encode_lineage(lineage) for ordinal, lineage in sorted(self.lineages.items())
            },
        }
        return json.dumps(body, indent=1).encode("ascii") + b"\n"

    def at_step(self, step: int) -> RunRecord:
        return replace(self, step=step, updated=time.time())

    def with_lineage(self, ordinal: int, lineage: Lineage) -> RunRecord:
        return replace(self, lineages={**self.lineages, ordinal: lineage}, updated=time.time())

    def finished(self, ordinal: int) -> RunRecord:
        """The same after the ``train()`` call of ``ordinal`` returned; the run is finished when no begun ordinal is left."""
        lineages = {**self.lineages, ordinal: replace(self.lineages[ordinal], state=FINISHED)}
        over = all(lineage.state == FINISHED for lineage in lineages.values())
        return replace(self, lineages=lineages, state=FINISHED if over else RUNNING, updated=time.time())

    def failed(self) -> RunRecord:
        """The same after the process ended with an error."""
        return replace(self, state=FAILED, updated=time.time())

    def program_ended(self, well: bool) -> RunRecord:
        """The same after the program ended, some time after its last training."""
        return replace(self, ended_well=well, updated=time.time())

    @property
    def is_of_this_process(self) -> bool:
        pid = os.getpid()
        return (self.host, self.pid, self.pid_started) == (os.uname().nodename, pid, process_started(pid))

    @property
    def process_is_gone(self) -> bool:
        """Whether the process was on this host and is no more. False when another host would have to be asked."""
        return self.host == os.uname().nodename and not process_alive(self.pid, self.pid_started)


def parse_run_record(data: bytes, file: Path) -> RunRecord:
    """Decode a run record; ``file`` is for messages. Raises :class:`ManifestError` for whatever is not exactly one."""
    fields = decode(data, file, RECORD_VERSION)
    return RunRecord(
        run_id=fields.text("run_id", IDENTIFIER),
        attempt=fields.text("attempt", IDENTIFIER),
        host=fields.text("host"),
        pid=fields.whole("pid", low=1),
        pid_started=fields.optional_whole("pid_started"),
        command=fields.texts("command"),
        cwd=fields.text("cwd"),
        world_size=fields.whole("world_size", low=1),
        started=fields.number("started"),
        updated=fields.number("updated"),
        state=fields.choice("state", RUNNING, FINISHED, FAILED),
        step=fields.whole("step"),
        max_steps=fields.whole("max_steps"),
        output_dir=fields.text("output_dir"),
        ended_well=fields.flag("ended_well", default=True),
        lineages={
            _parse_ordinal(name, file): _parse_lineage(item)
            for name, item in fields.mapping("lineages").items()
        },
    )


def process_alive(pid: int, started: int | None) -> bool:
    """Whether a process of this host lives and, if ``started`` is known, is the one that was meant. A zombie does not live."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # there is one, of another user
    stat = _process_stat(pid)
    if stat is None:
        return True  # /proc is not there to tell more
    return stat[0] != b"Z" and started in (None, int(stat[19]))


def process_started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when /proc does not say."""
    stat = _process_stat(pid)
    return int(stat[19]) if stat else None


def _process_stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/<pid>/stat from the state on; the name before them may hold anything."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return stat[stat.rindex(b")") + 2 :].split()


def _encode_lineage(lineage: Lineage) -> dict[str, object]:
    known = lineage.fingerprint
    return {
        "id": lineage.id,
        "origin": lineage.origin,
        "state": lineage.state,
        "fresh_token": lineage.fresh_token,
        "began": lineage.began,
        "fingerprint": known and {"model": dict(known.model), "training": dict(known.training)},
    }


def _parse_lineage(fields: Fields) -> Lineage:
    return Lineage(
        id=fields.text("id", IDENTIFIER),
        origin=fields.optional_text("origin"),
        state=fields.choice("state", RUNNING, FINISHED),
        fresh_token=fields.optional_text("fresh_token"),
        began=fields.number("began"),
        fingerprint=_parse_fingerprint(fields.optional_object("fingerprint")),
    )


def _parse_fingerprint(fields: Fields | None) -> Fingerprint | None:
    if fields is None:
        return None
    return Fingerprint(model=fields.named_texts("model"), training=fields.named_texts("training"))


def _parse_ordinal(name: str, file: Path) -> int:
    if not (name.isascii() and name.isdecimal() and len(name) < 10):
        raise ManifestError(file, f"lineages cannot have an ordinal {name[:80]!a}")
    return int(name)
