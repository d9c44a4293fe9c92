"""A script that is run as it is, in a forked process that has imported what takes long."""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import cpu_ranks  # noqa: E402


@dataclass
class Script:
    """``words``: its path and its arguments. ``log``: where the ranks' output goes (see :class:`processes.Training`)."""

    words: list[str]
    log: str
    cwd: str
    environment: dict[str, str] = field(default_factory=dict)


def main(script: Script) -> None:
    os.environ.update(script.environment)
    os.chdir(script.cwd)
    cpu_ranks.install()
    sys.argv = list(script.words)
    runpy.run_path(sys.argv[0], run_name="__main__")


Job = Script
