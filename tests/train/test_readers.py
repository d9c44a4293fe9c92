"""Whoever reads a checkpoint finds it complete, and nobody else is made to wait for it."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import checkpoints
import pytest
import runs
import tiny
import torch
import transformers.trainer
from checkpoints import whole
from datastates.llm.fence import FENCE
from datastates.llm.readers import reads_on_save
from datastates.store.journal import read_events
from datastates.store.layout import Root
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects
from transformers import Trainer, TrainerCallback
from transformers.integrations import integration_utils
from transformers.integrations.integration_utils import MLflowCallback, TensorBoardCallback, WandbCallback

STEPS = [2, 4, 6, 8]
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
}


class Overlapping(Trainer):
    """Notes at which steps training went on while a save was still being copied."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if FENCE.busy:
            self.__dict__.setdefault("overlapped", []).append(self.state.global_step)
        return super().training_step(*args, **kwargs)


def overlapped(trainer: Trainer) -> list[int]:
    return getattr(trainer, "overlapped", [])


def waits(output_dir: Path) -> list[str]:
    """Why this training waited for commits, from its journal."""
    events = read_events(Root.of(output_dir))
    return [event.text("what") for event in events if event.kind == "wait"]


# -- callbacks of the user's --------------------------------------------------------------------------------------------


class Reads(TrainerCallback):
    """Copies the checkpoint to somewhere else, as people do, where the documentation of Trainer says it is."""

    def __init__(self) -> None:
        self.found: dict[int, set[str]] = {}
        self.committed: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.found[state.global_step] = {name for name, data in checkpoints.tree(directory).items() if data}
        self.committed = whole(directory.parent.parent)


def test_a_callback_finds_the_complete_checkpoint_in_its_output_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reads = Reads()
    trainer = runs.decorate(tiny.trainer(tmp_path, callbacks=[reads]))
    trainer.train()
    assert reads.found == dict.fromkeys(STEPS, FILES)
    assert reads.committed == STEPS
    told = [record.message for record in caplog.records if "waiting for each checkpoint" in record.message]
    assert len(told) == 1
    assert "Reads" in told[0]


