"""Promise 5: memory stays within the host cache and a constant, over any number of saves; no descriptor or thread is left behind."""

from __future__ import annotations

import gc
import os
import time
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import runs
import tiny
import torch
from datastates.llm import DecoratedCheckpointing, host_cache, saver
from datastates.store import commit
from transformers import Trainer, TrainerCallback

MIB = 1 << 20


def resident() -> int:
    """Bytes of memory that this process has in use now, the host cache's included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """The most that :func:`resident` has been since :func:`forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def descriptors() -> list[str]:
    """What this process keeps open: not what it has open for the moment of a write, as the heartbeat's file every two seconds."""
    before = Counter(_open_now())
    time.sleep(0.05)
    return sorted((before & Counter(_open_now())).elements())


def _open_now() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except FileNotFoundError:  # the listing's own
            continue
    return found


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def settled(count: Callable[[], int], bound: int) -> int:
    """``count()``, once it has come down to ``bound``: a thread that has done its work needs a moment to end."""
    for _ in range(1000):
        if count() <= bound:
            break
        time.sleep(0.01)
    return count()


class Measure(TrainerCallback):
    """Looks at the process after every tenth save, with nothing in flight."""

    def __init__(self) -> None:
        self.decorated: Any = None
        self.memory: list[int] = []
        self.open: list[list[str]] = []
        self.threads: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0 or state.global_step % 10:
            return
        assert self.decorated.wait(60)
        gc.collect()
        self.memory.append(resident())
        self.open.append(descriptors())
        self.threads.append(settled(threads, self.threads[0] if self.threads else 0))


def test_memory_descriptors_and_threads_are_flat_over_two_hundred_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint has about 0.4 MB: were anything of it kept, 160 saves would keep more than 60 MB."""
    monkeypatch.setattr(host_cache, "_engine", None)
    measure = Measure()
    trainer = tiny.trainer(
        tmp_path, callbacks=[measure], max_steps=201, save_steps=1, save_total_limit=2, logging_steps=1000
    )
    measure.decorated = DecoratedCheckpointing({"trainer": trainer, "host_cache_size": 0.02}, -1)
    trainer.train()
    assert checkpoints.whole(tmp_path) == [200, 201]
    assert min(measure.memory[16:]) - min(measure.memory[2:5]) < 8 * MIB
    assert measure.open[-1] == measure.open[2]
    assert max(measure.threads[2:]) == measure.threads[2]


def test_threads_stay_within_a_bound_where_checkpoints_come_faster_than_the_disk_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, most = commit.publish, 0

    def slow(*args: Any, **how: Any) -> Any:
        nonlocal most
        most = max(most, threads())
        time.sleep(0.05)
        return publish(*args, **how)

    monkeypatch.setattr(commit, "publish", slow)
    before = threads()
    runs.decorated(tmp_path, max_steps=100, save_steps=1, save_total_limit=2, logging_steps=1000).train()
    assert checkpoints.whole(tmp_path) == [99, 100]
    assert most - before <= saver.MOST_IN_FLIGHT + 8


def test_a_training_that_has_ended_leaves_no_descriptor_and_no_thread(tmp_path: Path) -> None:
    runs.decorated(tmp_path / "first", max_steps=2).train()
    open_before, threads_before = descriptors(), threads()
    for name in ("second", "third", "fourth"):
        runs.decorated(tmp_path / name, max_steps=2).train()
    assert descriptors() == open_before
    assert settled(threads, threads_before) <= threads_before


class Unhooked(torch.optim.AdamW):
    """Fires no hook, so that nothing of it may be copied late."""


class PeakOfASave(Trainer):
    """Measures what a save needs beyond what was there before it, from its call to its commit."""

    needed: list[int]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        gc.collect()
        forget_peak()
        before = resident()
        super()._save_checkpoint(*args, **kwargs)
        self.before = before


class UntilCommitted(TrainerCallback):
    """Reads in ``on_save``, and so is called when the checkpoint is committed."""

    def __init__(self) -> None:
        self.needed: list[int] = []
        self.trainer: Any = None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.needed.append(peak() - self.trainer.before)


@pytest.mark.parametrize("staged", ["late", "at once"])
def test_a_save_needs_no_more_memory_than_the_host_cache_and_a_constant(
    staged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint has ten times the size of the cache. The constant is 64 MiB for what is copied aside, and some for Python."""
    monkeypatch.setattr(host_cache, "_engine", None)
    model = tiny.llama(hidden_size=512, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8)
    optimizer = Unhooked(model.parameters())
    if staged == "at once":
        optimizer.step = types.MethodType(lambda self, closure=None: None, optimizer)  # type: ignore[method-assign]
    until = UntilCommitted()
    until.trainer = tiny.trainer(
        tmp_path,
        model,
        cls=PeakOfASave,
        callbacks=[until],
        optimizers=(optimizer, None),
        max_steps=2,
        save_steps=1,
        save_total_limit=1,
    )
    runs.decorate(until.trainer, host_cache_size=32 / 1024)
    until.trainer.train()
    assert checkpoints.whole(tmp_path) == [2]
    size = sum(path.stat().st_size for path in runs.checkpoint(tmp_path, 2).iterdir() if path.is_file())
    assert size > (300 * MIB if staged == "late" else 100 * MIB)
    assert max(until.needed) < (32 + 64 + 24) * MIB


def test_nothing_is_put_into_dev_shm(tmp_path: Path) -> None:
    runs.decorated(tmp_path, max_steps=2).train()
    mapped = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    # Semaphores of Python's multiprocessing are there too; they have no name any more.
    assert [name for name in mapped + descriptors() if "/dev/shm" in name and "(deleted)" not in name] == []
