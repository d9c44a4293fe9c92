"""What a wait status means: the exit code we pass on, and a line for a person where the number alone says little."""

from __future__ import annotations

import os
import signal

from ckpt_run.signals import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

OWN_FAILURE = 125
NOT_EXECUTABLE = 126
NOT_FOUND = 127

HINTS: dict[int, str] = {
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a crash in native code, or no space left in shared memory",
    signal.SIGABRT: "a failed check in native code",
    signal.SIGILL: "a binary built for another processor?",
    signal.SIGXCPU: "a limit of processor time",
    signal.SIGXFSZ: "a limit of file size",
}

QUIET = (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM, signal.SIGHUP)


def code(status: int) -> int:
    """The exit code for a wait status: its own, or 128 + N for signal N."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def explain(command: list[str], status: int, out_of_memory: bool | None) -> str | None:
    """A sentence about an end by a signal, or None where there is nothing to add.

    ``out_of_memory``: whether the kernel has killed one of our processes for want of memory meanwhile; None: it does not tell.
    """
    name = os.path.basename(command[0])
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return None if number in QUIET else f"{name} was killed by {described(number, out_of_memory)}"
    behind = _signal_behind(os.WEXITSTATUS(status), name)
    if behind is None or behind in QUIET:
        return None
    return (
        f"{name} ended with exit code {os.WEXITSTATUS(status)}: "
        f"a process of it was killed by {described(behind, out_of_memory)}"
    )


def _signal_behind(exit_code: int, name: str) -> int | None:
    """Shells report 128 + N; deepspeed exits with -N, of which 256 - N arrives."""
    number = 256 - exit_code if name.startswith("deepspeed") and exit_code > 192 else exit_code - 128
    return number if number in {int(known) for known in signal.valid_signals()} and number < 32 else None


def described(number: int, out_of_memory: bool | None = None) -> str:
    """'SIGKILL (perhaps out of memory)'"""
    hint = HINTS.get(number)
    if number == signal.SIGKILL:
        hint = {True: "out of memory: the kernel ended it", None: "perhaps out of memory"}.get(out_of_memory)
    return f"{signal_name(number)} ({hint})" if hint else signal_name(number)


def memory_kills() -> int | None:
    """How many processes the kernel has killed for want of memory in our control group; None where it does not tell."""
    for path in _counters():
        try:
            with open(path, encoding="ascii") as file:
                return next(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
        except (OSError, ValueError, StopIteration):
            continue
    return None


def _counters() -> Iterator[str]:
    """The files that may count it, ours first: of cgroup v2 or v1, and in a container perhaps mounted as the topmost."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return
    for _, controllers, group in groups:
        if controllers == "":
            top, name = "/sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            top, name = "/sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        yield f"{top}{group.rstrip('/')}/{name}"
        yield f"{top}/{name}"