def test_the_output_directory_is_the_users_own_again_after_on_save(tmp_path: Path) -> None:
    seen: list[str] = []

    class Looks(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise RuntimeError("the user's own trouble")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(args.output_dir)

    trainer = runs.decorate(tiny.trainer(tmp_path, callbacks=[Looks()]))
    with pytest.raises(RuntimeError, match="the user's own trouble"):
        trainer.train()
    assert {*seen, trainer.args.output_dir} == {str(tmp_path)}
    assert whole(tmp_path) == [2]


def test_a_callback_without_on_save_makes_nobody_wait(late: Any, tmp_path: Path) -> None:
    trainer = runs.decorate(tiny.trainer(tmp_path, cls=Overlapping, callbacks=[runs.Watch()]))
    trainer.train()
    assert overlapped(trainer) == [2, 4, 6]
    assert waits(tmp_path) == ["end"]
    assert whole(tmp_path) == STEPS


def test_everything_is_committed_when_on_train_end_is_called(late: Any, tmp_path: Path) -> None:
    at_end: list[list[int]] = []

    class AtEnd(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            at_end.append(whole(tmp_path))

    runs.decorate(tiny.trainer(tmp_path, callbacks=[AtEnd()])).train()
    assert at_end == [STEPS]


# -- Trainer's own integrations -----------------------------------------------------------------------------------------


class Artifacts:
    """Stands for a tracker's client: keeps what it was given to upload, and the names it found there at that moment."""

    def __init__(self) -> None:
        self.uploads: dict[str, set[str]] = {}

    def add_dir(self, path: str) -> None:
        self.uploads[Path(path).name] = {name for name, data in checkpoints.tree(Path(path)).items() if data}

    def log_model(self, name: str, artifacts: dict[str, str], **kwargs: Any) -> None:
        self.add_dir(artifacts["model_path"])


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Artifacts:
    """wandb, mlflow and tensorboard can be imported, and talk to nobody."""
    artifacts = Artifacts()
    wandb, mlflow = MagicMock(), MagicMock()
    wandb.Artifact.return_value.add_dir = artifacts.add_dir
    wandb.sdk.lib.config_util.ConfigError = KeyError
    mlflow.__version__ = "2.9.0"
    mlflow.utils.validation.MAX_PARAM_VAL_LENGTH = 6000
    mlflow.utils.validation.MAX_PARAMS_TAGS_PER_BATCH = 100
    mlflow.pyfunc.log_model = artifacts.log_model
    modules = {
        "wandb": wandb,
        "wandb.sdk": wandb.sdk,
        "wandb.sdk.lib": wandb.sdk.lib,
        "wandb.sdk.lib.config_util": wandb.sdk.lib.config_util,
        "mlflow": mlflow,
        "torch.utils.tensorboard": MagicMock(),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("wandb", "mlflow", "tensorboard"):
        monkeypatch.setattr(integration_utils, f"is_{name}_available", lambda: True)
    return artifacts


TOLD = {WandbCallback: ("WANDB_LOG_MODEL", "checkpoint"), MLflowCallback: ("HF_MLFLOW_LOG_ARTIFACTS", "1")}


@pytest.mark.parametrize("kind", [WandbCallback, MLflowCallback, TensorBoardCallback])
def test_an_integration_does_not_make_saves_synchronous(
    kind: type[TrainerCallback], client: Artifacts, late: Any, tmp_path: Path
) -> None:
    trainer = runs.decorate(tiny.trainer(tmp_path, cls=Overlapping, callbacks=[kind()]))
    trainer.train()
    assert overlapped(trainer) == [2, 4, 6]
    assert waits(tmp_path) == ["end"]
    assert whole(tmp_path) == STEPS
    assert client.uploads == {}


@pytest.mark.parametrize("kind", TOLD)
def test_an_integration_that_was_told_to_upload_finds_the_complete_checkpoint(
    kind: type[TrainerCallback],
    client: Artifacts,
    late: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(*TOLD[kind])
    trainer = runs.decorate(tiny.trainer(tmp_path, cls=Overlapping, callbacks=[kind()]))
    trainer.train()
    assert client.uploads == {f"checkpoint-{step}": FILES for step in STEPS}
    assert overlapped(trainer) == []


def test_what_a_subclass_of_an_integration_does_itself_is_the_users(client: Artifacts) -> None:
    class LogsMore(WandbCallback):
        def on_log(self, *args: Any, **kwargs: Any) -> None:
            super().on_log(*args, **kwargs)

    class SavesToo(WandbCallback):
        def on_save(self, *args: Any, **kwargs: Any) -> None:
            super().on_save(*args, **kwargs)

    assert not reads_on_save(LogsMore())
    assert reads_on_save(SavesToo())


def test_a_handler_put_on_the_callback_itself_counts() -> None:
    callback = runs.Watch()
    assert not reads_on_save(callback)
    callback.on_save = lambda *args, **kwargs: None  # type: ignore[method-assign]
    assert reads_on_save(callback)


# -- the Hub ------------------------------------------------------------------------------------------------------------


class Upload:
    """One call of ``HfApi.upload_folder``: which files it would have taken, and their contents, at that moment."""

    def __init__(self, folder_path: Any, path_in_repo: str | None, ignore_patterns: Any) -> None:
        self.place = path_in_repo
        folder = Path(folder_path)
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        taken = filter_repo_objects(names, ignore_patterns=ignore_patterns)
        self.files = {name: (folder / name).read_bytes() for name in taken}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Upload]:
    """What was uploaded, in order; nothing leaves the machine."""
    uploads: list[Upload] = []

    def upload_folder(
        self: Any, *, folder_path: Any, path_in_repo: Any = None, ignore_patterns: Any = None, **_: Any
    ) -> Any:
        uploads.append(Upload(folder_path, path_in_repo, ignore_patterns))
        return MagicMock()

    def create_repo(self: Any, repo_id: str, **_: Any) -> Any:
        return MagicMock(repo_id=f"me/{repo_id}")

    for stand_in in (upload_folder, create_repo):
        monkeypatch.setattr(HfApi, stand_in.__name__, stand_in)
        if hasattr(transformers.trainer, stand_in.__name__):  # transformers 4 has bound them by name
            bound = functools.partial(stand_in, None)
            monkeypatch.setattr(transformers.trainer, stand_in.__name__, bound)
    return uploads


def pushing(output_dir: Path, **how: Any) -> Trainer:
    trainer = tiny.trainer(output_dir, cls=Overlapping, push_to_hub=True, hub_always_push=True, **how)
    return runs.decorate(trainer)


def test_the_model_is_complete_when_it_is_uploaded_and_no_checkpoint_goes_with_it(
    hub: list[Upload], late: Any, tmp_path: Path
) -> None:
    trainer = pushing(tmp_path, max_steps=4)
    trainer.train()
    assert len(hub) == 2
    for step, upload in zip((2, 4), hub, strict=True):
        saved = runs.checkpoint(tmp_path, step)
        assert upload.files["model.safetensors"] == (saved / "model.safetensors").read_bytes()
        assert upload.files["config.json"] == (saved / "config.json").read_bytes()
        assert not [name for name in upload.files if "concurrent_checkpoint" in name or "optimizer" in name]


def test_the_last_push_takes_no_checkpoint_either(hub: list[Upload], tmp_path: Path) -> None:
    trainer = pushing(tmp_path, max_steps=2, hub_strategy="end")
    trainer.train()
    assert hub == []
    trainer.create_model_card = lambda **_: None
    trainer.push_to_hub()
    pushed = hub[-1].files
    assert "model.safetensors" in pushed
    assert not [name for name in pushed if "concurrent_checkpoint" in name or "optimizer" in name]


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_a_pushed_checkpoint_is_the_committed_one_without_our_own_records(
    strategy: str, hub: list[Upload], tmp_path: Path
) -> None:
    trainer = pushing(tmp_path, max_steps=4, hub_strategy=strategy)
    trainer.train()
    pushed = [(upload.place, upload.files) for upload in hub if upload.place]
    places = {"checkpoint": ["last-checkpoint"] * 2, "all_checkpoints": ["checkpoint-2", "checkpoint-4"]}
    committed = [checkpoints.tree(runs.checkpoint(tmp_path, step)) for step in (2, 4)]
    assert pushed == list(zip(places[strategy], committed, strict=True))
    assert pushed[1][1].keys() == FILES


def test_an_upload_of_another_folder_is_left_as_it_is(hub: list[Upload], tmp_path: Path) -> None:
    pushing(tmp_path / "out")
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "data" / "sub" / "notes.txt").write_text("notes")
    (tmp_path / "data" / "skip.txt").write_text("skip")
    HfApi().upload_folder(repo_id="me/data", folder_path=tmp_path / "data", ignore_patterns="skip*")
    assert hub[-1].files == {"sub/notes.txt": b"notes"}
