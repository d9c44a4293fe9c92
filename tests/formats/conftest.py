"""Fixtures of the formats' tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from datastates.formats import intercept
from formats_bench import Bench


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    intercept.install()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(intercept, "_told", set())
    return Bench(tmp_path)


@pytest.fixture(scope="module")
def shared_bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """For property tests: one for all examples of a module."""
    return Bench(tmp_path_factory.mktemp("bench"))
