"""Promise 8: nothing of the user's goes but committed checkpoints beyond the limit; and what ``keep_trainer_saves`` adds."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoints
import disks
import pytest
import runs
import tiny
import torch
from checkpoints import whole
from datastates.llm import space
from datastates.store import commit
from datastates.store.journal import read_events
from datastates.store.layout import CheckpointDir, Root
from transformers import Trainer

BEST: dict[str, Any] = dict(eval_strategy="steps", eval_steps=2, load_best_model_at_end=True)


class Scripted(Trainer):
    """Its evaluations find ``losses``, one after another."""

    losses: tuple[float, ...] = (4.0, 1.0, 2.0, 3.0)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super().evaluate(*args, **kwargs)
        metrics["eval_loss"] = self.losses[self.state.global_step // 2 - 1]
        return metrics


def with_losses(*losses: float) -> type[Scripted]:
    return type("Scripted", (Scripted,), {"losses": losses})


def trained(output_dir: Path, settings: dict[str, Any] | None = None, **how: Any) -> Trainer:
    trainer = runs.decorate(tiny.trainer(output_dir, **how), **(settings or {}))
    trainer.train()
    return trainer


@pytest.mark.parametrize(("limit", "left"), [(None, [2, 4, 6, 8]), (3, [4, 6, 8]), (2, [6, 8]), (1, [8])])
def test_the_newest_are_left_up_to_the_limit(limit: int | None, left: list[int], tmp_path: Path) -> None:
    trained(tmp_path, save_total_limit=limit)
    assert whole(tmp_path) == left
    assert not list((runs.root(tmp_path) / ".aside").glob("*"))


@pytest.mark.parametrize(("limit", "left"), [(1, [4, 8]), (2, [4, 8]), (3, [4, 6, 8])])
def test_the_best_is_left_as_well_and_loaded_at_the_end(limit: int, left: list[int], tmp_path: Path) -> None:
    trainer = trained(tmp_path, cls=Scripted, save_total_limit=limit, **BEST)
    assert whole(tmp_path) == left
    assert trainer.state.best_model_checkpoint == str(runs.checkpoint(tmp_path, 4))
    best = checkpoints.weights(runs.checkpoint(tmp_path, 4))
    assert checkpoints.same(tiny.weights(trainer.model), best)


def test_training_arguments_keep_the_users_limit(tmp_path: Path) -> None:
    trainer = trained(tmp_path, save_total_limit=2)
    saved = torch.load(runs.checkpoint(tmp_path, 8) / "training_args.bin", weights_only=False)
    assert trainer.args.save_total_limit == saved.save_total_limit == 2


class TearsOnce:
    """Changes a weight in forward after the save of ``step``, behind everybody's back: that checkpoint is given up."""

    def __init__(self, step: int, model: Any) -> None:
        self.step = step
        self.weight = model.model.layers[0].mlp.up_proj.weight
        self.calls = 0
        model.register_forward_pre_hook(self)

    def __call__(self, module: Any, args: Any) -> None:
        self.calls += 1
        if self.calls == self.step + 1:
            self.weight.data.mul_(1.01)


