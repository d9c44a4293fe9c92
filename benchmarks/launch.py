"""What ckpt-run and its hook add to starting a program: the best and the median of many starts, side by side.

    python benchmarks/launch.py [REPEATS]

The cases take turns, so that a busy machine slows all of them; compare the columns, not the figures of two machines.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import datastates

CKPT_RUN = str(Path(sysconfig.get_path("scripts")) / "ckpt-run")
HOOK = str(Path(datastates.__file__).absolute().parent / "_hook")
PYTHON = [sys.executable, "-c", "pass"]

# name: command, variables, and the case that it is compared with
CASES: dict[str, tuple[list[str], dict[str, str], str]] = {
    "python": (PYTHON, {}, "python"),
    "python, hooked": (PYTHON, {"PYTHONPATH": HOOK, "CKPT_RUN_RUN_ID": "benchmark"}, "python"),
    "python, settings carried": (PYTHON, {"PYTHONPATH": HOOK, "PYTHON_CKPT_RUN": "e30="}, "python"),
    "true": (["true"], {}, "true"),
    "ckpt-run true": ([CKPT_RUN, "true"], {}, "true"),
    "ckpt-run --exec true": ([CKPT_RUN, "--exec", "true"], {}, "true"),
    "ckpt-run python": ([CKPT_RUN, *PYTHON], {}, "python"),
    "ckpt-run status": ([CKPT_RUN, "status", "/"], {}, "python"),
}


def start(command: list[str], env: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=False)
    return time.perf_counter() - began


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    dropped = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")  # as on a user's machine: compiled once, then read
    base = {name: value for name, value in os.environ.items() if name not in dropped}
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(repeats + 1):
        for name, (command, variables, _compared) in CASES.items():
            times[name].append(start(command, {**base, **variables}) * 1000)
    print(f"{'':26}{'best ms':>9}{'median ms':>11}{'added ms':>10}{'ratio':>7}")
    for name, (_, _, compared) in CASES.items():
        best = min(times[name][1:])
        median = statistics.median(times[name][1:])
        reference = min(times[compared][1:])
        print(f"{name:26}{best:9.1f}{median:11.1f}{best - reference:10.1f}{best / reference:7.2f}")


if __name__ == "__main__":
    main()
