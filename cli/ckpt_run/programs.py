"""Find the command's program and start it, as a shell would."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Callable, Mapping

from ckpt_run.exits import NOT_EXECUTABLE, NOT_FOUND
from ckpt_run.messages import shell_words
from ckpt_run.signals import Signals, give_back

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

SHELL = "/bin/sh"
PR_SET_PDEATHSIG = 1


class CannotRunError(Exception):
    """The command cannot be executed; the message says why. ``code`` is what shells exit with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def find(words: list[str], env: Mapping[str, str]) -> str:
    """The path of the program ``words[0]``.

    Raises:
        CannotRunError: there is none, or it is no program; an obvious slip is named.
    """
    name = words[0]
    if "/" in name:
        candidates = [name]
    else:
        candidates = [f"{folder or '.'}/{name}" for folder in env.get("PATH", os.defpath).split(os.pathsep)]
    files = [path for path in candidates if os.path.isfile(path)]
    for path in files:
        if os.access(path, os.X_OK):
            return path
    if files or ("/" in name and os.path.isdir(name)):
        raise CannotRunError(f"{name} is not executable{_slip(words)}", NOT_EXECUTABLE)
    raise CannotRunError(f"{name}: command not found{_slip(words)}", NOT_FOUND)


def spawn(
    path: str, words: list[str], env: Mapping[str, str], signals: Signals, own_group: bool
) -> int | None:
    """Start the program, in a process group of its own or in ours; its pid, or None when a stop has come before it.

    Call it in the main thread, with the signals blocked. The program gets SIGTERM when we end before it, however we end: a
    training must not go on beside the one that is started after it. That covers the program itself, not what it starts:
    the ranks of a launcher are the launcher's to end. A program with more rights than we have (set-user-ID) is not told.

    Raises:
        CannotRunError: the kernel refuses.
    """
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl
    word, go = os.pipe()
    failure, failed = os.pipe()  # closed by exec: then there is no error to tell
    pid = os.fork()
    if pid == 0:
        os.close(go)
        code = errno.EIO
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if own_group:
                os.setpgid(0, 0)
            # Without the parent nobody would tell us to stop: it may have ended before we asked to be told.
            if os.read(word, 1) and os.getppid() == parent:
                give_back(signals.mask_for_child)
                _with_shell(lambda file, argv: os.execve(file, argv, env), path, words)
        except OSError as error:
            code = error.errno or errno.EIO
        finally:
            os.write(failed, str(code).encode())
            os._exit(NOT_EXECUTABLE)
    os.close(word)
    os.close(failed)
    # A Ctrl-C that came before the fork waits for us alone, a later one for the program as well. Both look alike; so a
    # program that may have missed one does not start.
    stop = signals.stop_waits()
    if not stop:
        with contextlib.suppress(BrokenPipeError):  # it is dead already
            os.write(go, b"!")
    os.close(go)
    with open(failure, "rb") as pipe:
        number = pipe.read()
    if not (stop or number):
        return pid
    os.waitpid(pid, 0)
    if stop:
        return None
    raise _refused(words, OSError(int(number), os.strerror(int(number))))


def become(path: str, words: list[str], env: Mapping[str, str]) -> NoReturn:
    """Replace this process by the program; does not return.

    Raises:
        CannotRunError: the kernel refuses.
    """
    try:
        _with_shell(lambda file, argv: os.execve(file, argv, env), path, words)
    except OSError as error:
        raise _refused(words, error) from None


def _with_shell(start: Callable[[str, list[str]], NoReturn], path: str, words: list[str]) -> NoReturn:
    """A script without a first line that names its interpreter is one for the shell."""
    try:
        start(path, words)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        start(SHELL, [SHELL, path, *words[1:]])


def _refused(words: list[str], error: OSError) -> CannotRunError:
    code = NOT_FOUND if error.errno == errno.ENOENT else NOT_EXECUTABLE
    return CannotRunError(f"{words[0]}: {error.strerror}", code)


def _slip(words: list[str]) -> str:
    """A hint at what was probably meant."""
    from ckpt_run.arguments import SUBCOMMANDS

    if words[0].endswith(".py"):
        return f"; did you mean: ckpt-run python {shell_words(words)}"
    if words[0] == "help":
        return "; did you mean: ckpt-run --help"
    import difflib

    nearest = difflib.get_close_matches(words[0], SUBCOMMANDS, n=1, cutoff=0.75)
    return f"; did you mean: ckpt-run {nearest[0]}" if nearest and nearest[0] != words[0] else ""
