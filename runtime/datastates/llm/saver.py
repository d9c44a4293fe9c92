"""Concurrent saves into the checkpoint directories of one root, whoever asks for them.

What a save writes is whatever the writers write while ``write`` runs: torch zips and safetensors files below the checkpoint's directory are
handed over to the engine, all else lands on disk as always. Nothing here knows a Trainer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from datastates.engine import Engine, PendingFile, Ticket
from datastates.formats import intercept
from datastates.formats.collection import without_garbage_collection
from datastates.llm import log, trouble
from datastates.llm.committer import Committer
from datastates.llm.fence import FENCE
from datastates.llm.save import Manner, Save
from datastates.llm.scope import SaveScope
from datastates.llm.still import StillTensor
from datastates.settings import Settings
from datastates.store.journal import Journal
from datastates.store.layout import CheckpointDir
from datastates.store.verify import scan
from datastates.units import size

logger = log.logger("datastates.llm.decorator")

MOST_IN_FLIGHT = 16
"""Saves that wait for the disk at once, each on a thread of its own. Where they come faster, the next waits for the oldest."""

Still = Callable[[set[str]], Mapping[int, StillTensor]]
"""What holds still now, by address of its storage; takes the names of tensors that once did not."""


class Saver:
    """The saves of one rank. Used by the main thread; saves finish on their own threads.

    Args:
        root: below it lies everything that a failing disk may cost us; errors elsewhere are the caller's.
        rank: of this process.
        still: asked at each save what may be copied late.
        before_submit: is shown what is about to be handed to the engine; what it raises costs the save.
    """

    def __init__(
        self,
        engine: Engine,
        committer: Committer,
        settings: Settings,
        journal: Journal,
        root: Path,
        rank: int,
        still: Still,
        before_submit: Callable[[list[PendingFile]], None] = lambda pending: None,
    ) -> None:
        self._engine = engine
        self._committer = committer
        self._settings = settings
        self._journal = journal
        self._root = root
        self._rank = rank
        self._still = still
        self._before_submit = before_submit
        self._number = 0
        self._in_flight: list[Save] = []
        self._torn_before: set[str] = set()
        self._readers_told: set[str] = set()
        self._newest: Save | None = None
        self._refused = False
        self._gave_up = False
        self._in_vain: Save | None = None

    def save(
        self,
        directory: CheckpointDir,
        write: Callable[[], object],
        best: Callable[[], str | None] = lambda: None,
        pointers: Mapping[Path, bytes] | None = None,
        manner: Manner | None = None,
    ) -> bool:
        """Run ``write`` and carry on in the background with what it handed over. False when this rank's part has failed.

        Args:
            best: path of the best checkpoint, asked when ``write`` is done.
            pointers: see :class:`Save`; what ``write`` leaves of that kind in the directory is added.
            manner: of a training loop's save; its directory is the user's as well, and what ``write`` leaves there is all that counts.

        Raises:
            Exception: whatever ``write`` raises that is not about the disk below the root.
        """
        began = time.perf_counter()
        FENCE.wait_for_all()
        self._make_room()
        how = manner or Manner()
        self._number = self._number + 1 if how.number is None else how.number
        with without_garbage_collection():
            scope = SaveScope(directory.files, self._still(self._torn_before), how.leaves_out)
        try:
            with intercept.sink(scope):
                write()
            directory.prepare()
            # Only where they will be written: another rank may see the file of this one, for DeepSpeed lets the ranks meet after it.
            held = {**scope.hold_back(), **(pointers or {})} if self._committer.commits else {}
            pending = self._pending(directory, scope)
            others = [*scan(directory.files)] if manner and self._committer.commits else None
        except BaseException as error:  # torch.distributed.checkpoint has errors that are no Exceptions
            scope.discard()
            if not trouble.at_the_disk(error, str(self._root)):
                raise
            return self._refuse(directory, error)
        try:
            with without_garbage_collection():
                ticket = self._submit(pending)
        except Exception as error:  # noqa: BLE001 - ours, whatever it is: it costs this checkpoint and not the training
            return self._refuse(directory, error)
        before = self._in_flight[-1] if self._in_flight else None
        self._start(
            Save(
                directory,
                self._number,
                ticket,
                list(scope.late()),
                self._committer.finish,
                self._torn_before.update,
                self._journal.event,
                best(),
                before,
                held,
                others,
                how.voters,
            ),
            began,
            late_bytes=sum([part.nbytes for file in pending for part in file.image.memory if part.still]),
        )
        return True

    def _make_room(self) -> None:
        """Waits for one that hangs only once."""
        self._in_flight = [save for save in self._in_flight if save.outcome is None]
        if len(self._in_flight) < MOST_IN_FLIGHT:
            return
        oldest = self._in_flight[0]
        if oldest is not self._in_vain and not oldest.wait(self._settings.commit_timeout):
            self._in_vain = oldest

    def _submit(self, pending: list[PendingFile]) -> Ticket:
        self._before_submit(pending)
        return self._engine.submit(pending)

    def _start(self, save: Save, began: float, late_bytes: int) -> None:
        self._newest, self._refused = save, False
        save.start()
        self._in_flight = [*(other for other in self._in_flight if other.outcome is None), save]
        stall = time.perf_counter() - began
        self._journal.event(
            "save",
            step=save.step,
            save=save.number,
            bytes=save.nbytes,
            late_bytes=late_bytes,
            stall_s=stall,
        )

    def _pending(self, directory: CheckpointDir, scope: SaveScope) -> list[PendingFile]:
        signature = f"{self._committer.identity.attempt}-r{self._rank}"
        return [
            PendingFile(image, str(directory.temporary(signature, number)), path)
            for number, (path, image) in enumerate(scope.collect())
        ]

    def _refuse(self, directory: CheckpointDir, error: BaseException) -> bool:
        self._newest, self._refused = None, True
        self._committer.refuse(directory, self._number, trouble.in_words(error))
        return False

    @property
    def newest_is_missing(self) -> bool:
        """Whether the last save came to nothing, as far as is known now."""
        newest = self._newest
        return self._refused or (
            newest is not None and newest.outcome is not None and not newest.outcome.committed
        )

    # -- waiting --------------------------------------------------------------------------------------------------------

    def wait_for_readers(self, why: str) -> None:
        """Somebody is about to read checkpoints: wait until all that was saved is committed or given up. Says why, once."""
        if why not in self._readers_told and self._in_flight and self._committer.commits:
            self._readers_told.add(why)
            logger.info("%s waiting for each checkpoint to be complete, because %s", log.PREFIX, why)
        self._wait(self._settings.commit_timeout, "reader")

    def wait_for_all(self) -> None:
        """The end of training: wait for what is in flight, within ``exit_timeout``; say so when that takes long."""
        pending = [save for save in self._in_flight if save.outcome is None]
        if not pending or self._gave_up:
            return
        total = sum(save.nbytes for save in pending)
        logger.info(
            "%s waiting for %s to be committed: %s",
            log.PREFIX,
            ", ".join(save.directory.path.name for save in pending),
            size(total),
        )
        began = time.monotonic()
        if self._wait(self._settings.exit_timeout, "end"):
            logger.info("%s waited %.1f s", log.PREFIX, time.monotonic() - began)
        else:
            self._gave_up = True
            logger.error(
                "%s gave up waiting after %.0f s (exit_timeout)", log.PREFIX, time.monotonic() - began
            )

    def wait_for(self, path: Path, timeout: float) -> bool:
        """Until nothing is in flight into the checkpoint at ``path``; False when something is after ``timeout`` seconds."""
        FENCE.wait_for_all()
        return all(save.wait(timeout) for save in self._in_flight if save.directory.path == path)

    def wait(self, timeout: float | None) -> bool:
        """Until every save has its outcome; False when one has none after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        return all(
            save.wait(None if deadline is None else max(deadline - time.monotonic(), 0))
            for save in self._in_flight
        )

    def _wait(self, timeout: float, what: str) -> bool:
        FENCE.wait_for_all()
        began = time.perf_counter()
        done = self.wait(timeout)
        if self._in_flight:
            self._journal.event("wait", what=what, seconds=time.perf_counter() - began)
        return done
