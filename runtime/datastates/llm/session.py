"""One ``train()`` call: its attempt, its lineage, its saves.

``begin`` holds the only collectives of the library: the ranks meet, rank 0 finds out which training this is, draws the attempt id, chooses
the checkpoint to resume from, moves aside what was never committed, and tells the others. From then on ranks speak through files only.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from datastates.engine import PendingFile
from datastates.formats import intercept, self_check
from datastates.llm import fingerprint, fsdp, host_cache, log, meetings, nodes, ranks, resume, space, trouble
from datastates.llm.committer import Committer, Identity
from datastates.llm.fence import FENCE
from datastates.llm.heartbeat import Pulse
from datastates.llm.housekeeping import Housekeeping
from datastates.llm.plan import Plan, decide, look
from datastates.llm.save import Manner
from datastates.llm.saver import Saver
from datastates.llm.still import StillTensor, still_tensors
from datastates.settings import Settings
from datastates.store import commit, launches, layout, occupant
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
        self._steps = {plan.resume_step} if plan.resume_step else set()
        self._after_scope: list[tuple[Callable[[], None], str]] = []
        self._space_told = False
        self._leads = place.leads
        self._saver: Saver | None = None
        self._pulse: Pulse | None = None
        self._bystander = place.bystander
        self._housekeeping = Housekeeping(trainer, settings, place.leads, plan, self._root)
        self.running = True
        self.active = False
        _sessions.add(self)
        if place.bystander:
            return
        obstacle = ranks.first(place, plan.trouble or nodes.unseen(place, plan, self._root) or self._open())
        self.active = not obstacle
        if obstacle:
            self._leave_it_to_trainer(obstacle)
        else:
            self._begin_pulse()

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
        place = nodes.of(trainer)
        goes_on = last is not None and last.root_as_given == root and (request.resume is True or request.path)
        output_dir = str(Path(root).parent)
        request = replace(request, fingerprint=fingerprint.of(trainer, request.trial))
        ranks.meet(place)
        ranks.tell_misled(place)
        if last and goes_on:
            ordinal = last.ordinal
        else:
            found = resume.find(request, output_dir) if place.rank == 0 or place.bystander else None
            ordinal = ranks.tell(place, found, trainer.args.device)
        plan: Any
        if place.bystander:
            plan = look(settings, request, root, ordinal)
        elif place.nodes > 1:
            plan = nodes.decide(place, trainer.args, settings, request, root, ordinal)
        else:
            plan = decide(trainer.args, settings, request, root, ordinal) if place.rank == 0 else None
            plan = ranks.tell(place, plan, trainer.args.device)
        if isinstance(plan, resume.NothingToResumeError):
            raise plan.with_traceback(None) from None  # rank 0 alone would show where it was found out
        resume.count_train_call(output_dir, ordinal)
        if request.path is not None:
            plan = replace(
                plan, resume_path=request.path
            )  # not the absolute one: a train() of the script's own may fetch it
        return cls(trainer, settings, place, plan)

    def _open(self) -> str:
        """Get ready to save; why that cannot be, "" when it can."""
        try:
            engine = host_cache.engine(self._settings, self._ranks)
            self._journal = Journal(self._root, self._ranks.rank, self._plan.run_id, self._plan.attempt)
        except OSError as error:
            return str(error)
        intercept.install()
        self_check.run(sharded=bool(self._trainer.is_fsdp_enabled))
        self._journal.event(
            "hooked",
            rank=self._ranks.rank,
            world_size=len(self._ranks.voters),
            pid=os.getpid(),
            host=os.uname().nodename,
        )
        self._note_begin()
        self._committer = Committer(
            self._settings,
            self._ranks,
            _identity(self._plan),
            self._root,
            self._journal,
            self._housekeeping.after_commit,
        )
        self._saver = Saver(
            engine,
            self._committer,
            self._settings,
            self._journal,
            self._root.path,
            self._ranks.rank,
            self._still,
            self._tell_shortage,
        )
        return ""

    def _note_begin(self) -> None:
        self._journal.event(
            "train_begin",
            lineage=self._plan.lineage,
            ordinal=self._plan.ordinal,
            resume_step=self._plan.resume_step,
            max_steps=self._trainer.args.max_steps,
        )

    def _begin_pulse(self) -> None:
        if self._leads:
            self._end_pulse()
            self._pulse = Pulse(self._root, self._plan.attempt, lambda: self._trainer.state)

    def _end_pulse(self) -> None:
        if self._pulse:
            self._pulse.stop()

    def _leave_it_to_trainer(self, obstacle: str) -> None:
        """We cannot save, on some rank: then none of us does, and Trainer writes its own checkpoints where it always did."""
        self.root = str(Path(self.root).parent)
        self.root_as_given = str(Path(self.root_as_given).parent)
        if self._ranks.rank == 0:
            goes_on = f" (it goes on from {self.resume_path} all the same)" if self.resume_path else ""
            logger.error(
                "%s is off for this training, Trainer saves by itself: %s%s", log.PREFIX, obstacle, goes_on
            )
            launches.note_output_dir(os.environ.get("CKPT_RUN_RUN_ID", ""), self.root, off=obstacle)

    @property
    def root_now(self) -> str:
        """As the script gives it, since paths go into files; absolute where the script has gone to another directory."""
        try:
            moved = os.path.abspath(self.root_as_given) != self.root
        except FileNotFoundError:  # the working directory is gone
            moved = True
        return self.root if moved and self.active else self.root_as_given

    @property
    def resumed_at_the_end(self) -> bool:
        """Whether the checkpoint that training resumed from leaves nothing to train."""
        state = self._trainer.state
        return self.resume_path is not None and 0 < state.max_steps <= state.global_step

    # -- one save -------------------------------------------------------------------------------------------------------

    def save(self, original: Callable[[], None]) -> None:
        """Save concurrently what the original ``_save_checkpoint`` writes."""
        step = self._trainer.state.global_step
        if self._bystander:
            return
        if not self.active:
            self._save_by_trainer(step, original)
            return
        if step in self._steps:
            self._note_best_model()
            return
        assert self._saver is not None
        self._steps.add(step)
        if self._ranks.nodes > 1:
            self._housekeeping.keep(ranks.committed_everywhere(self._ranks, self._housekeeping.committed))
        directory = self._root.checkpoint(step)
        saved = self._saver.save(
            directory,
            lambda: self._write(directory, original),
            best=lambda: self._trainer.state.best_model_checkpoint,
            manner=Manner(leaves_out=ranks.of_trainer_alone) if self._yields else None,
        )
        actions, self._after_scope = self._after_scope, []
        for action, why in actions if saved else []:
            self._saver.wait_for_readers(why)
            action()

    def _save_by_trainer(self, step: int, original: Callable[[], None]) -> None:
        try:
            with meetings.kept(self._trainer, self.root):
                original()
        except BaseException as error:  # torch.distributed.checkpoint has errors that are no Exceptions
            if not trouble.at_the_disk(error, self.root):
                raise
            logger.error(
                "%s checkpoint-%d was not saved, training goes on: %s",
                log.PREFIX,
                step,
                trouble.in_words(error),
            )

    def _write(self, directory: layout.CheckpointDir, original: Callable[[], None]) -> None:
        """The original code, once the place is free. The directory is ours from the moment on when all ranks have met."""
        self.in_scope = True
        obstacle = self._clear_the_way(directory)
        try:
            with (
                ranks.trainer_writes_nothing(self._trainer) if self._yields else nullcontext(),
                fsdp.gathered_once(self._trainer),
                meetings.kept(self._trainer, self.root, after_first=lambda: self._enter(directory)),
            ):
                self._agree_on(obstacle)
                if self._searching:
                    directory.prepare()
                original()
        finally:
            self.in_scope = False

    @property
    def _yields(self) -> bool:
        """Whether another rank writes the Trainer's files."""
        return self._ranks.misled and self._ranks.rank != 0

    def _agree_on(self, obstacle: OSError | None) -> None:
        """Give up where the place is not free: together, if stock code lets the ranks meet again and again.

        Raises:
            OSError: this rank's obstacle, or what another one has said about its own.
        """
        if meetings.many(self._trainer):
            told = ranks.first(self._ranks, trouble.in_words(obstacle) if obstacle else "")
            obstacle = obstacle or (trouble.of_another_rank(told) if told else None)
        if obstacle:
            raise obstacle

    def _still(self, torn_before: set[str]) -> dict[int, StillTensor]:
        if self._settings.snapshot == "eager":
            return {}
        try:
            seen = FENCE.optimizers
            return still_tensors(seen.trusted(), self._trainer.model, torn_before, seen.trusted_engines())
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

    def _enter(self, directory: layout.CheckpointDir) -> None:
        """Make the directory. One of that name may have been moved aside just now: over NFS, it would still be found there for a while."""
        commit.look_again(self._root.path)
        directory.prepare()

    def _move_aside(self, directory: layout.CheckpointDir) -> None:
        # Trainer marks a save on a signal that is not complete yet. Here the manifest tells, and it will name every file it finds.
        (directory.path / INCOMPLETE).unlink(missing_ok=True)
        if self._leads and directory.path.exists() and any(directory.path.iterdir()):
            moved = commit.set_aside(directory, self._plan.attempt)
            logger.info("%s %s was in the way, and is now %s", log.PREFIX, directory.path.name, moved)

    def _note_best_model(self) -> None:
        """What ``_save_checkpoint`` would have noted for a step that is already there."""
        state = self._trainer.state
        best = (
            layout.Root(Path(self.root_now)).checkpoint(state.best_global_step).path
            if state.best_global_step
            else None
        )
        if best is not None and best.exists():
            state.best_model_checkpoint = str(best)

    def _tell_shortage(self, pending: list[PendingFile]) -> None:
        if not self._space_told and self._leads:
            self._space_told = True
            space.tell_shortage(
                self.root,
                sum(file.image.size for file in pending),
                self._housekeeping.committed_bytes(),
                self._trainer.args.save_total_limit,
            )

    # -- readers --------------------------------------------------------------------------------------------------------

    def after_scope(self, action: Callable[[], None], why: str) -> None:
        """Do ``action``, which reads the checkpoint, when the scope has ended and the checkpoint is committed."""
        self._after_scope.append((action, why))

    def wait_for_readers(self, why: str) -> None:
        """See :meth:`Saver.wait_for_readers`."""
        if self._saver:
            self._saver.wait_for_readers(why)

    def wait_for_all(self) -> None:
        """See :meth:`Saver.wait_for_all`."""
        if self._saver:
            self._saver.wait_for_all()

    def wait(self, timeout: float | None) -> bool:
        """See :meth:`Saver.wait`."""
        return self._saver is None or self._saver.wait(timeout)

    @property
    def newest_is_missing(self) -> bool:
        """See :attr:`Saver.newest_is_missing`."""
        return self._saver is not None and self._saver.newest_is_missing

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
        self._committer.identity = _identity(self._plan)
        self._housekeeping.begin_lineage(self._plan)
        self._journal.attempt = self._plan.attempt
        self._note_begin()
        self._begin_pulse()

    def end(self, error: BaseException | None) -> None:
        """``train()`` has returned, or raised ``error``: wait for what is in flight and leave the marker."""
        self.running = False
        self._end_pulse()
        if error is not None:
            resume.train_call_failed(str(self._root.path.parent), self.ordinal)
        if self.active:
            if error is not None:
                self._committer.training_has_failed()
            self.wait_for_all()
            self.active = False
            if error is None:
                self._journal.event("finish", step=self._trainer.state.global_step)
            elif not isinstance(error, KeyboardInterrupt):
                self._journal.event("error", text=f"{type(error).__name__}: {error}")
            self._journal.close()
        if not self._bystander:
            self._housekeeping.end(error)  # also where Trainer has saved by itself: the next launch asks
        occupant.leave(self._root)

    def leave_it_to_parent(self) -> None:
        """In a forked child: the threads that save, the directory and the record are its parent's."""
        # The event that stops the pulse may have been in its thread's hands, which is not here.
        self._saver, self._pulse, self.active, self._bystander = None, None, False, True


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for session in _sessions:
        session.leave_it_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def _identity(plan: Plan) -> Identity:
    return Identity(plan.attempt, plan.lineage, plan.ordinal)
