"""Find the command's program and start it, as a shell would."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Mapping

from ckpt_run.exits import NOT_EXECUTABLE, NOT_FOUND
from ckpt_run.messages import shell_words

SHELL = "/bin/sh"


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

    Raises:
        CannotRunError: the kernel refuses.
    """
    options: dict[str, object] = {
        "setsigmask": mask,
        "setsigdef": (
            signal.SIGPIPE,
            signal.SIGXFSZ,
        ),  # Python ignores them for itself; a program does not expect it
    }
    if own_group:
        options["setpgroup"] = 0
    try:
        return _with_shell(lambda file, argv: os.posix_spawn(file, argv, env, **options), path, words)  # type: ignore[arg-type]
    except OSError as error:
        raise _refused(words, error) from None


def become(path: str, words: list[str], env: Mapping[str, str]) -> int:
    """Replace this process by the program; does not return.

    Raises:
        CannotRunError: the kernel refuses.
    """
    try:
        return _with_shell(lambda file, argv: os.execve(file, argv, env), path, words)
    except OSError as error:
        raise _refused(words, error) from None


def _with_shell(start: Callable[[str, list[str]], int], path: str, words: list[str]) -> int:
    """A script without a first line that names its interpreter is one for the shell."""
    try:
        return start(path, words)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        return start(SHELL, [SHELL, path, *words[1:]])


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
