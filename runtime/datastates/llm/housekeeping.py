"""What a Trainer's commits entail: its own copy, the old checkpoints that go, and the run's record, which the committing rank keeps."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datastates.llm import log, mirror, program_end
from datastates.llm.save import Save
from datastates.settings import Settings
from datastates.store import retention
from datastates.store.catalog import Catalog, Checkpoint
from datastates.store.layout import Root
from datastates.store.manifest import ManifestError
from datastates.store.runrecord import RunRecord

if TYPE_CHECKING:
    from datastates.llm.plan import Plan

logger = log.logger("datastates.llm.decorator")


_changing_records = threading.Lock()
"""One for all, since a training may run inside another in one directory."""


def _forget() -> None:
    """In a forked child the lock may have been held by a thread that is not here."""
    global _changing_records
    _changing_records = threading.Lock()


os.register_at_fork(after_in_child=_forget)


class Housekeeping:
    """Of one ``train()`` call. ``after_commit`` runs on the saves' threads, everything else on the main thread.

    Args:
        leads: whether this rank keeps the record.
    """

    def __init__(self, trainer: Any, settings: Settings, leads: bool, plan: Plan, root: Root) -> None:
        self._trainer = trainer
        self._settings = settings
        self._leads = leads
        self._plan = plan
        self._root = root
        self._committed = {plan.resume_step} if plan.resume_step else set()
        self._everywhere: int | None = None
        self._cleaning = threading.Lock()

    def after_commit(self, save: Save) -> None:
        """Trainer's own copy first, then the old ones go. A failure here costs no checkpoint: it is told, the commit stands.

        Two checkpoints may be the best: training has gone on since the save, and what it now holds for the best may never be committed.
        """
        self._update_record(lambda record: record.at_step(max(record.step, save.step)))
        directory = save.directory
        self._committed.add(directory.step)
        limit = self._trainer.args.save_total_limit
        now_best = self._trainer.state.best_model_checkpoint
        kept = {Path(path).name for path in (save.best, now_best) if path is not None}
        if self._everywhere is not None:
            kept.add(self._root.checkpoint(self._everywhere).path.name)
        try:
            with self._cleaning:
                if self._settings.keep_trainer_saves:
                    output_dir = self._root.path.parent
                    mirror.trainer_save(directory, output_dir, self._plan.attempt, limit, kept)
                checkpoints = Catalog(self._root).checkpoints()
                for old in retention.expendable(checkpoints, limit, kept, lineage=self._plan.lineage):
                    retention.remove(old)
        except OSError as trouble:
            logger.error("%s after checkpoint-%d was committed: %s", log.PREFIX, directory.step, trouble)

    @property
    def committed(self) -> tuple[int, ...]:
        """The steps committed here in this ``train()`` call, and the one that it resumed from."""
        return tuple(self._committed)

    def keep(self, everywhere: int | None) -> None:
        """The newest step that all nodes have stays until they have a newer one: killed now, only that one could be resumed from.

        After a resume from what Trainer had saved by itself, it is the lineage's newest from before.
        """
        if everywhere is None and not self._committed:
            everywhere = self._newest_before()
        if everywhere is not None:
            self._everywhere = everywhere

    def _newest_before(self) -> int | None:
        with suppress(OSError):  # the save that follows tells what is wrong with the directory
            found = Catalog(self._root).checkpoints()
            return max((item.step for item in found if self._is_own(item)), default=None)
        return None

    def _is_own(self, checkpoint: Checkpoint) -> bool:
        manifest = checkpoint.manifest
        return checkpoint.committed and manifest is not None and manifest.lineage == self._plan.lineage

    def committed_bytes(self) -> int:
        """Bytes of this lineage's committed checkpoints, which retention will free one by one."""
        return sum(
            checkpoint.manifest.size
            for checkpoint in Catalog(self._root).checkpoints()
            if checkpoint.manifest and self._is_own(checkpoint)
        )

    def begin_lineage(self, plan: Plan) -> None:
        """The rest of this ``train()`` call belongs to the lineage and the attempt of ``plan``."""

        def renamed(record: RunRecord) -> RunRecord:
            mine = replace(record.lineages[plan.ordinal], id=plan.lineage)
            begun = replace(record, attempt=plan.attempt).at_step(plan.resume_step)
            return begun.with_lineage(plan.ordinal, mine)

        self._update_record(renamed)
        self._plan = plan
        self._committed = {plan.resume_step} if plan.resume_step else set()

    def end(self, error: BaseException | None) -> None:
        """``train()`` returned, or raised ``error``: the marker by which a later launch knows whether the run finished."""
        step = self._trainer.state.global_step
        if error is None:
            self._update_record(lambda record: record.at_step(step).finished(self._plan.ordinal))
            if self._leads:
                # Not a method: a Trainer may go long before the program ends.
                program_end.at_end(partial(_note_end, self._root, self._plan))
        elif isinstance(error, KeyboardInterrupt):
            # Somebody stopped it, nothing failed: when the process is gone the run shows as interrupted.
            self._update_record(lambda record: record.at_step(step))
        else:
            self._update_record(lambda record: record.at_step(step).failed())

    def _update_record(self, change: Callable[[RunRecord], RunRecord]) -> None:
        if self._leads:
            _update(self._root, self._plan, change)


def _note_end(root: Root, plan: Plan, failed: bool) -> None:
    """The program that trained ends."""
    if not failed:
        _update(root, plan, lambda record: record.program_ended(well=True))


def _update(root: Root, plan: Plan, change: Callable[[RunRecord], RunRecord]) -> None:
    try:
        with _changing_records:
            record = RunRecord.read(root)
            if record is not None and _is_in(record, plan):
                change(record).write(root)
    except (OSError, ManifestError, KeyError) as trouble:
        logger.error("%s the record of this run cannot be kept: %s", log.PREFIX, trouble)


def _is_in(record: RunRecord, plan: Plan) -> bool:
    """Where we cannot save, it is another training's record. The attempt alone does not tell: one training may run inside another."""
    lineage = record.lineages.get(plan.ordinal)
    return lineage is not None and lineage.id == plan.lineage
