"""Fixtures of the training tests. Engine and fence are one per process: a test that needs its own engine takes it from here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from datastates.llm import host_cache, resume
from late import LateEngine

# Inherited by every process that a test starts; the tests' checkpoints are small.
os.environ["CKPT_RUN_HOST_CACHE_SIZE"] = "0.25"


@pytest.fixture
def relaunch() -> Iterator[Callable[[], None]]:
    """Call it where a new process would begin: the number of ``train()`` calls so far is all that a process remembers."""
    yield resume._ordinals.clear
    resume._ordinals.clear()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateEngine]:
    """Trainings of this test stage as late as possible."""
    engine: Any = LateEngine()
    monkeypatch.setattr(host_cache, "_engine", engine)
    yield engine
    assert engine.close(30)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Afterwards it is as it was, for the processes that later tests start.

    Building a Trainer sets or removes CKPT_LAST_STEP, and with transformers 4.57 its arguments leave their precision in the environment.
    """
    with mock.patch.dict(os.environ):
        yield