def test_an_old_checkpoint_stays_until_a_newer_one_is_committed(late: Any, tmp_path: Path) -> None:
    seen: list[list[int]] = []

    class Looks(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.state.global_step == 5:
                _wait_for(lambda: outcomes(tmp_path) == {2: "commit", 4: "abandon"})
                seen.append(runs.committed(tmp_path))
            return super().training_step(*args, **kwargs)

    model = tiny.llama()
    TearsOnce(4, model)
    trained(tmp_path, model=model, cls=Looks, save_total_limit=1)
    assert seen == [[2]]
    assert whole(tmp_path) == [8]


def test_what_was_never_committed_neither_counts_nor_goes(late: Any, tmp_path: Path) -> None:
    model = tiny.llama()
    TearsOnce(4, model)
    trained(tmp_path, model=model, save_total_limit=2)
    assert whole(tmp_path) == [6, 8]
    assert runs.checkpoint(tmp_path, 4).is_dir()


def test_the_best_stays_while_a_better_one_is_not_committed_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed now, training would resume at step 4, whose state says that the best is checkpoint-2."""
    saved_6, seen = threading.Event(), []
    publish = commit.publish

    def delayed(directory: CheckpointDir, *args: Any, **kwargs: Any) -> Any:
        if directory.step == 4:
            assert saved_6.wait(60)
        if directory.step == 6:
            _wait_for(lambda: 4 in outcomes(tmp_path))
            seen.append(runs.committed(tmp_path))
        return publish(directory, *args, **kwargs)

    class Releases(with_losses(2.0, 3.0, 1.0, 4.0)):  # type: ignore[misc]
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            super()._save_checkpoint(*args, **kwargs)
            if self.state.global_step == 6:
                saved_6.set()

    monkeypatch.setattr(commit, "publish", delayed)
    trained(tmp_path, cls=Releases, save_total_limit=1, **BEST)
    assert seen == [[2, 4]]
    assert whole(tmp_path) == [6, 8]


def outcomes(output_dir: Path) -> dict[int, str]:
    """What became of each save: "commit" or "abandon"."""
    events = read_events(Root.of(output_dir))
    return {event.whole("step"): event.kind for event in events if event.kind in ("commit", "abandon")}


def _wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")


def test_checkpoints_of_another_training_are_not_touched(tmp_path: Path, relaunch: Any) -> None:
    trained(tmp_path, max_steps=4, save_steps=1)
    other = {step: checkpoints.digests(runs.checkpoint(tmp_path, step)) for step in (1, 3)}
    relaunch()
    trained(tmp_path, max_steps=8, save_steps=2, save_total_limit=1)
    assert whole(tmp_path) == [1, 3, 8]
    assert {step: checkpoints.digests(runs.checkpoint(tmp_path, step)) for step in (1, 3)} == other


def test_nothing_else_in_the_output_directory_goes(tmp_path: Path) -> None:
    mine = [
        "checkpoint-1/model.safetensors",
        "checkpoint-final/x",
        "concurrent_checkpoint/notes.txt",
        "a.txt",
    ]
    for name in mine:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    trained(tmp_path, save_total_limit=1)
    assert [(tmp_path / name).read_text() for name in mine] == mine


# -- keep_trainer_saves -------------------------------------------------------------------------------------------------


def usual(output_dir: Path) -> list[int]:
    """The steps of the checkpoints in Trainer's own place."""
    return sorted(int(path.name.split("-")[1]) for path in output_dir.glob("checkpoint-*"))


KEEP: dict[str, Any] = {"keep_trainer_saves": True}


def test_trainers_own_checkpoints_are_not_there_unless_asked_for(tmp_path: Path) -> None:
    trained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["concurrent_checkpoint"]


def test_trainers_own_checkpoints_are_hard_links_to_the_committed_files(tmp_path: Path) -> None:
    trained(tmp_path, KEEP)
    assert whole(tmp_path) == usual(tmp_path) == [2, 4, 6, 8]
    for step in (2, 8):
        committed, own = runs.checkpoint(tmp_path, step), tmp_path / f"checkpoint-{step}"
        assert checkpoints.tree(own) == checkpoints.tree(committed)
        assert not (own / ".ckpt").exists()
        assert all((own / name).samefile(committed / name) for name in checkpoints.tree(own))


def test_trainers_own_checkpoints_are_copies_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    trained(tmp_path, KEEP, save_total_limit=2)
    assert whole(tmp_path) == usual(tmp_path) == [6, 8]
    own, committed = tmp_path / "checkpoint-8", runs.checkpoint(tmp_path, 8)
    assert checkpoints.tree(own) == checkpoints.tree(committed)
    assert not (own / "model.safetensors").samefile(committed / "model.safetensors")


def test_trainers_own_checkpoints_keep_trainers_limit_and_the_best(tmp_path: Path) -> None:
    trained(tmp_path, KEEP, cls=Scripted, save_total_limit=2, **BEST)
    assert usual(tmp_path) == [4, 8]
    assert whole(tmp_path) == [4, 8]


def test_a_stock_training_goes_on_from_trainers_own_checkpoint_when_ours_are_gone(tmp_path: Path) -> None:
    trained(tmp_path / "whole")
    trained(tmp_path / "cut", KEEP, save_total_limit=1)
    shutil.rmtree(runs.root(tmp_path / "cut"))
    assert usual(tmp_path / "cut") == [8]
    resumed = tiny.trainer(tmp_path / "cut", max_steps=10)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 10


# -- space --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Path]]:
    """A directory on a file system of so many bytes; where nothing may be mounted, one that says it is that small."""

    def make(nbytes: int) -> Path:
        directory = tmp_path / "disk"
        if disks.mount(directory, nbytes):
            pages = nbytes // 4096
            answer = os.statvfs_result((4096, 4096, pages, pages, pages, 999, 999, 999, 0, 255))
            monkeypatch.setattr(space.os, "statvfs", lambda path: answer)
        return directory / "out"

    yield make
    disks.unmount(tmp_path / "disk")


def shortages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "free, and" in record.message]


def test_a_disk_that_cannot_hold_what_the_limit_asks_for_gets_one_line_with_both_figures(
    small_disk: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A limit of 6 means 7 for a moment: about 2.6 MiB of 1.9 MiB that are there, enough for what this training saves."""
    output_dir = small_disk(1_900 << 10)
    trained(output_dir, save_total_limit=6)
    assert whole(output_dir) == [2, 4, 6, 8]
    [line] = shortages(caplog)
    assert re.search(
        r"has 1\.8\d MiB free, and save_total_limit=6 needs 2\.[56]\d MiB more \(3[78]\d KiB a checkpoint",
        line,
    )


@pytest.mark.parametrize("limit", [1, None])
def test_a_disk_that_can_hold_it_gets_none(
    limit: int | None, small_disk: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    output_dir = small_disk(2 << 20)
    trained(output_dir, save_total_limit=limit)
    assert shortages(caplog) == []


def test_what_is_committed_already_is_counted_in() -> None:
    assert space.shortage("/", 10, 0, None) is None
    free = os.statvfs("/").f_bavail * os.statvfs("/").f_frsize
    size = free // 3
    found = space.shortage("/", size, 0, 3)
    assert found is not None
    assert found[0] == size * 4
    assert space.shortage("/", size, size * 3, 3) is None
