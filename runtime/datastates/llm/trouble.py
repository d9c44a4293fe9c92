"""Whether an error came from the disk, which costs a checkpoint, or from the user's own code, whose error it is."""

from __future__ import annotations

import errno
import os
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


def at_the_disk(error: Exception, root: str) -> bool:
    """Whether a writer failed at the disk of ``root``.

    An OSError about a file outside of ``root`` (FileNotFoundError for a user's own file, say) did not, unless only disks have it.
    """
    if isinstance(error, OSError):
        return error.errno in _OF_DISKS or _is_below(error.filename, root) or _is_below(error.filename2, root)
    return any(sign in str(error) for sign in _SIGNS)


def _is_below(name: Any, root: str) -> bool:
    if not isinstance(name, (str, bytes, os.PathLike)):
        return False
    return Path(os.fsdecode(name)).absolute().is_relative_to(Path(root).absolute())
