"""Which step there is to resume from in an output directory."""

from __future__ import annotations

import os
import zlib

from ckpt_run.messages import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datastates.store.checksums import Crc32


def step(output_dir: str | None, fresh: str | None = None) -> int | None:
    """The step of the newest whole checkpoint, its bytes verified; each newer one that is damaged is named on stderr.

    ``fresh`` is the token of a launch that is to start over: until its training has begun there is nothing to resume.
    None: nothing, or no directory is known. An output directory that cannot be read stops no training.
    """
    if output_dir is None or not os.path.isdir(output_dir):
        return None
    from datastates.store.catalog import resume_point

    try:
        if fresh is not None and _still_to_begin(output_dir, fresh):
            return None
        point = resume_point(output_dir, on_skip=_name, crc32=fastest_crc32())
    except OSError as error:
        say(f"cannot look for a checkpoint in {output_dir}: {error}")
        return None
    return None if point is None else point.step


def fastest_crc32() -> Crc32:
    """The engine's, with the processor's own instructions; zlib's where the native module cannot be loaded."""
    try:
        from datastates.engine import crc32
    except ImportError:
        return zlib.crc32
    fastest: Crc32 = crc32
    return fastest


def _still_to_begin(output_dir: str, fresh: str) -> bool:
    from datastates.store.document import ManifestError
    from datastates.store.layout import Root
    from datastates.store.lineage import wants_fresh
    from datastates.store.runrecord import RunRecord

    try:
        record = RunRecord.read(Root.of(output_dir))
    except ManifestError:
        return True
    return wants_fresh(record, 0, fresh)


def _name(path: os.PathLike[str], reason: str) -> None:
    say(f"{path} is passed over: {reason}")
