"""What the command finds in its environment: our variables, the user's in front of our defaults, options in front of both."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ckpt_run import environment
from datastates.settings import TABLE
from launch_tools import CKPT_RUN, HOOK, PRINT_ENVIRONMENT, Sandbox, commit_checkpoint
from waiting import until

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


def seen(
    sandbox: Sandbox, *options: str, arguments: tuple[str, ...] = (), **variables: str
) -> dict[str, str]:
    """The environment that a program gets."""
    done = sandbox.run(*options, sys.executable, "-c", PRINT_ENVIRONMENT, *arguments, env=variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_everything_else_is_passed_on_unchanged(sandbox: Sandbox) -> None:
    plain = json.loads(sandbox.plain(sys.executable, "-c", PRINT_ENVIRONMENT).stdout)
    wrapped = seen(sandbox)
    ours = {
        name
        for name in wrapped
        if name.startswith(("CKPT_", "CHECKPOINT_VENDOR", "PYTHON")) or name in OFFLINE
    }
    assert {name: value for name, value in wrapped.items() if name not in ours} == plain


def test_a_c_locale_is_passed_on_unchanged(sandbox: Sandbox) -> None:
    env = {name: value for name, value in sandbox.env.items() if name != "LANG"}
    done = subprocess.run(
        [CKPT_RUN, "env"], env={**env, "LC_ALL": ""}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    done = subprocess.run([CKPT_RUN, "/usr/bin/env"], env=env, capture_output=True, text=True, timeout=60)
    assert "LC_CTYPE" not in done.stdout


def test_the_hook_comes_first_and_is_named(sandbox: Sandbox) -> None:
    found = seen(sandbox)
    assert found["PYTHONPATH"] == found["CHECKPOINT_VENDOR"] == HOOK


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", HOOK),
        ("/a:/b", f"{HOOK}:/a:/b"),
        ("/a:", f"{HOOK}:/a:"),
        (":/a", f"{HOOK}::/a"),
        (HOOK, HOOK),
        (f"/a:{HOOK}:/b:{HOOK}/", f"{HOOK}:/a:/b"),
    ],
)
def test_the_users_pythonpath_is_kept_entry_by_entry(sandbox: Sandbox, given: str, expected: str) -> None:
    assert seen(sandbox, PYTHONPATH=given)["PYTHONPATH"] == expected


def test_downloads_are_off_unless_asked_for(sandbox: Sandbox) -> None:
    assert [seen(sandbox).get(name) for name in OFFLINE] == ["1", "1", "1"]
    assert [seen(sandbox, "--online").get(name) for name in OFFLINE] == [None, None, None]


def test_offline_variables_of_the_user_win(sandbox: Sandbox) -> None:
    found = seen(sandbox, HF_HUB_OFFLINE="0", HF_DATASETS_OFFLINE="")
    assert [found[name] for name in OFFLINE] == ["0", "", "1"]
    assert seen(sandbox, "--online", HF_HUB_OFFLINE="1")["HF_HUB_OFFLINE"] == "1"


def test_an_option_wins_over_a_variable_and_that_over_the_default(sandbox: Sandbox) -> None:
    assert seen(sandbox)["CKPT_RUN_RESUME"] == "auto"
    assert seen(sandbox, CKPT_RUN_RESUME="required")["CKPT_RUN_RESUME"] == "required"
    assert seen(sandbox, "--resume", "never", CKPT_RUN_RESUME="required")["CKPT_RUN_RESUME"] == "never"
    found = seen(sandbox, "--keep-trainer-saves", "--host-cache-size", "2.5")
    assert (found["CKPT_RUN_KEEP_TRAINER_SAVES"], found["CKPT_RUN_HOST_CACHE_SIZE"]) == ("1", "2.5")


@pytest.mark.parametrize("name", ["CKPT_RUN_IO", "CKPT_RUN_RESUME"])
def test_a_variable_that_cannot_be_is_refused_before_anything_runs(sandbox: Sandbox, name: str) -> None:
    done = sandbox.run("echo", "ran", env={name: "fast"})
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{name} is 'fast'" in done.stderr


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("CKPT_RUN_HOST_CACHE_SIZ", "CKPT_RUN_HOST_CACHE_SIZE"),
        ("CKPT_RUN_HOST_CACHE", "CKPT_RUN_HOST_CACHE_SIZE"),
        ("CKPT_RUN_KEEP_TRAINERS_SAVES", "CKPT_RUN_KEEP_TRAINER_SAVES"),
        ("CKPT_RUN_OUTPUTDIR", "CKPT_RUN_OUTPUT_DIR"),
        ("CKPT_RUN_RESUM", "CKPT_RUN_RESUME"),
        ("CKPT_RUN_Occupied", "CKPT_RUN_OCCUPIED"),
    ],
)
def test_a_misspelt_variable_is_named_once_with_the_one_that_was_meant_and_stops_nothing(
    sandbox: Sandbox, wrong: str, right: str
) -> None:
    line = f"ckpt-run: {wrong} is not a variable of ckpt-run, and has no effect; did you mean {right}?\n"
    done = sandbox.run(CKPT_RUN, "echo", "ran", env={wrong: "4"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", line)
    assert sandbox.run("env", env={wrong: "4"}).stderr == line


def test_no_variable_of_ours_is_taken_for_a_misspelt_one(sandbox: Sandbox) -> None:
    inner = [sys.executable, "-c", PRINT_ENVIRONMENT]
    done = sandbox.run("--fresh", "sh", "-c", f"{CKPT_RUN} {shlex.join(inner)} && {CKPT_RUN} env")
    assert (done.returncode, done.stderr) == (0, "")
    folders = [Path(HOOK).parent, Path(environment.__file__).parent]
    sources = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    names = {name for text in sources for name in re.findall(r"CKPT_RUN_[A-Z_]*[A-Z]", text)}
    assert names == {*environment.NO_SETTINGS, *(setting.variable for setting in TABLE)}


def test_fresh_is_the_id_of_this_run_and_of_no_other(sandbox: Sandbox) -> None:
    first = seen(sandbox, "--fresh")
    assert first["CKPT_RUN_FRESH"] == first["CKPT_RUN_RUN_ID"]
    assert "CKPT_RUN_FRESH" not in seen(sandbox)
    inherited = {name: first[name] for name in ("CKPT_RUN_FRESH", "CKPT_RUN_RUN_ID")}
    assert "CKPT_RUN_FRESH" not in seen(sandbox, **inherited)


# --- CKPT_LAST_STEP ------------------------------------------------------------------------------------------------------


def test_the_last_step_is_told_when_there_is_something_to_resume(sandbox: Sandbox) -> None:
    commit_checkpoint(sandbox.path / "out", 200)
    assert seen(sandbox, "--output-dir", "out")["CKPT_LAST_STEP"] == "200"
    assert seen(sandbox, CKPT_RUN_OUTPUT_DIR="out")["CKPT_LAST_STEP"] == "200"
    assert seen(sandbox, arguments=("--output_dir", "out"))["CKPT_LAST_STEP"] == "200"
    assert seen(sandbox, arguments=("--lr", "1", "--output_dir=out"))["CKPT_LAST_STEP"] == "200"
    assert seen(sandbox, arguments=("--output-dir", str(sandbox.path / "out")))["CKPT_LAST_STEP"] == "200"


def test_the_last_step_of_a_finished_training_is_told_too(sandbox: Sandbox) -> None:
    commit_checkpoint(sandbox.path / "out", 300, state="finished")
    assert seen(sandbox, "--output-dir", "out")["CKPT_LAST_STEP"] == "300"


def test_without_anything_to_resume_the_last_step_is_removed(sandbox: Sandbox) -> None:
    (sandbox.path / "empty").mkdir()
    assert "CKPT_LAST_STEP" not in seen(sandbox, "--output-dir", "empty", CKPT_LAST_STEP="7")
    assert "CKPT_LAST_STEP" not in seen(sandbox, CKPT_LAST_STEP="7")


def test_a_fresh_start_has_no_last_step(sandbox: Sandbox) -> None:
    commit_checkpoint(sandbox.path / "out", 200)
    assert "CKPT_LAST_STEP" not in seen(sandbox, "--fresh", "--output-dir", "out")


def test_a_damaged_checkpoint_is_named_and_the_older_one_told(sandbox: Sandbox) -> None:
    commit_checkpoint(sandbox.path / "out", 100)
    newest = commit_checkpoint(sandbox.path / "out", 200)
    (newest / "model.safetensors").write_bytes(b"weightz")
    done = sandbox.run("--output-dir", "out", sys.executable, "-c", PRINT_ENVIRONMENT)
    assert json.loads(done.stdout)["CKPT_LAST_STEP"] == "100"
    assert str(newest) in done.stderr
    assert "model.safetensors" in done.stderr


def test_the_output_directory_of_the_last_launch_of_the_same_command_is_remembered(sandbox: Sandbox) -> None:
    # What the library notes in the training process, where the directory is known for certain.
    note = "import os; from datastates.store.launches import note_output_dir as note; note(os.environ['CKPT_RUN_RUN_ID'], 'out')"
    show = f"{note}; print(os.environ.get('CKPT_LAST_STEP'))"
    assert sandbox.run(sys.executable, "-c", show).stdout == "None\n"
    commit_checkpoint(sandbox.path / "out", 40)
    assert sandbox.run(sys.executable, "-c", show).stdout == "40\n"
    (sandbox.path / "elsewhere").mkdir()
    assert sandbox.run(sys.executable, "-c", show, cwd=sandbox.path / "elsewhere").stdout == "None\n"


def test_an_unwritable_home_is_lived_with(sandbox: Sandbox) -> None:
    assert (
        sandbox.run("echo", "on", env={"XDG_STATE_HOME": "/proc/nowhere", "TMPDIR": "/proc/nowhere"}).stdout
        == "on\n"
    )


def test_nothing_is_left_in_the_temporary_directory(sandbox: Sandbox) -> None:
    sandbox.run("true")
    sandbox.run("no-such-program")
    assert os.listdir(sandbox.env["TMPDIR"]) == []


def test_what_a_killed_launcher_left_there_goes_at_the_next_launch(sandbox: Sandbox) -> None:
    process = sandbox.start("sh", "-c", "touch up; while test -e up; do sleep 0.02; done")
    until((sandbox.path / "up").exists)
    process.kill()
    process.wait(60)
    (sandbox.path / "up").unlink()
    assert len(os.listdir(sandbox.env["TMPDIR"])) == 1
    sandbox.run("true")
    assert os.listdir(sandbox.env["TMPDIR"]) == []


# --- other hosts ---------------------------------------------------------------------------------------------------------


def carried(env: dict[str, str]) -> dict[str, str]:
    return json.loads(base64.urlsafe_b64decode(env["PYTHON_CKPT_RUN"]))


def test_our_variables_travel_in_one_word(sandbox: Sandbox) -> None:
    commit_checkpoint(sandbox.path / "out", 200)
    env = seen(sandbox, "--output-dir", "out", "--fresh", CKPT_RUN_IO="direct", HF_TOKEN="secret")
    found = carried(env)
    for name in ("CKPT_RUN_RUN_ID", "CKPT_RUN_RESUME", "CKPT_RUN_FRESH", "CKPT_RUN_IO", "HF_HUB_OFFLINE"):
        assert found[name] == env[name]
    assert "HF_TOKEN" not in found
    assert not {"CKPT_RUN_LAUNCHER", "CKPT_RUN_PROCESSES"} & found.keys()
    assert not set(env["PYTHON_CKPT_RUN"]) & set(" \"'$\\;&<>\n")


def test_the_hook_unpacks_them_where_they_did_not_arrive(sandbox: Sandbox) -> None:
    env = seen(sandbox, "--host-cache-size", "3")
    # What deepspeed hands on to another host: variables named PYTHON* only.
    remote = {name: env[name] for name in ("PYTHONPATH", "PYTHON_CKPT_RUN")} | {"CKPT_RUN_IO": "buffered"}
    done = sandbox.plain(sys.executable, "-c", PRINT_ENVIRONMENT, env=remote)
    arrived = json.loads(done.stdout)
    assert arrived["CKPT_RUN_HOST_CACHE_SIZE"] == "3"
    assert arrived["CKPT_RUN_RUN_ID"] == env["CKPT_RUN_RUN_ID"]
    assert arrived["HF_HUB_OFFLINE"] == "1"
    assert arrived["CKPT_RUN_IO"] == "buffered"


@pytest.mark.parametrize("carrier", ["x", "{}", "bm90IGpzb24=", "W10=", "\u00e4"])
def test_a_carrier_that_is_none_disturbs_nothing(sandbox: Sandbox, carrier: str) -> None:
    env = {"PYTHONPATH": HOOK, "PYTHON_CKPT_RUN": carrier}
    done = sandbox.plain(sys.executable, "-W", "error", "-c", "print(1)", env=env)
    assert (done.stdout, done.stderr) == ("1\n", "")


# --- ckpt-run env --------------------------------------------------------------------------------------------------------


def test_env_prints_lines_that_a_shell_takes_unchanged(sandbox: Sandbox) -> None:
    hard = 'it\'s a $HOME "dir" `x` \\ ; #'
    shell = f'eval "$({CKPT_RUN} --output-dir "$HARD" env)"; exec {sys.executable} -c "$SHOW"'
    done = sandbox.plain(
        "bash", "-c", shell, env={"HARD": hard, "SHOW": PRINT_ENVIRONMENT, "CKPT_LAST_STEP": "9"}
    )
    found = json.loads(done.stdout)
    assert found["CKPT_RUN_OUTPUT_DIR"] == hard
    assert found["PYTHONPATH"] == found["CHECKPOINT_VENDOR"] == HOOK
    assert found["HF_HUB_OFFLINE"] == "1"
    assert "CKPT_LAST_STEP" not in found


def test_env_as_json_says_what_to_set_and_to_unset(sandbox: Sandbox) -> None:
    commit_checkpoint(sandbox.path / "out", 200)
    words = ("env", "--json", "--online", sys.executable, "train.py", "--output_dir", "out")
    found = json.loads(sandbox.run(*words).stdout)
    assert found["schema_version"] == 1
    assert found["set"]["CKPT_LAST_STEP"] == "200"
    assert found["output_dir"] == str(sandbox.path / "out")
    assert "HF_HUB_OFFLINE" not in found["set"]
    found = json.loads(sandbox.run("env", "--json", env={"CKPT_LAST_STEP": "9"}).stdout)
    assert found["unset"] == ["CKPT_LAST_STEP"]


def test_env_runs_nothing(sandbox: Sandbox) -> None:
    sandbox.run("env", "touch", "made")
    assert not Path(sandbox.path / "made").exists()


def test_who_means_the_program_env_is_told_how_to_run_it(sandbox: Sandbox) -> None:
    done = sandbox.run("env", "LR=1", "python", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "ckpt-run -- env" in done.stderr
    assert "LR=1\n" in sandbox.run("--", "env", "LR=1", "env").stdout


def test_env_help_has_an_example(sandbox: Sandbox) -> None:
    assert 'eval "$(ckpt-run env)"' in sandbox.run("env", "--help").stdout
