"""The file through which deepspeed hands variables to other nodes.

``accelerate launch`` over several nodes appends its whole environment to ``.deepspeed_env`` in the working directory, tokens
and what is of this launch alone included, for any later launch to find. With a file of its own nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, MutableMapping

VARIABLE = "DS_ENV_FILE"
DEFAULT = ".deepspeed_env"
LAUNCHERS = (
    "accelerate",
    "accelerate-launch",
    "accelerate.commands.launch",
    "deepspeed",
    "deepspeed.launcher.runner",
)
"""Of a command that is none of these nothing is known: it may go to another directory, and use the file that lies there."""


def own_env_file(command: list[str], env: MutableMapping[str, str], folder: str) -> None:
    """Give a command that may reach other nodes such a file in ``folder``, with the lines of the user's own in it."""
    if not any(os.path.basename(word) in LAUNCHERS for word in command):
        return
    path = os.path.join(folder, DEFAULT)
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.writelines(f"{line}\n" for line in _lines(env))
        env[VARIABLE] = path


def _lines(env: MutableMapping[str, str]) -> Iterator[str]:
    """Those that deepspeed would read, in its order. Comments and empty lines, of which it dies, are left out."""
    name = env.get(VARIABLE, DEFAULT)
    paths = dict.fromkeys(os.path.join(place, name) for place in (os.path.expanduser("~"), "."))
    for path in paths:
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="surrogateescape") as file:
            for line in file.read().splitlines():
                if "=" in line and not line.lstrip().startswith("#"):
                    yield line
