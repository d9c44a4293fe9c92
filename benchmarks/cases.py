"""The cases, by name."""

from __future__ import annotations

from benchmarks import starting
from benchmarks.case import Case, Column, Target
from benchmarks.contestants import ALL

SAVING = (
    Column("stall", "ms"),
    Column("lost", "ms"),
    Column("durable", "s"),
    Column("cpu", "s"),
    Column("first", "ms"),
    Column("memory", "MiB"),
)
RAW = "raw write"
PEERS = tuple(name for name in ALL if name != "ckpt-run")
MB, GB = 10**6, 10**9


def _is_missing(contestant: str) -> bool:
    return contestant in ALL and ALL[contestant].missing()


def _saving(name: str, work: str, targets: tuple[Target, ...], **arguments: object) -> Case:
    return Case(
        name,
        work,
        "benchmarks.saving",
        "visit",
        (RAW, "ckpt-run", *PEERS),
        SAVING,
        targets,
        arguments,
        _is_missing,
    )


def _training(name: str, work: str, most: float, save_steps: int) -> Case:
    """``most``: how many times longer than without saves it may take."""
    return Case(
        name,
        work,
        "benchmarks.training",
        "visit",
        ("without saves", "ckpt-run", "stock Trainer"),
        (Column("seconds", "s"), Column("stall", "ms")),
        (Target("seconds", most, ("without saves",)),),
        {"save_steps": save_steps},
    )


SAVE_TARGETS = (
    Target("stall", 0.1, PEERS),
    Target("lost", 1 / 3, PEERS),
    Target("durable", 1.15, (RAW,)),
)
MANY_TARGETS = (
    Target("first", 1 / 3, ("torch.save",)),
    Target("stall", 0.1, ("torch.save",)),
    Target("durable", 1.5, (RAW,)),
)

CASES = {
    case.name: case
    for case in (
        _saving("save", "400 MB in 300 tensors", SAVE_TARGETS, state="alike", nbytes=400 * MB),
        _saving(
            "save-small-cache",
            "400 MB in 300 tensors, a host cache of a quarter of it",
            SAVE_TARGETS,
            state="alike",
            nbytes=400 * MB,
            cache=0.25,
        ),
        _saving(
            "save-large",
            "4 GB in 300 tensors",
            SAVE_TARGETS,
            state="alike",
            nbytes=4 * GB,
            seconds=8.0,
            saves=1,
        ),
        _saving("many", "20,000 tensors of 4 to 64 KiB", MANY_TARGETS, state="many", nbytes=0),
        _training(
            "train",
            "Trainer, 42 M parameters, AdamW, 500 MB a checkpoint, saved at every 4th step",
            1.03,
            4,
        ),
        _training("train-every-step", "the same, saved at every step", 1.3, 1),
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
    )
}
