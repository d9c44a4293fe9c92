"""What we note about one launch, for ``status`` and for the next launch of the same command."""

from __future__ import annotations

from ckpt_run import processes


class Ledger:
    def __init__(self, run_id: str, command: list[str]) -> None:
        self.processes: str | None = None

    def output_dir_of_last_launch(self) -> str | None:
        return None

    def output_dir_of_this_launch(self) -> str | None:
        return next((path for path in processes.registered(self.processes).values() if path), None)

    def begin(self, output_dir: str | None) -> None: ...

    def end(self, code: int) -> None: ...
