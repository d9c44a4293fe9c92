"""``ckpt-run convert``: a copy of a DeepSpeed checkpoint that any number of ranks can load. DeepSpeed itself converts, in a child process."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from datastates.store.catalog import Checkpoint, damage
from datastates.store.layout import PRIVATE, step_of

from ckpt_run.messages import say
from ckpt_run.resume import fastest_crc32

FAILED = 1
LATEST = "latest"
PART = ".part"


def convert(checkpoint: Path, output: Path | None) -> int:
    """Write the copy and tell how to load it; the exit code. Nothing of ``checkpoint`` is changed.

    Args:
        output: the directory to make; ``universal-<name>`` beside the checkpoint by default. Trainer's own rotation, which goes by names
            that begin with "checkpoint-", leaves that one alone.
    """
    output = output or checkpoint.parent / f"universal-{checkpoint.absolute().name}"
    obstacle = _obstacle(checkpoint, output)
    if obstacle:
        say(obstacle)
        return FAILED
    part = output.with_name(output.name + PART)
    shutil.rmtree(part, ignore_errors=True)
    tag = (checkpoint / LATEST).read_text().strip()
    if not _run_deepspeed(checkpoint / tag, part / f"{tag}_universal"):
        shutil.rmtree(part, ignore_errors=True)
        say(f"DeepSpeed could not convert {checkpoint}; nothing was left behind")
        return FAILED
    _copy_the_rest(checkpoint, tag, part)
    part.rename(output)
    print(f"{output} can be loaded by any number of ranks. Put this into the DeepSpeed configuration,")
    print('    "checkpoint": {"load_universal": true}')
    print(f'and resume from it: resume_from_checkpoint="{output.absolute()}"')
    return 0


def _obstacle(checkpoint: Path, output: Path) -> str:
    """Why there can be no conversion, "" when there can."""
    if output.exists():
        return f"{output} is there already; remove it or give another --output"
    if not (checkpoint / LATEST).is_file():
        return f"{checkpoint} is no checkpoint of DeepSpeed: it has no file named {LATEST}"
    if (checkpoint / PRIVATE).is_dir():
        found = Checkpoint.load(checkpoint, step_of(checkpoint.absolute().name))
        problem = damage(found, crc32=fastest_crc32())
        if problem:
            return f"{checkpoint} {problem}"
    if importlib.util.find_spec("deepspeed") is None:
        return f"deepspeed cannot be imported by {sys.executable}"
    return ""


def _run_deepspeed(source: Path, target: Path) -> bool:
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(source.absolute()), "--output_folder", str(target.absolute())]
    target.mkdir(parents=True)
    return subprocess.run(command, stdout=sys.stderr, check=False).returncode == 0


def _copy_the_rest(checkpoint: Path, tag: str, target: Path) -> None:
    """What belongs to the Trainer: its state, random numbers, configuration and weights."""
    for entry in checkpoint.iterdir():
        if entry.name in (tag, LATEST, PRIVATE):
            continue
        if entry.is_dir():
            shutil.copytree(entry, target / entry.name)
        else:
            shutil.copy2(entry, target / entry.name)
