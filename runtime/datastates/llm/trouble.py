"""Whether an error came from the disk, which costs a checkpoint, or from the user's own code, whose error it is."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path
from typing import Any

_OF_DISKS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
    errno.ESTALE,
    errno.ENXIO,
    errno.ENODEV,
    errno.ENOTCONN,
    errno.EREMOTEIO,
}

# Rust's writers (tokenizers, safetensors) and torch's zip writer raise types of their own that only their text tells apart.
_SIGNS = ("os error ", "PytorchStreamWriter failed", "No space left on device", "Parent directory ")


def at_the_disk(error: BaseException, root: str) -> bool:
    """Whether a writer failed at the disk of ``root``.

    An OSError about a file outside of ``root`` (FileNotFoundError for a user's own file, say) did not, unless only disks have it.
    What several ranks have raised was the disk's if all of it was.
    """
    carried = _carried(error)
    if carried:
        return all(at_the_disk(one, root) for one in carried.values())
    uncopied = _uncopied(error)
    if uncopied:
        return all(_is_below(target, root) for _, target, _ in uncopied)
    if isinstance(error, OSError):
        return only_disks_have(error) or any(
            _is_below(name, root) for name in (error.filename, error.filename2)
        )
    return isinstance(error, Exception) and any(sign in str(error) for sign in _SIGNS)


def only_disks_have(error: BaseException) -> bool:
    """Whether the error is the disk's, whatever file it is about."""
    return isinstance(error, OSError) and error.errno in _OF_DISKS


def of_another_rank(text: str) -> OSError:
    """The error with which a rank gives up its part of a save because another one has ``text`` to say about its own."""
    return OSError(errno.EREMOTEIO, text)


def in_words(error: BaseException) -> str:
    """The error in one line."""
    carried = _carried(error)
    if carried:
        return "; ".join(f"rank {rank}: {in_words(one)}" for rank, one in sorted(carried.items()))
    uncopied = _uncopied(error)
    if uncopied:
        (_, target, why), *more = uncopied
        return f"{target}: {why}" + (f" (and {len(more)} more files)" if more else "")
    return f"{type(error).__name__}: {error}"


def _carried(error: BaseException) -> dict[int, BaseException]:
    """The errors by rank which torch.distributed.checkpoint has collected and raises on every rank. They are no Exceptions there."""
    library = sys.modules.get("torch.distributed.checkpoint.api")
    if library is None or not isinstance(error, library.CheckpointException):
        return {}
    return {rank: one for rank, (one, _) in error.failures.items()}


def _uncopied(error: BaseException) -> list[tuple[Any, Any, Any]]:
    """From, to and why of each file that ``shutil.copytree`` could not copy; its error has the numbers of those errors in words only."""
    told = error.args[0] if isinstance(error, shutil.Error) and error.args else None
    return [one for one in told if isinstance(one, tuple) and len(one) == 3] if isinstance(told, list) else []


def _is_below(name: Any, root: str) -> bool:
    if not isinstance(name, (str, bytes, os.PathLike)):
        return False
    return Path(os.fsdecode(name)).absolute().is_relative_to(Path(root).absolute())
