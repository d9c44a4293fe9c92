"""Tells from a thread of its own, every few seconds, at which step training is: between two saves a slow run must not look like one that hangs."""

from __future__ import annotations

import threading
from typing import Any

from datastates.llm import log
from datastates.store.heartbeat import Heartbeat
from datastates.store.layout import Root

logger = log.logger("datastates.llm.decorator")

SECONDS = 2.0
"""Between two looks. It is written only when there is something new, so that its time tells when training was last seen to move."""


class Pulse:
    """Of one attempt, from now until :meth:`stop`. A file system that hangs holds up this thread and nobody else.

    Args:
        state: the Trainer's ``TrainerState`` when it is called.
    """

    def __init__(self, root: Root, attempt: str, state: Any) -> None:
        self._root = root
        self._attempt = attempt
        self._state = state
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="ckpt-run heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        told = 0
        while not self._stopped.wait(SECONDS):
            state = self._state()
            if state.global_step == told:
                continue
            told = state.global_step
            try:
                Heartbeat(attempt=self._attempt, step=told, max_steps=max(state.max_steps, 0)).write(
                    self._root
                )
            except OSError as error:
                logger.warning("%s ckpt-run status cannot tell the step any more: %s", log.PREFIX, error)
                return
