"""A sandbox for every test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_tools import Sandbox


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    with tempfile.TemporaryDirectory(prefix="ckpt-") as temporary:
        sandbox = Sandbox(tmp_path, temporary)
        yield sandbox
        sandbox.close()
