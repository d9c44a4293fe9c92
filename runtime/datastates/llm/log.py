"""The library's log lines: through ``logging``, and visible even when a script never sets logging up.

Lines go to stderr with the prefix that users of DeepSpeed know, and on to the root logger's handlers if the script has any. Where one of
those writes the line to the terminal itself, ours does not write it a second time.
"""

from __future__ import annotations

import logging
import sys
import time

PREFIX = "[Concurrent Checkpoint]"

_FORMAT = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"


TWO_FORMS = {"two_forms": True}
"""For ``extra``: a line that is written in the script's own form as well as in ours, because programs look for either."""


class _CurrentStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever ``sys.stderr`` is at the moment, as ``logging.lastResort`` does."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[no-untyped-def]
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "two_forms", False) or not _root_writes(record):
            super().emit(record)


def _root_writes(record: logging.LogRecord) -> bool:
    """Whether a handler of the script's writes this line to stderr or stdout. Asked anew for each: scripts set logging up when they like."""
    terminal = {id(stream) for stream in (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__) if stream}
    return logging.getLogger("datastates").propagate and any(
        isinstance(handler, logging.StreamHandler)
        and id(handler.stream) in terminal
        and handler.level <= record.levelno
        and not handler.filters  # which may drop the line: twice is better than never
        for handler in logging.getLogger().handlers
    )


def logger(name: str) -> logging.Logger:
    """The logger ``name``; the first call gives the library's root logger its handler."""
    root = logging.getLogger("datastates")
    if not any(isinstance(handler, _CurrentStderr) for handler in root.handlers):
        handler = _CurrentStderr()
        formatter = logging.Formatter(_FORMAT)
        formatter.converter = time.localtime
        handler.setFormatter(formatter)
        root.addHandler(handler)
        if root.level == logging.NOTSET:
            root.setLevel(logging.INFO)
    return logging.getLogger(name)
