"""A training script as a child process: start it, follow its steps, kill it as a lost machine would."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_POLL_SECONDS = 0.02
_STEP = re.compile(rb"^step (\d+)/\d+ ", re.MULTILINE)


class Training:
    """One run of the script; it has begun when this object exists. Its output goes to ``log``.

    Steps are read from the script's own lines, ``step 12/160 loss 5.1234``: what they say is what was trained.
    """

    def __init__(self, command: Sequence[str], log: Path, environ: Mapping[str, str]) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environ
            )

    @property
    def steps(self) -> list[int]:
        """The steps that this run has trained so far, in order."""
        return [int(step) for step in _STEP.findall(self.log.read_bytes())]

    def tail(self, lines: int) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def poll(self) -> int | None:
        """Wait a moment; the exit code once the run has ended, None before."""
        try:
            return self._process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """SIGKILL to every process of the run, from the launcher down, leaving none to clean up after the others."""
        _kill_trees([self._process.pid])
        self._process.wait()


def kill_descendants() -> None:
    """SIGKILL to everything that this process has started and that still runs."""
    _kill_trees(_children(os.getpid()))


def _kill_trees(roots: list[int]) -> None:
    members = list(roots)
    for pid in members:  # grows while it is walked; a stopped process starts no further children
        _send(pid, signal.SIGSTOP)
        members.extend(_children(pid))
    for pid in members:
        _send(pid, signal.SIGKILL)
    while any(_alive(pid) for pid in members):
        time.sleep(_POLL_SECONDS)


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children.extend(int(child) for child in task.read_text().split())
        except OSError:  # the thread is gone
            continue
    return children


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
