"""What ckpt-run and its hook add to starting a program, beside other tools that start programs with a hook of theirs."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from ckpt_run.environment import CARRIER, RUN_ID, hook_folder

REPEATS = 20
SCRIPTS = sysconfig.get_path("scripts")
CKPT_RUN = str(Path(SCRIPTS) / "ckpt-run")
PYTHON = [sys.executable, "-c", "pass"]

COMMANDS: dict[str, tuple[list[str], dict[str, str]]] = {
    "python": (PYTHON, {}),
    "the hook": (PYTHON, {"PYTHONPATH": hook_folder(), RUN_ID: "benchmark"}),
    "the hook, settings carried": (PYTHON, {"PYTHONPATH": hook_folder(), CARRIER: "e30="}),
    "ckpt-run": ([CKPT_RUN, *PYTHON], {}),
    "ckpt-run --exec": ([CKPT_RUN, "--exec", *PYTHON], {}),
    "ddtrace-run": (["ddtrace-run", *PYTHON], {}),
    "opentelemetry-instrument": (["opentelemetry-instrument", *PYTHON], {}),
}
"""By contestant: the command, and variables."""


def missing(contestant: str) -> str:
    name = COMMANDS[contestant][0][0]
    return "" if shutil.which(name, path=_path()) else f"{name} is not installed"


def visit(contestant: str, folder: str) -> dict[str, float]:
    """Seconds of many starts; ``added`` is what the best one takes longer than the best of bare Python, which takes turns with it."""
    dropped = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")  # as on a user's machine: compiled once, then read
    base = {name: value for name, value in os.environ.items() if name not in dropped} | {"PATH": _path()}
    command, variables = COMMANDS[contestant]
    bare, with_it = [], []
    for _ in range(REPEATS + 1):
        bare.append(_start(PYTHON, base, folder))
        with_it.append(_start(command, {**base, **variables}, folder))
    best = min(with_it[1:])
    return {"best": best, "median": statistics.median(with_it[1:]), "added": best - min(bare[1:])}


def _start(command: list[str], env: dict[str, str], folder: str) -> float:
    began = time.perf_counter()
    subprocess.run(command, env=env, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def _path() -> str:
    return f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"
