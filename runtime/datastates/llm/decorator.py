"""The public face: decorate a Trainer, so that its saves are concurrent and ``train()`` resumes from what is committed.

Or the engine or the accelerator of a training loop.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from datastates import settings
from datastates.llm import log

logger = log.logger("datastates.llm.decorator")


class DecoratedCheckpointing:
    """Save the checkpoints of one Trainer concurrently; or those of a training loop.

    Args:
        runtime_config: settings (see :data:`datastates.settings.TABLE`) and ``trainer``, the Trainer to decorate. Or, in its place, ``engine``:
            what ``deepspeed.initialize`` returns; or ``accelerator``: an ``accelerate.Accelerator``.
        rank: this process's rank, as scripts pass their ``--local_rank``; -1 means: read it from the environment.

    Raises:
        datastates.settings.SettingError: an unknown key, or a value that cannot be used; the message names both.
        TypeError: there is no trainer in ``runtime_config``, or it is not a Trainer.
    """

    def __init__(self, runtime_config: Mapping[str, Any], rank: int = -1) -> None:
        if not isinstance(runtime_config, Mapping):
            raise TypeError(
                f"runtime_config is a {type(runtime_config).__name__}; expected a dict with the key 'trainer'"
            )
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < -1:
            raise settings.SettingError(
                f"rank is {rank!r}: expected a rank, or -1 to read it from the environment"
            )
        if runtime_config.keys() & {"engine", "accelerator"}:
            self._attachment = _attach_loop(runtime_config)
            return
        trainer = runtime_config.get("trainer")
        if trainer is None or not callable(getattr(trainer, "_save_checkpoint", None)):
            raise TypeError(
                f"runtime_config['trainer'] is {type(trainer).__name__}; expected a transformers.Trainer"
            )
        self._attachment = attach(trainer, settings.load(runtime_config))

    def wait(self, timeout: float | None = None) -> bool:
        """Until every checkpoint in flight is committed or given up; False when some are not after ``timeout`` seconds."""
        return self._attachment is None or self._attachment.wait(timeout)


# Weak at both ends: an attachment holds its trainer, and lives in the trainer's own replaced methods.
_attachments: weakref.WeakKeyDictionary[Any, weakref.ReferenceType[Any]] = weakref.WeakKeyDictionary()
_attaching = threading.Lock()
_missing_engine_told = False
_installed_told = False


def attach(trainer: Any, given: settings.Settings | None = None) -> Any:
    """Decorate ``trainer``, once; a second call only replaces the settings (a script's own win over the launcher's).

    Returns None, after one warning, where the native engine cannot be loaded: training then runs as if not wrapped.
    """
    with _attaching:
        known = _attachments.get(trainer)
        attachment = known() if known else None
        if attachment is None:
            try:
                from datastates.llm.attachment import Attachment
            except ImportError as error:
                _tell_missing_engine(error)
                return None
            attachment = Attachment(trainer, given or settings.load())
            _tell_installed()
            _attachments[trainer] = weakref.ref(attachment)
        elif given is not None:
            attachment.settings = given
    return attachment


def _attach_loop(runtime_config: Mapping[str, Any]) -> Any:
    given = settings.load(runtime_config)
    key = "engine" if "engine" in runtime_config else "accelerator"
    owner, method = runtime_config[key], "save_checkpoint" if key == "engine" else "save_state"
    if not callable(getattr(owner, method, None)):
        raise TypeError(
            f"runtime_config[{key!r}] is {type(owner).__name__}; expected one that has {method}()"
        )
    try:
        from datastates.llm import accelerate_loop, deepspeed_loop, loop
    except ImportError as error:
        _tell_missing_engine(error)
        return None
    module: Any = deepspeed_loop if key == "engine" else accelerate_loop
    names = (method, method.replace("save", "load"))
    return loop.Attachment(owner, given, {name: getattr(module, name) for name in names})


def trainers() -> list[Any]:
    """The Trainers of this process that are decorated."""
    return list(_attachments)


def prepare() -> None:
    """Teach transformers' functions about our checkpoints; the hook calls this as soon as ``transformers.trainer`` is there.

    Scripts ask ``get_last_checkpoint`` before they build a Trainer. Nothing happens where the native engine cannot be loaded:
    :func:`attach` tells that.
    """
    try:
        from datastates.llm import resume, trainer_module
    except ImportError:
        return
    trainer_module.install(resume.last_checkpoint)


def _tell_installed() -> None:
    """One line in the log of a job, by its first rank."""
    global _installed_told
    if not _installed_told and os.environ.get("RANK", "0") == "0":
        _installed_told = True
        logger.info("%s library is installed", log.PREFIX.strip("[]"))


def _tell_missing_engine(error: ImportError) -> None:
    global _missing_engine_told
    if not _missing_engine_told:
        _missing_engine_told = True
        logger.warning("%s is off, training runs as if not wrapped: %s", log.PREFIX, error)
