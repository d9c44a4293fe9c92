"""Where a command saves, as far as that can be known before it runs; in the process ``args.output_dir`` is the truth."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ckpt_run.environment import OUTPUT_DIR

NAMES = ("--output_dir", "--output-dir")


def from_words(words: list[str]) -> str | None:
    """The value of ``--output_dir`` among a command's arguments; the last one counts, as for every parser."""
    found = None
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in NAMES and equals:
            found = value
        elif name in NAMES and position + 1 < len(words):
            found = words[position + 1]
    return found or None


def told(command: list[str], env: Mapping[str, str]) -> str | None:
    """As somebody says it: our option or variable (one and the same in ``env``), then the command's own argument.

    An absolute path, or None.
    """
    directory = env.get(OUTPUT_DIR) or from_words(command[1:])
    return os.path.abspath(directory) if directory else None
