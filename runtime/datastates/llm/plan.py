"""What rank 0 decides at the start of ``train()``; with disks of their own (nodes.py), what each node's committing rank does of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datastates.llm import log, resume
from datastates.settings import Settings
from datastates.store import commit, last_word, layout, lineage, occupant
from datastates.store.lineage import ResumePoint
from datastates.store.runrecord import Fingerprint, RunRecord

logger = log.logger("datastates.llm.decorator")


@dataclass(frozen=True)
class Plan:
    """The same on every rank that saves into one directory. ``root`` is as the script gives it, relative or not. ``trouble`` says why nothing can be saved; it is empty when all is well.

    ``keeper`` tells apart who wrote run.json: host, pid and time of the rank that commits.
    """

    root: str
    run_id: str
    attempt: str
    lineage: str
    ordinal: int
    resume_path: str | None
    resume_step: int
    trouble: str = ""
    keeper: tuple[str, int, float] = ("", 0, 0.0)


def decide(
    args: Any, settings: Settings, request: resume.Request, root: str, ordinal: int
) -> Plan | resume.NothingToResumeError:
    """Decide, and do what follows on disk before any rank writes: leftovers move aside, run.json is written.

    Nothing is raised, since the other ranks wait for this rank's word: an error that shall end the training is returned, any other is the
    plan's ``trouble``.

    Args:
        args: the TrainingArguments.
        ordinal: which training of the script this is.
    """
    output_dir = str(Path(root).parent)
    try:
        record = resume.run_record(output_dir)
        choice = resume.choose(request, settings, output_dir, ordinal, record)
    except resume.NothingToResumeError as error:
        return error
    except Exception as error:
        logger.debug("no plan", exc_info=True)
        return in_trouble(root, ordinal, error, request.path)
    return set_out(args, settings, root, ordinal, choice, record, request.fingerprint)


def look(
    settings: Settings, request: resume.Request, root: str, ordinal: int
) -> Plan | resume.NothingToResumeError:
    """What a rank that saves nothing goes by: the same choice, and nothing done on disk."""
    output_dir = str(Path(root).parent)
    try:
        choice = resume.choose(request, settings, output_dir, ordinal, resume.run_record(output_dir))
    except resume.NothingToResumeError as error:
        return error
    path = str(choice.path) if choice else None
    return Plan(root, "", "", "", ordinal, path, max(choice.step, 0) if choice else 0)


def set_out(
    args: Any,
    settings: Settings,
    root: str,
    ordinal: int,
    choice: ResumePoint | None,
    record: RunRecord | None,
    fingerprint: Fingerprint | None,
    like: Plan | None = None,
    siblings: Collection[str] = (),
    voters: int | None = None,
) -> Plan:
    """Do what follows from a choice on disk. Nothing is raised: what goes wrong is the plan's ``trouble``.

    Args:
        record: of the last run in this directory.
        fingerprint: of the training.
        like: the plan of another node, whose attempt and lineage this one's are to be.
        siblings: how the names begin of those that save for the other nodes of this training.
        voters: how many ranks save here; None: all.
    """
    place = layout.Root.of(str(Path(root).parent))
    run_id = like.run_id if like else os.environ.get("CKPT_RUN_RUN_ID") or lineage.new_id()
    attempt = like.attempt if like else lineage.new_id()
    try:
        _occupy(place, siblings, take=settings.occupied == "take")
        if not occupant.shared(place):  # or it is not left over, but in flight
            commit.sweep(place, attempt, spare=choice.path if choice else None)
            last_word.forget(place)
        here = RunRecord.here(
            run_id=run_id,
            attempt=attempt,
            output_dir=str(place.path.parent),
            world_size=voters or args.world_size,
            step=max(choice.step, 0) if choice else 0,
            max_steps=max(args.max_steps, 0),
        )
        mine, here = lineage.begin(
            record,
            ordinal,
            choice,
            here,
            fresh_token=os.environ.get("CKPT_RUN_FRESH"),
            fingerprint=fingerprint,
        )
        if like is not None:
            mine = replace(mine, id=like.lineage)
            here = here.with_lineage(ordinal, mine)
        here.write(place)
    except Exception as error:
        logger.debug("no plan", exc_info=True)
        return in_trouble(root, ordinal, error, str(choice.path) if choice else None)
    keeper = (here.host, here.pid, here.started)
    plan = Plan(root, run_id, attempt, mine.id, ordinal, None, 0, keeper=keeper)
    if choice is None:
        return plan
    if like is not None:
        return replace(plan, resume_path=str(choice.path), resume_step=like.resume_step)
    continues = choice.lineage == mine.id and choice.kind == lineage.OURS
    return replace(plan, resume_path=str(choice.path), resume_step=choice.step if continues else 0)


def in_trouble(root: str, ordinal: int, error: Exception, resume_path: str | None) -> Plan:
    """The plan of a training that we cannot save, because of ``error``."""
    run_id, attempt, nobody = lineage.new_id(), lineage.new_id(), lineage.new_id()
    return Plan(root, run_id, attempt, nobody, ordinal, resume_path, 0, f"{type(error).__name__}: {error}")


def name() -> str:
    """How this process is told apart from others that save; the command follows."""
    return f"process {os.getpid()} on {os.uname().nodename} ("


def _occupy(root: layout.Root, siblings: Collection[str], take: bool) -> None:
    other = occupant.occupy(root, f"{name()}{' '.join(sys.orig_argv)})", take=take)
    if other is None:
        return
    if other.startswith(tuple(siblings)):
        raise FileExistsError(f"{root.path} is one directory for all nodes: leave out save_on_each_node")
    raise FileExistsError(
        f"{other} saves into {root.path} now; end it, or give this training another output_dir (or set CKPT_RUN_OCCUPIED=take if it is gone)"
    )
