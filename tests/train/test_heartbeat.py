"""The step that ``ckpt-run status`` tells between two saves: that of the training that runs, and telling it never costs the training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
from datastates.llm import heartbeat
from datastates.llm.heartbeat import Pulse
from datastates.store.heartbeat import Heartbeat
from datastates.store.layout import Root
from datastates.store.runrecord import RunRecord
from datastates.store.summary import RunSummary, summarize
from transformers import Trainer, TrainerCallback
from waiting import until

ATTEMPT = "attempt1"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "SECONDS", 0.005)


class States:
    """Gives a Trainer's state to whoever asks, and counts how often."""

    def __init__(self, step: int) -> None:
        self.now = SimpleNamespace(global_step=step, max_steps=10)
        self.asked = 0

    def __call__(self) -> Any:
        self.asked += 1
        return self.now

    def be_asked(self) -> None:
        """Return when whoever asks now is done with the answers that it got before."""
        before = self.asked
        until(lambda: self.asked > before + 2, "somebody to ask for the state")


def told(root: Root) -> int | None:
    found = Heartbeat.read(root, ATTEMPT)
    return found.step if found else None


@pytest.fixture
def root(tmp_path: Path) -> Root:
    root = Root.of(tmp_path)
    RunRecord.here(run_id="run1", attempt=ATTEMPT, output_dir=str(tmp_path)).write(root)
    return root


def test_the_state_that_a_training_before_has_left_is_not_told_as_that_of_the_next(root: Root) -> None:
    states = States(step=8)
    pulse = Pulse(root, ATTEMPT, states)
    states.be_asked()
    assert told(root) is None
    states.now = SimpleNamespace(global_step=3, max_steps=10)
    until(lambda: told(root) == 3, "the step of the training that has begun")
    pulse.stop()


def test_a_training_that_is_resumed_where_the_one_before_ended_is_told_at_once(root: Root) -> None:
    states = States(step=8)
    pulse = Pulse(root, ATTEMPT, states)
    states.now = SimpleNamespace(global_step=8, max_steps=10)
    until(lambda: told(root) == 8, "the step that was resumed from")
    pulse.stop()


def test_once_stopped_it_writes_no_more(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, release = threading.Event(), threading.Event()
    stock = Heartbeat.write

    def slow(self: Heartbeat, place: Root) -> None:
        entered.set()
        release.wait(0.2)
        stock(self, place)

    monkeypatch.setattr(Heartbeat, "write", slow)
    states = States(step=0)
    pulse = Pulse(root, ATTEMPT, states)
    states.now = SimpleNamespace(global_step=1, max_steps=10)
    assert entered.wait(60)
    pulse.stop()
    root.heartbeat.unlink()  # it was written before stop() returned
    states.now = SimpleNamespace(global_step=2, max_steps=10)
    release.set()
    assert [thread.name for thread in threading.enumerate() if thread.name == "ckpt-run heartbeat"] == []
    assert told(root) is None


class NeedsMemory(Trainer):
    """Runs out of memory at step 5 while a batch has more than 3 rows."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == 5 and len(inputs["input_ids"]) > 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate much")
        return super().training_step(model, inputs, *args, **kwargs)


class Asks(TrainerCallback):
    """Asks ``status`` at the beginning of each step, when it has told the step that was done."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.seen: list[tuple[int, int | None]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append((0, summarize(self.root).step))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        def summary() -> RunSummary | None:
            found = summarize(self.root)
            return found if state.global_step == 0 or (found.step or 0) >= state.global_step else None

        self.seen.append((state.global_step, until(summary, f"step {state.global_step}", bound=20).step))


def test_where_auto_find_batch_size_begins_again_the_step_is_told_from_the_beginning(tmp_path: Path) -> None:
    asks = Asks(Root.of(tmp_path))
    trainer = runs.decorated(
        tmp_path, cls=NeedsMemory, auto_find_batch_size=True, save_steps=2, callbacks=[asks]
    )
    trainer.train()
    assert [step for step, _ in asks.seen] == [0, 0, 1, 2, 3, 4, 5, 0, 0, 1, 2, 3, 4, 5, 6, 7]
    assert [(step, shown) for step, shown in asks.seen if step != shown] == []


def test_where_no_thread_can_be_had_training_goes_on_and_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stock: Callable[..., None] = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "ckpt-run heartbeat":
            raise RuntimeError("can't start new thread")
        stock(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    runs.decorated(tmp_path).train()
    assert runs.committed(tmp_path) == [2, 4, 6, 8]
    assert "cannot tell the step" in caplog.text
