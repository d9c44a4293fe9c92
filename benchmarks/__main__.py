"""``python -m benchmarks [--only NAME] ...``: runs the cases and writes down what they show."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import IO, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks import report
from benchmarks.case import Case, Figures, Measured
from benchmarks.cases import CASES

ROOT = Path(__file__).parents[1]
TEMPORARY = Path(tempfile.gettempdir())
TIME_LIMIT = 1800.0
"""Seconds for one contestant in one round."""


def main(
    only: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A case to run, of {', '.join(CASES)}; may be given several times. All, if none is."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each contestant has its turn.")] = 1,
    contestants: Annotated[
        list[str] | None, typer.Option("--contestant", help="Only these; may be given several times.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where to write: the disk that is measured.")] = TEMPORARY,
    output: Annotated[Path, typer.Option(help="Where the results go.")] = Path("build/benchmarks"),
) -> None:
    """Measure ckpt-run beside its peers and the limits of this machine.

    Each contestant runs in a process of its own; they take turns, and what is shown are medians over the rounds. All cases take less
    than half an hour a round on two idle cores. One round tells where things stand; for figures to quote take five, on a machine that does nothing else.

    Example: python -m benchmarks --only save --rounds 5 --folder /data
    """
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)
    unknown = set(only or ()) - set(CASES)
    if unknown:
        raise typer.BadParameter(
            f"there is no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}"
        )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    cases = [CASES[name] for name in only or CASES]
    measured: list[Measured] = []
    with _Turns(cases, rounds, contestants, folder) as turns:
        for case in cases:
            measured.append(turns.take(case))
            console.print(report.table(measured[-1]))
            for line in (*report.legend(case), *report.verdicts(measured[-1])):
                console.print(line, markup=False)
            report.write(output, measured, Console(quiet=case is not cases[-1]))


class _Turns:
    """Lets contestants take their turns, and shows how far that is: a bar on a terminal, a line for each turn elsewhere."""

    def __init__(self, cases: list[Case], rounds: int, wanted: list[str] | None, folder: Path) -> None:
        self._rounds = rounds
        self._folder = folder
        self._taking_part = {
            case.name: [name for name in case.contestants if not wanted or name in wanted] for case in cases
        }
        self._console = Console(stderr=True, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        terminal = self._console.is_terminal
        self._progress = Progress(*columns, console=self._console, transient=True, disable=not terminal)
        self._task: TaskID = self._progress.add_task(
            "", total=rounds * sum(map(len, self._taking_part.values()))
        )
        self._done = 0

    def __enter__(self) -> _Turns:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def take(self, case: Case) -> Measured:
        measured = Measured(case)
        for name in self._taking_part[case.name]:
            reason = case.missing(name)
            if reason:
                measured.left_out[name] = f"skipped: {reason}"
                self._advance(f"{case.name}: {name} {measured.left_out[name]}", self._rounds)
        for _ in range(self._rounds):
            for name in self._taking_part[case.name]:
                if name not in measured.left_out:
                    self._turn(measured, name)
        return measured

    def _turn(self, measured: Measured, contestant: str) -> None:
        case, began = measured.case, time.monotonic()
        self._progress.update(self._task, description=f"{case.name}: {contestant}")
        try:
            figures = _visit(case, contestant, self._folder)
            measured.results.setdefault(contestant, []).append(figures)
            said = f"{time.monotonic() - began:.0f} s"
        except _FailedError as error:
            measured.results.pop(contestant, None)
            measured.left_out[contestant] = said = f"failed: {error}"
            self._console.print(error.output, markup=False, highlight=False)
        self._advance(f"{case.name}: {contestant}, {said}", 1)

    def _advance(self, line: str, turns: int) -> None:
        self._done += turns
        self._progress.advance(self._task, turns)
        if self._progress.disable:
            total = self._progress.tasks[0].total or 0
            self._console.print(f"[{self._done}/{total:.0f}] {line}", markup=False, highlight=False)


class _FailedError(Exception):
    """A contestant's turn came to nothing; ``output`` is the end of what it printed."""

    def __init__(self, reason: str, output: str) -> None:
        super().__init__(reason)
        self.output = "\n".join(output.strip().splitlines()[-30:])


def _visit(case: Case, contestant: str, folder: Path) -> Figures:
    """One turn, in a process and a folder of its own; nothing of either is left.

    Raises:
        _FailedError: it has no figures.
    """
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as own:
        given = json.dumps({"contestant": contestant, "folder": own, **case.arguments})
        command = [sys.executable, "-m", "benchmarks.worker", case.module, case.function, given]
        with (
            tempfile.TemporaryFile("w+", dir=own) as errors,
            subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            ) as worker,
        ):
            try:
                answer, _ = worker.communicate(timeout=TIME_LIMIT)
            except subprocess.TimeoutExpired:
                raise _FailedError(f"not done after {TIME_LIMIT:.0f} s", _text(errors)) from None
            finally:
                _end(worker.pid)
            if worker.returncode:
                raise _FailedError(_reason(answer, worker.returncode), _text(errors))
    figures: Figures = json.loads(answer)
    return figures


def _end(group: int) -> None:
    """Some contestants have processes that never end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _text(stream: IO[str]) -> str:
    stream.seek(0)
    return stream.read()


def _reason(answer: bytes, code: int) -> str:
    """Short enough for a table."""
    words = str(json.loads(answer)) if answer else f"exit code {code}"
    return textwrap.shorten(words, 60, placeholder="...")


if __name__ == "__main__":
    typer.run(main)
