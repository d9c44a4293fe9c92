"""Training never dies of checkpointing: one clear error, the older checkpoint intact, training goes on."""

from __future__ import annotations

import errno
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import checkpoints
import disks
import processes
import pytest
import runs
import tiny
from datastates.store import commit, durable
from datastates.store.layout import Root
from datastates.store.runrecord import RunRecord
from processes import SCRIPTS, Job, Training
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

MIB = 1 << 20


@dataclass
class Disk:
    """A file system of its own, small enough to be filled."""

    path: Path

    @property
    def ballast(self) -> Path:
        return self.path / "ballast"

    def fill(self, leave: int) -> None:
        """Leave about ``leave`` bytes."""
        status = os.statvfs(self.path)
        free = status.f_bavail * status.f_frsize
        with self.ballast.open("ab") as stream:
            stream.write(b"\0" * max(0, free - leave))

    def empty(self) -> None:
        self.ballast.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """8 MiB of tmpfs; a tiny checkpoint takes 0.4."""
    with disks.small(tmp_path / "disk", 8 << 20) as path:
        yield Disk(path)


class At(TrainerCallback):
    """Does something when so many steps are done, with what they saved still in flight."""

    def __init__(self, **actions: Callable[[], object]) -> None:
        self.actions = {int(name.removeprefix("step")): action for name, action in actions.items()}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.actions.get(state.global_step, lambda: None)()


def errors(caplog: pytest.LogCaptureFixture, step: int | None = None) -> list[str]:
    """The errors that were logged, about one step or all."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.ERROR and (step is None or f"checkpoint-{step} " in record.getMessage())
    ]


# -- full ---------------------------------------------------------------------------------------------------------------


def wordy() -> PreTrainedTokenizerFast:
    """A tokenizer with a file of 200 kB, which the tokenizers library writes in Rust."""
    words = {f"word-{number}": number for number in range(8000)}
    raw = Tokenizer(models.WordLevel(words, unk_token="word-0"))
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="word-1")


@pytest.mark.parametrize(
    "leave", [0, 4096, 40_960, 102_400, 300_000], ids=lambda leave: f"{leave} bytes left"
)
@pytest.mark.parametrize("processing_class", [None, wordy()], ids=["model", "model and tokenizer"])
def test_a_disk_that_fills_up_costs_the_checkpoints_that_do_not_fit_and_nothing_else(
    processing_class: Any, leave: int, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    output_dir = disk.path / "out"
    trainer = runs.decorated(output_dir, processing_class=processing_class)
    trainer.add_callback(
        At(
            step3=lambda: (runs.wait(trainer), disk.fill(leave)),
            step5=lambda: (runs.wait(trainer), disk.empty()),
        )
    )
    trainer.train()
    assert runs.steps_done(trainer) == list(range(1, 9))
    assert checkpoints.whole(output_dir) == [2, 6, 8]
    assert len(errors(caplog, 4)) == 1
    assert "No space left on device" in errors(caplog, 4)[0]
    assert errors(caplog, 6) + errors(caplog, 8) == []


def test_the_tokenizers_own_writer_may_run_out_of_space_too(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = runs.decorated(disk.path / "out", processing_class=wordy())
    trainer.add_callback(At(step3=lambda: (runs.wait(trainer), disk.fill(102_400))))
    trainer.train()
    assert runs.steps_done(trainer) == list(range(1, 9))
    assert "(os error 28)" in errors(caplog, 4)[0]


def test_a_folder_that_does_not_fit_costs_the_checkpoint_it_was_to_be_copied_into(
    disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSpeed copies what it keeps on NVMe with shutil.copytree, whose error has no number."""
    swap = tmp_path / "swap"
    swap.mkdir()
    for number in range(3):
        (swap / f"{number}.bin").write_bytes(bytes(300_000))

    class Swapping(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            target = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}" / "swap"
            shutil.copytree(swap, target)

    trainer = runs.decorated(disk.path / "out", cls=Swapping)
    trainer.add_callback(
        At(
            step3=lambda: (runs.wait(trainer), disk.fill(400_000)),
            step5=lambda: (runs.wait(trainer), disk.empty()),
        )
    )
    trainer.train()
    assert runs.steps_done(trainer) == list(range(1, 9))
    assert checkpoints.whole(disk.path / "out") == [2, 6, 8]
    [told] = errors(caplog)
    assert "checkpoint-4/swap" in told
    assert "No space left on device" in told


