"""An engine that copies still memory at the latest moment the design allows."""

from __future__ import annotations

from collections.abc import Sequence

from datastates.engine import Engine, PendingFile, Ticket


class LateEngine:
    """An engine without staging threads of its own: memory is copied at the fence, by the thread that waits there, and never earlier.

        So whatever changes memory before the fence is sure to be seen. ``late_bytes`` counts what was left to copy when the save call
        returned, ``bytes`` all that was handed over; ``late`` has the names and sizes of each save's late parts, ``eager`` those of the others.
    ``passed`` counts the steps that were told to :meth:`note_step` while the newest save was not copied.
    """

    def __init__(self) -> None:
        self.late_bytes = 0
        self.bytes = 0
        self.passed = 0
        self.late: list[dict[str, int]] = []
        self.eager: list[dict[str, int]] = []
        self._newest: Ticket | None = None
        self._engine = Engine(256 << 20, threads=0, pin=False)

    def submit(self, files: Sequence[PendingFile]) -> Ticket:
        parts = [part for file in files for part in file.image.memory]
        self.late.append({part.name: part.nbytes for part in parts if part.still})
        self.eager.append({part.name: part.nbytes for part in parts if not part.still})
        self.late_bytes += sum(part.nbytes for part in parts if part.still)
        self.bytes += sum(file.image.size for file in files)
        self._newest = self._engine.submit(files)
        return self._newest

    def note_step(self) -> None:
        """A step of the optimizer is done."""
        self.passed += self._newest is not None and self._newest.state == "staging"

    def close(self, timeout: float) -> bool:
        return self._engine.close(timeout)
