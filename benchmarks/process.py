"""What this process has used, as the kernel tells it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def cpu_seconds() -> float:
    """Processor time of this process and all that are below it, living ones as well."""
    found = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(times.user + times.system for times in (process.cpu_times() for process in found))


def resident() -> int:
    """Bytes of memory in use now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """The most that :func:`resident` has been since :func:`forget_peak`, or ever."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