def test_a_folder_of_the_users_that_cannot_be_copied_elsewhere_is_the_users_error(tmp_path: Path) -> None:
    class Copying(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            (tmp_path / "mine").mkdir()
            (tmp_path / "mine" / "link").symlink_to(tmp_path / "nowhere")
            shutil.copytree(tmp_path / "mine", tmp_path / "copy")

    with pytest.raises(shutil.Error):
        runs.decorated(tmp_path / "out", cls=Copying).train()


def test_a_disk_that_stays_full_costs_every_later_checkpoint_and_the_older_one_is_resumed_from(
    disk: Disk, relaunch: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    output_dir = disk.path / "out"
    trainer = runs.decorated(output_dir)
    trainer.add_callback(At(step3=lambda: (runs.wait(trainer), disk.fill(0))))
    trainer.train()
    assert runs.steps_done(trainer) == list(range(1, 9))
    assert [len(errors(caplog, step)) for step in (2, 4, 6, 8)] == [0, 1, 1, 1]
    relaunch()
    again = runs.decorated(output_dir, max_steps=4)
    again.train(resume_from_checkpoint=True)
    assert runs.steps_done(again) == [3, 4]


def test_a_disk_without_room_for_more_files_costs_checkpoints_only(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    output_dir = disk.path / "out"
    trainer = runs.decorated(output_dir)
    options = ["mount", "-o", "remount,nr_inodes=40", str(disk.path)]
    trainer.add_callback(At(step3=lambda: (runs.wait(trainer), subprocess.run(options, check=True))))
    trainer.train()
    assert runs.steps_done(trainer) == list(range(1, 9))
    assert 2 in checkpoints.whole(output_dir)
    assert len(errors(caplog, 8)) == 1


def test_a_disk_that_is_full_when_training_begins_is_told_and_training_runs(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.fill(0)
    trainer = runs.decorated(disk.path / "out", max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [1, 2, 3, 4]
    assert any("No space left on device" in text for text in errors(caplog))


def test_a_limit_of_the_file_size_costs_checkpoints_only(tmp_path: Path) -> None:
    """As a full disk, for machines on which nothing can be mounted."""
    submit = "datastates.llm.saver:Saver._submit"
    faults = [
        {"at": submit, "do": "limit", "amount": 100_000, "nth": 2, "times": 1},
        {"at": submit, "do": "unlimit", "nth": 3},
    ]
    job = Job(output_dir=str(tmp_path / "out"), log=str(tmp_path / "log"), orderly=True, faults=faults)
    training = Training(job)
    training.finish()
    assert checkpoints.whole(tmp_path / "out") == [2, 6, 8]
    [line] = [line for line in training.text().splitlines() if "[ERROR]" in line and "checkpoint-4 " in line]
    assert "File too large" in line


def under_the_launcher(directory: Path, limits: str = "true") -> str:
    """Run a training of 8 steps to its good end, after the shell's ``limits``; what it printed."""
    job = Job(str(directory / "out"), str(directory / "log"), decorated=False, resume=None)
    script = [
        sys.executable,
        "-m",
        "ckpt_run",
        sys.executable,
        str(SCRIPTS / "train.py"),
        json.dumps(asdict(job)),
    ]
    command = ["bash", "-c", f"{limits} && exec {shlex.join(script)}"]
    process = processes.launch(command, directory / "out.txt", CKPT_RUN_HOST_CACHE_SIZE="")
    try:
        code = process.wait(processes.PATIENCE)
    finally:
        processes.kill_tree(process)
    text = (directory / "out.txt").read_text()
    assert code == 0, text[-5000:]
    assert [step for step, _ in processes.losses(job)] == list(range(1, 9))
    return text


def test_a_limit_of_the_file_size_below_everything_is_told_and_training_runs(tmp_path: Path) -> None:
    told = [line for line in under_the_launcher(tmp_path, "ulimit -f 50").splitlines() if "[ERROR]" in line]
    assert ["is off for this training" in line for line in told] == [True, False, False, False, False]
    assert "File too large (the limit of file size, ulimit -f, counts for it as well)" in told[0]
    for step, line in zip((2, 4, 6, 8), told[1:], strict=True):
        assert f"checkpoint-{step} was not saved, training goes on" in line
        assert "File too large" in line


def test_a_read_only_output_directory_is_told_under_the_launcher_and_training_runs(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with disks.read_only(tmp_path / "out"):
        text = under_the_launcher(tmp_path)
    told = [line for line in text.splitlines() if "[ERROR]" in line]
    assert ["is off for this training" in line for line in told] == [True, False, False, False, False]
    assert all("Read-only file system" in line for line in told)
    assert "Traceback" not in text
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    "ours", ["datastates.llm.host_cache:engine", "datastates.store.journal:Journal.__init__"]
)
def test_where_trainer_saves_by_itself_it_is_known_that_training_has_finished(
    tmp_path: Path, ours: str
) -> None:
    job = Job(
        output_dir=str(tmp_path / "out"),
        log=str(tmp_path / "log"),
        resume=None,
        faults=[{"at": ours, "do": "ENOMEM"}],
    )
    training = Training(job)
    training.finish()
    assert "is off for this training" in training.text()
    record = RunRecord.read(Root.of(tmp_path / "out"))
    assert record is not None
    assert (record.state, record.step) == ("finished", 8)


def test_where_trainer_saves_by_itself_another_trainings_record_is_left_alone(tmp_path: Path) -> None:
    first = runs.decorated(tmp_path, max_steps=4)
    seen = []

    class Second(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                job = Job(output_dir=str(tmp_path), log=str(tmp_path / "log"), resume=False)
                Training(job).finish()
                seen.append(RunRecord.read(Root.of(tmp_path)))

    first.add_callback(Second())
    first.train()
    assert [record.state for record in seen] == ["running"]


# -- broken -------------------------------------------------------------------------------------------------------------


def test_a_disk_that_becomes_read_only_costs_checkpoints_only(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    output_dir = disk.path / "out"
    trainer = runs.decorated(output_dir)
    trainer.add_callback(At(step5=lambda: (runs.wait(trainer), disks.freeze(disk.path))))
    trainer.train()
    assert runs.steps_done(trainer) == list(range(1, 9))
    assert checkpoints.whole(output_dir) == [2, 4]
    assert [len(errors(caplog, step)) for step in (6, 8)] == [1, 1]
    assert "Read-only file system" in errors(caplog, 6)[0]


def test_a_read_only_directory_is_told_and_training_runs(
    disk: Disk, relaunch: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    output_dir = disk.path / "out"
    runs.decorated(output_dir, max_steps=4).train()
    disks.freeze(disk.path)
    relaunch()
    trainer = runs.decorated(output_dir)
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [5, 6, 7, 8]
    assert len([text for text in errors(caplog) if "is off for this training" in text]) == 1
    assert checkpoints.whole(output_dir) == [2, 4]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("what", ["fsync_file", "fsync_directory", "write_durably"])
def test_an_error_while_a_checkpoint_is_committed_costs_that_checkpoint(
    what: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = getattr(durable, what)

    def broken(path: Path, *rest: Any) -> Any:
        if "checkpoint-4" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return original(path, *rest)

    for module in (commit, durable):
        monkeypatch.setattr(module, what, broken)
    trainer = runs.decorated(tmp_path)
    trainer.train()
    assert runs.steps_done(trainer) == list(range(1, 9))
    assert checkpoints.whole(tmp_path) == [2, 6, 8]
    assert len(errors(caplog, 4)) == 1
    assert os.strerror(number) in errors(caplog, 4)[0]


# -- in the way ---------------------------------------------------------------------------------------------------------


def test_a_file_in_the_place_of_our_directory_leaves_the_saving_to_trainer(
    tmp_path: Path, relaunch: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "concurrent_checkpoint").write_text("mine")
    trainer = runs.decorated(tmp_path, max_steps=4, save_total_limit=1)
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [1, 2, 3, 4]
    [text] = [text for text in errors(caplog) if "is off for this training" in text]
    assert "concurrent_checkpoint" in text
    assert (tmp_path / "concurrent_checkpoint").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4"]
    relaunch()
    again = runs.decorated(tmp_path, max_steps=6)
    assert os.environ["CKPT_LAST_STEP"] == "4"
    again.train(resume_from_checkpoint=True)
    assert runs.steps_done(again) == [5, 6]


def test_an_output_directory_that_cannot_be_made_any_more_costs_checkpoints_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = runs.decorated(tmp_path / "parent" / "out")
    shutil.rmtree(tmp_path / "parent")
    (tmp_path / "parent").write_text("a file")
    trainer.train()
    assert runs.steps_done(trainer) == list(range(1, 9))
    assert len([text for text in errors(caplog) if "is off for this training" in text]) == 1
    assert [len(errors(caplog, step)) for step in (2, 4, 6, 8)] == [1, 1, 1, 1]


def test_an_output_directory_that_cannot_be_made_fails_as_in_stock(tmp_path: Path) -> None:
    (tmp_path / "parent").write_text("a file")
    failures = []
    for build in (tiny.trainer, runs.decorated):
        with pytest.raises(OSError) as failure:
            build(tmp_path / "parent" / "out")
        failures.append((failure.type, str(failure.value)))
    assert failures[0] == failures[1]


@pytest.mark.parametrize("when", ["between saves", "with a save in flight"])
def test_a_directory_that_is_removed_during_training_costs_what_was_in_it(
    when: str, tmp_path: Path, relaunch: Callable[[], None]
) -> None:
    output_dir = tmp_path / "out"
    trainer = runs.decorated(output_dir)

    def remove() -> None:
        if when == "between saves":
            runs.wait(trainer)
        shutil.rmtree(output_dir, ignore_errors=True)

    trainer.add_callback(At(step4=remove))
    trainer.train()
    assert runs.steps_done(trainer) == list(range(1, 9))
    assert checkpoints.whole(output_dir)[-2:] == [6, 8]
    relaunch()
    again = runs.decorated(output_dir, max_steps=9)
    again.train(resume_from_checkpoint=True)
    assert runs.steps_done(again) == [9]


@pytest.mark.parametrize("moment", ["cast_vote", "collect_votes", "publish"])
def test_a_checkpoint_that_a_callback_removes_while_it_is_saved_is_given_up_with_one_error(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original, reached, removed = getattr(commit, moment), threading.Event(), threading.Event()

    def held_up(checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        if checkpoint.step == 4:
            reached.set()
            assert removed.wait(60)
        return original(checkpoint, *args, **kwargs)

    def remove() -> None:
        assert reached.wait(60)
        shutil.rmtree(runs.checkpoint(tmp_path, 4))
        removed.set()

    monkeypatch.setattr(commit, moment, held_up)
    trainer = runs.decorated(tmp_path, callbacks=[At(step4=remove)])
    trainer.train()
    assert runs.steps_done(trainer) == list(range(1, 9))
    assert checkpoints.whole(tmp_path) == [2, 6, 8]
    [told] = errors(caplog)
    assert "checkpoint-4 was not committed" in told
    assert commit.GONE in told


def test_a_checkpoint_that_is_removed_again_and_again_while_it_is_saved_costs_only_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whenever something of it is there: also while stock code writes."""
    over = threading.Event()

    def remove() -> None:
        while not over.wait(0.0005):
            shutil.rmtree(runs.checkpoint(tmp_path, 4), ignore_errors=True)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        trainer = runs.decorated(tmp_path, processing_class=wordy())
        trainer.train()
    finally:
        over.set()
        thread.join()
    assert runs.steps_done(trainer) == list(range(1, 9))
    assert checkpoints.whole(tmp_path) == [2, 6, 8]
    assert len(errors(caplog, 4)) <= 1, errors(caplog)  # none: it was whole before it was removed
    assert errors(caplog) == errors(caplog, 4)


# -- errors of the user's -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        ValueError("mine"),
        FileNotFoundError(errno.ENOENT, "No such file", "/data/labels.txt"),
        ConnectionError("mine"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("first", [True, False], ids=["before super", "after super"])
def test_an_exception_in_a_users_own_override_is_raised_as_it_is(
    first: bool, error: Exception, tmp_path: Path
) -> None:
    class Own(Trainer):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            if first and self.state.global_step == 4:
                raise error
            super()._save_checkpoint(*args, **kwargs)
            if self.state.global_step == 4:
                raise error

    trainer = runs.decorated(tmp_path, cls=Own)
    with pytest.raises(type(error)) as raised:
        trainer.train()
    assert raised.value is error
    assert runs.steps_done(trainer) == [1, 2, 3, 4]
    assert checkpoints.whole(tmp_path) == [2]


def test_a_callback_that_reads_is_not_called_for_a_save_that_came_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reads(TrainerCallback):
        steps: list[int] = []  # noqa: RUF012

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "model.safetensors"
            self.steps.append(state.global_step)
            assert path.stat().st_size

    original = commit.publish

    def broken(checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        if checkpoint.step == 4:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(checkpoint, *args, **kwargs)

    monkeypatch.setattr(commit, "publish", broken)
    trainer = runs.decorated(tmp_path, callbacks=[Reads()])
    trainer.train()
    assert runs.steps_done(trainer) == list(range(1, 9))
    assert Reads.steps == [2, 6, 8]


# -- the end ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_an_exception_in_training_waits_for_what_is_in_flight(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = commit.publish

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return original(*args, **kwargs)

    def fail() -> None:
        raise error

    monkeypatch.setattr(commit, "publish", slow)
    trainer = runs.decorated(tmp_path, callbacks=[At(step2=fail)])
    with pytest.raises(type(error)) as raised:
        trainer.train()
    assert raised.value is error
    assert checkpoints.whole(tmp_path) == [2]
    assert get_last_checkpoint(str(tmp_path)) == str(runs.checkpoint(tmp_path, 2))


def hangs(tmp_path: Path, **changes: Any) -> Job:
    """A training whose last save never ends."""
    fault = {"at": "datastates.store.commit:publish", "do": "sleep", "amount": 10**6, "nth": 2}
    settings = {"exit_timeout": 1}
    return Job(
        output_dir=str(tmp_path / "out"),
        log=str(tmp_path / "log"),
        arguments={"max_steps": 4, "save_steps": 2},
        settings=settings,
        faults=[fault],
        orderly=True,
        **changes,
    )


def test_the_end_of_training_waits_no_longer_than_exit_timeout_and_says_so_once(tmp_path: Path) -> None:
    training = Training(hangs(tmp_path))
    training.finish()
    assert checkpoints.whole(tmp_path / "out") == [2]
    assert training.text().count("waiting for checkpoint-4") == 1
    assert training.text().count("gave up waiting after 1 s (exit_timeout)") == 1


def test_the_interpreter_exits_though_a_save_never_ends(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "train.py"), json.dumps(asdict(hangs(tmp_path)))]
    process = processes.launch(command, tmp_path / "out.txt")
    try:
        assert process.wait(processes.PATIENCE) == 0, (tmp_path / "out.txt").read_text()[-3000:]
    finally:
        processes.kill_tree(process)
    assert "gave up waiting" in (tmp_path / "out.txt").read_text()


def test_after_a_save_that_never_ended_the_next_launch_resumes_from_the_one_before(tmp_path: Path) -> None:
    Training(hangs(tmp_path)).finish()
    trainer = runs.decorated(tmp_path / "out", max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    assert runs.steps_done(trainer) == [3, 4]
    assert [path.name.split("-")[0] for path in Root.of(tmp_path / "out").aside.iterdir()] == ["4"]
