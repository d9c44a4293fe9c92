"""The ranks that make one checkpoint together, as one of them sees it: it votes, and commits or waits for who does.

This is what a rank does of the protocol in :mod:`datastates.store.commit`, and what it does when a rank fails, dies or hangs, or when the
disk takes no word any more (:mod:`datastates.store.last_word`). Every call ends: the committing rank waits ``timeout`` seconds
for votes, the others twice as long for its word.
"""

from __future__ import annotations

import time
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
    """One attempt's voters. ``rank`` is this process, ``voters`` are all that vote, ``committer`` the one of them that commits.

    Once ``failed`` (this rank's training has, most often because another rank is gone), the others have ``patience`` seconds for their words.
    """

    root: Root
    attempt: str
    rank: int
    committer: int
    voters: tuple[int, ...]
    timeout: float
    failed: Callable[[], bool] = commit.never
    patience: float = 0.0

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
        impatient = self._impatience()
        answer = commit.wait_outcome(
            checkpoint,
            self.attempt,
            vote.save,
            WAIT * self.timeout,
            lambda: impatient() or last_word.has_given_up(self.root, self.attempt, vote.save, self.committer),
            waiting=len(self.voters) - 1,
        )
        if answer == "cancelled" and impatient():
            return f"rank {self.committer}, which commits, {self._has_been_silent}"
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
        impatient = self._impatience()

        def in_vain() -> bool:
            silent[:] = last_word.given_up(self.root, self.attempt, save)
            return bool(silent) or impatient()

        try:
            return commit.collect_votes(checkpoint, self.attempt, save, self.voters, self.timeout, in_vain)
        except commit.VotesCancelled as trouble:
            if silent:
                raise commit.CommitAbandoned(f"rank {silent[0]} could not even write its vote") from None
            raise commit.CommitAbandoned(f"{commit.named(trouble.missing)} {self._has_been_silent}") from None

    def _impatience(self) -> Callable[[], bool]:
        """For one wait: whether the others have had their time. It begins with the wait or the failure, whichever comes later."""
        since: list[float] = []

        def over() -> bool:
            if not since and self.failed():
                since.append(time.monotonic())
            return bool(since) and time.monotonic() >= since[0] + self.patience

        return over

    @property
    def _has_been_silent(self) -> str:
        return f"said nothing within {self.patience:.0f} s after training had failed here"

    def _give_up(self, save: int) -> None:
        try:
            last_word.give_up(self.root, self.attempt, save, self.rank)
        except OSError:  # then the others wait until their time limit
            return
