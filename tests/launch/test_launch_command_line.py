"""Our options end at the first word that is not one; everything after it is the command's, byte for byte."""

from __future__ import annotations

import json
import sys

import pytest
from launch_tools import CKPT_RUN, Sandbox

ECHO = "import json, sys; print(json.dumps(sys.argv[1:]))"

ARGUMENTS = [
    ["-v", "--config", "x", "--", "--foo"],
    ["--help"],
    ["-h"],
    ["--version"],
    ["--"],
    ["--", "--"],
    ["-c", "print(1)"],
    ["-nv", "-c", "--", "-"],
    ["--output-dir", "x", "--resume", "never", "--fresh", "--exec", "--online"],
    ["status"],
    ["", " ", "a b", "$HOME", "*", "it's", '"q"', "\\", "line\nline", "\u00e4\u20ac"],
    ["--max-restarts=nonsense", "--unknown=1"],
]


@pytest.mark.parametrize("words", ARGUMENTS, ids=str)
def test_what_follows_the_command_reaches_it_untouched(sandbox: Sandbox, words: list[str]) -> None:
    done = sandbox.run(sys.executable, "-c", ECHO, *words)
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (0, words, "")


def test_bytes_that_are_no_text_reach_the_command(sandbox: Sandbox) -> None:
    done = sandbox.run("printf", "%s", b"\xff\xfe", text=False)
    assert done.stdout == b"\xff\xfe"


def test_our_options_are_taken_from_the_front_in_both_spellings(sandbox: Sandbox) -> None:
    show = "import os; print(os.environ['CKPT_RUN_RESUME'], os.environ['CKPT_RUN_OUTPUT_DIR'])"
    done = sandbox.run("--resume=never", "--output-dir", "some dir", sys.executable, "-c", show)
    assert done.stdout == "never some dir\n"


def test_a_leading_pair_of_dashes_is_dropped_once(sandbox: Sandbox) -> None:
    done = sandbox.run("--online", "--", sys.executable, "-c", ECHO, "--", "x")
    assert json.loads(done.stdout) == ["--", "x"]


def test_after_dashes_a_program_with_the_name_of_a_command_runs(sandbox: Sandbox) -> None:
    program = sandbox.path / "status"
    program.write_text("#!/bin/sh\necho mine\n")
    program.chmod(0o755)
    done = sandbox.run("--", "status", env={"PATH": f"{sandbox.path}:{sandbox.env['PATH']}"})
    assert done.stdout == "mine\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ouput-dir", "x", "python"], "did you mean --output-dir?"),
        (["--max-restart", "3", "python"], "did you mean --max-restarts?"),
        (["-x", "python"], "no option -x"),
        (["--max-restarts", "many", "python"], "expected 0 or more"),
        (["--resume", "sometimes", "python"], "auto, never or required"),
        (["--fresh=yes", "python"], "--fresh takes no value"),
        (["--output-dir"], "--output-dir needs a value"),
        (["--host-cache-size", "-1", "python"], "--host-cache-size is '-1'"),
        (
            ["--host-cache-size", "abc", "python"],
            "--host-cache-size is 'abc': expected a number above 0 (GiB per rank",
        ),
        (["--host-cache-size", "", "python"], "--host-cache-size is empty"),
        (["--output-dir=", "python"], "--output-dir is empty"),
        (["--fresh", "status"], "ckpt-run -- status"),
    ],
)
def test_a_slip_among_our_options_is_named_and_nothing_runs(
    sandbox: Sandbox, words: list[str], said: str
) -> None:
    done = sandbox.run(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_a_bad_variable_is_named_with_its_value_and_each_choice_once(sandbox: Sandbox) -> None:
    done = sandbox.run("true", env={"CKPT_RUN_RESUME": "sometimes"})
    assert done.returncode == 2
    assert "CKPT_RUN_RESUME is 'sometimes': expected one of auto, never, required" in done.stderr
    assert done.stderr.count("required") == 1


def test_without_a_command_help_goes_to_stderr(sandbox: Sandbox) -> None:
    done = sandbox.run()
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: ckpt-run" in done.stderr


def test_help_and_version_go_to_stdout(sandbox: Sandbox) -> None:
    assert "Examples:" in sandbox.run("--help").stdout
    assert sandbox.run("--version").stdout.startswith("ckpt-run ")


def test_python_dash_m_is_the_same_command(sandbox: Sandbox) -> None:
    done = sandbox.plain(sys.executable, "-m", "ckpt_run", sys.executable, "-c", "print(1)")
    assert done.stdout == "1\n"


def test_launching_imports_no_heavy_library(sandbox: Sandbox) -> None:
    done = sandbox.plain(sys.executable, "-X", "importtime", CKPT_RUN, "true")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "ckpt_run.launch" in imported
    assert not imported & {"torch", "typer", "click", "rich", "transformers", "numpy"}
