"""Whether the disk can hold what ``save_total_limit`` asks for; known before the first byte is written."""

from __future__ import annotations

import os

from datastates.llm import log
from datastates.units import size

logger = log.logger("datastates.llm.decorator")


def shortage(
    root: str, checkpoint_bytes: int, committed_bytes: int, limit: int | None
) -> tuple[int, int] | None:
    """Bytes needed and bytes free, when the disk of ``root`` cannot hold the checkpoints to come; None when it can.

    With a limit of N there are N + 1 checkpoints for a moment, since an old one goes only after a newer one is committed.
    """
    wanted = checkpoint_bytes * (limit + 1) if limit else checkpoint_bytes
    needed = max(wanted - committed_bytes, checkpoint_bytes)
    status = os.statvfs(root)
    free = status.f_bavail * status.f_frsize
    return (needed, free) if needed > free else None


def tell_shortage(root: str, checkpoint_bytes: int, committed_bytes: int, limit: int | None) -> None:
    """One line with both figures, when there is a shortage."""
    found = shortage(root, checkpoint_bytes, committed_bytes, limit)
    if found is not None:
        logger.error(
            "%s the disk of %s has %s free, and save_total_limit=%s needs %s more (%s a checkpoint)",
            log.PREFIX,
            root,
            size(found[1]),
            limit,
            size(found[0]),
            size(checkpoint_bytes),
        )
