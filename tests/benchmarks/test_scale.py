"""The model of how a save grows does the sums that can be done by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import scale, scaling
from benchmarks.scale import Job, Machine

MACHINE = Machine(copy=2e9, disk=1e9, save=0.01, tensor=1e-5, commit=0.05, vote=0.001)
JOB = Job(nbytes=400e6, tensors=1000, step=1.0, quiet=0.7, every=4, cache=500e6)
CALL = 0.02
"""Seconds of the call itself, by the two above."""


def test_what_fits_the_cache_and_is_copied_in_time_stalls_for_the_call_alone() -> None:
    told = scale.foretell(MACHINE, JOB)
    assert told.stall == pytest.approx(CALL)
    assert told.durable == pytest.approx(CALL + 0.4 + 0.051)
    assert told.host_memory == pytest.approx(200e6)  # copied twice as fast as written


def test_without_time_before_the_step_all_of_the_copying_stalls() -> None:
    told = scale.foretell(MACHINE, replace(JOB, quiet=0.0))
    assert told.stall == pytest.approx(CALL + 0.2)


def test_what_is_eager_stalls_in_the_call() -> None:
    told = scale.foretell(MACHINE, replace(JOB, eager=100e6))
    assert told.stall == pytest.approx(CALL + 0.05)


def test_a_cache_too_small_makes_the_step_wait_for_the_disk() -> None:
    told = scale.foretell(MACHINE, replace(JOB, quiet=0.1, cache=100e6))
    # 200 MB in 0.1 s until the cache is full, 200 MB more at the speed of the disk; a tenth of a second of it is hidden.
    assert told.stall == pytest.approx(CALL + 0.2)
    assert told.host_memory == pytest.approx(100e6)
    assert told.first == "the host cache"


@pytest.mark.parametrize("cache", [100e6, 500e6, 5e9])
def test_saves_that_come_faster_than_the_disk_takes_them_go_at_the_disk_s_speed(cache: float) -> None:
    told = scale.foretell(MACHINE, replace(JOB, every=1, step=0.1, quiet=0.05, cache=cache), saves=200)
    assert told.stall + told.interval == pytest.approx(0.4, rel=0.02)
    assert told.host_memory == pytest.approx(cache)
    assert told.first in ("writing", "the host cache")
    assert told.used["writing"] == pytest.approx(4)


@pytest.mark.parametrize(
    ("ranks", "disk", "shared", "rate"),
    [(1, 1e9, 9e9, 1e9), (4, 1e9, 9e9, 0.25e9), (32, 1e9, 9e9, 0.125e9), (256, 1e9, 16e9, 0.0625e9)],
)
def test_ranks_share_the_disk_of_their_node_and_the_file_system_of_all(
    ranks: int, disk: float, shared: float, rate: float
) -> None:
    machine = replace(MACHINE, disk=disk, shared=shared)
    told = scale.foretell(machine, replace(JOB, ranks=ranks, every=100))
    assert told.durable == pytest.approx(CALL + 400e6 / rate + 0.05 + 0.001 * ranks)


def test_every_byte_that_was_saved_is_copied_and_written_once() -> None:
    simulation = scale.Simulation(MACHINE, replace(JOB, every=3, step=0.2, quiet=0.1, cache=64e6))
    simulation.run(60)
    assert len(simulation.durable) == len(simulation.began) == 20
    assert simulation.saved == simulation.copied == pytest.approx(simulation.written) == 20 * 400e6


def test_the_model_is_held_against_real_saves_and_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"small": scaling.Size(20 * scaling.MB, 10), "few": 4}
    monkeypatch.setattr(scaling, "SIZES", sizes)
    told = {name: scaling.visit(name, str(tmp_path)) for name in sizes}
    pairs = {"stall", "stall foretold", "durable", "durable foretold"}
    assert told["small"].keys() == pairs | {"off"}
    assert told["few"].keys() == {"durable", "durable foretold", "off"}
    assert all(figure > 0 for figures in told.values() for figure in figures.values())
    assert list(tmp_path.iterdir()) == []


def test_the_scenarios_of_the_documentation_are_what_the_model_foretells(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scale.main()
    text = (Path(__file__).parents[2] / "docs/scale.md").read_text()
    table = capsys.readouterr().out
    assert len(table.splitlines()) == 2 + len(scale.SCENARIOS)
    assert table in text
