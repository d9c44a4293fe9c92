"""The benchmarks that train: the figures are what happened, and each way to save is measured with nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_benchmarks import visited

from benchmarks.training import Measurement, Schedule
from benchmarks.ways import WAYS, ZERO_WAYS, missing_for_zero

TINY = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
FIGURES = {"ratio", "stall", "slowdown", "lost", "durable", "synced", "cpu", "peak", "step"}


def each(*names: str) -> list[object]:
    """ckpt-run always, the others in the campaign."""
    return [pytest.param(name, marks=[] if name == "ckpt-run" else [pytest.mark.campaign]) for name in names]


@pytest.mark.parametrize("schedule", [Schedule(4, 3), Schedule(1, 6), Schedule(32, 3)])
def test_every_step_after_the_warm_up_is_either_calm_or_of_a_save(schedule: Schedule) -> None:
    assert sorted(schedule.calm + schedule.disturbed) == [*range(schedule.warm_up + 1, schedule.last + 1)]
    assert all(step + 1 in schedule.disturbed for step in schedule.saved)
    assert len(schedule.calm) == 2 * schedule.quiet


def test_what_a_save_costs_is_told_apart_from_what_steps_cost() -> None:
    """Steps of two seconds; each save stops training for a quarter, and makes the step after it half a second longer."""
    schedule = Schedule(4, 3)
    measurement = Measurement(WAYS["without saves"], schedule, "")
    now = 0.0
    for step in range(schedule.last + 1):
        measurement.clock.ended[step] = now
        measurement.clock.used[step] = now * 2
        if step in schedule.saved:
            measurement.stalls.found.append((now, 0.25))
            now += 0.75
        now += 2.0
    figures = measurement.figures()
    assert figures["step"] == pytest.approx(2.0)
    assert figures["stall"] == pytest.approx(0.25)
    assert figures["lost"] == pytest.approx(0.75)
    assert figures["slowdown"] == pytest.approx(0.5)
    assert figures["cpu"] == pytest.approx(1.5)
    assert figures["ratio"] == pytest.approx(8.75 / 8)


@pytest.mark.parametrize("contestant", each(*WAYS))
def test_a_training_is_measured(contestant: str, tmp_path: Path) -> None:
    figures = visited("benchmarks.training", contestant, tmp_path, save_steps=1, saves=2, model=TINY)
    assert figures.keys() == FIGURES - ({"durable", "synced"} if contestant == "without saves" else set())
    assert figures["stall"] > 0 or contestant == "without saves"
    assert figures.get("synced", 0.0) == WAYS[contestant].synced


@pytest.mark.parametrize("contestant", each("ckpt-run", "DeepSpeed torch", "DeepSpeed python writer"))
def test_a_sharded_training_is_measured(contestant: str, tmp_path: Path) -> None:
    if missing_for_zero(contestant):
        pytest.skip(missing_for_zero(contestant))
    figures = visited("benchmarks.zero", contestant, tmp_path, save_steps=1, saves=2, model=TINY)
    assert figures.keys() == FIGURES
    assert figures["synced"] == ZERO_WAYS[contestant].synced


@pytest.mark.campaign
@pytest.mark.parametrize("contestant", ["ckpt-run", "stock Trainer"])
def test_a_resume_is_measured_up_to_its_first_step(contestant: str, tmp_path: Path) -> None:
    figures = visited("benchmarks.resuming", contestant, tmp_path, model=TINY, starts=1)
    compared = {"ratio", "cpu ratio"} if contestant == "ckpt-run" else set()
    assert figures.keys() == {"first step", "median", "from disk", "verified", "cpu", "peak"} | compared
    assert 0 < figures["first step"] == figures["median"]


@pytest.mark.parametrize("contestant", each("ckpt-run", "stock Trainer"))
def test_the_memory_of_many_saves_is_measured(contestant: str, tmp_path: Path) -> None:
    figures = visited("benchmarks.memory", contestant, tmp_path, model=TINY, saves=20, quiet=2)
    assert figures.keys() == {"peak", "over", "growth", "seconds", "synced"}
    assert figures["peak"] > 100e6
