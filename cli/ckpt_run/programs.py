"""Find the command's program and start it, as a shell would."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from collections.abc import Callable, Mapping

from ckpt_run.exits import NOT_EXECUTABLE, NOT_FOUND
from ckpt_run.messages import shell_words

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


def spawn(path: str, words: list[str], env: Mapping[str, str], mask: set[int], own_group: bool) -> int:
    """Start the program with the signal mask ``mask``, in a process group of its own or in ours; its pid.

    Call it in the main thread, with the signals blocked that have a handler. The program gets SIGTERM when we end before
    it, however we end: a training must not go on beside the one that is started after it. That covers the program itself,
    not what it starts: the ranks of a launcher are the launcher's to end. A program with more rights than we have
    (set-user-ID) is not told.

    Raises:
        CannotRunError: the kernel refuses.
    """
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl
    receiver, sender = os.pipe()  # closed by exec: then there is no error to tell
    pid = os.fork()
    if pid == 0:
        code = errno.EIO
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if own_group:
                os.setpgid(0, 0)
            _reset_signals(mask)
            if os.getppid() == parent:  # else it has ended before we asked to be told
                _with_shell(lambda file, argv: os.execve(file, argv, env), path, words)
        except OSError as error:
            code = error.errno or errno.EIO
        finally:
            os.write(sender, str(code).encode())
            os._exit(NOT_EXECUTABLE)
    os.close(sender)
    with open(receiver, "rb") as pipe:
        failure = pipe.read()
    if failure:
        os.waitpid(pid, 0)
        raise _refused(words, OSError(int(failure), os.strerror(int(failure))))
    return pid


def _reset_signals(mask: set[int]) -> None:
    """As a program expects it: what our parent ignores stays ignored, not what Python ignores for itself."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


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
    import difflib

    nearest = difflib.get_close_matches(words[0], SUBCOMMANDS, n=1, cutoff=0.75)
    return f"; did you mean: ckpt-run {nearest[0]}" if nearest and nearest[0] != words[0] else ""
