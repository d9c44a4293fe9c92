"""A sandbox for every test."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_run.signals import STOPS
from launch_tools import Sandbox


@pytest.fixture(scope="session", autouse=True)
def _default_signals() -> None:
    """What we start inherits which signals are ignored: Ctrl-C in a background job, the hang-up under nohup.

    A handler of ours keeps them from this process as well, and does not survive exec.
    """
    for number in STOPS:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    with tempfile.TemporaryDirectory(prefix="ckpt-") as temporary:
        sandbox = Sandbox(tmp_path, temporary)
        yield sandbox
        sandbox.close()
