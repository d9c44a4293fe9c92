"""Whether a checkpoint that stock Trainer wrote is worth trying.

Stock Trainer writes no checksums and no mark of completeness, so only the shape can be judged: what an interrupted save or a full disk
leaves behind is recognised, changed bytes are not. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datastates.store.layout import directories, step_of
from datastates.store.regular import open_regular

INCOMPLETE = "checkpoint-is-incomplete.txt"
"""Trainer's own mark while it saves on a signal."""

_WEIGHTS = (
    "*.safetensors",
    "pytorch_model*.bin",
    "adapter_model.bin",
    "pytorch_model_fsdp*/*.distcp",
    "*/adapter_model.*",
    "global_step*/*model_states.pt",
)
_TORCH = {".pt", ".pth", ".bin"}
_ZIP_START = b"PK\x03\x04"
_ZIP_END = b"PK\x05\x06"
_ZIP_TAIL = 22 + 0xFFFF
_MAX_HEADER = 100_000_000


def stock_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Every ``checkpoint-N`` directory of an output directory with its N, highest first."""
    found = [(step_of(entry.name), Path(entry.path)) for entry in directories(output_dir)]
    return sorted(((step, path) for step, path in found if step is not None), reverse=True)


def stock_problem(path: Path) -> str | None:
    """Why a stock checkpoint cannot be whole, with the file's name; None when nothing speaks against it."""
    try:
        return next(_problems(path), None)
    except OSError as error:
        return f"{error.filename or path} cannot be read: {error.strerror}"


def global_step(path: Path) -> int | None:
    """The step that a checkpoint's trainer_state.json tells; None when it does not."""
    step = _state(path).get("global_step")
    return step if isinstance(step, int) and step >= 0 else None


def saved_at(path: Path) -> float:
    """When a checkpoint was written, in seconds since 1970: Trainer's state is its last file. 0 when there is none."""
    try:
        return (path / "trainer_state.json").stat().st_mtime
    except OSError:
        return 0.0


@dataclass(frozen=True, slots=True)
class Story:
    """What Trainer has logged of a training up to a checkpoint, its entries in order."""

    step: int
    entries: list[Any]

    @classmethod
    def read(cls, path: Path) -> Story | None:
        """That of the checkpoint at ``path``, None when its trainer_state.json does not tell."""
        state = _state(path)
        step, entries = state.get("global_step"), state.get("log_history", [])
        return cls(step, entries) if isinstance(step, int) and isinstance(entries, list) else None

    def goes_on_from(self, earlier: Story) -> bool:
        """Whether this may be the same training later on: all that was logged up to ``earlier`` is here, and nothing else up to that step."""
        told = len(earlier.entries)
        since = [_step(entry) for entry in self.entries[told:]]
        return (
            self.step > earlier.step
            and self.entries[:told] == earlier.entries
            and min(since, default=earlier.step) >= earlier.step
        )


def _step(entry: Any) -> float:
    step = entry.get("step") if isinstance(entry, dict) else None
    return step if isinstance(step, (int, float)) else -1


def _state(path: Path) -> dict[str, Any]:
    """The content of trainer_state.json, empty when it cannot be read. NaN, which would not equal itself, is a text in it."""
    try:
        state = json.loads(_content(path / "trainer_state.json"), parse_constant=str)
    except (OSError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def _problems(path: Path) -> Iterator[str]:
    if not path.is_dir():
        yield "is no directory"
        return
    if (path / INCOMPLETE).exists():
        yield f"{INCOMPLETE} says that its save was interrupted"
    if not (path / "trainer_state.json").is_file():
        yield "trainer_state.json is missing"
    elif global_step(path) is None:
        yield "trainer_state.json is damaged"
    yield from _missing_weights(path)
    for directory, _, names in os.walk(path):
        for name in sorted(names):
            problem = _file_problem(Path(directory, name))
            if problem:
                yield f"{Path(directory, name).relative_to(path)} {problem}"


def _missing_weights(path: Path) -> Iterator[str]:
    if not any(True for pattern in _WEIGHTS for _ in path.glob(pattern)):
        yield "has no file with weights"
    for index in sorted(path.glob("*.index.json")):
        for name in _shards(index):
            if not (path / name).is_file():
                yield f"{name} is missing, which {index.name} names"


def _shards(index: Path) -> list[str]:
    try:
        return sorted({str(name) for name in json.loads(_content(index))["weight_map"].values()})
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return ["the list of weights"]


def _file_problem(path: Path) -> str | None:
    if path.suffix not in {".safetensors", *_TORCH}:
        return None
    if not path.exists():
        return "leads nowhere"
    if not path.is_file():
        return "is not a regular file"
    if path.suffix == ".safetensors":
        return _safetensors_problem(path)
    return _torch_problem(path)


def _content(path: Path) -> bytes:
    with open_regular(path) as stream:
        return stream.read()


def _safetensors_problem(path: Path) -> str | None:
    size = path.stat().st_size
    with open_regular(path) as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            return f"has only {size} bytes"
        (length,) = struct.unpack("<Q", prefix)
        if length > min(_MAX_HEADER, size):
            return "has no whole header"
        header = stream.read(length)
    try:
        tensors = {name: tensor for name, tensor in json.loads(header).items() if name != "__metadata__"}
        end = max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError):
        return "has no whole header"
    expected = 8 + length + end
    return None if size == expected else f"has {size} bytes instead of {expected}"


def _torch_problem(path: Path) -> str | None:
    """A zip must end with its directory; an older torch file is a pickle, of which only the first byte is known."""
    size = path.stat().st_size
    with open_regular(path) as stream:
        start = stream.read(4)
        stream.seek(max(0, size - _ZIP_TAIL))
        tail = stream.read()
    if not start:
        return "is empty"
    if start == _ZIP_START:
        return None if _ends_with_directory(tail) else "does not end with the zip's directory"
    return "begins with zeros" if not start.strip(b"\0") else None


def _ends_with_directory(tail: bytes) -> bool:
    """Whether the last record, 22 bytes and a comment of the length it tells, reaches exactly to the end."""
    at = tail.rfind(_ZIP_END)
    if at < 0 or at + 22 > len(tail):
        return False
    return at + 22 + int.from_bytes(tail[at + 20 : at + 22], "little") == len(tail)
