"""One ``train()`` call: its attempt, its lineage, its saves.

``begin`` holds the only collectives of the library: the ranks meet, rank 0 draws the attempt id, chooses the checkpoint to resume from,
moves aside what was never committed, and tells the others. From then on ranks speak through files only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from datastates.engine import Engine, PendingFile
from datastates.formats import intercept
from datastates.llm import host_cache, log, meetings, ranks, resume, space, trouble
from datastates.llm.committer import Committer
from datastates.llm.fence import FENCE
from datastates.llm.plan import Plan, decide
from datastates.llm.save import Save
from datastates.llm.scope import SaveScope
from datastates.llm.still import StillTensor, still_tensors
from datastates.settings import Settings
from datastates.store import commit, layout, occupant
from datastates.store.journal import Journal
from datastates.store.stock import INCOMPLETE

logger = log.logger("datastates.llm.decorator")


class Session:
    """The saves of one ``train()`` call on this rank. Used by the main thread; saves finish on their own threads."""

    def __init__(self, trainer: Any, settings: Settings, place: ranks.Ranks, plan: Plan) -> None:
        # Settled once: a script may change directory before this session ends.
        self._root = layout.Root(Path(os.path.abspath(plan.root)))
        self.root = str(self._root.path)
        self.root_as_given = plan.root
        self.ordinal = plan.ordinal
        self.resume_path = plan.resume_path
        self.in_scope = False
        self._trainer = trainer
        self._settings = settings
        self._ranks = place
        self._plan = plan
        self._number = 0
        self._steps = {plan.resume_step} if plan.resume_step else set()
        self._in_flight: list[Save] = []
        self._torn_before: set[str] = set()
        self._after_scope: list[tuple[Callable[[], None], str]] = []
        self._engine: Engine | None = None
        self._space_told = False
        self._readers_told: set[str] = set()
        self._refused = False
        self._gave_up = False
        self._newest: Save | None = None
        self.running = True
        obstacle = ranks.first(place, plan.trouble or self._open())
        self.active = not obstacle
        if obstacle:
            self._leave_it_to_trainer(obstacle)

    # -- the start ------------------------------------------------------------------------------------------------------

    @classmethod
    def begin(
        cls, trainer: Any, settings: Settings, request: resume.Request, root: str, last: Session | None
    ) -> Session:
        """Meet the other ranks and agree.

        Args:
            root: the checkpoint root, relative if the script's output directory is.
            last: the session of this Trainer's ``train()`` call before; asked to resume, this call goes on with that training.

        Raises:
            resume.NothingToResumeError: on every rank.
        """
        place = ranks.Ranks.of(trainer)
        goes_on = last is not None and last.root_as_given == root and (request.resume is True or request.path)
        ordinal = resume.count_train_call(str(Path(root).parent), last.ordinal if last and goes_on else None)
        ranks.meet(place)
        plan = decide(trainer.args, settings, request, root, ordinal) if place.rank == 0 else None
        plan = ranks.tell(place, plan, trainer.args.device)
        if isinstance(plan, resume.NothingToResumeError):
            raise plan
        return cls(trainer, settings, place, plan)

    def _open(self) -> str:
        """Get ready to save; why that cannot be, "" when it can."""
        try:
            self._engine = host_cache.engine(self._settings, self._ranks)
            self._journal = Journal(self._root, self._ranks.rank, self._plan.run_id, self._plan.attempt)
        except OSError as error:
            return str(error)
        intercept.install()
        self._journal.event(
            "hooked",
            rank=self._ranks.rank,
            world_size=self._ranks.size,
            pid=os.getpid(),
            host=os.uname().nodename,
        )
        self._journal.event(
            "train_begin",
            lineage=self._plan.lineage,
            ordinal=self._plan.ordinal,
            resume_step=self._plan.resume_step,
            max_steps=self._trainer.args.max_steps,
        )
        self._committer = Committer(
            self._trainer, self._settings, self._ranks, self._plan, self._root, self._journal
        )
        return ""

    def _leave_it_to_trainer(self, obstacle: str) -> None:
        """We cannot save, on some rank: then none of us does, and Trainer writes its own checkpoints where it always did."""
        self.root = str(Path(self.root).parent)
        self.root_as_given = str(Path(self.root_as_given).parent)
        if self._ranks.rank == 0:
            logger.error("%s is off for this training, Trainer saves by itself: %s", log.PREFIX, obstacle)

    @property
    def resumed_at_the_end(self) -> bool:
        """Whether the checkpoint that training resumed from leaves nothing to train."""
        state = self._trainer.state
        return self.resume_path is not None and 0 < state.max_steps <= state.global_step

    # -- one save -------------------------------------------------------------------------------------------------------

    def save(self, original: Callable[[], None]) -> None:
        """Run the original ``_save_checkpoint`` inside the scope and hand what it wrote to the engine."""
        step = self._trainer.state.global_step
        if not self.active:
            self._save_by_trainer(step, original)
            return
        if step in self._steps:
            self._note_best_model()
            return
        began = time.perf_counter()
        FENCE.wait()
        self._steps.add(step)
        self._number += 1
        save = self._newest = self._run_scope(step, self._number, original)
        self._refused = save is None
        if save is not None:
            save.start()
            self._in_flight = [*(other for other in self._in_flight if other.outcome is None), save]
            self._journal.event(
                "save", step=step, save=self._number, bytes=save.nbytes, stall_s=time.perf_counter() - began
            )
        self._run_after_scope()

    def _save_by_trainer(self, step: int, original: Callable[[], None]) -> None:
        try:
            with meetings.kept(self._trainer):
                original()
        except Exception as error:
            if not trouble.at_the_disk(error, self.root):
                raise
            logger.error(
                "%s checkpoint-%d was not saved, training goes on: %s: %s",
                log.PREFIX,
                step,
                type(error).__name__,
                error,
            )

    def _run_scope(self, step: int, number: int, original: Callable[[], None]) -> Save | None:
        directory = self._root.checkpoint(step)
        scope = SaveScope(directory.path, self._still())
        try:
            with self._scope(scope, directory):
                original()
            directory.prepare()
            pending = [
                PendingFile(
                    image, str(directory.temporary(f"{self._plan.attempt}-r{self._ranks.rank}", n)), path
                )
                for n, (path, image) in enumerate(scope.collect())
            ]
        except Exception as error:
            scope.discard()
            if not trouble.at_the_disk(error, self.root):
                raise
            self._committer.refuse(step, number, f"{type(error).__name__}: {error}")
            return None
        return self._submit(step, number, pending, list(scope.late()))

    def _submit(
        self, step: int, number: int, pending: list[PendingFile], late: list[StillTensor]
    ) -> Save | None:
        assert self._engine is not None
        try:
            self._tell_shortage(pending)
            ticket = self._engine.submit(pending)
        except Exception as error:  # noqa: BLE001 - ours, whatever it is: it costs this checkpoint and not the training
            self._committer.refuse(step, number, f"{type(error).__name__}: {error}")
            return None
        return Save(
            step,
            number,
            ticket,
            late,
            self._committer.finish,
            self._torn_before.update,
            self._journal.event,
            self._trainer.state.best_model_checkpoint,
            self._in_flight[-1] if self._in_flight else None,
        )

    @contextmanager
    def _scope(self, scope: SaveScope, directory: layout.CheckpointDir) -> Iterator[None]:
        """The writers' hand-over. The directory is ours from the moment on when all ranks have met."""
        self.in_scope = True
        obstacle = self._clear_the_way(directory)
        try:
            with intercept.sink(scope), meetings.kept(self._trainer, after_first=directory.prepare):
                if obstacle:
                    raise obstacle
                if self._searching:
                    directory.prepare()
                yield
        finally:
            self.in_scope = False

    def _still(self) -> dict[int, StillTensor]:
        if self._settings.snapshot == "eager":
            return {}
        try:
            return still_tensors(FENCE.optimizers.trusted(), self._trainer.model, self._torn_before)
        except Exception:
            logger.exception("%s cannot tell what holds still: everything is copied at once", log.PREFIX)
            return {}

    @property
    def _searching(self) -> bool:
        return self._trainer.hp_search_backend is not None

    def _clear_the_way(self, directory: layout.CheckpointDir) -> OSError | None:
        """Another lineage's checkpoint of this step, or a damaged one, is moved aside; the other ranks write only after that.

        They wait in ``store_flos``, the first thing that ``_save_checkpoint`` does, except in a hyperparameter search.
        """
        obstacle = None
        try:
            self._move_aside(directory)
        except OSError as error:
            obstacle = error
        if self._searching:
            ranks.meet(self._ranks)
        return obstacle

    def _move_aside(self, directory: layout.CheckpointDir) -> None:
        # Trainer marks a save on a signal that is not complete yet. Here the manifest tells, and it will name every file it finds.
        (directory.path / INCOMPLETE).unlink(missing_ok=True)
        if self._committer.commits and directory.path.exists() and any(directory.path.iterdir()):
            commit.set_aside(directory, self._plan.attempt)

    def _note_best_model(self) -> None:
        """What ``_save_checkpoint`` would have noted for a step that is already there."""
        state = self._trainer.state
        best = (
            layout.Root(Path(self.root_as_given)).checkpoint(state.best_global_step).path
            if state.best_global_step
            else None
        )
        if best is not None and best.exists():
            state.best_model_checkpoint = str(best)

    def _tell_shortage(self, pending: list[PendingFile]) -> None:
        if not self._space_told and self._committer.commits:
            self._space_told = True
            space.tell_shortage(
                self.root,
                sum(file.image.size for file in pending),
                self._committer.committed_bytes(),
                self._trainer.args.save_total_limit,
            )

    # -- readers --------------------------------------------------------------------------------------------------------

    def after_scope(self, action: Callable[[], None], why: str) -> None:
        """Do ``action``, which reads the checkpoint, when the scope has ended and the checkpoint is committed."""
        self._after_scope.append((action, why))

    def _run_after_scope(self) -> None:
        actions, self._after_scope = self._after_scope, []
        if self._refused:
            return
        for action, why in actions:
            self.wait_for_readers(why)
            action()

    def wait_for_readers(self, why: str) -> None:
        """Somebody is about to read checkpoints: wait until all that was saved is committed or given up. Says why, once."""
        if why not in self._readers_told and self._in_flight and self._committer.commits:
            self._readers_told.add(why)
            logger.info("%s waiting for each checkpoint to be complete, because %s", log.PREFIX, why)
        self._wait(self._settings.commit_timeout, "reader")

    @property
    def newest_is_missing(self) -> bool:
        """Whether the last save came to nothing, as far as is known now."""
        newest = self._newest
        return self._refused or (
            newest is not None and newest.outcome is not None and not newest.outcome.committed
        )

    def wait_for_all(self) -> None:
        """The end of training: wait for what is in flight, within ``exit_timeout``; say so when that takes long."""
        pending = [save for save in self._in_flight if save.outcome is None]
        if not pending or self._gave_up:
            return
        total = sum(save.nbytes for save in pending)
        logger.info(
            "%s waiting for %s: %s still being written",
            log.PREFIX,
            ", ".join(f"checkpoint-{save.step}" for save in pending),
            space.human(total),
        )
        began = time.monotonic()
        if self._wait(self._settings.exit_timeout, "end"):
            logger.info("%s waited %.1f s", log.PREFIX, time.monotonic() - began)
        else:
            self._gave_up = True
            logger.error(
                "%s gave up waiting after %.0f s (exit_timeout)", log.PREFIX, time.monotonic() - began
            )

    def wait(self, timeout: float | None) -> bool:
        """Until every save has its outcome; False when one has none after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        return all(
            save.wait(None if deadline is None else max(deadline - time.monotonic(), 0))
            for save in self._in_flight
        )

    def _wait(self, timeout: float, what: str) -> bool:
        FENCE.wait()
        began = time.perf_counter()
        done = self.wait(timeout)
        if self._in_flight:
            self._journal.event("wait", what=what, seconds=time.perf_counter() - began)
        return done

    # -- the end --------------------------------------------------------------------------------------------------------

    def start_over(self, entry: int) -> None:
        """``auto_find_batch_size`` begins again with smaller batches: what was saved so far belongs to another training."""
        if not self.active:
            return
        self.wait_for_all()
        self._plan = replace(
            self._plan, lineage=f"{self._plan.lineage}-{entry}", attempt=f"{self._plan.attempt}-{entry}"
        )
        self._steps = {self._plan.resume_step} if self._plan.resume_step else set()
        self._committer.begin_lineage(self._plan)

    def end(self, error: BaseException | None) -> None:
        """``train()`` has returned, or raised ``error``: wait for what is in flight and leave the marker."""
        self.running = False
        if error is not None:
            resume.train_call_failed(str(self._root.path.parent), self.ordinal)
        if self.active:
            self.wait_for_all()
            self.active = False
            self._committer.end(error)
            self._journal.close()
        occupant.leave(self._root)
