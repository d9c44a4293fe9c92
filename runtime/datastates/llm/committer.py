"""The end of a save: this rank's vote, and on the committing rank the commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from datastates.engine import crc32
from datastates.llm import log
from datastates.llm.ranks import Ranks
from datastates.llm.save import Outcome, Save
from datastates.llm.space import human
from datastates.settings import Settings
from datastates.store import commit, durable, last_word
from datastates.store.journal import Journal
from datastates.store.layout import CheckpointDir, Root
from datastates.store.manifest import FileEntry, Vote

logger = log.logger("datastates.llm.decorator")


@dataclass(frozen=True)
class Identity:
    """Whose saves these are; in every vote and manifest."""

    attempt: str
    lineage: str
    ordinal: int


class Committer:
    """Finishes saves on their threads. The committing rank is 0; every rank votes.

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

    @property
    def commits(self) -> bool:
        return self._ranks.rank == 0

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
            self._abandon(directory, number, reason)
        else:
            self._cast(directory, self._vote(directory.step, number, (), reason))
        self._journal.event("abandon", step=directory.step, reason=reason)
        logger.error("%s %s was not saved, training goes on: %s", log.PREFIX, directory.path.name, reason)

    def _vote_and_settle(self, save: Save, error: str | None) -> Outcome:
        vote = self._vote(save.step, save.number, () if error else _entries(save), error)
        return self._lead(save, vote) if self.commits else self._follow(save.directory, vote)

    def _lead(self, save: Save, vote: Vote) -> Outcome:
        """The committing rank: collect the votes and commit, or abandon the save."""
        directory = save.directory
        try:
            if vote.error is not None:
                raise commit.CommitAbandoned(vote.error)
            commit.cast_vote(directory, vote)
            votes = self._collect(directory, save.number)
            if save.before is not None:  # in order: a checkpoint may name an earlier one as the best
                save.before.wait(self._settings.commit_timeout)
            _write(save.pointers_inside)
            commit.publish(directory, votes, crc32=crc32)
        except (commit.CommitAbandoned, OSError) as trouble:
            self._abandon(directory, save.number, str(trouble))
            return Outcome(False, str(trouble))
        try:
            _write(save.pointers_outside)
        except OSError as trouble:
            logger.error("%s after %s was committed: %s", log.PREFIX, directory.path.name, trouble)
        self._after_commit(save)
        return Outcome(True)

    def _collect(self, directory: CheckpointDir, number: int) -> list[Vote]:
        silent: list[int] = []

        def somebody_gave_up() -> bool:
            silent[:] = last_word.given_up(self._root, self.identity.attempt, number)
            return bool(silent)

        everybody = range(self._ranks.size)
        limit = self._settings.commit_timeout
        try:
            return commit.collect_votes(
                directory, self.identity.attempt, number, everybody, limit, somebody_gave_up
            )
        except commit.CommitAbandoned:
            if silent:
                raise commit.CommitAbandoned(f"rank {silent[0]} could not even write its vote") from None
            raise

    def _follow(self, directory: CheckpointDir, vote: Vote) -> Outcome:
        """Any other rank: vote, and wait for what the committing rank makes of it."""
        trouble = self._cast(directory, vote)
        if trouble:
            return Outcome(False, vote.error or trouble)
        answer = commit.wait_outcome(
            directory,
            vote.attempt,
            vote.save,
            self._settings.commit_timeout,
            lambda: 0 in last_word.given_up(self._root, vote.attempt, vote.save),
        )
        if answer == "cancelled":
            answer = "rank 0 could not commit, nor write why"
        return Outcome(answer == "committed", "" if answer == "committed" else answer)

    def _cast(self, directory: CheckpointDir, vote: Vote) -> str:
        """Vote; why that cannot be, "" when it can."""
        try:
            commit.cast_vote(directory, vote)
        except OSError as trouble:
            self._give_up(vote.save)
            return str(trouble)
        return ""

    def _abandon(self, directory: CheckpointDir, number: int, reason: str) -> None:
        try:
            commit.abandon(directory, self.identity.attempt, number, reason)
        except OSError:
            self._give_up(number)

    def _give_up(self, number: int) -> None:
        try:
            last_word.give_up(self._root, self.identity.attempt, number, self._ranks.rank)
        except OSError as trouble:  # then the others wait until their time limit
            logger.debug("%s the other ranks cannot be told: %s", log.PREFIX, trouble)

    def _vote(self, step: int, number: int, files: tuple[FileEntry, ...], error: str | None) -> Vote:
        return Vote(
            attempt=self.identity.attempt,
            save=number,
            step=step,
            rank=self._ranks.rank,
            world_size=self._ranks.size,
            lineage=self.identity.lineage,
            ordinal=self.identity.ordinal,
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
                    human(save.nbytes),
                    seconds,
                )
            return
        self._journal.event("abandon", step=save.step, reason=outcome.reason)
        logger.error("%s %s was not committed, training goes on: %s", log.PREFIX, name, outcome.reason)


def _write(pointers: Mapping[Path, bytes]) -> None:
    for path, content in pointers.items():
        durable.write_durably(path, content)


def _entries(save: Save) -> tuple[FileEntry, ...]:
    return tuple(
        FileEntry(save.directory.relative(result.path), result.size, result.crc32)
        for result in save.ticket.files
    )
