"""Memory that the writers made for a file and that nobody else holds any more: whole copies of a model, mostly.

Stock code makes them to gather or to clone what it writes, and lets go of them when it has written. What only a file image keeps alive
nobody can change, so it may be copied late like still memory, and needs neither fence nor witness.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Sequence

import torch

from datastates.engine.image import CPU, FileImage, Memory


def hold_still(images: Sequence[FileImage]) -> None:
    """Mark as still the host memory of ``images`` that is theirs alone. To be called when the code that wrote them has returned."""
    if _any_left(images):
        _mark_orphans(images)
    if _any_left(images):
        # Stock code may have left what it made in a cycle of its own, until the next collection of what is young.
        gc.collect(1)
        _mark_orphans(images)


def _any_left(images: Sequence[FileImage]) -> bool:
    return any(not part.still and part.device == CPU for image in images for part in image.memory)


def _mark_orphans(images: Sequence[FileImage]) -> None:
    parts = Counter(id(part.owner) for image in images for part in image.memory)
    for image in images:
        image.memory = [
            part._replace(still=True) if _is_orphan(part, parts[id(part.owner)]) else part
            for part in image.memory
        ]


def _is_orphan(part: Memory, parts: int) -> bool:
    """Whether the storage behind ``part`` is held by nothing but that many parts.

    A tensor counts as one use of its storage, the Python object that stands for the storage as another; several may hold that object.
    """
    owner = part.owner
    return (
        not part.still
        and part.device == CPU
        and isinstance(owner, torch.UntypedStorage)
        and owner.resizable()  # or the memory is not torch's: a numpy array's, say
        and not owner.is_shared()
        and _uses(owner) == 1
        and sys.getrefcount(owner) <= parts + 2  # this function's own name for it, and the argument
    )


def _uses(storage: torch.UntypedStorage) -> int:
    count = getattr(torch._C, "_storage_Use_Count", None)
    return int(count(storage._cdata)) if count else 0
