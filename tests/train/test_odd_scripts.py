"""Scripts that do what few scripts do: they must fare as they would without us."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import tiny
import torch
from datastates.llm import DecoratedCheckpointing, resume
from datastates.llm.fence import FENCE
from datastates.store import commit
from datastates.store.catalog import Catalog
from datastates.store.layout import Root
from datastates.store.runrecord import RunRecord
from processes import occupied
from transformers import Trainer, TrainerCallback


def decorated(output_dir: Path, **options: Any) -> Trainer:
    trainer = tiny.trainer(output_dir, **options)
    DecoratedCheckpointing({"trainer": trainer, "host_cache_size": 0.1}, -1)
    return trainer


def committed(output_dir: Path) -> list[int]:
    return sorted(item.step for item in Catalog(Root.of(output_dir)).checkpoints() if item.committed)


class FailOnce(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step
        self.steps: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)
        if state.global_step == self.step and self.steps.count(self.step) == 1:
            raise RuntimeError("the network is gone")


def test_a_training_that_raised_and_is_tried_again_goes_on_where_it_was(tmp_path: Path) -> None:
    failing = FailOnce(5)
    trainer = decorated(tmp_path / "out", callbacks=[failing])
    with pytest.raises(RuntimeError, match="the network is gone"):
        trainer.train()
    trainer.train(resume_from_checkpoint=True)
    assert failing.steps == [1, 2, 3, 4, 5, 5, 6, 7, 8]


def test_a_trainer_built_anew_after_a_failure_goes_on_where_it_was(tmp_path: Path) -> None:
    failing = FailOnce(5)
    with pytest.raises(RuntimeError, match="the network is gone"):
        decorated(tmp_path / "out", callbacks=[failing]).train()
    decorated(tmp_path / "out", callbacks=[failing]).train(resume_from_checkpoint=True)
    assert failing.steps == [1, 2, 3, 4, 5, 5, 6, 7, 8]


def test_a_trainer_asked_to_resume_what_it_has_just_finished_goes_on_from_there(tmp_path: Path) -> None:
    counting = FailOnce(-1)
    trainer = decorated(tmp_path / "out", callbacks=[counting], max_steps=4)
    trainer.train()
    trainer.args.max_steps = 8
    trainer.train(resume_from_checkpoint=True)
    assert counting.steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert committed(tmp_path / "out") == [2, 4, 6, 8]


def test_a_script_that_changes_directory_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    class Wandering(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            os.chdir("/")
            try:
                return super().training_step(*args, **kwargs)
            finally:
                os.chdir(tmp_path)

    trainer = tiny.trainer(Path("out"), cls=Wandering)
    DecoratedCheckpointing({"trainer": trainer, "host_cache_size": 0.1}, -1)
    trainer.train()
    assert committed(tmp_path / "out") == [2, 4, 6, 8]


def test_a_script_that_stays_in_another_directory_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    class Leaving(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                os.chdir(tmp_path / "elsewhere")

    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    trainer = tiny.trainer(Path("out"), callbacks=[Leaving()], **best)
    DecoratedCheckpointing({"trainer": trainer, "host_cache_size": 0.1}, -1)
    trainer.train()
    assert checkpoints.whole(tmp_path / "out") == [2, 4, 6, 8]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_script_that_saves_somewhere_else_by_itself_has_no_empty_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One of them would be resumed from, and with a limit the older whole ones would go."""

    class Elsewhere(Trainer):
        def _save_checkpoint(self, model: Any, *args: Any, **kwargs: Any) -> None:
            if self.state.global_step == 2:
                super()._save_checkpoint(model, *args, **kwargs)
            else:
                model.save_pretrained(tmp_path / "mine" / str(self.state.global_step))

    decorated(tmp_path / "out", cls=Elsewhere, save_total_limit=1).train()
    assert checkpoints.whole(tmp_path / "out") == [2]
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["4", "6", "8"]
    assert "checkpoint-4 was not committed, training goes on: no file was saved" in caplog.text


def test_a_script_that_ends_in_another_directory_gives_its_own_back_and_may_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    class Leaving(FailOnce):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            os.chdir(tmp_path / "elsewhere")
            super().on_step_end(args, state, control, **kwargs)

    failing = Leaving(1)
    trainer = tiny.trainer(Path("out"), callbacks=[failing])
    DecoratedCheckpointing({"trainer": trainer, "host_cache_size": 0.1}, -1)
    with pytest.raises(RuntimeError, match="the network is gone"):
        trainer.train()
    assert resume.ordinal(str(tmp_path / "out")) == 0
    with occupied(tmp_path / "out"):
        pass


def test_where_no_thread_can_be_had_saves_are_synchronous_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("checkpoint-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    decorated(tmp_path / "out").train()
    assert committed(tmp_path / "out") == [2, 4, 6, 8]
    assert not FENCE.busy


def test_a_forked_child_passes_the_fence_of_its_parent(tmp_path: Path, late: Any) -> None:
    class Forking(Trainer):
        exit_codes: list[int] = []  # noqa: RUF012

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            if FENCE.busy:
                child = os.fork()
                if child == 0:
                    torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(2, 2).state_dict())
                    os._exit(7)
                self.exit_codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            return super().training_step(*args, **kwargs)

    trainer = tiny.trainer(tmp_path / "out", cls=Forking)
    DecoratedCheckpointing({"trainer": trainer}, -1)
    trainer.train()
    assert set(Forking.exit_codes) == {7}
    assert committed(tmp_path / "out") == [2, 4, 6, 8]


