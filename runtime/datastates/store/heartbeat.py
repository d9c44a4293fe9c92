"""``.run/heartbeat.json``: the step that a training is at, told every few seconds whether it saves or not.

Nothing depends on it but what a person is shown, so it is not fsynced: a power cut may take it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

from datastates.store.document import ManifestError, decode, read_bytes
from datastates.store.durable import write_whole
from datastates.store.layout import Root
from datastates.store.manifest import IDENTIFIER

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """``attempt`` had done ``step`` of ``max_steps`` (0: not known) at ``time``, in seconds since 1970, and not a step more."""

    attempt: str
    step: int
    max_steps: int
    time: float = field(default_factory=time.time)

    def write(self, root: Root) -> None:
        """Make this the newest of ``root``, whose record must have been written. Raises OSError."""
        body = {
            "version": VERSION,
            "attempt": self.attempt,
            "step": self.step,
            "max_steps": self.max_steps,
            "time": self.time,
        }
        write_whole(root.heartbeat, json.dumps(body).encode("ascii") + b"\n")

    @classmethod
    def read(cls, root: Root, attempt: str) -> Heartbeat | None:
        """That of an attempt; None where there is none that can be used, since the record and the journals tell nearly as much.

        Raises:
            OSError: there is one that cannot be read.
        """
        try:
            fields = decode(read_bytes(root.heartbeat), root.heartbeat, VERSION)
            found = cls(
                attempt=fields.text("attempt", IDENTIFIER),
                step=fields.whole("step"),
                max_steps=fields.whole("max_steps"),
                time=fields.number("time"),
            )
        except (FileNotFoundError, NotADirectoryError, ManifestError):
            return None
        return found if found.attempt == attempt else None
