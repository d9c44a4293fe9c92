"""The signals that we take in order to hand them on.

While the command runs they are blocked and taken one by one with ``sigtimedwait``: no handler runs in between, and what
the kernel tells about a signal is known. Did a person press Ctrl-C, or did somebody send it to us alone?
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

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


class Signals:
    """Made first of all, before anything slow: process 1 of a container never sees a signal it has no handler for.

    Until :meth:`block` a stop ends us, since there is no command to hand it to, and every other signal waits. A signal
    that our parent ignores stays ignored, for the command as well (nohup, background jobs).
    """

    def __init__(self) -> None:
        self._taken = {number for number in HANDED_ON if signal.getsignal(number) != signal.SIG_IGN}
        self._last_words: Callable[[int], None] | None = None
        self.mask_for_child = signal.pthread_sigmask(signal.SIG_BLOCK, self._taken - set(STOPS))
        for number in self._taken:
            signal.signal(number, self._stop)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def block(self) -> None:
        """From now on signals wait until :meth:`next` takes them."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._taken | {signal.SIGCHLD})

    def obey(self, last_words: Callable[[int], None]) -> None:
        """While there is no command: a stop ends us again, after ``last_words(exit code)``, until :meth:`block`."""
        self._last_words = last_words
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._taken & set(STOPS) - self.mask_for_child)

    def next(self, timeout: float | None) -> signal.struct_siginfo | None:
        """The next signal, SIGCHLD among them, or None after ``timeout`` seconds (None: wait for ever)."""
        awaited = self._taken | {signal.SIGCHLD}
        return signal.sigwaitinfo(awaited) if timeout is None else signal.sigtimedwait(awaited, timeout)

    def stop_waits(self) -> bool:
        """Whether :meth:`next` has a stop to give."""
        return not self._taken.isdisjoint(signal.sigpending() & set(STOPS))

    def release(self) -> None:
        """Give back what we inherited; the last thing before becoming the command. What waits ends us, as it would the command."""
        self.block()
        give_back(self.mask_for_child)

    def _stop(self, number: int, frame: object) -> None:
        """No exception: Python drops those in callbacks of weak references, which imports have, and changes others."""
        code = 128 + number
        if self._last_words is not None:
            self._last_words(code)
        if number == signal.SIGINT:
            die_of(number)
        os._exit(code)


def give_back(mask: set[int]) -> None:
    """Signals as a program expects them: what our parent ignores stays ignored, not what Python ignores for itself."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


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
    os._exit(128 + number)  # process 1 of a container cannot die of it
