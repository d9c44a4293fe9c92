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

from benchmarks.case import Case, Results, medians


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


def table(case: Case, results: Results) -> Table:
    """Medians over the rounds."""
    shown = Table(title=f"{case.name}: {case.work}")
    for heading in _headings(case):
        shown.add_column(heading, justify="left" if heading == "" else "right", no_wrap=not heading)
    for row in _rows(case, results):
        shown.add_row(*row)
    return shown


def verdicts(case: Case, results: Results) -> list[str]:
    """A line for each target."""
    found = []
    for target in case.targets:
        reached = target.reached(medians(results))
        if reached is None:
            found.append(f"?  {target.words()}: nothing to compare with")
        else:
            found.append(f"{'ok' if reached <= target.most else 'NO'} {target.words()}: {reached:.3g}")
    return found


def markdown(measured: list[tuple[Case, Results]], where: dict[str, Any]) -> str:
    lines = [
        f"{where['cores']} cores of {where['processor']}, {where['memory'] >> 30} GiB"
        + (f", {where['gpu']}" if where["gpu"] else "")
        + f"; Python {where['python']}, torch {where['torch']}. Medians.",
        "",
    ]
    for case, results in measured:
        lines += [f"**{case.name}**: {case.work}", "", _line(_headings(case))]
        lines += [_line(["---", *("---:" for _ in case.columns)])]
        lines += [*map(_line, _rows(case, results)), ""]
        lines += [f"- {verdict}" for verdict in verdicts(case, results)] + [""]
    return "\n".join(lines)


def write(folder: Path, measured: list[tuple[Case, Results]], console: Console) -> None:
    """``results.md``, ``results.json`` and, where matplotlib is installed, ``results.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    where = machine()
    found = {
        case.name: {"work": case.work, "rounds": results, "targets": verdicts(case, results)}
        for case, results in measured
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
    return ["", *(f"{column.figure}, {column.unit}" for column in case.columns)]


def _rows(case: Case, results: Results) -> Iterator[list[str]]:
    for name, figures in medians(results).items():
        yield [name, *(column.text(figures.get(column.figure)) for column in case.columns)]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plot(path: Path, measured: list[tuple[Case, Results]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    widest = max(len(case.columns) for case, _ in measured)
    figure, grid = pyplot.subplots(
        len(measured),
        widest,
        figsize=(3.2 * widest, 2.6 * len(measured)),
        squeeze=False,
        layout="constrained",
    )
    for row, (case, results) in zip(grid, measured, strict=True):
        found = medians(results)
        for axes in row[len(case.columns) :]:
            axes.remove()
        for axes, column in zip(row, case.columns, strict=False):
            names = [name for name in found if column.figure in found[name]]
            values = [float(column.text(found[name][column.figure])) for name in names]
            colours = ["tab:green" if name.startswith("ckpt-run") else "tab:grey" for name in names]
            axes.barh(names, values, color=colours)
            axes.invert_yaxis()
            axes.set_title(f"{case.name}: {column.figure}, {column.unit}", fontsize=8)
            axes.tick_params(labelsize=7)
    figure.savefig(path, dpi=110)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "CPU part")):
            return line.partition(":")[2].strip()
    return platform.machine()
