"""Runs a training script with the stock Trainer and writes down how long each of its checkpoints took.

    python -m ckpt_run.demo_stock STALLS SCRIPT [arguments of the script]

STALLS is a file that gets one number a line: the seconds that the training thread stood in ``Trainer._save_checkpoint``.
"""

from __future__ import annotations

import runpy
import sys
import time
from typing import Any

from transformers import Trainer


def measure_saves(stalls: str) -> None:
    """Let every Trainer append its stalls to the file ``stalls``."""
    save = Trainer._save_checkpoint

    def measured(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return save(self, *args, **kwargs)
        finally:
            with open(stalls, "a") as file:
                file.write(f"{time.perf_counter() - began}\n")

    Trainer._save_checkpoint = measured


if __name__ == "__main__":
    _, stalls, script, *arguments = sys.argv
    measure_saves(stalls)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
