"""``ckpt-run verify``: a verdict for each file of each checkpoint. Sizes and checksums decide; nothing is unpickled."""

from __future__ import annotations

from pathlib import Path

from datastates.store import staged
from datastates.store.catalog import NOT_COMMITTED, Checkpoint, verify, why_not_committed
from datastates.store.layout import PRIVATE, step_of
from datastates.store.loops import all_checkpoints
from datastates.store.verify import FileVerdict
from datastates.units import size
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text

from ckpt_run.find_run import root_at
from ckpt_run.resume import fastest_crc32
from ckpt_run.wording import count

DAMAGED = 1
TRIES = 5
"""How often a checkpoint is read that training replaces or moves while it is read."""


def show(path: Path) -> int:
    """Verify what lies at ``path`` and print it; the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    if not path.is_dir():
        console.print(f"{path} is not a directory")
        return DAMAGED
    root = None
    if step_of(path.name) is None and not (path / PRIVATE).is_dir():
        root = root_at(path)
        if root is None or not all_checkpoints(root):
            console.print(f"there is no checkpoint of ckpt-run in {path}")
            return DAMAGED
    for _ in range(TRIES):
        found = all_checkpoints(root) if root else [Checkpoint.load(path, step_of(path.name))]
        good, bad, gone = _show_all(found, console, asked_for=root is None)
        if good or bad or not gone:
            break
        # All of them have given way to newer ones meanwhile: those are looked at.
    if bad:
        console.print(Text(f"{count(bad, 'file')} damaged or missing, {good} ok", style="bold red"))
        return DAMAGED
    console.print(Text(f"{count(good, 'file')} ok", style="bold green"))
    return 0 if good else DAMAGED


def _show_all(checkpoints: list[Checkpoint], console: Console, asked_for: bool) -> tuple[int, int, int]:
    """How many files are good and bad, and how many checkpoints went while they were read.

    ``asked_for``: a person named this one checkpoint; then one that was never committed fails as well.
    """
    good = bad = gone = 0
    for listed in checkpoints:
        console.print(Text(str(listed.path), style="bold"))
        if listed.problem == NOT_COMMITTED and not asked_for:
            console.print(f"  skipped    {why_not_committed(listed.path)}", markup=False)
            continue
        checkpoint, verdicts = _verify_what_is_there(listed)
        if checkpoint is None:
            console.print("  skipped    was removed, or replaced by a newer one, while it was read")
            gone += 1
            continue
        for verdict in verdicts:
            console.print(_line(verdict, checkpoint))
        bad += sum(not verdict.ok for verdict in verdicts)
        good += sum(verdict.ok for verdict in verdicts)
    return good, bad, gone


def _verify_what_is_there(checkpoint: Checkpoint) -> tuple[Checkpoint | None, list[FileVerdict]]:
    """Training may go on meanwhile: what was read is bad only if it still is the checkpoint of that manifest, and lies where it lay.

    None for one that is no longer there, or is replaced each time.
    """
    for left in reversed(range(TRIES)):
        may_move = left > 0 and staged.waits(checkpoint.path)
        verdicts = _verify(checkpoint)
        if all(verdict.ok for verdict in verdicts):
            return checkpoint, verdicts
        now = Checkpoint.load(checkpoint.path, step_of(checkpoint.path.name))
        if now == checkpoint and not may_move:
            return checkpoint, verdicts
        if checkpoint.committed and now.problem == NOT_COMMITTED:
            break
        checkpoint = now
    return None, []


def _verify(checkpoint: Checkpoint) -> list[FileVerdict]:
    """With a progress bar, if stderr is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(checkpoint.path.name, total=None)
        return verify(
            checkpoint,
            fastest_crc32(),
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )


def _line(verdict: FileVerdict, checkpoint: Checkpoint) -> Text:
    word, style = ("ok", "green") if verdict.ok else ("DAMAGED", "bold red")
    if not verdict.ok and "missing" in verdict.reason:
        word = "MISSING"
    sizes = (
        {entry.path: size(entry.size) for entry in checkpoint.manifest.files} if checkpoint.manifest else {}
    )
    reason = f": {verdict.reason}" if verdict.reason else ""
    return Text.assemble(
        "  ", (f"{word:<9}", style), f"{sizes.get(verdict.path, ''):>10}  {verdict.path}{reason}"
    )
