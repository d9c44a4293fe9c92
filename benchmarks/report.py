"""What was measured, for a terminal, for Markdown, as JSON, and as a picture."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datastates.store.verify import usable_cores
from rich.console import Console
from rich.table import Table

from benchmarks.case import Case, Column, Measured, Target, medians


def machine() -> dict[str, Any]:
    """Where it was measured."""
    import torch

    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def table(measured: Measured) -> Table:
    """Medians over the rounds."""
    case = measured.case
    shown = Table(title=f"{case.name}: {case.work}")
    for heading in _headings(case):
        shown.add_column(heading, justify="left" if heading == "" else "right", no_wrap=not heading)
    for row in _rows(measured):
        shown.add_row(*row)
    return shown


def verdicts(measured: Measured) -> list[str]:
    """A line for each target."""
    return [_verdict(measured, target) for target in measured.case.targets]


def _verdict(measured: Measured, target: Target) -> str:
    column = measured.case.column(target.figure)
    words, reached = target.words(column), target.reached(medians(measured.results))
    if reached is None:
        return f"?  {words}: nothing to compare with"
    shown = f"{reached:.3g}" if target.than or column is None else column.text(reached)
    return f"{'ok' if reached <= target.most else 'NO'} {words}: {shown}"


def legend(case: Case) -> list[str]:
    """What the figures count."""
    return [f"{column.figure}: {column.meaning}" for column in case.columns if column.meaning]


def markdown(measured: list[Measured], where: dict[str, Any]) -> str:
    lines = [
        f"{where['cores']} cores of {where['processor']}, {where['memory'] >> 30} GiB"
        + (f", {where['gpu']}" if where["gpu"] else "")
        + f"; Python {where['python']}, torch {where['torch']}. Medians.",
        "",
    ]
    for one in measured:
        case = one.case
        lines += [f"**{case.name}**: {case.work}", "", _line(_headings(case))]
        lines += [_line(["---", *("---:" for _ in case.columns)])]
        lines += [*map(_line, _rows(one)), ""]
        lines += [f"- {line}" for line in (*legend(case), *verdicts(one))] + [""]
    return "\n".join(lines)


def write(folder: Path, measured: list[Measured], console: Console) -> None:
    """``results.md``, ``results.json`` and, where matplotlib is installed, ``results.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    where = machine()
    found = {
        one.case.name: {
            "work": one.case.work,
            "rounds": one.results,
            "left out": one.left_out,
            "targets": verdicts(one),
        }
        for one in measured
    }
    (folder / "results.json").write_text(json.dumps({"machine": where, "cases": found}, indent=1))
    (folder / "results.md").write_text(markdown(measured, where))
    names = ["results.md", "results.json"]
    try:
        _plot(folder / "results.png", measured)
        names.append("results.png")
    except ImportError:
        console.print("no picture: matplotlib is not installed")
    console.print(f"{', '.join(names)} in {folder}")


def _headings(case: Case) -> list[str]:
    return ["", *(column.heading for column in case.columns)]


def _rows(measured: Measured) -> Iterator[list[str]]:
    """In the order of the case; who was left out has the reason in place of the figures."""
    found, columns = medians(measured.results), measured.case.columns
    for name in measured.case.contestants:
        if name in found:
            yield [name, *(column.text(found[name].get(column.figure)) for column in columns)]
        elif name in measured.left_out:
            yield [name, measured.left_out[name], *("" for _ in columns[1:])]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plot(path: Path, measured: list[Measured]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    widest = max(len(_pictured(one.case)) for one in measured)
    figure, grid = pyplot.subplots(
        len(measured),
        widest,
        figsize=(3.2 * widest, 2.6 * len(measured)),
        squeeze=False,
        layout="constrained",
    )
    for row, one in zip(grid, measured, strict=True):
        case, found, columns = one.case, medians(one.results), _pictured(one.case)
        for axes in row[len(columns) :]:
            axes.remove()
        for axes, column in zip(row, columns, strict=False):
            names = [name for name in found if column.figure in found[name]]
            values = [float(column.text(found[name][column.figure])) for name in names]
            colours = ["tab:green" if name.startswith("ckpt-run") else "tab:grey" for name in names]
            axes.barh(names, values, color=colours)
            axes.invert_yaxis()
            axes.set_title(f"{case.name}: {column.figure}, {column.unit}", fontsize=8)
            axes.tick_params(labelsize=7)
    figure.savefig(path, dpi=110)


def _pictured(case: Case) -> list[Column]:
    return [column for column in case.columns if column.unit != "yes"]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "CPU part")):
            return line.partition(":")[2].strip()
    return platform.machine()
