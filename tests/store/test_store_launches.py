from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from datastates.store import launches
from datastates.store.launches import LaunchRecord, note_output_dir

COMMAND = ("python", "train.py", "--lr", "1e-3")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "state/ckpt-run"


def test_a_launch_is_found_again_by_its_command_and_directory(home: Path, tmp_path: Path) -> None:
    record = LaunchRecord.begin("run1", COMMAND, "/out")
    assert record.write()
    assert LaunchRecord.find(str(tmp_path), COMMAND) == record
    assert LaunchRecord.find(str(tmp_path), (*COMMAND, "--more")) is None
    assert LaunchRecord.find("/elsewhere", COMMAND) is None


def test_the_newest_launch_of_a_directory_is_found_whatever_it_ran(home: Path, tmp_path: Path) -> None:
    first = LaunchRecord.begin("run1", COMMAND)
    first.write()
    second = replace(LaunchRecord.begin("run2", ("python", "other.py")), started=first.started + 1)
    second.write()
    replace(second, cwd="/elsewhere", started=first.started + 2).write()
    assert LaunchRecord.newest(str(tmp_path)) == second
    assert LaunchRecord.newest("/nowhere") is None


def test_the_output_directory_that_the_process_notes_wins_over_the_launchers_guess(
    home: Path, tmp_path: Path
) -> None:
    record = LaunchRecord.begin("run1", COMMAND, "/guess")
    record.write()
    assert note_output_dir("run1", "out")
    replace(record, restarts=1).write()
    found = LaunchRecord.find(str(tmp_path), COMMAND)
    assert found and (found.output_dir, found.restarts) == (str(tmp_path / "out"), 1)
    note_output_dir("run1", "/another")
    assert LaunchRecord.newest(str(tmp_path)) == replace(found, output_dir="/another")


@pytest.mark.parametrize(("code", "state"), [(0, "finished"), (1, "failed"), (-9, "failed"), (143, "failed")])
def test_the_end_of_a_launch_is_recorded(home: Path, tmp_path: Path, code: int, state: str) -> None:
    LaunchRecord.begin("run1", COMMAND).over(code).write()
    found = LaunchRecord.find(str(tmp_path), COMMAND)
    assert found and (found.exit_code, found.state) == (code, state)
    assert found.ended


def test_only_the_user_can_read_what_commands_were_run(home: Path) -> None:
    path = LaunchRecord.begin("run1", COMMAND).write()
    assert path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_without_a_writable_home_everything_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for home in (str(tmp_path / "file"), "/proc/none"):
        monkeypatch.setenv("XDG_STATE_HOME", home)
        assert LaunchRecord.begin("run1", COMMAND).write() is None
        assert note_output_dir("run1", "/out") is None
        assert LaunchRecord.find(os.getcwd(), COMMAND) is None
        assert LaunchRecord.newest(os.getcwd()) is None


def test_the_default_place_is_below_the_home_and_a_relative_setting_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    for setting in ("", "relative/path"):
        monkeypatch.setenv("XDG_STATE_HOME", setting)
        assert launches.state_home() == Path("/home/somebody/.local/state/ckpt-run")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert launches.state_home() == Path("/home/somebody/.local/state/ckpt-run")


@pytest.mark.parametrize(
    "data", [b"", b"{}", bytes(50), b'{"version": 9}', b'{"version": 1, "run_id": "../x"}']
)
def test_a_damaged_record_is_as_good_as_none(home: Path, tmp_path: Path, data: bytes) -> None:
    path = LaunchRecord.begin("run1", COMMAND).write()
    assert path
    note_output_dir("run1", "/out")
    path.write_bytes(data)
    assert LaunchRecord.find(str(tmp_path), COMMAND) is None
    assert LaunchRecord.newest(str(tmp_path)) is None


def test_a_run_id_that_is_no_name_is_not_noted(home: Path) -> None:
    assert note_output_dir("../../etc/x", "/out") is None


def test_old_launches_are_forgotten(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "KEPT", 3)
    for number in range(20):
        path = LaunchRecord.begin(f"run{number}", (*COMMAND, str(number))).write()
        assert path
        os.utime(path, (number, number))
    assert len(list(home.iterdir())) <= 7
    assert LaunchRecord.find(os.getcwd(), (*COMMAND, "19"))
    assert LaunchRecord.find(os.getcwd(), (*COMMAND, "0")) is None
