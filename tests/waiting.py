"""Wait for something to become true: never for a fixed time, never for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

BOUND = 120.0  # seconds: no test waits longer for anything that should happen at once

T = TypeVar("T")


def until(
    condition: Callable[[], T], what: str = "it", bound: float = BOUND, seen: Callable[[], str] = str
) -> T:
    """Poll until ``condition()`` is true, and return what it gave.

    Args:
        what: what is waited for, in the message of the failure.
        bound: seconds after which the test fails.
        seen: its text is shown then, for example what a process has printed.
    """
    deadline = time.monotonic() + bound
    pause = 0.001
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {bound:.0f} s for {what}\n{seen()[-5000:]}"
        time.sleep(pause)
        pause = min(pause * 2, 0.01)
    return value
