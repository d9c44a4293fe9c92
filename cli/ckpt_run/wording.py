"""Numbers as a person reads them."""

from __future__ import annotations

import time


def duration(seconds: float) -> str:
    """Seconds: '12 ms', '3.4 s', '5 min', '2.5 h', '3 d'."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    for length, unit in ((60, "min"), (3600, "h"), (86400, "d")):
        if seconds < 100 * length or unit == "d":
            return f"{seconds / length:.0f} {unit}"
    return ""


def ago(moment: float) -> str:
    """A time in seconds since 1970: '12 s ago'."""
    return f"{duration(max(time.time() - moment, 0.001))} ago"


def count(number: int, word: str) -> str:
    """'1 file', '2 files'"""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
