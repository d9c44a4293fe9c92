"""Which training a ``train()`` call belongs to. Pure rules: nothing here reads or writes a file.

A *lineage* is one training from its fresh start through all its resumes:

- a fresh ``train()`` begins a new one;
- resuming from the newest checkpoint of the current one continues it;
- so does resuming from its origin while it has no checkpoint of its own;
- resuming from anything else (an explicit path, a stock checkpoint) begins a new one with that path as its origin.

When a ``train()`` call begins a new lineage, those of the later calls are forgotten: they built on the training that is now done anew.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from datastates.store.runrecord import FINISHED, RUNNING, Lineage, RunRecord

OURS = "ours"
STOCK = "stock"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A checkpoint to resume from.

    ``step`` is its global step (-1: not known); ``kind`` is ``"ours"`` or ``"stock"``; ``lineage`` is the id of the lineage that goes on
    with it, None when a new one begins.
    """

    path: Path
    step: int
    kind: str
    lineage: str | None


def new_id() -> str:
    """A short random id for an attempt, a lineage or a run."""
    return os.urandom(4).hex()


def begin(
    previous: RunRecord | None,
    ordinal: int,
    decision: ResumePoint | None,
    current: RunRecord,
    *,
    fresh_token: str | None = None,
) -> tuple[Lineage, RunRecord]:
    """The lineage of a ``train()`` call, and the record to write before its first step.

    Args:
        previous: what run.json said until now; None when there was nothing usable.
        ordinal: how many ``train()`` calls of this process into this root came before.
        decision: where training resumes; None for a fresh start.
        current: a record of this process (:meth:`RunRecord.here`); it takes over the lineages of ``previous`` that go on.
        fresh_token: of the launch, when it asked for a fresh start.
    """
    known = dict(previous.lineages) if previous else {}
    lineage = _lineage(known.get(ordinal), decision)
    if ordinal not in known or known[ordinal].id != lineage.id:
        known = {earlier: kept for earlier, kept in known.items() if earlier < ordinal}
    if fresh_token is not None:
        lineage = replace(lineage, fresh_token=fresh_token)
    return lineage, replace(current, lineages={**known, ordinal: lineage}, state=RUNNING)


def wants_fresh(record: RunRecord | None, ordinal: int, fresh_token: str | None) -> bool:
    """Whether a launch's wish to start fresh is still open for this ``train()`` call: once it began, a restart of it resumes."""
    if fresh_token is None:
        return False
    lineage = record.lineages.get(ordinal) if record else None
    return lineage is None or lineage.fresh_token != fresh_token


def unfinished(record: RunRecord | None) -> bool:
    """Whether the last run was begun and not finished: then a script that passes nothing resumes."""
    return record is not None and any(lineage.state != FINISHED for lineage in record.lineages.values())


def _lineage(known: Lineage | None, decision: ResumePoint | None) -> Lineage:
    if decision is None:
        return Lineage(id=new_id())
    if decision.lineage is None:
        return Lineage(id=new_id(), origin=str(decision.path))
    if known and known.id == decision.lineage:
        return replace(known, state=RUNNING)
    return Lineage(id=decision.lineage)
