"""``ckpt-run status``, ``verify`` and ``convert``: their options and help; what they do is in modules of the same names."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

# Plain help: it looks the same in a terminal, in a pipe and in a log file.
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def status(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="An output directory, or a concurrent_checkpoint in one."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object (it has a schema_version).")
    ] = False,
) -> None:
    """Tell what the newest run is doing: its step, checkpoints, stalls and ranks.

    Without DIR: what was launched in this directory last, or else what lies one or two folders below it.

    \b
    Examples:
      ckpt-run status
      ckpt-run status out --json

    Exit code: 0 when there is a run to tell about, 1 when there is none.
    """
    from ckpt_run.status import show

    raise typer.Exit(show(directory, as_json))


@app.command()
def verify(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A checkpoint, a concurrent_checkpoint, or an output directory."),
    ],
) -> None:
    """Check every file of a checkpoint, or of all there are, against the checksums it was committed with.

    All cores read; nothing is unpickled.

    \b
    Examples:
      ckpt-run verify out
      ckpt-run verify out/concurrent_checkpoint/checkpoint-200

    Exit code: 1 when a file is missing or damaged, or when there is nothing to verify.
    """
    from ckpt_run.verify import show

    raise typer.Exit(show(path))


@app.command()
def convert(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint that holds ZeRO files of DeepSpeed.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", help="The directory to make (default: universal-<name> beside it)."),
    ] = None,
) -> None:
    """Copy a DeepSpeed checkpoint into a form that any number of ranks can load, and tell how.

    DeepSpeed's own ds_to_universal does it. The checkpoint itself is not changed.

    \b
    Example:
      ckpt-run convert out/concurrent_checkpoint/checkpoint-200

    Exit code: 1 when there is nothing to convert, or DeepSpeed cannot.
    """
    from ckpt_run.convert import convert as run

    raise typer.Exit(run(checkpoint, output))


def main(words: list[str]) -> int:
    """Run one of the commands; the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path can hold what the locale cannot write
            stream.reconfigure(errors="backslashreplace")
    try:
        app(words, prog_name="ckpt-run")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
