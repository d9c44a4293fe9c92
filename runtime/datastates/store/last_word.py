"""The last word of a rank that cannot write any more, so that nobody waits for its vote.

On a full disk neither a vote nor an abandonment can be written. The name of an empty file needs no space there, so the name tells all:
``.run/gave-up-<attempt>-<save>-rank<rank>``. Why, the rank's own log tells.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from datastates.store.durable import make_directories
from datastates.store.layout import Root

_PREFIX = "gave-up-"


def give_up(root: Root, attempt: str, save: int, rank: int) -> None:
    """Tell the other ranks that nothing more will come from ``rank`` for this save. Raises OSError."""
    make_directories(root.run_dir)
    (root.run_dir / f"{_prefix(attempt, save)}{rank}").touch()


def given_up(root: Root, attempt: str, save: int) -> list[int]:
    """The ranks that gave this save up. None as long as the directory cannot be read: every wait has its time limit as well."""
    prefix = _prefix(attempt, save)
    with contextlib.suppress(OSError):
        ranks = [name.removeprefix(prefix) for name in os.listdir(root.run_dir) if name.startswith(prefix)]
        return sorted(int(rank) for rank in ranks if rank.isascii() and rank.isdecimal())
    return []


def has_given_up(root: Root, attempt: str, save: int, rank: int) -> bool:
    """Whether this one rank gave the save up; cheaper than :func:`given_up`, since it looks for one name."""
    try:
        return os.path.lexists(root.run_dir / f"{_prefix(attempt, save)}{rank}")
    except OSError:
        return False


def forget(root: Root) -> None:
    """Remove the last words of earlier attempts; the committer calls it at the start of a new one. Raises OSError."""
    for name in _names(root):
        (root.run_dir / name).unlink(missing_ok=True)


def _names(root: Root) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):
        yield from (name for name in os.listdir(root.run_dir) if name.startswith(_PREFIX))


def _prefix(attempt: str, save: int) -> str:
    return f"{_PREFIX}{attempt}-{save}-rank"
