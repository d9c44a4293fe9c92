"""What ``train()`` starts from: the script's word, the settings, and what the catalog holds.

The *number* of a ``train()`` call is the ordinal of the training that it is, see :func:`datastates.store.lineage.ordinal_of`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from datastates.engine import crc32
from datastates.llm import log, trainer_module
from datastates.settings import Settings
from datastates.store import catalog, lineage
from datastates.store.layout import CHECKPOINT_ROOT, Root
from datastates.store.lineage import ResumePoint
from datastates.store.manifest import ManifestError
from datastates.store.runrecord import Fingerprint, Lineage, RunRecord

logger = log.logger("datastates.llm.decorator")


class NothingToResumeError(ValueError):
    """There is nothing to resume from where ``--resume required`` or the script says. A ValueError, as Trainer raises there."""


@dataclass(frozen=True)
class Request:
    """The arguments of one ``train()`` call; ``resume`` is what the script passed: None (nothing), a bool or a path.

    ``literal``: Trainer itself is given the path, not a ``train`` of the script's own, which may fetch what it names.
    ``fingerprint`` is of the training that it asks for, None when that cannot be told.
    """

    resume: Any
    trial: Any
    literal: bool
    _args: tuple[Any, ...]
    _kwargs: Mapping[str, Any]
    fingerprint: Fingerprint | None = None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], literal: bool = False) -> Request:
        resume = args[0] if args else kwargs.get("resume_from_checkpoint")
        trial = args[1] if len(args) > 1 else kwargs.get("trial")
        return cls(resume, trial, literal, args, kwargs)

    @property
    def path(self) -> str | None:
        """The path that the script passed, if it passed one."""
        return os.fspath(self.resume) if isinstance(self.resume, (str, os.PathLike)) else None

    def args(self, path: str | None) -> tuple[Any, ...]:
        """The positional arguments with ``path`` (None: start fresh) in place of what the script passed."""
        return (path, *self._args[1:]) if self._args else ()

    def kwargs(self, path: str | None) -> dict[str, Any]:
        return dict(self._kwargs) if self._args else {**self._kwargs, "resume_from_checkpoint": path}


_ordinals: dict[str, int] = {}


def ordinal(output_dir: str) -> int:
    """How many trainings into ``output_dir`` this process has behind it: what it did, and what it left out before that."""
    return _ordinals.get(os.path.realpath(output_dir), 0)


def count_train_call(output_dir: str, number: int) -> None:
    """A ``train()`` call begins that is training ``number``, or goes on with it."""
    _ordinals[os.path.realpath(output_dir)] = max(ordinal(output_dir), number + 1)


def train_call_failed(output_dir: str, number: int) -> None:
    """``train()`` raised: if the script tries once more, that is the same training."""
    _ordinals[os.path.realpath(output_dir)] = number


def find(request: Request, output_dir: str) -> int:
    """The number of the ``train()`` call that begins now. Rank 0 alone asks."""
    earliest = ordinal(output_dir)
    number = lineage.ordinal_of(run_record(output_dir), earliest, request.fingerprint)
    if number > earliest:
        logger.info(
            "%s this is taken for training %d of the script as it was last run: %s left out before it",
            log.PREFIX,
            number + 1,
            "one is" if number - earliest == 1 else f"{number - earliest} are",
        )
    return number


def choose(
    request: Request, settings: Settings, output_dir: str, number: int, record: RunRecord | None
) -> ResumePoint | None:
    """Settle where training ``number`` starts; None is the beginning. Rank 0 alone asks.

    Args:
        record: the last run in ``output_dir``; a script that passes nothing resumes only when that is not over.

    Raises:
        NothingToResumeError: the settings require a checkpoint and there is none, or the path leads to none.
    """
    if request.path is not None:
        if request.literal:
            _check_path(request.path, output_dir, number)
        return catalog.explicit_point(
            output_dir, number, request.path, fingerprint=request.fingerprint, crc32=crc32
        )
    if request.resume is False or lineage.wants_fresh(record, number, _fresh_token()):
        return None
    asked = request.resume is True
    required = settings.resume == "required" and request.trial is None
    by_itself = settings.resume == "auto" and request.trial is None and _is_to_go_on(record)
    if not (asked or required or by_itself):
        if settings.resume == "auto" and record is not None and request.trial is None:
            logger.info(
                "%s the last run into %s finished: this one starts from the beginning (ckpt-run --resume required goes on from it)",
                log.PREFIX,
                output_dir,
            )
        return None
    point = catalog.resume_point(
        output_dir, number, fingerprint=request.fingerprint, on_skip=tell_skipped, crc32=crc32
    )
    known = record.lineages.get(number) if record else None
    if point is not None:
        logger.info(
            "%s resuming at step %d from %s%s",
            log.PREFIX,
            point.step,
            point.path,
            "" if asked else " (ckpt-run --fresh starts over)",
        )
        _tell_changes(known, request.fingerprint)
    elif required:
        raise NothingToResumeError(
            f"resume is 'required', and there is no checkpoint to resume from in {Root.of(output_dir).path}. "
            "If that is where this training saves, --resume auto (CKPT_RUN_RESUME=auto) starts it from the beginning"
        )
    elif asked or lineage.other_model(known, request.fingerprint):
        logger.error("%s No Checkpoint found with step: -1", log.PREFIX, extra=log.TWO_FORMS)
    else:
        logger.info(
            "%s the last run into %s left no checkpoint to go on from: this one starts from the beginning",
            log.PREFIX,
            output_dir,
        )
    return point


def _is_to_go_on(record: RunRecord | None) -> bool:
    """Whether the last run is not over. In the process that trained, what comes after the last training is its own affair."""
    if record is None or lineage.over(record):
        return False
    return lineage.unfinished(record) or not record.is_of_this_process


def _check_path(given: str, output_dir: str, number: int) -> None:
    """Refuse, before anything is written, a path that Trainer can only fail at: it reads trainer_state.json in every mode."""
    path = os.path.abspath(given)
    if os.path.isfile(os.path.join(path, "trainer_state.json")):
        return
    problem = "it has no trainer_state.json" if os.path.isdir(path) else "there is no such directory"
    near = path.removesuffix(f"/{CHECKPOINT_ROOT}") if os.path.isdir(path) else output_dir
    point = catalog.resume_point(near, verify=False) or catalog.resume_point(output_dir, number, verify=False)
    meant = f"Did you mean {str(point.path)!r}? " if point else ""
    raise NothingToResumeError(
        f"Can't find a valid checkpoint at {path} (resume_from_checkpoint={given!r}): {problem}. "
        f"{meant}True takes the newest checkpoint of {output_dir}, False starts from the beginning"
    )


def run_record(output_dir: str) -> RunRecord | None:
    """The record of the last run in ``output_dir``; one that cannot be read counts as none, and the catalog says so."""
    try:
        return RunRecord.read(Root.of(output_dir))
    except ManifestError:
        return None


def tell_skipped(path: Any, reason: str) -> None:
    if reason == catalog.NOT_COMMITTED:  # as every kill leaves one
        logger.info("%s passing over %s: it %s", log.PREFIX, path, catalog.why_not_committed(path))
        return
    logger.error("%s skipping %s: %s", log.PREFIX, path, reason)


def _tell_changes(known: Lineage | None, now: Fingerprint | None) -> None:
    """Any argument may be changed by hand; but whoever means another training shall be able to notice."""
    if known is None or known.fingerprint is None or now is None:
        return
    changes = lineage.differences(known.fingerprint.training, now.training)
    if changes:
        logger.info("%s this training goes on with a change: %s", log.PREFIX, changes)


def _fresh_token() -> str | None:
    """Set by ``ckpt-run --fresh``. Its value is new for each launch: ranks that are restarted within the launch resume."""
    return os.environ.get("CKPT_RUN_FRESH") or None


def announce_last_step(output_dir: str, fingerprint: Fingerprint | None = None) -> None:
    """Set CKPT_LAST_STEP, or remove it: only when a Trainer is built its output directory is certain.

    Who says ``--resume never`` means a script that goes by it as well. That we do nothing by ourselves unless told is another matter.
    """
    record = run_record(output_dir)
    number = lineage.ordinal_of(record, ordinal(output_dir), fingerprint)
    fresh = (
        lineage.wants_fresh(record, number, _fresh_token()) or os.environ.get("CKPT_RUN_RESUME") == "never"
    )
    point = None if fresh else catalog.resume_point(output_dir, number, fingerprint=fingerprint, verify=False)
    if point is None:
        os.environ.pop("CKPT_LAST_STEP", None)
    else:
        os.environ["CKPT_LAST_STEP"] = str(point.step)


def last_checkpoint(folder: str) -> str | None:
    """``transformers.trainer_utils.get_last_checkpoint``, answered from the catalog where there is one."""
    if not Root.of(folder).path.is_dir():
        return trainer_module.stock_last_checkpoint(folder)
    record, number = run_record(folder), ordinal(folder)
    if number and (record is None or number not in record.lineages):
        number -= 1  # nothing is known of a next training: the script reads what the last one saved
    if lineage.wants_fresh(record, number, _fresh_token()):
        return None
    point = catalog.resume_point(folder, number, on_skip=tell_skipped, crc32=crc32)
    return None if point is None else str(point.path)


_cpu_ranks_load = False


def let_cpu_ranks_load() -> None:
    """Let ``torch.load`` accept the location ``cpu:0``, as which transformers before 5.23 names the device of a CPU rank."""
    global _cpu_ranks_load
    if not _cpu_ranks_load:
        _cpu_ranks_load = True
        torch.serialization.register_package(
            19,
            lambda storage: None,
            lambda storage, location: storage if location.startswith("cpu:") else None,
        )
