"""The library's log lines: through ``logging``, and visible even when a script never sets logging up.

Lines go to stderr with the prefix that users of DeepSpeed know, and on to the root logger's handlers if the script has any.
"""

from __future__ import annotations

import logging
import sys
import time

PREFIX = "[Concurrent Checkpoint]"

_FORMAT = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"


class _CurrentStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever ``sys.stderr`` is at the moment, as ``logging.lastResort`` does."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[no-untyped-def]
        return sys.stderr


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
