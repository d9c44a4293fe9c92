"""A program on a terminal of its own."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import time

import psutil
from launch_tools import BOUND, CKPT_RUN, Sandbox


class Terminal:
    """Runs ``program`` as the leader of the terminal's session; the sandbox ends what a failed test leaves there."""

    def __init__(self, sandbox: Sandbox, *words: str, program: str = CKPT_RUN) -> None:
        self.text = b""
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            os.chdir(sandbox.path)
            os.execve(program, [program, *words], sandbox.env)
        sandbox.at_close.append(self._close)

    def type(self, data: bytes) -> None:
        os.write(self._master, data)

    def hang_up(self) -> int:
        """Take the terminal away; the exit code of the program, or minus the signal."""
        os.close(self._master)
        self._master = -1
        return self._wait()

    def finish(self) -> int:
        """Read until every process has let go of the terminal; the exit code of the program, or minus the signal."""
        deadline = time.monotonic() + BOUND
        with contextlib.suppress(OSError):  # the other end is closed
            while data := self._read(deadline):
                self.text += data
        return self._wait()

    def _read(self, deadline: float) -> bytes:
        readable, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, f"still in use after {BOUND:.0f} s: {self.text!r}"
        return os.read(self._master, 1000)

    def _wait(self) -> int:
        code = psutil.Process(self.pid).wait(BOUND)
        self.pid = 0
        assert code is not None
        return int(code)

    def _close(self) -> None:
        if self.pid:
            family = psutil.Process(self.pid)
            for member in [*family.children(recursive=True), family]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            os.waitpid(self.pid, 0)
        if self._master >= 0:
            os.close(self._master)
