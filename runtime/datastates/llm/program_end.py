"""When the program ends, and whether well, as far as the process itself can tell: it never learns with which code it exits."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
from collections.abc import Callable


def at_end(call: Callable[[bool], object]) -> None:
    """Call ``call(failed)`` once when this process ends by itself, the last one registered first.

    Not in a forked child of it. ``failed``: an exception ended it.
    """
    process = os.getpid()
    calls = [call]

    def end() -> None:
        if os.getpid() == process and calls:
            calls.pop()(_failed())

    atexit.register(end)
    # A child of multiprocessing calls only these.
    multiprocessing.util.Finalize(None, end, exitpriority=0)


def _failed() -> bool:
    if getattr(sys, "last_value", None) is not None:
        return True
    flying = sys.exc_info()[1]  # where multiprocessing calls
    if isinstance(flying, SystemExit):
        return flying.code not in (None, 0)
    return flying is not None


def error() -> str:
    """The exception that ended the program, for a person; empty when it is not known."""
    found = getattr(sys, "last_value", None) or sys.exc_info()[1]
    return f"{type(found).__name__}: {found}" if found is not None else ""
