"""Who is about to read a checkpoint's files: such a reader waits for the commit first.

A user's callback that overrides ``on_save`` may do anything with the files. Trainer's own integrations override it too, but most of
them read files only when told to upload; waiting for all of them would make every user of a tracker save synchronously.
"""

from __future__ import annotations

from collections.abc import Callable
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
    kind = type(callback)
    if kind.on_save is TrainerCallback.on_save:
        return False
    uploads = _UPLOADS.get(kind.__name__) if kind.__module__.startswith("transformers.") else None
    if uploads is None:
        return True
    try:
        return uploads(callback)
    except AttributeError:  # another version of the integration: when in doubt, the files are there
        return True


def readers(callbacks: list[TrainerCallback]) -> list[str]:
    """Names of the callbacks that read a checkpoint in ``on_save``."""
    return [type(callback).__name__ for callback in callbacks if reads_on_save(callback)]
