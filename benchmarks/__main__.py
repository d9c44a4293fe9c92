"""``python -m benchmarks [--only NAME] ...``: runs the cases and writes down what they show."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import report
from benchmarks.case import Case, Figures, Results
from benchmarks.cases import CASES

ROOT = Path(__file__).parents[1]
TEMPORARY = Path(tempfile.gettempdir())
TIME_LIMIT = 1800.0
"""Seconds for one contestant in one round."""


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="A case to run; may be given several times. All, if none is.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each contestant has its turn.")] = 3,
    contestants: Annotated[
        list[str] | None, typer.Option("--contestant", help="Only these; may be given several times.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where to write: the disk that is measured.")] = TEMPORARY,
    output: Annotated[Path, typer.Option(help="Where the results go.")] = Path("build/benchmarks"),
) -> None:
    """Measure ckpt-run beside its peers and the limits of this machine.

    Each contestant runs in a process of its own; they take turns, and what is shown are medians over the rounds.

    Example: python -m benchmarks --only save --rounds 5 --folder /data
    """
    console = Console(soft_wrap=True)
    unknown = set(only or ()) - set(CASES)
    if unknown:
        raise typer.BadParameter(
            f"there is no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}"
        )
    measured = []
    for name in only or CASES:
        results = _run(CASES[name], rounds, contestants, folder, console)
        measured.append((CASES[name], results))
        console.print(report.table(*measured[-1]))
        for verdict in report.verdicts(*measured[-1]):
            console.print(verdict)
        report.write(output, measured, Console(quiet=name != (only or [*CASES])[-1]))


def _run(case: Case, rounds: int, wanted: list[str] | None, folder: Path, console: Console) -> Results:
    taking_part = [name for name in case.contestants if not wanted or name in wanted]
    for name in taking_part:
        if case.missing(name):
            console.print(f"{case.name}: {name} is not installed here")
    results: Results = {name: [] for name in taking_part if not case.missing(name)}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(case.name, total=rounds * len(results))
        for _ in range(rounds):
            for name in list(results):
                progress.update(task, description=f"{case.name}: {name}")
                figures = _visit(case, name, folder, console)
                if figures is None:
                    del results[name]
                else:
                    results[name].append(figures)
                progress.advance(task)
    return results


def _visit(case: Case, contestant: str, folder: Path, console: Console) -> Figures | None:
    """None when it failed: it is left out then, and why is shown."""
    given = json.dumps({"contestant": contestant, "folder": str(folder), **case.arguments})
    command = [sys.executable, "-m", "benchmarks.worker", case.module, case.function, given]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT, check=True
        )
        figures: Figures = json.loads(done.stdout)
        return figures
    except subprocess.TimeoutExpired:
        console.print(f"{case.name}: {contestant} was not done after {TIME_LIMIT:.0f} s and is left out")
    except subprocess.CalledProcessError as error:
        last = "\n    ".join(error.stderr.strip().splitlines()[-8:])
        console.print(f"{case.name}: {contestant} failed and is left out:\n    {last}", markup=False)
    return None


if __name__ == "__main__":
    typer.run(main)
