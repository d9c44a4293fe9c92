"""What can be set, how, and what is said about a value that cannot be."""

from __future__ import annotations

import logging
import re
import resource
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import runs
import tiny
from datastates.llm import DecoratedCheckpointing, host_cache
from datastates.llm.decorator import attach
from datastates.llm.ranks import Ranks
from datastates.settings import TABLE, SettingError, load

GIB = 1 << 30


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("host_cache", "host_cache_size"),
        ("hostcachesize", "host_cache_size"),
        ("parser_thread", "parser_threads"),
        ("pin_host_memory", "pin_host_cache"),
        ("keep_trainer_save", "keep_trainer_saves"),
        ("trainner", "trainer"),
        ("commit_time_out", "commit_timeout"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest_known_one(wrong: str, right: str) -> None:
    with pytest.raises(SettingError, match=f"'{wrong}'; did you mean '{right}'"):
        load({wrong: 1})


def test_an_unknown_key_is_refused_before_the_trainer_is_touched(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path)
    before = dict(vars(trainer))
    with pytest.raises(SettingError, match="host_cache_size"):
        DecoratedCheckpointing({"trainer": trainer, "host_cash_size": 1}, -1)
    assert vars(trainer) == before


BAD: dict[str, list[Any]] = {
    "host_cache_size": [0, -1, "big", True, float("nan"), float("inf"), [1]],
    "parser_threads": [0, -2, 1.5, "two", False, float("inf"), float("nan")],
    "pin_host_cache": [2, "maybe", -1],
    "keep_trainer_saves": [2, "never"],
    "commit_timeout": [0, -1.0, "soon", True, 10**400],
    "exit_timeout": [0, "inf"],
    "resume": ["sometimes", 1, True],
    "io": ["fast", 0],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_a_value_that_cannot_be_is_refused_with_its_key_and_itself(key: str, value: Any) -> None:
    with pytest.raises(SettingError) as refused:
        load({key: value})
    message = str(refused.value)
    assert re.match(
        rf"runtime_config\['{key}'\] is {re.escape(repr(value))}: expected [a-z0-9, ]+ \(", message
    )
    choices = re.search(r"expected one of (.+?) \(", message)
    assert not choices or message.count(choices[1]) == 1


@pytest.mark.parametrize("key", BAD)
def test_a_bad_value_in_the_environment_is_refused_with_the_variable(key: str) -> None:
    [variable] = [setting.variable for setting in TABLE if setting.key == key]
    with pytest.raises(SettingError, match=f"{variable} is '-x'"):
        load({}, {variable: "-x"})


def test_every_setting_can_be_set_by_its_variable_and_the_script_wins() -> None:
    values: dict[str, tuple[str, Any, Any]] = {
        "host_cache_size": ("1.5", 1.5, 2),
        "parser_threads": ("3", 3, 4),
        "pin_host_cache": ("0", False, True),
        "resume": ("auto", "auto", "required"),
        "keep_trainer_saves": ("yes", True, False),
        "commit_timeout": ("60", 60.0, 61.0),
        "exit_timeout": ("60", 60.0, 61.0),
        "io": ("buffered", "buffered", "direct"),
        "snapshot": ("eager", "eager", "late"),
        "loop_saves": ("wait", "wait", "off"),
        "occupied": ("take", "take", "refuse"),
        "cuda_driver": ("/opt/libcuda.so", "/opt/libcuda.so", "libcuda.so.2"),
    }
    assert values.keys() == {setting.key for setting in TABLE}
    for setting in TABLE:
        text, meant, scripts = values[setting.key]
        assert getattr(load({}, {}), setting.key) == setting.default
        assert getattr(load({}, {setting.variable: text}), setting.key) == meant
        assert getattr(load({}, {setting.variable: ""}), setting.key) == setting.default
        assert getattr(load({setting.key: scripts}, {setting.variable: text}), setting.key) == scripts
        assert getattr(load({setting.key: None}, {setting.variable: text}), setting.key) == meant


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save makes the engine anew."""
    monkeypatch.setattr(host_cache, "_engine", None)


def test_the_variable_sizes_the_host_cache(
    no_engine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CKPT_RUN_HOST_CACHE_SIZE", "0.125")
    runs.decorated(tmp_path, max_steps=2).train()
    assert host_cache._engine is not None
    assert host_cache._engine.cache_bytes == GIB // 8


def test_the_script_wins_over_the_variable(
    no_engine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CKPT_RUN_HOST_CACHE_SIZE", "0.125")
    runs.decorated(tmp_path, {"host_cache_size": 0.0625}, max_steps=2).train()
    assert host_cache._engine is not None
    assert host_cache._engine.cache_bytes == GIB // 16


def test_without_a_size_it_is_derived_and_said_once(
    no_engine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CKPT_RUN_HOST_CACHE_SIZE")
    for name in ("first", "second"):
        runs.decorated(tmp_path / name, max_steps=2).train()
    said = [record for record in caplog.records if "host cache:" in record.message]
    assert [record.levelno for record in said] == [logging.INFO]
    assert "host_cache_size sets it" in said[0].message


def test_the_derived_size_is_shared_among_the_ranks_of_the_host() -> None:
    assert host_cache.default_size(64 * GIB, 1) == 16 * GIB
    assert host_cache.default_size(64 * GIB, 8) == 2 * GIB
    assert host_cache.default_size(0, 8) == 64 << 20


def test_more_memory_than_the_machine_has_is_refused_in_the_log_and_training_is_saved_all_the_same(
    no_engine: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs.decorated(tmp_path, {"host_cache_size": 1_000_000}, max_steps=2).train()
    [error] = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert "host_cache_size=1e+06 GiB is refused" in error
    assert "CKPT_RUN_HOST_CACHE_SIZE" in error
    assert checkpoints.whole(tmp_path) == [2]


def test_less_memory_than_the_engine_can_work_with_is_refused_in_the_log(
    no_engine: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs.decorated(tmp_path, {"host_cache_size": 1e-6}, max_steps=2).train()
    [error] = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert "host_cache_size=1e-06 GiB is refused" in error
    assert "smaller" not in error
    assert checkpoints.whole(tmp_path) == [2]


def test_more_memory_than_a_limit_of_the_process_leaves_is_refused_in_the_log(
    no_engine: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (GIB // 8, before[1]))  # the cache is a file without a name
    try:
        runs.decorated(tmp_path, {"host_cache_size": 0.25}, max_steps=2).train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    [error] = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert "host_cache_size=0.25 GiB is refused" in error
    assert checkpoints.whole(tmp_path) == [2]


# -- the call itself ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [-1, 0, 3])
def test_a_rank_or_minus_one_will_do_and_the_trainer_knows_better(rank: int, tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, max_steps=2)
    DecoratedCheckpointing({"trainer": trainer}, rank=rank)
    trainer.train()
    assert checkpoints.whole(tmp_path) == [2]
    assert Ranks.of(trainer) == Ranks(0, 1, 0, 1)


def test_the_rank_may_be_left_out(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, max_steps=2)
    DecoratedCheckpointing({"trainer": trainer})
    trainer.train()
    assert checkpoints.whole(tmp_path) == [2]


@pytest.mark.parametrize("rank", [-2, "0", True, 1.0, None])
def test_what_is_no_rank_is_refused(rank: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="rank is"):
        DecoratedCheckpointing({"trainer": tiny.trainer(tmp_path)}, rank)


@pytest.mark.parametrize("config", [{}, {"trainer": None}, {"trainer": "mine"}, {"host_cache_size": 1}])
def test_a_missing_trainer_is_an_error_that_says_what_is_expected(config: dict[str, Any]) -> None:
    with pytest.raises(
        TypeError, match=r"runtime_config\['trainer'\] is .*; expected a transformers.Trainer"
    ):
        DecoratedCheckpointing(config, -1)


def test_a_trainer_in_place_of_the_settings_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="expected a dict with the key 'trainer'"):
        DecoratedCheckpointing(tiny.trainer(tmp_path), -1)  # type: ignore[arg-type]


def test_a_trainer_that_the_launcher_has_decorated_takes_the_scripts_settings(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, max_steps=2)
    attachment = attach(trainer)
    assert not attachment.settings.keep_trainer_saves
    runs.decorate(trainer, keep_trainer_saves=True)
    assert attach(trainer) is attachment
    assert attachment.settings.keep_trainer_saves
    trainer.train()
    assert checkpoints.whole(tmp_path) == [2]
    assert (tmp_path / "checkpoint-2").is_dir()
