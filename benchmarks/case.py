"""A case: the same work for several contestants, what is read off it, and what is to be reached."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Figures = dict[str, float]
"""What one process measured, by the name of the figure."""

Results = dict[str, list[Figures]]
"""By contestant, one for each round."""

SCALES = {"s": (1.0, 3), "ms": (1000.0, 1), "MiB": (1 / (1 << 20), 0), "x": (1.0, 3)}
"""By unit: what a figure is multiplied with, and the digits behind the point."""


@dataclass(frozen=True)
class Column:
    """A figure in the table.

    Args:
        unit: s, ms, MiB, x (a ratio) or yes (1: yes, 0: no).
        meaning: what it counts, for the legend.
    """

    figure: str
    unit: str
    meaning: str = ""

    @property
    def heading(self) -> str:
        return self.figure if self.unit == "yes" else f"{self.figure}, {self.unit}"

    def text(self, value: float | None) -> str:
        if value is None:
            return ""
        if self.unit == "yes":
            return "yes" if value else "no"
        scale, digits = SCALES[self.unit]
        return f"{value * scale:.{digits}f}"


@dataclass(frozen=True)
class Target:
    """``figure`` of ``ours`` is to be at most ``most`` times the least of those of ``than``; without ``than``, at most ``most``."""

    figure: str
    most: float
    than: tuple[str, ...] = ()
    ours: str = "ckpt-run"

    def reached(self, medians: Mapping[str, Figures]) -> float | None:
        """What is to be at most ``most``; None where somebody is missing."""
        ours = medians.get(self.ours, {}).get(self.figure)
        if ours is None or not self.than:
            return ours
        theirs = (medians.get(name, {}).get(self.figure) for name in self.than)
        least = min((figure for figure in theirs if figure is not None), default=0.0)
        return ours / least if least > 0 else None

    def words(self, column: Column | None = None) -> str:
        """``column``: of the figure, for its unit."""
        if not self.than:
            most = f"{column.text(self.most)} {column.unit}" if column else f"{self.most:g}"
            return f"{self.figure} of {self.ours}: at most {most}"
        than = "the best peer" if len(self.than) > 1 else self.than[0]
        return f"{self.figure} of {self.ours}: at most {self.most:.3g} x that of {than}"


@dataclass(frozen=True)
class Case:
    """Run as ``function`` of ``module`` in a process for each contestant and round, the contestants in turn.

    Args:
        arguments: given to the function, together with ``contestant`` and the ``folder`` to work in.
        missing: why a contestant cannot run here; empty when it can.
    """

    name: str
    work: str
    module: str
    function: str
    contestants: tuple[str, ...]
    columns: tuple[Column, ...]
    targets: tuple[Target, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    missing: Callable[[str], str] = lambda contestant: ""

    def column(self, figure: str) -> Column | None:
        return next((column for column in self.columns if column.figure == figure), None)


@dataclass
class Measured:
    """What came of a case; ``left_out`` says why somebody has no figures, by contestant."""

    case: Case
    results: Results = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def medians(results: Results) -> dict[str, Figures]:
    """Over the rounds, figure by figure."""
    return {name: dict(_medians(rounds)) for name, rounds in results.items() if rounds}


def _medians(rounds: list[Figures]) -> Iterator[tuple[str, float]]:
    for figure in rounds[0]:
        yield figure, statistics.median(map(operator.itemgetter(figure), rounds))
