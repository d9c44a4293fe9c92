from __future__ import annotations

from pathlib import Path

import pytest
from datastates.store import retention
from datastates.store.catalog import Catalog, Checkpoint
from datastates.store.layout import Root
from datastates.store.manifest import Manifest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_files import FILES, save, uncommitted

steps = st.lists(st.integers(1, 10**6), unique=True, max_size=12)


def committed(step: int, lineage: str = "lineage1") -> Checkpoint:
    manifest = Manifest(attempt="a", save=1, step=step, rank=0, world_size=1, lineage=lineage, ordinal=0)
    return Checkpoint(step, Path(f"/out/concurrent_checkpoint/checkpoint-{step}"), manifest)


def going(checkpoints: list[Checkpoint], limit: int | None, *best: str) -> list[int]:
    return [item.step for item in retention.expendable(checkpoints, limit, best, lineage="lineage1")]


@settings(deadline=None)
@given(steps, st.integers(-1, 14) | st.none(), st.data())
def test_the_newest_and_the_best_always_stay_and_the_limit_is_kept(
    own: list[int], limit: int | None, data: st.DataObject
) -> None:
    best = data.draw(st.sets(st.sampled_from(own), max_size=3)) if own else set()
    others = [committed(step, "older") for step in data.draw(steps)]
    damaged = [Checkpoint(step, Path(f"/x/checkpoint-{step}"), None, "damaged") for step in data.draw(steps)]
    own_checkpoints = [committed(step) for step in own]
    mixed = data.draw(st.permutations(own_checkpoints + others + damaged))
    gone = retention.expendable(mixed, limit, [f"checkpoint-{step}" for step in best], lineage="lineage1")
    assert all(item in own_checkpoints for item in gone)
    left = [item.step for item in own_checkpoints if item not in gone]
    if own:
        assert max(own) in left
        assert best <= set(left)
    if limit is None or limit <= 0:
        assert gone == []
    else:
        protected = {max(own)} | best if own else set()
        assert len(left) == min(len(own), max(limit, len(protected)))
        assert all(step > item.step for item in gone for step in left if step not in protected)


def test_the_oldest_go_first() -> None:
    assert going([committed(step) for step in (100, 9, 20)], 1) == [9, 20]
    assert going([committed(step) for step in (100, 9, 20)], 2) == [9]
    assert going([committed(step) for step in (100, 9, 20)], 3) == []


@pytest.mark.parametrize(
    "best",
    ["/out/concurrent_checkpoint/checkpoint-9", "concurrent_checkpoint/checkpoint-9", "/moved/checkpoint-9/"],
)
def test_the_best_is_recognised_however_its_path_is_spelled(best: str) -> None:
    assert going([committed(step) for step in (100, 9, 20)], 1, best) == [20]


def test_a_limit_of_one_keeps_both_when_the_best_is_not_the_newest() -> None:
    assert going([committed(step) for step in (100, 9, 20)], 1, "checkpoint-20") == [9]


def test_two_that_may_be_the_best_both_stay_and_count_towards_the_limit() -> None:
    checkpoints = [committed(step) for step in (9, 15, 20, 100)]
    assert going(checkpoints, 3, "checkpoint-9", "checkpoint-20") == [15]
    assert going(checkpoints, 4, "checkpoint-9", "checkpoint-20") == []


def test_what_is_not_committed_neither_counts_nor_goes(tmp_path: Path) -> None:
    root = Root.of(tmp_path)
    for step in (10, 20):
        save(root, step)
    uncommitted(root, 30)
    assert going(Catalog(root).checkpoints(), 2) == []
    assert going(Catalog(root).checkpoints(), 1) == [10]


def test_a_removed_checkpoint_is_gone_without_a_trace_and_the_others_are_untouched(tmp_path: Path) -> None:
    root = Root.of(tmp_path)
    for step in (10, 20):
        save(root, step)
    retention.remove(Catalog(root).get(10))
    assert root.steps() == [20]
    assert not any(root.aside.iterdir())
    retention.remove(Catalog(root).get(10))


def test_a_checkpoint_that_was_set_aside_can_be_removed_too(tmp_path: Path) -> None:
    from datastates.store import commit

    root = Root.of(tmp_path)
    save(root, 10)
    aside = commit.set_aside(root.checkpoint(10), "attempt2")
    assert aside
    retention.remove(Checkpoint.load(aside))
    assert not any(root.aside.iterdir())
    assert FILES
