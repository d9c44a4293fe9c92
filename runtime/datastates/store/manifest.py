"""Votes, manifests and abandonments: the three documents of the commit protocol (:mod:`datastates.store.commit`).

All are sealed (:mod:`datastates.store.document`) and carry the format version, the attempt and the running number of the save, so that what
an earlier attempt left behind is never taken for an answer. Sizes are in bytes, times in seconds since 1970, checksums are the CRC-32 of
the whole file. Paths are relative to the checkpoint, with ``/``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from datastates.store.document import Fields, ManifestError, read_bytes, seal, unseal
from datastates.store.durable import write_durably
from datastates.store.layout import PRIVATE

__all__ = [
    "FORMAT_VERSION",
    "Abandonment",
    "FileEntry",
    "Manifest",
    "ManifestError",
    "Vote",
    "parse_abandonment",
    "parse_manifest",
    "parse_vote",
    "read_abandonment",
    "read_manifest",
    "read_vote",
    "write_durably",
]

FORMAT_VERSION = 1

IDENTIFIER = re.compile(r"[0-9A-Za-z_-]{1,64}")
_CRC32 = re.compile(r"[0-9a-f]{8}")
_MAX_PATH = 4096
_MAX_NAME = 255
_MAX_RANKS = 1 << 24

T = TypeVar("T")
S = TypeVar("S", bound="_Signed")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint: path relative to it, size in bytes, CRC-32 of all of it."""

    path: str
    size: int
    crc32: int

    def to_json(self) -> dict[str, object]:
        return {"path": self.path, "size": self.size, "crc32": f"{self.crc32:08x}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signed:
    """What a vote and a manifest have in common: which save of which training, who signs, and the files. ``rank`` is the signer's.

    Where every node saves on a disk of its own, this is the checkpoint of ``node``, one of ``nodes`` that belong together.
    """

    attempt: str
    save: int
    step: int
    rank: int
    world_size: int
    lineage: str
    ordinal: int
    node: int = 0
    nodes: int = 1
    files: tuple[FileEntry, ...] = ()
    created: float = field(default_factory=time.time)

    def _seal(self, **more: object) -> bytes:
        return seal(
            {
                "version": FORMAT_VERSION,
                "attempt": self.attempt,
                "save": self.save,
                "step": self.step,
                "rank": self.rank,
                "world_size": self.world_size,
                "lineage": self.lineage,
                "ordinal": self.ordinal,
                **({"node": self.node, "nodes": self.nodes} if self.nodes > 1 else {}),
                "created": self.created,
                **more,
                "files": [entry.to_json() for entry in self.files],
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote(_Signed):
    """One rank's word that its files are durable under their final names; with ``error``, that they never will be."""

    error: str | None = None

    def encode(self) -> bytes:
        return self._seal(error=self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(_Signed):
    """The commit: every file of a checkpoint. ``rank`` is the committer's, ``voters`` how many ranks voted, told where that is not all of them."""

    voters: int = 0

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size for entry in self.files)

    def encode(self) -> bytes:
        return self._seal(**({"voters": self.voters} if self.nodes > 1 else {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandonment:
    """The committer's word that a save will never be committed."""

    attempt: str
    save: int
    reason: str
    created: float = field(default_factory=time.time)

    def encode(self) -> bytes:
        return seal(
            {
                "version": FORMAT_VERSION,
                "attempt": self.attempt,
                "save": self.save,
                "created": self.created,
                "reason": self.reason,
            }
        )


def read_vote(file: Path) -> Vote:
    """Read a vote. Raises FileNotFoundError when there is none, :class:`ManifestError` when it cannot be used."""
    return _read(file, parse_vote)


def read_manifest(file: Path) -> Manifest:
    """Read a manifest. Raises FileNotFoundError when there is none, :class:`ManifestError` when it cannot be used."""
    return _read(file, parse_manifest)


def read_abandonment(file: Path) -> Abandonment:
    """Read an abandonment. Raises FileNotFoundError when there is none, :class:`ManifestError` when it cannot be used."""
    return _read(file, parse_abandonment)


def parse_vote(data: bytes, file: Path) -> Vote:
    """Decode a vote; ``file`` is for messages. Raises :class:`ManifestError` for whatever is not exactly one."""
    fields = unseal(data, file, FORMAT_VERSION)
    return _parse_signed(Vote, fields, error=fields.optional_text("error"))


def parse_manifest(data: bytes, file: Path) -> Manifest:
    """Decode a manifest; ``file`` is for messages. Raises :class:`ManifestError` for whatever is not exactly one."""
    fields = unseal(data, file, FORMAT_VERSION)
    return _parse_signed(Manifest, fields, voters=fields.optional_whole("voters") or 0)


def parse_abandonment(data: bytes, file: Path) -> Abandonment:
    """Decode an abandonment; ``file`` is for messages. Raises :class:`ManifestError` for whatever is not exactly one."""
    fields = unseal(data, file, FORMAT_VERSION)
    return Abandonment(
        attempt=fields.text("attempt", IDENTIFIER),
        save=fields.whole("save"),
        reason=fields.text("reason"),
        created=fields.number("created"),
    )


def _parse_signed(kind: type[S], fields: Fields, **more: Any) -> S:
    world_size = fields.whole("world_size", low=1, high=_MAX_RANKS)
    return kind(
        attempt=fields.text("attempt", IDENTIFIER),
        save=fields.whole("save"),
        step=fields.whole("step"),
        rank=fields.whole("rank", high=world_size - 1),
        world_size=world_size,
        lineage=fields.text("lineage", IDENTIFIER),
        ordinal=fields.whole("ordinal"),
        node=fields.optional_whole("node") or 0,
        nodes=fields.optional_whole("nodes", low=1) or 1,
        created=fields.number("created"),
        files=_parse_files(fields),
        **more,
    )


def _parse_files(fields: Fields) -> tuple[FileEntry, ...]:
    entries: dict[str, FileEntry] = {}
    for item in fields.objects("files"):
        path = item.text("path", limit=_MAX_PATH)
        problem = "occurs twice" if path in entries else path_problem(path)
        if problem:
            item.fail(f"path {path!a}", problem)
        entries[path] = FileEntry(path, item.whole("size"), int(item.text("crc32", _CRC32), 16))
    return tuple(entries.values())


def path_problem(path: str) -> str | None:
    """Why ``path`` cannot name a file inside a checkpoint; None when it can."""
    try:
        names = path.encode("utf-8", "surrogateescape").split(b"/")  # file names that are not UTF-8 are legal
    except UnicodeEncodeError:
        return "is not a file name"
    if path.startswith("/"):
        return "is absolute"
    if b".." in names:
        return "leads out of the checkpoint"
    if (
        b"" in names
        or b"." in names
        or b"\0" in path.encode("utf-8", "surrogateescape")
        or max(map(len, names)) > _MAX_NAME
    ):
        return "is not a file name"
    if names[0] == PRIVATE.encode():
        return f"lies in {PRIVATE}"
    return None


def _read(file: Path, parse: Callable[[bytes, Path], T]) -> T:
    return parse(read_bytes(file), file)
