from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from datastates.engine import Engine
from engine_support import BLOCK
from stand_in import StandIn


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return StandIn(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def cuda(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Engines that are made from here on find the stand-in where the CUDA driver is looked for."""
    monkeypatch.setenv("CKPT_RUN_CUDA_DRIVER", str(stand_in.path))
    return stand_in


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """Makes engines of 64 KiB blocks that are closed at the end of the test; what is in flight then is given up."""
    engines: list[Engine] = []

    def make(blocks: int = 4, **options: Any) -> Engine:
        engines.append(Engine(blocks * BLOCK, block_bytes=BLOCK, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close(0)


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()
