"""Which training a ``train()`` call belongs to. Pure rules: nothing here reads or writes a file.

A *lineage* is one training from its fresh start through all its resumes:

- a fresh ``train()`` begins a new one;
- resuming from the newest checkpoint of the current one continues it;
- so does resuming from its origin while it has no checkpoint of its own;
- so does resuming from a stock checkpoint that goes on from the newest of its own: Trainer saved that by itself;
- resuming from anything else (an explicit path, any other stock checkpoint) begins a new one with that path as its origin.

When a ``train()`` call begins a new lineage, those of the later calls are forgotten: they built on the training that is now done anew.

Which lineage is the current one of a call, :func:`ordinal_of` says. A script that is started again calls ``train()`` in the same order, but may
leave out what is done. So a call is one of the trainings that the record has at its own ordinal or later:

- never one of another model: its checkpoints could not be loaded;
- of several, the one whose facts are alike in most, since any argument may have been changed by hand in order to go on;
- of those that are alike in as many, the first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from datastates.store.runrecord import FINISHED, RUNNING, Fingerprint, Lineage, RunRecord

OURS = "ours"
STOCK = "stock"

OPAQUE = "#"
"""What the text of a fact begins with when it says nothing to a person: a digest."""


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


def ordinal_of(record: RunRecord | None, earliest: int, fingerprint: Fingerprint | None) -> int:
    """Which training of the script a ``train()`` call is: one of the record, or one that begins now.

    Args:
        record: of the last run; None when there was nothing usable.
        earliest: how many trainings of the script came before in this process, those among them that it left out.
        fingerprint: of the call. Without it the order alone tells.
    """
    if record is None or fingerprint is None:
        return earliest
    same = [
        (_alike(known.fingerprint, fingerprint), -ordinal)
        for ordinal, known in record.lineages.items()
        if ordinal >= earliest and not other_model(known, fingerprint)
    ]
    return -max(same)[1] if same else earliest


def other_model(known: Lineage | None, now: Fingerprint | None) -> str:
    """How the model of a lineage differs, for a person; empty when it does not, as far as is known. Its checkpoints cannot be loaded then."""
    if known is None or known.fingerprint is None or now is None:
        return ""
    return differences(known.fingerprint.model, now.model)


def differences(known: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What differs, for a person: ``"seed 1 there and 2 here, ..."``; only names, where all texts are digests. Empty: nothing.

    What only one of the two tells counts neither way.
    """
    different = [name for name, text in now.items() if known.get(name, text) != text]
    told = [
        f"{name} {known[name]} there and {now[name]} here"
        for name in different
        if not now[name].startswith(OPAQUE)
    ]
    return ", ".join(told or different)


def begin(
    previous: RunRecord | None,
    ordinal: int,
    decision: ResumePoint | None,
    current: RunRecord,
    *,
    fresh_token: str | None = None,
    fingerprint: Fingerprint | None = None,
) -> tuple[Lineage, RunRecord]:
    """The lineage of a ``train()`` call, and the record to write before its first step.

    Args:
        previous: what run.json said until now; None when there was nothing usable.
        ordinal: of the call, see :func:`ordinal_of`.
        decision: where training resumes; None for a fresh start.
        current: a record of this process (:meth:`RunRecord.here`); it takes over the lineages of ``previous`` that go on.
        fresh_token: of the launch, when it asked for a fresh start.
        fingerprint: of the call.
    """
    known = dict(previous.lineages) if previous else {}
    lineage = _lineage(known.get(ordinal), decision)
    if ordinal not in known or known[ordinal].id != lineage.id:
        known = {earlier: kept for earlier, kept in known.items() if earlier < ordinal}
    if fresh_token is not None:
        lineage = replace(lineage, fresh_token=fresh_token)
    lineage = replace(lineage, fingerprint=_newest(lineage.fingerprint, fingerprint))
    return lineage, replace(current, lineages={**known, ordinal: lineage}, state=RUNNING)


def wants_fresh(record: RunRecord | None, ordinal: int, fresh_token: str | None) -> bool:
    """Whether a launch's wish to start fresh is still open for this ``train()`` call: once it began, a restart of it resumes."""
    if fresh_token is None:
        return False
    lineage = record.lineages.get(ordinal) if record else None
    return lineage is None or lineage.fresh_token != fresh_token


def unfinished(record: RunRecord | None) -> bool:
    """Whether a training of the last run was begun and not finished: then a script that passes nothing resumes."""
    return record is not None and any(lineage.state != FINISHED for lineage in record.lineages.values())


def over(record: RunRecord | None) -> bool:
    """Whether there was a last run, and it is over: all its trainings have finished, and the program ended well after that."""
    return record is not None and record.ended_well and not unfinished(record)


def _lineage(known: Lineage | None, decision: ResumePoint | None) -> Lineage:
    if decision is None:
        return Lineage(id=new_id())
    if decision.lineage is None:
        return Lineage(id=new_id(), origin=str(decision.path))
    if known and known.id == decision.lineage:
        return replace(known, state=RUNNING)
    return Lineage(id=decision.lineage)


def _alike(known: Fingerprint | None, now: Fingerprint) -> int:
    """In how many facts of the training. Each counts the same, whoever changed it."""
    if known is None:
        return 0
    return sum(known.training.get(name) == text for name, text in now.training.items())


def _newest(known: Fingerprint | None, now: Fingerprint | None) -> Fingerprint | None:
    """A model that is not known now is still the one that it was."""
    if known is None or now is None:
        return now or known
    return replace(now, model=now.model or known.model)
