"""What we note about one launch, for ``status`` and for the next launch of the same command.

Also the folder in which the hook registers the processes that train, and what else is of this launch alone. It lies in the temporary directory, since it is of
use only as long as we live; the record lies under ``$XDG_STATE_HOME`` (:mod:`datastates.store.launches`).
"""

from __future__ import annotations

import contextlib
import os

from ckpt_run import processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datastates.store.launches import LaunchRecord


class Ledger:
    """``processes``: the folder for the hook, None where none can be made."""

    def __init__(self, run_id: str, command: list[str]) -> None:
        self.processes: str | None = None
        self._run_id = run_id
        self._command = command
        self._record: LaunchRecord | None = None

    def output_dir_of_last_launch(self) -> str | None:
        """Where this command saved when it ran in this directory the last time."""
        from datastates.store.launches import LaunchRecord

        try:
            last = LaunchRecord.find(os.getcwd(), self._command)
        except OSError:  # the working directory is gone
            return None
        return last.output_dir if last else None

    def output_dir_of_this_launch(self) -> str | None:
        """What the trainers of this launch said; the truth as soon as there is one."""
        return next((path for path in processes.registered(self.processes).values() if path), None)

    def open_folder(self) -> str | None:
        """Make the folder for the hook."""
        with contextlib.suppress(OSError):
            path = f"{_temporary()}/{_prefix()}{os.getpid()}-{self._run_id}"
            os.mkdir(path, 0o700)
            self.processes = path
        return self.processes

    def begin(self, output_dir: str | None) -> None:
        """Note that the launch runs."""
        from datastates.store.launches import LaunchRecord

        with contextlib.suppress(OSError):  # the working directory is gone: nothing to find it by
            self._record = LaunchRecord.begin(self._run_id, self._command, output_dir)
            self._record.write()
        _sweep()

    def restarted(self) -> None:
        """Note one more restart."""
        if self._record is not None:
            from dataclasses import replace

            self._record = replace(self._record, restarts=self._record.restarts + 1)
            self._record.write()

    def end(self, code: int) -> None:
        """Note how it ended."""
        if self._record is not None:
            self._record.over(code).write()

    def close(self) -> None:
        """Remove the hook's folder."""
        if self.processes is not None:
            _remove(self.processes)


def _temporary() -> str:
    return os.environ.get("TMPDIR") or "/tmp"


def _prefix() -> str:
    """Tells apart containers that share a temporary directory: process ids mean something within one only."""
    return f"ckpt-run-{os.stat('/proc/self/ns/pid').st_ino:x}-"


def _sweep() -> None:
    """Remove the folders of launchers that were killed."""
    with contextlib.suppress(OSError), os.scandir(_temporary()) as entries:
        prefix = _prefix()
        for entry in entries:
            pid = entry.name.removeprefix(prefix).partition("-")[0]
            ours = entry.name.startswith(prefix) and pid.isdecimal() and entry.is_dir(follow_symlinks=False)
            if ours and processes.read_process(int(pid)) is None:
                _remove(entry.path)


def _remove(folder: str) -> None:
    """The folder and the files in it; what belongs to somebody else stays."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            os.unlink(entry.path)
        os.rmdir(folder)
