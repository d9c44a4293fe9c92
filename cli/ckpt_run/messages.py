"""What ckpt-run says while it wraps a command: to stderr, each line with our prefix. Stdout is the command's own."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Write one line to stderr, or nothing where there is no stderr to write to."""
    try:
        sys.stderr.write(f"ckpt-run: {text}\n")
        sys.stderr.flush()
    except (
        AttributeError,
        OSError,
        ValueError,
    ):  # closed, full, or a reader that left: no reason to end a training
        return


def shell_words(words: list[str]) -> str:
    """A command as one would type it."""
    import shlex

    return shlex.join(words)
