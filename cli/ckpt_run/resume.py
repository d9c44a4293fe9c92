"""Which step there is to resume from in an output directory."""

from __future__ import annotations

import os
import zlib

from ckpt_run import environment
from ckpt_run.messages import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datastates.store.catalog import OnSkip
    from datastates.store.checksums import Crc32


def announce(env: dict[str, str], output_dir: str | None, guessed: bool = False) -> None:
    """Set CKPT_LAST_STEP, or take it away: with ``--resume never`` always.

    ``guessed``: the directory is that of the last launch. What is wrong with it is told when it turns out to be the right one.
    """
    never = env.get(environment.RESUME) == "never"
    found = None if never else step(output_dir, env.get(environment.FRESH), None if guessed else _name)
    environment.set_last_step(env, found)


def step(output_dir: str | None, fresh: str | None = None, on_skip: OnSkip | None = None) -> int | None:
    """The step of the newest whole checkpoint, its bytes verified; of each newer one that is damaged, ``on_skip`` is told.

    ``fresh`` is the token of a launch that is to start over: until its training has begun there is nothing to resume.
    None: nothing, or no directory is known. An output directory that cannot be read stops no training.
    """
    if output_dir is None or not os.path.isdir(output_dir):
        return None
    from datastates.store.catalog import ignore, resume_point

    try:
        if fresh is not None and _still_to_begin(output_dir, fresh):
            return None
        point = resume_point(output_dir, on_skip=on_skip or ignore, crc32=fastest_crc32())
    except OSError as error:
        say(f"cannot look for a checkpoint in {output_dir}: {error}")
        return None
    return None if point is None else point.step


def note_failure(output_dir: str | None, run_id: str) -> None:
    """The command of this run has failed: its trainings may have finished before that, and the process itself not have known."""
    if output_dir is None or not os.path.isdir(output_dir):
        return
    from datastates.store.document import ManifestError
    from datastates.store.layout import Root
    from datastates.store.runrecord import RunRecord

    root = Root.of(output_dir)
    try:
        record = RunRecord.read(root)
        if record is not None and record.run_id == run_id and record.ended_well:
            record.program_ended(well=False).write(root)
    except (OSError, ManifestError) as error:
        say(f"cannot note in {root.run_record} that the command failed: {error}")


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
    from datastates.store.catalog import NOT_COMMITTED

    if reason != NOT_COMMITTED:  # as every kill leaves one
        say(f"{path} is passed over: {reason}")
