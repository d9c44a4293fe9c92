"""The ranks that make one checkpoint together, as one of them sees it: it votes, and commits or waits for who does.

This is what a rank does of the protocol in :mod:`datastates.store.commit`, and what it does when a rank fails, dies or hangs, or when the
disk takes no word any more (:mod:`datastates.store.last_word`). Every call ends: the committing rank waits ``timeout`` seconds
for votes, the others twice as long for its word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from datastates.store import commit, last_word
from datastates.store.layout import CheckpointDir, Root
from datastates.store.manifest import Vote

COMMITTED = ""
"""What :meth:`Quorum.lead` and :meth:`Quorum.follow` return for a save that was committed; anything else says why it was not."""

WAIT = 2
"""How many times longer a rank waits for the committing one than that waits for votes: it may have begun to wait long after this rank, and
its word says who is missing."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """One attempt's voters. ``rank`` is this process, ``voters`` are all that vote, ``committer`` the one of them that commits."""

    root: Root
    attempt: str
    rank: int
    committer: int
    voters: tuple[int, ...]
    timeout: float

    def lead(self, checkpoint: CheckpointDir, vote: Vote, publish: Callable[[list[Vote]], object]) -> str:
        """The committing rank: vote, collect the votes and let ``publish`` commit them, or abandon the save and tell the others."""
        try:
            if vote.error is not None:
                raise commit.CommitAbandoned(vote.error)
            commit.cast_vote(checkpoint, vote)
            publish(self._collect(checkpoint, vote.save))
        except (commit.CommitAbandoned, OSError) as trouble:
            reason = str(trouble) or type(trouble).__name__
            self.abandon(checkpoint, vote.save, reason)
            return reason
        return COMMITTED

    def follow(self, checkpoint: CheckpointDir, vote: Vote) -> str:
        """Any other rank: vote, and wait for what the committing rank makes of it."""
        trouble = self.cast(checkpoint, vote)
        if trouble:
            return vote.error or trouble
        answer = commit.wait_outcome(
            checkpoint,
            self.attempt,
            vote.save,
            WAIT * self.timeout,
            lambda: last_word.has_given_up(self.root, self.attempt, vote.save, self.committer),
            waiting=len(self.voters) - 1,
        )
        return {
            "committed": COMMITTED,
            # By then it may have been beyond save_total_limit: nothing else removes a checkpoint. Where the user did, the committing rank tells.
            "gone": COMMITTED,
            "cancelled": f"rank {self.committer} could not commit, nor write why",
            "timeout": f"rank {self.committer}, which commits, has said nothing within {WAIT * self.timeout:g} s",
        }.get(answer, answer.removeprefix("abandoned: "))

    def cast(self, checkpoint: CheckpointDir, vote: Vote) -> str:
        """Vote; why that cannot be, "" when it can. The others are told even then."""
        try:
            commit.cast_vote(checkpoint, vote)
        except OSError as trouble:
            self._give_up(vote.save)
            return str(trouble)
        return ""

    def abandon(self, checkpoint: CheckpointDir, save: int, reason: str) -> None:
        """The committing rank tells the others that there will be no commit, however full the disk is."""
        try:
            commit.abandon(checkpoint, self.attempt, save, reason)
        except OSError:
            self._give_up(save)

    def _collect(self, checkpoint: CheckpointDir, save: int) -> list[Vote]:
        silent: list[int] = []

        def somebody_gave_up() -> bool:
            silent[:] = last_word.given_up(self.root, self.attempt, save)
            return bool(silent)

        try:
            return commit.collect_votes(
                checkpoint, self.attempt, save, self.voters, self.timeout, somebody_gave_up
            )
        except commit.CommitAbandoned:
            if silent:
                raise commit.CommitAbandoned(f"rank {silent[0]} could not even write its vote") from None
            raise

    def _give_up(self, save: int) -> None:
        try:
            last_word.give_up(self.root, self.attempt, save, self.rank)
        except OSError:  # then the others wait until their time limit
            return
