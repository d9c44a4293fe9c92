"""Functions of transformers that decide about checkpoint directories: taught about ours. And one that resumes wrongly.

``get_last_checkpoint`` is imported by name into many scripts, some of them before anything of ours is loaded. So its code object is
replaced, which every binding sees; the original stays reachable under another name.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datastates.store.layout import CHECKPOINT_ROOT

_ORIGINAL = "_get_last_checkpoint_of_transformers"
_HUB_IGNORES = (f"{CHECKPOINT_ROOT}/*", f"*/{CHECKPOINT_ROOT}/*", ".ckpt/*")


def is_root(path: Any) -> bool:
    """Whether ``path`` is a directory that this library keeps checkpoints in."""
    return Path(path).name == CHECKPOINT_ROOT


def is_stock(method: Any) -> bool:
    """Whether a Trainer's method is transformers' own code, not a subclass's or one that was put in its place."""
    code = getattr(getattr(method, "__func__", None), "__code__", None)
    return code is not None and code.co_filename == getattr(
        sys.modules.get("transformers.trainer"), "__file__", ""
    )


def install(last_checkpoint: Callable[[str], str | None]) -> None:
    """Teach the functions; idempotent. transformers is imported already, or nothing happens.

    Args:
        last_checkpoint: answers for ``get_last_checkpoint``.
    """
    utils = sys.modules.get("transformers.trainer_utils")
    if utils is not None and hasattr(utils, "get_last_checkpoint"):
        _teach_last_checkpoint(utils, last_checkpoint)
    trainer = sys.modules.get("transformers.trainer")
    if trainer is not None:
        _teach_rotation(trainer)
        _teach_upload(trainer)
        _teach_skipping(trainer)


def _teach_last_checkpoint(utils: types.ModuleType, answer: Callable[[str], str | None]) -> None:
    function = utils.get_last_checkpoint
    if hasattr(utils, _ORIGINAL):
        return
    setattr(utils, _ORIGINAL, types.FunctionType(function.__code__, function.__globals__, function.__name__))
    utils._last_checkpoint_of_ckpt_run = answer  # type: ignore[attr-defined]
    function.__code__ = _get_last_checkpoint.__code__


def _get_last_checkpoint(folder):  # type: ignore[no-untyped-def]
    # Runs with the globals of transformers.trainer_utils.
    return _last_checkpoint_of_ckpt_run(folder)  # type: ignore[name-defined]  # noqa: F821


def stock_last_checkpoint(folder: str) -> str | None:
    """What transformers itself would have answered."""
    utils = sys.modules["transformers.trainer_utils"]
    original = getattr(utils, _ORIGINAL, None) or utils.get_last_checkpoint
    found: str | None = original(folder)
    return found


def _teach_rotation(trainer: types.ModuleType) -> None:
    """Checkpoints below our root are removed by our retention alone: only it knows which ones are committed."""
    for name, answer in (("rotate_checkpoints", None), ("sort_checkpoints", [])):
        function = getattr(trainer, name, None)
        if function is not None and not hasattr(function, "_leaves_roots_alone"):
            setattr(trainer, name, _except_for_roots(function, answer))


def _except_for_roots(function: Any, answer: Any) -> Any:
    @functools.wraps(function)
    def unless_root(output_dir: Any, *args: Any, **kwargs: Any) -> Any:
        if is_root(output_dir):
            return list(answer) if isinstance(answer, list) else answer
        return function(output_dir, *args, **kwargs)

    unless_root._leaves_roots_alone = True  # type: ignore[attr-defined]
    return unless_root


def _teach_upload(trainer: types.ModuleType) -> None:
    """An upload of the output directory leaves the checkpoints out: they hold optimizer state."""
    from huggingface_hub import HfApi

    if not hasattr(HfApi.upload_folder, "_leaves_checkpoints_out"):
        HfApi.upload_folder = _without_checkpoints(HfApi.upload_folder)  # type: ignore[method-assign]
    bound = getattr(
        trainer, "upload_folder", None
    )  # transformers 4 binds the method of huggingface_hub's shared HfApi
    if bound is not None and not hasattr(bound, "_leaves_checkpoints_out"):
        trainer.upload_folder = _without_checkpoints(bound)  # type: ignore[attr-defined]


def _without_checkpoints(upload: Any) -> Any:
    @functools.wraps(upload)
    def upload_folder(*args: Any, **kwargs: Any) -> Any:
        ignored = kwargs.get("ignore_patterns") or []
        kwargs["ignore_patterns"] = [*([ignored] if isinstance(ignored, str) else ignored), *_HUB_IGNORES]
        return upload(*args, **kwargs)

    upload_folder._leaves_checkpoints_out = True  # type: ignore[attr-defined]
    return upload_folder


def _teach_skipping(trainer: types.ModuleType) -> None:
    """Resumed in the middle of an epoch, training goes on with the rows of that epoch.

    accelerate's ``skip_first_batches`` makes a new loader, which believes to be in its first epoch. transformers 4.57 does not
    tell it better, and so shuffles the rest of the epoch as the first one was: some rows come twice and some never.
    """
    skip = getattr(trainer, "skip_first_batches", None)
    if skip is not None and not hasattr(skip, "_stays_in_its_epoch"):
        trainer.skip_first_batches = _in_its_epoch(skip)  # type: ignore[attr-defined]


def _in_its_epoch(skip: Any) -> Any:
    @functools.wraps(skip)
    def skip_first_batches(dataloader: Any = None, num_batches: int = 0) -> Any:
        rest = skip(dataloader, num_batches)
        epoch = getattr(dataloader, "iteration", None)
        if epoch is not None and hasattr(rest, "set_epoch"):
            rest.set_epoch(epoch)
        return rest

    skip_first_batches._stays_in_its_epoch = True  # type: ignore[attr-defined]
    return skip_first_batches
