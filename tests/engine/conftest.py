from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from datastates.engine import Engine
from engine_support import BLOCK
from stand_in import StandIn


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return StandIn(tmp_path_factory.mktemp("cuda"))


class MakeEngine:
    """Makes engines of 64 KiB blocks, which look for the CUDA driver under the name ``cuda_driver``."""

    def __init__(self) -> None:
        self.cuda_driver = "libcuda.so.1"
        self.engines: list[Engine] = []

    def __call__(self, blocks: int = 4, **options: Any) -> Engine:
        given = {"block_bytes": BLOCK, "cuda_driver": self.cuda_driver, **options}
        self.engines.append(Engine(blocks * BLOCK, **given))
        return self.engines[-1]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Its engines are closed at the end of the test; what is in flight then is given up."""
    make = MakeEngine()
    yield make
    for engine in make.engines:
        engine.close(0)


@pytest.fixture
def cuda(stand_in: StandIn, make_engine: MakeEngine) -> StandIn:
    """Engines that are made from here on find the stand-in where the CUDA driver is looked for."""
    make_engine.cuda_driver = str(stand_in.path)
    return stand_in


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()
