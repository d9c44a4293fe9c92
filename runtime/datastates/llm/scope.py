"""The save scope: what the writers hand over while the original ``_save_checkpoint`` runs.

Inside the scope the original code runs unchanged. What it would have written as a torch zip or a safetensors file below the checkpoint's
directory arrives here as a file image; small files it writes itself.

An empty placeholder stands for each image while the scope lasts, so that code which removes a file again, or looks whether it exists,
finds what it expects; a placeholder that is gone, or was filled by other means, takes its image with it. All placeholders are removed
when the scope ends: a file has its final name only when its bytes are durable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from datastates.engine.image import FileImage
from datastates.llm import log, orphans
from datastates.llm.still import StillTensor

_POINTERS = ("latest",)
"""Files by which a tool (DeepSpeed) finds what to load. They may appear only with the commit."""
_WEIGHTS = ("model", "pytorch_model", "adapter_model")

logger = log.logger("datastates.llm.decorator")


class SaveScope:
    """Collects the file images of one save of one rank; used by the main thread only.

    Args:
        directory: the checkpoint's directory; images for paths outside of it are not wanted.
        still: what may be copied late, by storage address.
        leaves_out: tells the names of files that this rank shall not write, since another one does.
    """

    def __init__(
        self,
        directory: Path,
        still: Mapping[int, StillTensor],
        leaves_out: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._leaves_out = leaves_out
        self._prefix = os.path.join(os.path.abspath(directory), "")
        self._still = still
        self._images: dict[str, FileImage] = {}
        self._used: dict[int, StillTensor] = {}
        self._failed: OSError | None = None

    def wants(self, path: str) -> bool:
        return os.path.abspath(path).startswith(self._prefix)

    def describe(self, address: int, nbytes: int) -> tuple[bool, str]:
        """Whether the storage there may be copied late, and its name."""
        entry = self._still.get(address)
        if entry is None or entry.nbytes != nbytes:
            return False, ""
        self._used[address] = entry
        return True, entry.name

    def accept(self, path: str, image: FileImage) -> None:
        """Take ``image`` for ``path``; it replaces what was pending there."""
        path = os.path.abspath(path)
        if self._leaves_out(os.path.basename(path)):
            return
        try:
            with open(path, "wb"):
                self._images[path] = image
        except OSError as error:
            # Told at the end of the scope: stock code may have other ranks to meet before.
            self._failed = self._failed or error

    def note(self, text: str) -> None:
        logger.warning("%s %s", log.PREFIX, text)

    def collect(self) -> list[tuple[str, FileImage]]:
        """The images that are still pending, in the order in which their files shall appear: weights last.

        Raises:
            OSError: one of them could not be taken.
        """
        if self._failed is not None:
            raise self._failed
        pending = []
        for path, image in self._images.items():
            if _is_placeholder(path):
                os.unlink(path)
                pending.append((path, image))
        orphans.hold_still([image for _, image in pending])
        return sorted(pending, key=lambda item: _is_weights(item[0]))

    def hold_back(self) -> dict[Path, bytes]:
        """Take away the pointers that were written into the directory: their content by path, for the commit to write."""
        held = {}
        for name in _POINTERS:
            path = Path(self._prefix) / name
            if path.is_file():
                held[path] = path.read_bytes()
                path.unlink()
        return held

    def discard(self) -> None:
        """Remove what is left of a scope that failed."""
        for path in self._images:
            if _is_placeholder(path):
                os.unlink(path)

    def late(self) -> Iterable[StillTensor]:
        """The tensors that will be copied late."""
        return self._used.values()


def _is_placeholder(path: str) -> bool:
    try:
        return os.path.getsize(path) == 0
    except FileNotFoundError:
        return False


def _is_weights(path: str) -> bool:
    return os.path.basename(path).startswith(_WEIGHTS)
