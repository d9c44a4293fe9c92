"""What callbacks may do to a checkpoint: read its files, or change the memory that it is still being copied from.

A user's callback that overrides ``on_save`` may do anything with the files, so it waits for the commit first. Trainer's own integrations
override it too, but most of them read files only when told to upload; waiting for all of them would make every user of a tracker save
synchronously.

A user's callback may also change the model, in ways that nobody can notice afterwards (one element, past autograd); whatever event it
overrides stands behind the fence. Trainer's own callbacks leave the model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from transformers.trainer_callback import TrainerCallback

_UPLOADS: dict[str, Callable[[Any], bool]] = {
    "WandbCallback": lambda callback: (
        str(getattr(callback._log_model, "value", callback._log_model)) == "checkpoint"
    ),
    "MLflowCallback": lambda callback: bool(callback._log_artifacts),
    "NeptuneCallback": lambda callback: bool(callback._should_upload_checkpoint),
    "ClearMLCallback": lambda callback: bool(callback._log_model),
    "FlyteCallback": lambda callback: bool(callback.sync_checkpoints),
    "DVCLiveCallback": lambda callback: callback._log_model == "all",
    "TrackioCallback": lambda callback: False,
    "SwanLabCallback": lambda callback: False,
}
"""Trainer's own integrations with an ``on_save``, and whether one of them will read files (transformers 4.57 to 5.24)."""


def reads_on_save(callback: TrainerCallback) -> bool:
    """Whether ``callback.on_save`` has to be expected to read the checkpoint."""
    owner = _owner(callback, "on_save")
    if owner is None:
        return False
    uploads = _UPLOADS.get(owner.__name__) if _is_of_transformers(owner) else None
    if uploads is None:
        return True
    try:
        return uploads(callback)
    except AttributeError:  # another version of the integration: when in doubt, the files are there
        return True


def readers(callbacks: list[TrainerCallback]) -> list[str]:
    """Names of the callbacks that read a checkpoint in ``on_save``."""
    return [type(callback).__name__ for callback in callbacks if reads_on_save(callback)]


def may_change_the_model(callbacks: Iterable[TrainerCallback], event: str) -> bool:
    """Whether the code of one of ``callbacks`` for ``event`` is not transformers' own."""
    owners = [_owner(callback, event) for callback in callbacks]
    return any(owner is not None and not _is_of_transformers(owner) for owner in owners)


def _owner(callback: TrainerCallback, event: str) -> type | None:
    """The class whose code handles ``event``; None when it is left to TrainerCallback, which does nothing."""
    kind = type(callback)
    if event in getattr(callback, "__dict__", {}):
        return kind
    owner = next((base for base in kind.__mro__ if event in base.__dict__), kind)
    return None if owner is TrainerCallback else owner


def _is_of_transformers(owner: type) -> bool:
    return owner.__module__.startswith("transformers.")
