"""Tells from a thread of its own, every few seconds, at which step training is: between two saves a slow run must not look like one that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from datastates.llm import log
from datastates.store.heartbeat import Heartbeat
from datastates.store.layout import Root

logger = log.logger("datastates.llm.decorator")

SECONDS = 2.0
"""Between two looks. It is written only when there is something new, so that its time tells when training was last seen to move."""

LAST_WRITE_SECONDS = 1.0
"""How long :meth:`Pulse.stop` waits for a write that is under way."""


class Pulse:
    """Of one attempt, from now until :meth:`stop`. A file system that hangs holds up this thread and nobody else.

    Args:
        state: the Trainer's ``TrainerState`` when it is called. Until training has one of its own, it is what the training before has left.
    """

    def __init__(self, root: Root, attempt: str, state: Callable[[], Any]) -> None:
        self._root = root
        self._attempt = attempt
        self._state = state
        self._before = state()
        self._step_before = self._before.global_step
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckpt-run heartbeat", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread can be had, and training does well without this one
            self._give_up(error)

    def stop(self) -> None:
        """Nothing is written any more when this returns, unless the file system hangs."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(LAST_WRITE_SECONDS)

    def _run(self) -> None:
        told = 0
        while not self._stopped.wait(SECONDS):
            state = self._state()
            step = state.global_step
            if step == told or (state is self._before and step == self._step_before):
                continue
            told = step
            try:
                Heartbeat(attempt=self._attempt, step=told, max_steps=max(state.max_steps, 0)).write(
                    self._root
                )
            except OSError as error:
                self._give_up(error)
                return

    def _give_up(self, error: Exception) -> None:
        logger.warning("%s ckpt-run status cannot tell the step any more: %s", log.PREFIX, error)
