"""``ckpt-run verify``: a verdict for each file of each checkpoint. Sizes and checksums decide; nothing is unpickled."""

from __future__ import annotations

from pathlib import Path

from datastates.store.catalog import NOT_COMMITTED, Checkpoint, verify
from datastates.store.layout import PRIVATE, step_of
from datastates.store.loops import all_checkpoints
from datastates.store.verify import FileVerdict
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text

from ckpt_run.find_run import root_at
from ckpt_run.resume import fastest_crc32
from ckpt_run.wording import count, size

DAMAGED = 1


def show(path: Path) -> int:
    """Verify what lies at ``path`` and print it; the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    if not path.is_dir():
        console.print(f"{path} is not a directory")
        return DAMAGED
    if step_of(path.name) is not None or (path / PRIVATE).is_dir():
        return _show_all([Checkpoint.load(path, step_of(path.name))], console, asked_for=True)
    root = root_at(path)
    checkpoints = all_checkpoints(root) if root else []
    if not checkpoints:
        console.print(f"there is no checkpoint of ckpt-run in {path}")
        return DAMAGED
    return _show_all(checkpoints, console, asked_for=False)


def _show_all(checkpoints: list[Checkpoint], console: Console, asked_for: bool) -> int:
    """``asked_for``: a person named this one checkpoint; then one that was never committed fails as well."""
    good = 0
    bad = 0
    for checkpoint in checkpoints:
        console.print(Text(str(checkpoint.path), style="bold"))
        if checkpoint.problem == NOT_COMMITTED and not asked_for:
            console.print("  skipped    was never committed: it is in flight, or its run was interrupted")
            continue
        verdicts = _verify(checkpoint)
        for verdict in verdicts:
            console.print(_line(verdict, checkpoint))
        bad += sum(not verdict.ok for verdict in verdicts)
        good += sum(verdict.ok for verdict in verdicts)
    if bad:
        console.print(Text(f"{count(bad, 'file')} damaged or missing, {good} ok", style="bold red"))
        return DAMAGED
    console.print(Text(f"{count(good, 'file')} ok", style="bold green"))
    return 0 if good else DAMAGED


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
