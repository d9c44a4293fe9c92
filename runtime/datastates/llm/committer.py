"""The end of a save: this rank's vote, and on the committing rank the commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from datastates.engine import crc32
from datastates.llm import log
from datastates.llm.ranks import Ranks
from datastates.llm.save import Outcome, Save
from datastates.settings import Settings
from datastates.store import commit, durable, staged
from datastates.store.journal import Journal
from datastates.store.layout import CheckpointDir, Root
from datastates.store.manifest import FileEntry, Vote
from datastates.store.quorum import Quorum
from datastates.units import size

logger = log.logger("datastates.llm.decorator")

OTHERS_SECONDS = 60.0
"""Once training has failed here, how long other ranks may be silent about a save, unless it took this rank longer. Most often it failed because
one of them is gone; on another node, no launcher ends those that would wait for its vote."""

VISIBLE_SECONDS = 60.0
"""How long a file of another rank may take to be seen by the committing one; by default NFS remembers no longer that it was not there."""


@dataclass(frozen=True)
class Identity:
    """Whose saves these are; in every vote and manifest."""

    attempt: str
    lineage: str
    ordinal: int


class Committer:
    """Finishes saves on their threads. Every rank votes, one of those that save into the same directory commits.

    Args:
        after_commit: what follows from a commit, on the committing rank and on the save's thread.
    """

    def __init__(
        self,
        settings: Settings,
        place: Ranks,
        identity: Identity,
        root: Root,
        journal: Journal,
        after_commit: Callable[[Save], None],
    ) -> None:
        self.identity = identity
        self._settings = settings
        self._ranks = place
        self._journal = journal
        self._root = root
        self._after_commit = after_commit
        self._failed = threading.Event()

    @property
    def commits(self) -> bool:
        return self._ranks.leads

    def training_has_failed(self) -> None:
        """On this rank: from now on the others have ``OTHERS_SECONDS`` for their words."""
        self._failed.set()

    def finish(self, save: Save, error: str | None) -> Outcome:
        """Vote; commit, or learn what became of the save. Never raises OSError: that is an outcome too."""
        if error is None:
            self._journal.event("persisted", step=save.step, seconds=time.time() - save.began)
        try:
            outcome = self._vote_and_settle(save, error)
        except OSError as trouble:
            outcome = Outcome(False, str(trouble))
        self._report(save, outcome)
        return outcome

    def refuse(self, directory: CheckpointDir, number: int, reason: str) -> None:
        """Make known that this rank's part of a save failed before the engine had it."""
        if self.commits:
            self._quorum.abandon(directory, number, reason)
        else:
            self._quorum.cast(directory, self._vote(directory.step, number, (), reason))
        self._journal.event("abandon", step=directory.step, reason=reason)
        logger.error("%s %s was not saved, training goes on: %s", log.PREFIX, directory.path.name, reason)

    def _vote_and_settle(self, save: Save, error: str | None) -> Outcome:
        vote = self._vote(save.step, save.number, () if error else _entries(save), error)
        patience = max(OTHERS_SECONDS, time.time() - save.began)
        quorum = replace(self._quorum, failed=self._failed.is_set, patience=patience)
        if not self.commits:
            reason = quorum.follow(save.directory, vote)
            return Outcome(not reason, reason)
        if save.voters:
            quorum = replace(quorum, voters=tuple(save.voters()))
        reason = quorum.lead(save.directory, vote, lambda votes: self._publish(save, votes))
        if reason:
            return Outcome(False, reason)
        try:
            if save.directory.staged:
                staged.settle(save.directory.path)
            _write(save.pointers_outside)
        except OSError as trouble:
            logger.error("%s after %s was committed: %s", log.PREFIX, save.directory.path.name, trouble)
        self._after_commit(save)
        return Outcome(True)

    def _publish(self, save: Save, votes: list[Vote]) -> None:
        if save.before is not None:  # in order: a checkpoint may name an earlier one as the best
            save.before.wait(self._settings.commit_timeout)
        _write(save.pointers_inside)
        if save.directory.staged:
            staged.replace(save.directory)
        commit.publish(
            save.directory,
            votes,
            rank=self._ranks.rank,
            crc32=crc32,
            patience=VISIBLE_SECONDS,
            others=save.others,
        )

    @property
    def _quorum(self) -> Quorum:
        place = self._ranks
        return Quorum(
            self._root,
            self.identity.attempt,
            place.rank,
            place.committer,
            place.voters,
            self._settings.commit_timeout,
        )

    def _vote(self, step: int, number: int, files: tuple[FileEntry, ...], error: str | None) -> Vote:
        return Vote(
            attempt=self.identity.attempt,
            save=number,
            step=step,
            rank=self._ranks.rank,
            world_size=self._ranks.size,
            lineage=self.identity.lineage,
            ordinal=self.identity.ordinal,
            node=self._ranks.node,
            nodes=self._ranks.nodes,
            files=files,
            error=error,
        )

    def _report(self, save: Save, outcome: Outcome) -> None:
        seconds = time.time() - save.began
        name = save.directory.path.name
        if outcome.committed:
            self._journal.event("commit", step=save.step, seconds=seconds, bytes=save.nbytes)
            if self.commits:
                logger.info(
                    "%s %s is committed: %s, %.2f s after its save",
                    log.PREFIX,
                    name,
                    size(save.nbytes),
                    seconds,
                )
            return
        self._journal.event("abandon", step=save.step, reason=outcome.reason)
        goes_on = "" if self._failed.is_set() else ", training goes on"
        logger.error("%s %s was not committed%s: %s", log.PREFIX, name, goes_on, outcome.reason)


def _write(pointers: Mapping[Path, bytes]) -> None:
    for path, content in pointers.items():
        durable.write_durably(path, content)


def _entries(save: Save) -> tuple[FileEntry, ...]:
    return tuple(
        FileEntry(save.directory.relative(result.path), result.size, result.crc32)
        for result in save.ticket.files
    )
