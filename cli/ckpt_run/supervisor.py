"""Run a command and stay with it: hand signals to the processes that train, leave when the last descendant is gone.

Launchers die of a SIGTERM, or swallow it, and leave their ranks behind; so we are the one process that stays.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Mapping

from ckpt_run import exits, processes, programs
from ckpt_run.messages import say
from ckpt_run.signals import SI_KERNEL, STOPS, Signals, signal_name

PR_SET_CHILD_SUBREAPER = 36

POLL = 1.0  # seconds between looks at /proc, once we were told to stop or the command has ended
PATIENCE = 10.0  # seconds after which we say what we are still waiting for
GRACE = (
    30.0  # seconds that what a failed command left behind gets between SIGTERM and SIGKILL, before a restart
)


class Supervisor:
    """Stays with one command at a time until it and everything that it started is gone.

    ``folder`` is where the hook registers the processes that train, None if there is no such place. ``stopped`` is the
    signal that told us to stop, None as long as there was none; ``interrupted``: it came from the terminal, as Ctrl-C.
    """

    def __init__(self, signals: Signals, folder: str | None) -> None:
        self.stopped: int | None = None
        self.interrupted = False
        self.signals = signals
        self._folder = folder
        # A shell that became us by `exec` leaves us its children: not ours to wait for.
        self._strangers = frozenset(process.pid for process in processes.descendants(os.getpid()))
        # With a terminal the command stays in our process group: Ctrl-C, Ctrl-Z and reading work as without us.
        self._own_group = not has_terminal()
        self._child = 0
        self._status: int | None = None
        self._told: set[int] = set()
        adopt_orphans()

    def start(self, path: str, words: list[str], env: Mapping[str, str]) -> bool:
        """Start the command; what signals arrive from now on waits for :meth:`wait` to hand it on.

        False when we were told to stop before there was a command to tell it to.

        Raises:
            programs.CannotRunError: it cannot be executed.
        """
        self.signals.block()
        child = programs.spawn(path, words, env, self.signals, self._own_group)
        if child is None:
            while self.stopped is None:
                self._turn(0)
            return False
        self._child = child
        self._status = None
        self._told.clear()
        return True

    def wait(self) -> int:
        """The command's wait status when it has ended; what it started may still run."""
        while self._status is None:
            self._turn(POLL if self.stopped else None)
        return self._status

    def drain(self) -> None:
        """Return when every descendant is gone. Only who sends us signals decides how long that takes."""
        self._wait(PATIENCE)
        if self._any_left():
            names = ", ".join(_name(process.pid) for process in self._remaining()[:3])
            say(f"the command has ended; waiting for what it has left running: {names}")
            self._wait(None)

    def clear_the_way(self) -> bool:
        """End what a failed command has left behind: before a restart, since it may hold the devices.

        False when we were told to stop meanwhile.
        """
        self._wait(PATIENCE)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._any_left():
                remaining = self._remaining()
                say(f"{number.name} to {len(remaining)} process(es) that the failed command has left running")
                _send(number, [process.pid for process in remaining])
                self._wait(GRACE)
        return self.stopped is None

    def exit_code(self, status: int) -> int:
        """The command's own; but a launcher cannot know that its ranks ended because they were told to."""
        own = exits.code(status)
        launcher = self._child not in self._told
        return self.stop_code() if self.stopped and launcher and own != 0 else own

    def stop_code(self) -> int:
        """The exit code of who ended because we were told to stop."""
        return 128 + (self.stopped or 0)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _turn(self, timeout: float | None) -> None:
        """Take one signal and do what it asks for, or do nothing for ``timeout`` seconds."""
        info = self.signals.next(timeout)
        self._reap()
        if info is not None and info.si_signo != signal.SIGCHLD:
            self._hand_on(info)
        if self.stopped:
            self._tell_newcomers(self.stopped)

    def _reap(self) -> bool:
        """Take in who has ended; whether we have children left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._child:
                    self._status = ended[1]
        except ChildProcessError:
            return False
        return True

    def _wait(self, seconds: float | None) -> None:
        """Until nothing of the command is left, or the time is over."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._any_left() and (deadline is None or time.monotonic() < deadline):
            self._turn(POLL)

    def _any_left(self) -> bool:
        """Every descendant has us above it, so without children there is none.

        A look at /proc alone misses one that is born, and its parent gone, while we look.
        """
        return self._reap() and (not self._strangers or bool(self._remaining()))

    def _remaining(self) -> list[processes.Process]:
        return processes.descendants(os.getpid(), self._strangers)

    # --- handing on --------------------------------------------------------------------------------------------------

    def _hand_on(self, info: signal.struct_siginfo) -> None:
        number = info.si_signo
        if number in STOPS:
            self.stopped = number
        if number in STOPS and self._group_has_it(info):
            self._told.update(self._group())
            self._reap()
            if self._status is not None:  # it may have ended of it before we looked
                self._told.add(self._child)
            self.interrupted = number == signal.SIGINT
            return
        trainers = self._trainers()
        targets = trainers or self._group()
        _send(number, targets)
        if number in STOPS:
            self._told.update(targets)
        if trainers:
            say(f"{signal_name(number)}: handed to {_count(trainers)}")

    def _group_has_it(self, info: signal.struct_siginfo) -> bool:
        """Whether it is from the terminal to the whole group. A terminal that goes away tells its session's leader alone."""
        alone = info.si_signo == signal.SIGHUP and os.getsid(0) == os.getpid()
        return info.si_code == SI_KERNEL and not self._own_group and not alone

    def _tell_newcomers(self, number: int) -> None:
        """After a stop: ranks that a launcher starts again are told too, and at last what the command has left behind."""
        targets = {*self._trainers(), *(self._left_behind() if self._status is not None else ())} - self._told
        _send(number, list(targets))
        self._told |= targets

    def _left_behind(self) -> list[int]:
        """What still runs, but for what is above or below a process that was told to stop and still saves."""
        parents = {process.pid: process.parent for process in self._remaining()}
        above = {
            ancestor for pid in self._told & parents.keys() for ancestor in processes.ancestors(pid, parents)
        }
        return [
            pid
            for pid in parents
            if pid not in above and self._told.isdisjoint(processes.ancestors(pid, parents))
        ]

    def _trainers(self) -> list[int]:
        return processes.trainers(os.getpid(), self._folder, self._strangers)

    def _group(self) -> list[int]:
        """The living members of the command's process group."""
        group = self._child if self._own_group else os.getpgrp()
        return [process.pid for process in self._remaining() if process.group == group]


def has_terminal() -> bool:
    """Whether there is a person at a terminal, whatever stdin and stdout are connected to."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def adopt_orphans() -> None:
    """Become the parent of each descendant whose own parent ends, so that none is lost sight of."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        say(f"cannot watch over processes that outlive their parent: {os.strerror(ctypes.get_errno())}")


def _send(number: int, pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
        except PermissionError:
            say(f"may not send {signal_name(number)} to process {pid}")


def _count(pids: list[int]) -> str:
    return "the training process" if len(pids) == 1 else f"{len(pids)} training processes"


def _name(pid: int) -> str:
    words = processes.command_line(pid)
    return f"{os.path.basename(words[0]) if words else 'process'} ({pid})"