class Forks(TrainerCallback):
    """Forks in the middle of training, with what was saved not committed yet. The child goes on as ``child`` says, the parent waits for it."""

    def __init__(self, child: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
        self.child = child
        self.exit_code: int | None = None
        self.record: RunRecord | None = None
        self._waited = threading.Event()
        publish = commit.publish
        monkeypatch.setattr(
            commit, "publish", lambda *args, **how: (self._waited.wait(100), publish(*args, **how))
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != 3 or self.exit_code is not None:
            return
        child = os.fork()
        if child == 0:
            self.exit_code = 0
            self.child()
            return
        self.exit_code = ended(child)
        self.record = RunRecord.read(Root.of(Path(args.output_dir)))
        self._waited.set()


def ended(child: int) -> int:
    """The exit code of a forked child, -9 when it has not ended by itself."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train_on_both_sides(trainer: Trainer) -> None:
    """The child ends with exit code 7 if ``train()`` returned or raised :class:`LeavesError`."""
    parent = os.getpid()
    try:
        with contextlib.suppress(LeavesError):
            trainer.train()
        if os.getpid() != parent:
            os._exit(7)
    finally:
        if os.getpid() != parent:
            os._exit(8)


class LeavesError(Exception):
    """Raised by a child that has no more to do."""


def leave() -> None:
    raise LeavesError


@pytest.mark.parametrize("child", [leave, lambda: None], ids=["leaves", "goes on"])
def test_a_child_forked_during_training_neither_waits_nor_saves_nor_ends_the_run(
    child: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that save are its parent's, and so are the directory and the record."""
    forks = Forks(child, monkeypatch)
    train_on_both_sides(decorated(tmp_path / "out", callbacks=[forks]))
    assert forks.exit_code == 7
    assert forks.record is not None
    assert (forks.record.state, forks.record.step) == ("running", 0)
    assert committed(tmp_path / "out") == [2, 4, 6, 8]
    record = RunRecord.read(Root.of(tmp_path / "out"))
    assert record is not None
    assert record.state == "finished"


def test_a_child_forked_after_a_training_saves_its_own(tmp_path: Path) -> None:
    """As scripts do that train each fold of their data in a process of its own."""
    decorated(tmp_path / "parent", max_steps=2).train()
    child = os.fork()
    if child == 0:
        try:
            decorated(tmp_path / "child", max_steps=4).train()
        finally:
            os._exit(0)
    assert ended(child) == 0
    assert committed(tmp_path / "child") == [2, 4]


def test_a_child_forked_during_training_does_not_train_into_the_directory_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> None:
        decorated(tmp_path / "out", max_steps=1, save_steps=1).train()
        raise LeavesError

    forks = Forks(train, monkeypatch)
    train_on_both_sides(decorated(tmp_path / "out", callbacks=[forks]))
    assert forks.exit_code == 7
    assert (tmp_path / "out" / "checkpoint-1").is_dir()
    assert committed(tmp_path / "out") == [2, 4, 6, 8]


def test_keeping_trainers_saves_leaves_other_files_in_their_directories(tmp_path: Path) -> None:
    notes = tmp_path / "out" / "checkpoint-2" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    unfinished = tmp_path / "out" / ".checkpoint-2-0123abcd"
    unfinished.mkdir()
    trainer = tiny.trainer(tmp_path / "out")
    DecoratedCheckpointing({"trainer": trainer, "keep_trainer_saves": True, "host_cache_size": 0.1}, -1)
    trainer.train(resume_from_checkpoint=False)
    assert notes.read_text() == "mine"
    assert (notes.parent / "model.safetensors").exists()
    assert not unfinished.exists()


def test_a_snapshot_taken_at_once_holds_what_no_check_can_notice(tmp_path: Path, late: Any) -> None:
    seen: dict[int, torch.Tensor] = {}

    class Reviving(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            weight = self.model.get_input_embeddings().weight
            seen.setdefault(self.state.global_step, weight.detach().clone())
            weight.data[5, 3] += 1.0
            return super().training_step(*args, **kwargs)

    trainer = tiny.trainer(tmp_path / "out", cls=Reviving)
    DecoratedCheckpointing({"trainer": trainer, "snapshot": "eager"}, -1)
    trainer.train()
    from safetensors.torch import load_file

    for step in (2, 4, 6):
        saved = load_file(
            tmp_path / "out" / "concurrent_checkpoint" / f"checkpoint-{step}" / "model.safetensors"
        )
        assert torch.equal(saved["model.embed_tokens.weight"], seen[step])


@pytest.mark.parametrize("resumes", [False, True], ids=["from the beginning", "resumed"])
def test_a_second_training_into_the_same_directory_is_told_of_the_first_and_harms_nothing(
    resumes: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = None
    if resumes:
        decorated(tmp_path / "out", max_steps=2).train()
        start = str(Root.of(tmp_path / "out").checkpoint(2).path)
    with occupied(tmp_path / "out"):
        decorated(tmp_path / "out").train(resume_from_checkpoint=start)
    [told] = [record.getMessage() for record in caplog.records if "is off for this" in record.getMessage()]
    assert "the other training saves into" in told
    assert ("(it goes on from " in told) == resumes
    assert committed(tmp_path / "out") == ([2] if resumes else [])
    assert (tmp_path / "out" / "checkpoint-8" / "model.safetensors").exists()
