"""``ckpt-run demo``: the main job on real input, offline.

A small language model is trained twice, with the same script and the same seed: once undisturbed with the stock Trainer,
once under ``ckpt-run``, killed twice and relaunched. Then the two are compared.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ckpt_run.demo_process import Training, kill_descendants
from ckpt_run.demo_report import Comparison, Kill, measure_ours, measure_stock, table, verdict
from ckpt_run.environment import CARRIER, hook_folder

SCRIPT = "train_language_model.py"
_KILLS = 2
_LATEST_WITHIN_A_STEP = 0.2  # seconds after a step's line; about the time of one step
_LOG_LINES_SHOWN = 20
_OURS = ("CKPT_", "CHECKPOINT_VENDOR", CARRIER, "PYTHONPATH")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class DemoError(Exception):
    """The demo could not be carried out; the message says what happened and shows where."""


def main(argv: Sequence[str]) -> int:
    """Run the demo with the words after ``ckpt-run demo``; returns the exit code."""
    try:
        typer.main.get_command(app).main(args=list(argv), prog_name="ckpt-run demo")
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    return 0


@app.command(
    epilog="Example: ckpt-run demo --seed 7 --keep demo-run, then: ckpt-run status demo-run/ckpt-run"
)
def demo(
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Work in the new or empty folder DIR, and keep it.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Kill at the moments of an earlier demo; it printed its seed.")
    ] = None,
    steps: Annotated[int, typer.Option(min=8, help="Steps to train.")] = 100,
    save_steps: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 10,
) -> None:
    """Train a small language model, kill it twice, and show that nothing was lost.

    One script is trained undisturbed with the stock Trainer, then under ckpt-run, killed with SIGKILL at two random
    moments and relaunched. At the end: the steps lost at each kill, the stall per checkpoint of both, and whether the
    final weights are identical; exits 1 if they are not. Takes a bit over a minute on two cores, and no network.
    """
    console = Console()
    seed = random.SystemRandom().randrange(10_000) if seed is None else seed
    try:
        if steps < 4 * save_steps:
            raise DemoError(
                f"--steps {steps} leaves no room for two kills: at least four times --save-steps ({save_steps})"
            )
        with _folder(keep) as folder, _progress(console) as progress:
            progress.console.print(
                f"Training {steps} steps twice, a checkpoint every {save_steps}; kills by --seed {seed}"
            )
            comparison = Demo(folder, steps, save_steps, seed, progress).compare()
    except DemoError as error:
        typer.echo(f"ckpt-run: demo: {error}", err=True)
        raise typer.Exit(1) from None
    console.print(table(comparison))
    console.print(verdict(comparison))
    raise typer.Exit(0 if comparison.identical else 1)


class Demo:
    """The two trainings in ``folder``, each with its output directory and a log of each launch.

    Raises:
        DemoError: from every method, when a training ends in a way that it should not.
    """

    def __init__(self, folder: Path, steps: int, save_steps: int, seed: int, progress: Progress) -> None:
        self._folder = folder
        self._steps = steps
        self._save_steps = save_steps
        self._random = random.Random(seed)
        self._progress = progress

    def compare(self) -> Comparison:
        try:
            stalls = self._train_undisturbed()
            kills = self._train_killed()
        finally:
            kill_descendants()
        stock = measure_stock(self._folder / "stock", stalls)
        return Comparison(stock, measure_ours(self._folder / "ckpt-run"), kills)

    def _train_undisturbed(self) -> Path:
        """Returns the file that holds the stock Trainer's stalls."""
        stalls = self._folder / "stock-stalls.txt"
        task = self._progress.add_task("stock Trainer, undisturbed", total=self._steps)
        training = self._launch(
            "stock", [sys.executable, "-m", "ckpt_run.demo_stock", str(stalls)], "stock.log"
        )
        self._follow(training, task)
        return stalls

    def _train_killed(self) -> list[Kill]:
        task = self._progress.add_task("under ckpt-run, killed twice", total=self._steps)
        launcher = [sys.executable, "-m", "ckpt_run", sys.executable]
        kills: list[Kill] = []
        for number, (step, delay) in enumerate(self._moments(), start=1):
            training = self._launch("ckpt-run", launcher, f"ckpt-run-{number}.log")
            self._follow(training, task, kills, until=step)
            time.sleep(delay)
            training.kill()
            kills.append(Kill(training.steps[-1]))
            self._progress.console.print(f"  killed at step {kills[-1].reached}")
        self._follow(self._launch("ckpt-run", launcher, f"ckpt-run-{_KILLS + 1}.log"), task, kills)
        return kills

    def _moments(self) -> list[tuple[int, float]]:
        """When to kill: a step, and seconds after it. One moment in each equal share of the steps after the first save."""
        share = (self._steps - self._save_steps) // _KILLS
        firsts = [self._save_steps + number * share for number in range(_KILLS)]
        return [
            (self._random.randrange(first, first + share - 1), self._random.uniform(0, _LATEST_WITHIN_A_STEP))
            for first in firsts
        ]

    def _launch(self, output: str, launcher: list[str], log: str) -> Training:
        """The script under `launcher`; nothing but the output directory tells the two trainings apart."""
        options = {
            "--output_dir": self._folder / output,
            "--max_steps": self._steps,
            "--save_steps": self._save_steps,
            "--batch_size": 1,
            "--corpus_bytes": 2_000_000,
        }
        arguments = [str(word) for option in options.items() for word in option]
        command = [*launcher, str(templates() / SCRIPT), *arguments, "--use_cpu"]
        return Training(command, self._folder / log, self._environ())

    def _environ(self) -> dict[str, str]:
        """This environment without what belongs to a surrounding run, and with a record of launches that is only ours.

        One thread computes unless the user wants more: a busy machine then slows the demo down evenly, and as on a GPU machine
        there is a core left to save with.
        """
        environ = {"OMP_NUM_THREADS": "1", **without_ckpt_run(os.environ)}
        return environ | {"XDG_STATE_HOME": str(self._folder / "state"), "HF_HUB_OFFLINE": "1"}

    def _follow(
        self, training: Training, task: TaskID, kills: Sequence[Kill] = (), until: int | None = None
    ) -> None:
        """Show the steps until the training has ended, or has trained step `until`; tell the last kill what it cost."""
        code = None
        while code is None:
            code = training.poll()
            reached = self._show(training.steps, task, kills)
            if until is not None and reached >= until:
                return
        if code != 0 or until is not None:
            shown = training.tail(_LOG_LINES_SHOWN)
            raise DemoError(f"the training ended at step {reached}, with exit code {code}\n{shown}")

    def _show(self, steps: Sequence[int], task: TaskID, kills: Sequence[Kill]) -> int:
        """Returns the last step, 0 before the first."""
        if not steps:
            return 0
        if kills and kills[-1].resumed is None:
            kills[-1].resumed = steps[0] - 1
            self._progress.console.print(f"  carried on from step {kills[-1].resumed}")
        self._progress.update(task, completed=steps[-1])
        return steps[-1]


def without_ckpt_run(environ: Mapping[str, str]) -> dict[str, str]:
    """What `environ` would be outside of ckpt-run and of ``eval "$(ckpt-run env)"``: the stock Trainer has to be stock."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_OURS)}
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(entry for entry in entries if entry and entry.rstrip("/") != hook_folder())
    return kept | ({"PYTHONPATH": path} if path else {})


def templates() -> Path:
    """The folder of templates: beside this file in an installed package, at the top of a source tree."""
    here = Path(__file__).resolve().parent
    installed = here / "templates"
    return installed if installed.is_dir() else here.parents[1] / "templates"


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """`keep`, made if need be, or else a temporary folder that is removed at the end."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="ckpt-run-demo-") as folder:
            yield Path(folder)
        return
    keep.mkdir(parents=True, exist_ok=True)
    if any(keep.iterdir()):
        raise DemoError(f"{keep} is not empty; name a new folder or remove it")
    yield keep.resolve()


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console)
