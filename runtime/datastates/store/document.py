"""The small JSON files of this library: how strictly they are read, and the checksum that some of them end with.

A *sealed* document is a JSON object whose last member, ``checksum``, is the CRC-32 of every byte before it. Damage to any byte is noticed,
and a person can still read the file. Whatever a file holds, reading it gives a value or a :class:`ManifestError` that names the file and
the reason, and nothing else.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from datastates.store.regular import open_regular

MAX_BYTES = 256 << 20
"""No document of ours comes near; what is larger is not read."""

_SEAL = re.compile(rb',\n "checksum": "([0-9a-f]{8})"\n\}\n')
_SEAL_BYTES = len(b',\n "checksum": "00000000"\n}\n')
_MAX_WHOLE = (1 << 63) - 1
_MAX_DIGITS = 20


class ManifestError(ValueError):
    """A file of this library's own that cannot be used. ``file`` is its path, ``reason`` says what is wrong with it."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason


def seal(body: Mapping[str, object]) -> bytes:
    """Encode a non-empty object, with its checksum as the last member."""
    head = json.dumps(body, indent=1).encode("ascii").removesuffix(b"\n}")
    return head + b',\n "checksum": "%08x"\n}\n' % zlib.crc32(head)


def unseal(data: bytes, file: Path, version: int) -> Fields:
    """Decode what :func:`seal` made, of a format version of at most ``version``.

    Raises:
        ManifestError: anything else, with a reason of its own for a version that is newer.
    """
    fields = decode(data, file, version)
    match = _SEAL.fullmatch(data[-_SEAL_BYTES:])
    if not match or int(match[1], 16) != zlib.crc32(data[:-_SEAL_BYTES]):
        raise ManifestError(file, "is damaged: it does not match the checksum at its end")
    return fields


def decode(data: bytes, file: Path, version: int) -> Fields:
    """Decode a JSON object that carries a ``version`` of at most ``version``.

    Raises:
        ManifestError: anything else.
    """
    if not data:
        raise ManifestError(file, "is empty")
    try:
        document = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_bounded,
            parse_constant=_refuse_constant,
        )
    except RecursionError:
        raise ManifestError(file, "is nested too deeply") from None
    except ValueError as error:
        raise ManifestError(file, f"is not whole: {error}") from None
    if not isinstance(document, dict):
        raise ManifestError(file, "is not a JSON object")
    fields = Fields(document, file)
    found = fields.whole("version", low=1)
    if found > version:
        raise ManifestError(
            file,
            f"was written by a newer version of ckpt-run (format {found}; this one reads up to {version})",
        )
    return fields


def read_bytes(file: Path) -> bytes:
    """The bytes of a document. Never waits for a pipe or a device that lies in its place.

    Raises:
        FileNotFoundError: there is none.
        ManifestError: it is no regular file, too large, or cannot be read.
    """
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size  # not more room than it needs: there may be little
            data = stream.read(min(size, MAX_BYTES) + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{file}: No such file") from None
    except OSError as error:
        raise ManifestError(file, f"cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ManifestError(file, f"is larger than {MAX_BYTES >> 20} MiB")
    return data


class Fields:
    """A JSON object that is read member by member; every wrong or missing one is a :class:`ManifestError`."""

    def __init__(self, members: dict[str, object], file: Path, where: str = "") -> None:
        self._members = members
        self._file = file
        self._where = where

    def fail(self, key: str, reason: str) -> NoReturn:
        raise ManifestError(self._file, f"{self._where}{key} {reason}")

    def text(self, key: str, pattern: re.Pattern[str] | None = None, limit: int = 1 << 16) -> str:
        value = self._members.get(key)
        if not isinstance(value, str):
            self.fail(key, "is not text")
        if len(value) > limit or (pattern and not pattern.fullmatch(value)):
            self.fail(key, f"cannot be {_shown(value)}")
        return value

    def optional_text(self, key: str) -> str | None:
        return None if self._members.get(key) is None else self.text(key)

    def choice(self, key: str, *choices: str) -> str:
        value = self.text(key)
        if value not in choices:
            self.fail(key, f"cannot be {_shown(value)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._members.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, "is neither true nor false")
        return value

    def whole(self, key: str, low: int = 0, high: int = _MAX_WHOLE) -> int:
        value = self._members.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(key, "is not a whole number")
        if not low <= value <= high:
            self.fail(key, f"cannot be {value}")
        return value

    def optional_whole(self, key: str, low: int = 0) -> int | None:
        return None if self._members.get(key) is None else self.whole(key, low)

    def optional_number(self, key: str) -> float | None:
        return None if self._members.get(key) is None else self.number(key)

    def number(self, key: str) -> float:
        value = self._members.get(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            self.fail(key, "is not a number")
        return float(value)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._members.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.fail(key, "is not a list of texts")
        return tuple(value)

    def named_texts(self, key: str) -> dict[str, str]:
        """The texts of an object, by their names."""
        value = self._members.get(key)
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            self.fail(key, "is not an object of texts")
        return dict(value)

    def optional_object(self, key: str) -> Fields | None:
        value = self._members.get(key)
        return None if value is None else self._object(value, key)

    def objects(self, key: str) -> list[Fields]:
        """The objects of a list, in order."""
        value = self._members.get(key)
        if not isinstance(value, list):
            self.fail(key, "is not a list")
        return [self._object(item, f"{key}[{index}]") for index, item in enumerate(value)]

    def mapping(self, key: str) -> dict[str, Fields]:
        """The objects of an object, by their names."""
        value = self._members.get(key)
        if not isinstance(value, dict):
            self.fail(key, "is not an object")
        return {name: self._object(item, f"{key}[{_shown(name)}]") for name, item in value.items()}

    def _object(self, value: object, where: str) -> Fields:
        if not isinstance(value, dict):
            self.fail(where, "is not an object")
        return Fields(value, self._file, f"{self._where}{where}.")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return members


def _bounded(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError("a number is too large")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _shown(value: str) -> str:
    return ascii(value if len(value) <= 80 else value[:80] + "...")
