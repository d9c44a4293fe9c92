"""The cases, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from benchmarks import scaling, starting
from benchmarks.case import Case, Column, Target
from benchmarks.contestants import ALL
from benchmarks.ways import OURS, STOCK, WITHOUT, ZERO_WAYS, missing_for_zero

STALL = "seconds that the training thread stood still for a save: in its call, and at the fence before the state changes"
SLOWDOWN = "seconds that steps took longer because a save was in flight"
LOST = "stall and slowdown: how much longer training took for each save"
DURABLE = "seconds from the call until the contestant says that the checkpoint is done"
SYNCED = "whether the data have been through fsync by then; where not, a power cut may still take them"

SAVING = (
    Column("stall", "ms", STALL),
    Column("slowdown", "ms", SLOWDOWN),
    Column("lost", "ms", LOST),
    Column("durable", "s", f"{DURABLE}, with nothing else running"),
    Column("synced", "yes", SYNCED),
    Column("cpu", "s", "seconds of processor time of one such save, of all processes of the contestant"),
    Column("first", "ms", "the stall of the first save of a process"),
    Column("memory", "MiB", "by how much the process's peak is above what it had before the first save"),
)
ON_DEVICE = (*SAVING, Column("copy", "ms", "save and fence at once: the copy from the GPU, behind nothing"))
TRAINING = (
    Column(
        "ratio", "x", "how many times as long steps with saves take as steps without, in the same process"
    ),
    Column("stall", "ms", STALL),
    Column("slowdown", "ms", SLOWDOWN),
    Column("lost", "ms", LOST),
    Column("durable", "s", f"{DURABLE}, beside training"),
    Column("synced", "yes", SYNCED),
    Column("cpu", "s", "processor time that a save adds, of all processes"),
    Column("peak", "MiB", "memory of the training process at most"),
    Column("step", "ms", "a step without saves"),
)
RAW, PINNED = "raw write", "pinned copy"
PEERS = tuple(name for name in ALL if name != OURS)
FEW = ("torch.save", "safetensors", "DCP async_save, thread")
"""Peers where all of them would take too long: stock code, and those that are the best in the first case."""

MB, GB = 10**6, 10**9


def _missing(contestant: str) -> str:
    return ALL[contestant].missing() if contestant in ALL else ""


def _no_gpu(otherwise: Callable[[str], str]) -> Callable[[str], str]:
    return lambda contestant: otherwise(contestant) if torch.cuda.is_available() else "no GPU"


def _saving(
    name: str, work: str, targets: tuple[Target, ...], peers: Iterable[str] = FEW, **arguments: object
) -> Case:
    contestants = (RAW, OURS, *peers)
    return Case(name, work, "benchmarks.saving", "visit", contestants, SAVING, targets, arguments, _missing)


def _training(name: str, work: str, most: float, save_steps: int, saves: int) -> Case:
    """``most``: how many times longer than without saves it may take."""
    contestants = (WITHOUT, OURS, STOCK)
    given = {"save_steps": save_steps, "saves": saves}
    most_of_it = (Target("ratio", most),)
    return Case(name, work, "benchmarks.training", "visit", contestants, TRAINING, most_of_it, given)


def _zero(name: str, work: str, most: float, save_steps: int, saves: int) -> Case:
    return Case(
        name,
        work,
        "benchmarks.zero",
        "visit",
        tuple(ZERO_WAYS),
        TRAINING,
        (Target("ratio", most),),
        {"save_steps": save_steps, "saves": saves},
        missing_for_zero,
    )


def _save_targets(peers: tuple[str, ...]) -> tuple[Target, ...]:
    return Target("stall", 0.1, peers), Target("lost", 1 / 3, peers), Target("durable", 1.15, (RAW,))


MANY_TARGETS = (
    Target("first", 1 / 3, ("torch.save",)),
    Target("stall", 0.1, ("torch.save",)),
    Target("durable", 1.5, (RAW,)),
)

CASES = {
    case.name: case
    for case in (
        _saving("save", "400 MB in 300 tensors", _save_targets(PEERS), PEERS, state="alike", nbytes=400 * MB),
        _saving(
            "save-small-cache",
            "400 MB in 300 tensors, a host cache of a quarter of it",
            _save_targets(FEW),
            state="alike",
            nbytes=400 * MB,
            cache=0.25,
        ),
        _saving(
            "save-large",
            "4 GB in 300 tensors",
            _save_targets(FEW),
            state="alike",
            nbytes=4 * GB,
            seconds=4.0,
            saves=1,
        ),
        _saving("many", "20,000 tensors of 4 to 64 KiB", MANY_TARGETS, state="many", nbytes=0),
        _training(
            "train",
            "Trainer, 42 M parameters, AdamW, 500 MB a checkpoint, saved at every 4th step",
            1.03,
            save_steps=4,
            saves=2,
        ),
        _training("train-every-step", "the same, saved at every step", 1.3, save_steps=1, saves=4),
        _zero(
            "deepspeed",
            "Trainer, ZeRO-2 in one process on CPUs, 42 M parameters, AdamW, 840 MB a checkpoint, saved at every 4th step",
            1.03,
            save_steps=4,
            saves=2,
        ),
        _zero("deepspeed-every-step", "the same, saved at every step", 1.3, save_steps=1, saves=4),
        Case(
            "resume",
            "a Trainer resumes 42 M parameters and AdamW from 500 MB",
            "benchmarks.resuming",
            "visit",
            (STOCK, OURS),
            (
                Column(
                    "first step",
                    "s",
                    "from the start of the process to its first step, files in memory: the best",
                ),
                Column("median", "s", "the same, the median"),
                Column("from disk", "s", "the same, with none of the files in memory"),
                Column(
                    "ratio", "x", "the best over the best of the stock Trainer's starts, which took turns"
                ),
                Column("cpu ratio", "x", "the same of processor time, which a busy machine changes less"),
                Column("verified", "yes", "whether checksums were compared"),
                Column("cpu", "s", "processor time of one such start"),
                Column("peak", "MiB", "memory of the process at most"),
            ),
            (Target("ratio", 1.05), Target("from disk", 1.05, (STOCK,))),
        ),
        Case(
            "memory",
            "200 saves in a row of 50 MB each, a host cache of 32 MiB",
            "benchmarks.memory",
            "visit",
            (OURS, STOCK),
            (
                Column("peak", "MiB", "memory of the process at most"),
                Column(
                    "over",
                    "MiB",
                    "peak over that of the same training before the first save, less the host cache",
                ),
                Column(
                    "growth", "MiB", "the least that stays after a save, second half of them over the first"
                ),
                Column("seconds", "s", "all of them and their steps"),
                Column("synced", "yes", SYNCED),
            ),
            (Target("over", 64 * MB), Target("growth", 8 << 20)),
        ),
        Case(
            "cuda",
            "4 GB in 300 tensors on a GPU",
            "benchmarks.saving",
            "visit",
            (PINNED, RAW, OURS, *FEW),
            ON_DEVICE,
            (Target("stall", 0.02), Target("copy", 1 / 0.9, (PINNED,))),
            {"state": "alike", "nbytes": 4 * GB, "seconds": 8.0, "saves": 2, "device": "cuda"},
            _no_gpu(_missing),
        ),
        Case(
            "cuda-train",
            "Trainer on a GPU, 42 M parameters, AdamW, 500 MB a checkpoint, saved at every 32nd step",
            "benchmarks.training",
            "visit",
            (WITHOUT, OURS, STOCK),
            TRAINING,
            (Target("stall", 0.02), Target("ratio", 1.03)),
            {"save_steps": 32, "saves": 3, "batch": 32, "device": "cuda"},
            _no_gpu(lambda contestant: ""),
        ),
        Case(
            "launch",
            "starting `python -c pass`",
            "benchmarks.starting",
            "visit",
            tuple(starting.COMMANDS),
            (Column("best", "ms"), Column("median", "ms"), Column("added", "ms")),
            (
                Target("best", 4.0, ("python",)),
                Target("best", 1 / 8, ("ddtrace-run", "opentelemetry-instrument")),
                Target("added", 0.002, ours="the hook"),
            ),
            missing=starting.missing,
        ),
        Case(
            "verify",
            "checksums of 4 GB",
            "benchmarks.verifying",
            "visit",
            ("raw read", "ckpt-run verify"),
            (Column("cached", "s"), Column("from disk", "s")),
            (
                Target("cached", 1.15, ("raw read",), ours="ckpt-run verify"),
                Target("from disk", 1.15, ("raw read",), ours="ckpt-run verify"),
            ),
        ),
        Case(
            "scale",
            "the model of docs/scale.md beside what happens",
            "benchmarks.scaling",
            "visit",
            tuple(scaling.SIZES),
            (
                Column(
                    "stall", "ms", "of a save whose state changes at once: the call and all of the copying"
                ),
                Column("stall foretold", "ms"),
                Column("durable", "s", DURABLE),
                Column("durable foretold", "s"),
                Column("off", "x", "how many times as long as the other is the longer of the two, at worst"),
            ),
        ),
    )
}
