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


@dataclass(frozen=True)
class Column:
    """A figure in the table. ``unit``: s, ms or MiB."""

    figure: str
    unit: str

    def text(self, value: float | None) -> str:
        if value is None:
            return ""
        scale, digits = {"s": (1.0, 3), "ms": (1000.0, 1), "MiB": (1 / (1 << 20), 0)}[self.unit]
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

    def words(self) -> str:
        if not self.than:
            return f"{self.figure} of {self.ours}: at most {self.most:g}"
        than = "the best peer" if len(self.than) > 1 else self.than[0]
        return f"{self.figure} of {self.ours}: at most {self.most:.3g} x that of {than}"


@dataclass(frozen=True)
class Case:
    """Run as ``function`` of ``module`` in a process for each contestant and round, the contestants in turn.

    Args:
        arguments: given to the function, together with ``contestant`` and the ``folder`` to work in.
        missing: whether a contestant cannot run here.
    """

    name: str
    work: str
    module: str
    function: str
    contestants: tuple[str, ...]
    columns: tuple[Column, ...]
    targets: tuple[Target, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    missing: Callable[[str], bool] = lambda contestant: False


def medians(results: Results) -> dict[str, Figures]:
    """Over the rounds, figure by figure."""
    return {name: dict(_medians(rounds)) for name, rounds in results.items() if rounds}


def _medians(rounds: list[Figures]) -> Iterator[tuple[str, float]]:
    for figure in rounds[0]:
        yield figure, statistics.median(map(operator.itemgetter(figure), rounds))
