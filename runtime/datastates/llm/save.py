"""One save of one rank, from the moment the engine has it to its outcome.

    submitted -> staged -> approved -> persisted -> voted -> committed or abandoned

A thread of its own carries the save through; the training thread meets it only at the fence (``settle``) and where somebody is about to
read the files (``wait``). Every way to fail ends in an outcome, never in an exception on the training thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from datastates.engine import Ticket
from datastates.llm import log
from datastates.llm.fence import FENCE
from datastates.llm.still import StillTensor
from datastates.store.layout import CheckpointDir

logger = log.logger("datastates.llm.decorator")


@dataclass(frozen=True)
class Outcome:
    """How a save ended; ``reason`` is empty when it was committed."""

    committed: bool
    reason: str = ""


@dataclass(frozen=True)
class Manner:
    """How a save of a training loop differs from one of a Trainer.

    Args:
        number: which save it is, as all ranks have agreed; None: they count alike.
        voters: asked on the save's thread which ranks take part, when that is not known before; may take its time.
        leaves_out: tells the names of files that this rank shall not write, since another one does.
    """

    number: int | None = None
    voters: Callable[[], Collection[int]] | None = None
    leaves_out: Callable[[str], bool] = lambda name: False


Finish = Callable[["Save", "str | None"], Outcome]
"""Takes the save and this rank's error (or None), votes, and returns the outcome when it is known."""


class Save:
    """One save; ``settle``, ``note_stall`` and ``wait`` may be called by any thread.

    Args:
        directory: the checkpoint.
        number: which save of the attempt it is; the same on every rank.
        ticket: the engine's side of it.
        late: the tensors that are copied late and that training may change; what else is copied late is ours alone.
        finish: votes and waits for the outcome; runs on the save's own thread.
        note: records an event of the journal.
        best: path of the best checkpoint when this one was saved.
        before: the save before this one, which is to be committed first.
        pointers: small files that name this checkpoint as one to load, written only with the commit: content by path.
        torn: is told the names of tensors that did not hold still.
        others: the files that stock code wrote by itself, where the directory is the user's as well; None: whatever is there.
        voters: see :class:`Manner`.
    """

    def __init__(
        self,
        directory: CheckpointDir,
        number: int,
        ticket: Ticket,
        late: list[StillTensor],
        finish: Finish,
        torn: Callable[[list[str]], None],
        note: Callable[..., object],
        best: str | None = None,
        before: Save | None = None,
        pointers: Mapping[Path, bytes] = MappingProxyType({}),
        others: Collection[str] | None = None,
        voters: Callable[[], Collection[int]] | None = None,
    ) -> None:
        self.directory = directory
        self.step = directory.step
        self.number = number
        self.ticket = ticket
        self.best = best
        self.before = before
        self.voters = voters
        self._others = others
        self._pointers = pointers
        self.nbytes = int(ticket.stats["bytes"])
        self.began = time.time()
        self.outcome: Outcome | None = None
        self.changeable = bool(late)
        self._late = late
        self._finish = finish
        self._torn = torn
        self._note = note
        self._settling = threading.Lock()
        self._settled = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._carry_out, name=directory.path.name, daemon=True)

    @property
    def pointers_inside(self) -> dict[Path, bytes]:
        """Those that are files of the checkpoint."""
        return {
            path: text for path, text in self._pointers.items() if path.is_relative_to(self.directory.path)
        }

    @property
    def pointers_outside(self) -> dict[Path, bytes]:
        """Those beside it: they name it when it is committed."""
        inside = self.pointers_inside
        return {path: text for path, text in self._pointers.items() if path not in inside}

    @property
    def others(self) -> list[str] | None:
        """The files of the checkpoint that no vote names; None: whatever is in the directory."""
        if self._others is None:
            return None
        return [*self._others, *map(self.directory.relative, self.pointers_inside)]

    def start(self) -> None:
        """Go on in the background; where no thread can be had, to the end and on this one."""
        FENCE.enter(self)
        try:
            self._thread.start()
        except RuntimeError as error:
            logger.warning("%s %s is saved synchronously: %s", log.PREFIX, self.directory.path.name, error)
            self._carry_out()

    def settle(self) -> None:
        """Copy what is left on this thread, then check that the memory held still; approve the save or give it up."""
        self.ticket.wait_staged(help=True)
        with self._settling:
            if self._settled:
                return
            disturbed = self._disturbed()
            self._late = []
            if disturbed:
                self._torn(list(disturbed))
                name, reason = next(iter(disturbed.items()))
                count = f" (and {len(disturbed) - 1} more)" if len(disturbed) > 1 else ""
                self.ticket.cancel(f"torn snapshot: {name}{count}: {reason} between the save and the fence")
            else:
                self.ticket.approve()
            # Last: interrupted before (Ctrl-C), the save's own thread still does all of it.
            self._settled = True

    def _disturbed(self) -> dict[str, str]:
        """What did not hold still, and how that shows."""
        moved = {tensor.name: reason for tensor in self._late if (reason := tensor.disturbed())}
        return moved | dict.fromkeys(self.ticket.torn, "its bytes changed")

    def note_stall(self, seconds: float) -> None:
        self._note("fence", step=self.step, stall_s=seconds)

    def wait(self, timeout: float | None) -> bool:
        """Until the outcome is known; False when it is not after ``timeout`` seconds."""
        return self._done.wait(timeout)

    def _carry_out(self) -> None:
        try:
            self.ticket.wait_staged(help=False)
            self.settle()
            FENCE.leave(self)
            self._note("staged", step=self.step, seconds=time.time() - self.began)
            self.ticket.wait()
            self.outcome = self._finish(self, str(self.ticket.error) if self.ticket.error else None)
        except Exception as error:
            logger.exception("%s %s was given up", log.PREFIX, self.directory.path.name)
            self.outcome = Outcome(False, f"{type(error).__name__}: {error}")
        finally:
            self.before = None
            self._done.set()
