"""What rank 0 decides at the start of ``train()``."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datastates.llm import log, resume
from datastates.settings import Settings
from datastates.store import commit, last_word, layout, lineage, occupant
from datastates.store.runrecord import RunRecord

logger = log.logger("datastates.llm.decorator")


@dataclass(frozen=True)
class Plan:
    """The same on every rank. ``root`` is as the script gives it, relative or not. ``trouble`` says why nothing can be saved; it is empty when all is well."""

    root: str
    run_id: str
    attempt: str
    lineage: str
    ordinal: int
    resume_path: str | None
    resume_step: int
    trouble: str = ""


def decide(
    args: Any, settings: Settings, request: resume.Request, root: str, ordinal: int
) -> Plan | resume.NothingToResumeError:
    """Decide, and do what follows on disk before any rank writes: leftovers move aside, run.json is written.

    Nothing is raised, since the other ranks wait for this rank's word: an error that shall end the training is returned, any other is the
    plan's ``trouble``.

    Args:
        args: the TrainingArguments.
        ordinal: how many ``train()`` calls of this process went into the same output directory before.
    """
    attempt, lineage_id = lineage.new_id(), lineage.new_id()
    run_id = os.environ.get("CKPT_RUN_RUN_ID") or lineage.new_id()
    output_dir = str(Path(root).parent)
    place = layout.Root.of(output_dir)
    choice = None
    try:
        record = resume.run_record(output_dir)
        choice = resume.choose(request, settings, output_dir, ordinal, record)
        _occupy(place)
        commit.sweep(place, attempt, spare=choice.path if choice else None)
        last_word.forget(place)
        here = RunRecord.here(
            run_id=run_id,
            attempt=attempt,
            output_dir=os.path.abspath(output_dir),
            world_size=args.world_size,
            step=max(choice.step, 0) if choice else 0,
            max_steps=max(args.max_steps, 0),
        )
        mine, here = lineage.begin(
            record, ordinal, choice, here, fresh_token=os.environ.get("CKPT_RUN_FRESH")
        )
        here.write(place)
    except resume.NothingToResumeError as error:
        return error
    except Exception as error:
        logger.debug("no plan", exc_info=True)
        given = str(choice.path) if choice else request.path
        return Plan(root, run_id, attempt, lineage_id, ordinal, given, 0, f"{type(error).__name__}: {error}")
    if choice is None:
        return Plan(root, run_id, attempt, mine.id, ordinal, None, 0)
    continues = choice.lineage == mine.id and choice.kind == lineage.OURS
    return Plan(root, run_id, attempt, mine.id, ordinal, str(choice.path), choice.step if continues else 0)


def _occupy(root: layout.Root) -> None:
    name = f"process {os.getpid()} on {os.uname().nodename} ({' '.join(sys.orig_argv)})"
    other = occupant.occupy(root, name)
    if other is not None:
        raise FileExistsError(
            f"{other} saves into {root.path} now; end it, or give this training another output_dir"
        )
