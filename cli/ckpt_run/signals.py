"""The signals that we take in order to hand them on.

While the command runs they are blocked and taken one by one with ``sigtimedwait``: no handler runs in between, and what
the kernel tells about a signal is known. Did a person press Ctrl-C, or did somebody send it to us alone?
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_LEFT_ALONE = {
    # cannot be caught
    signal.SIGKILL,
    signal.SIGSTOP,
    # end nobody
    signal.SIGCHLD,
    signal.SIGCONT,
    signal.SIGURG,
    signal.SIGWINCH,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    # are about what we did ourselves
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGTRAP,
    signal.SIGSYS,
}

HANDED_ON = frozenset(signal.valid_signals() - _LEFT_ALONE)
"""Every signal that would end us and leave the command behind: SIGXCPU and the real-time signals among them."""

SI_KERNEL = 128  # si_code of a signal that the terminal sends to its whole foreground group


class Stopped(BaseException):
    """A signal told us to stop when there was no child to tell it to."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """Made first of all, before anything slow: process 1 of a container never sees a signal it has no handler for.

    Until :meth:`block` a stop raises :class:`Stopped` and every other signal waits. A signal that our parent ignores stays
    ignored, for the command as well (nohup, background jobs).
    """

    def __init__(self) -> None:
        self._taken = {number for number in HANDED_ON if signal.getsignal(number) != signal.SIG_IGN}
        self.mask_for_child = signal.pthread_sigmask(signal.SIG_BLOCK, self._taken - set(STOPS))
        for number in self._taken:
            signal.signal(number, _stop)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def block(self) -> None:
        """From now on signals wait until :meth:`next` takes them."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._taken | {signal.SIGCHLD})

    def next(self, timeout: float | None) -> signal.struct_siginfo | None:
        """The next signal, SIGCHLD among them, or None after ``timeout`` seconds (None: wait for ever)."""
        awaited = self._taken | {signal.SIGCHLD}
        return signal.sigwaitinfo(awaited) if timeout is None else signal.sigtimedwait(awaited, timeout)

    def release(self) -> None:
        """Give back what we inherited; the last thing before becoming the command, which resets the handlers."""
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask_for_child)


def signal_name(number: int) -> str:
    """'SIGTERM', and 'SIGRTMIN+3' for those that Python has no name for."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def die_of(number: int) -> NoReturn:
    """End as a program does that a signal has ended: a shell's loop around us stops at Ctrl-C only then."""
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    raise SystemExit(128 + number)


def _stop(number: int, frame: object) -> None:
    raise Stopped(number)
