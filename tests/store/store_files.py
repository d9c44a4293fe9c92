"""Real checkpoints for the store's tests, made through the protocol itself, and the ways in which real files get damaged."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from datastates.store import commit
from datastates.store.catalog import Checkpoint
from datastates.store.layout import CheckpointDir, Root
from datastates.store.manifest import FileEntry, Vote
from datastates.store.runrecord import Lineage, RunRecord

FILES = {
    "model.safetensors": bytes(range(256)) * 64,
    "optimizer.pt": bytes(reversed(range(256))) * 64,
    "rng_state.pth": b"random numbers " * 20,
    "sub/part.distcp": b"nested " * 100,
}
BY_STOCK = {"trainer_state.json": b'{"global_step": 0}', "config.json": b"{}"}


def entry(path: str, data: bytes) -> FileEntry:
    return FileEntry(path, len(data), zlib.crc32(data))


def write(directory: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def vote(checkpoint: CheckpointDir, files: dict[str, bytes], **facts: object) -> Vote:
    plain = Vote(
        attempt="attempt1",
        save=1,
        step=checkpoint.step,
        rank=0,
        world_size=1,
        lineage="lineage1",
        ordinal=0,
        files=tuple(entry(name, data) for name, data in files.items()),
    )
    return replace(plain, **facts)  # type: ignore[arg-type]


def save(
    root: Root,
    step: int,
    files: dict[str, bytes] | None = None,
    by_stock: dict[str, bytes] | None = None,
    **facts: object,
) -> Checkpoint:
    """Commit a checkpoint of one rank: ``files`` voted for, two more as stock code would leave them, or as ``by_stock`` has them."""
    checkpoint = root.checkpoint(step)
    files = FILES if files is None else files
    checkpoint.prepare()
    write(
        checkpoint.path,
        {
            **files,
            **BY_STOCK,
            "trainer_state.json": json.dumps({"global_step": step}).encode(),
            **(by_stock or {}),
        },
    )
    ballot = vote(checkpoint, files, **facts)
    commit.cast_vote(checkpoint, ballot)
    votes = commit.collect_votes(checkpoint, ballot.attempt, ballot.save, [0], timeout=10)
    return Checkpoint(step, checkpoint.path, commit.publish(checkpoint, votes))


def uncommitted(root: Root, step: int) -> CheckpointDir:
    """What a killed save leaves behind."""
    checkpoint = root.checkpoint(step)
    checkpoint.prepare()
    write(checkpoint.path, {**BY_STOCK, ".ckpt/attempt0-0.part": b"half a fi"})
    return checkpoint


def record(root: Root, lineages: dict[int, Lineage]) -> RunRecord:
    here = RunRecord.here(run_id="run1", attempt="attempt1", output_dir=str(root.path.parent))
    written = replace(here, lineages=lineages)
    written.write(root)
    return written


def stock(output_dir: Path, step: int, **files: bytes) -> Path:
    """A checkpoint with the shape that stock Trainer gives it, as small as it can be."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path = output_dir / f"checkpoint-{step}"
    write(
        path,
        {
            "model.safetensors": len(header).to_bytes(8, "little") + header + bytes(8),
            "optimizer.pt": b"PK\x03\x04" + b"payload" * 9 + b"PK\x05\x06" + bytes(18),
            "trainer_state.json": json.dumps({"global_step": step}).encode(),
            **files,
        },
    )
    return path


def _zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _long(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _missing(path: Path) -> None:
    path.unlink()


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (_missing, "is missing"),
    "short": (_short, "bytes instead of"),
    "long": (_long, "bytes instead of"),
    "flipped": (_flipped, "has checksum"),
    "zeroed": (_zeroed, "has checksum"),
    "a directory": (_directory, "is not a regular file"),
    "a pipe": (_fifo, "is not a regular file"),
}
