"""The exit code is the command's own, or says in the usual numbers why there is none; stdout stays the program's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_run import exits
from launch_tools import CKPT_RUN, Sandbox
from waiting import until


@pytest.mark.parametrize("code", [0, 1, 3, 75, 125, 128, 200, 255])
def test_the_commands_code_is_ours(sandbox: Sandbox, code: int) -> None:
    assert sandbox.run("sh", "-c", f"exit {code}").returncode == code


@pytest.mark.parametrize(
    ("name", "code"), [("TERM", 143), ("KILL", 137), ("SEGV", 139), ("INT", 130), ("USR1", 138)]
)
def test_death_by_a_signal_is_128_and_its_number(sandbox: Sandbox, name: str, code: int) -> None:
    assert sandbox.run("sh", "-c", f"kill -{name} $$").returncode == code


def test_death_by_sigkill_is_told_in_one_line_which_blames_the_memory_only_where_that_may_be(
    sandbox: Sandbox,
) -> None:
    perhaps = " (perhaps out of memory)" if exits.memory_kills() is None else ""
    done = sandbox.run("sh", "-c", "kill -9 $$")
    assert (done.returncode, done.stderr) == (137, f"ckpt-run: sh was killed by SIGKILL{perhaps}\n")


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A control group of 64 MiB within our own, where we may make one."""
    with open("/proc/self/cgroup") as file:
        groups = [line.rstrip("\n").split(":", 2) for line in file]
    found = next((group for _, names, group in groups if "memory" in names.split(",")), None)
    old = found is not None
    top = Path("/sys/fs/cgroup/memory" if old else "/sys/fs/cgroup")
    path = top / (found or groups[-1][2]).strip("/") / f"ckpt-run-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        (path / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(64 << 20))
        yield path
    except OSError as error:
        pytest.skip(f"no control group can be limited here: {error}")
    finally:
        until(lambda: not (path / "cgroup.procs").read_text(), "the processes in it to end")
        path.rmdir()


def test_a_program_that_the_kernel_ended_for_want_of_memory_is_said_to_have_run_out_of_it(
    sandbox: Sandbox, little_memory: Path
) -> None:
    eat = "pages = bytearray(512 << 20)\nfor at in range(0, len(pages), 4096): pages[at] = 1"
    enter = f"echo $$ > {little_memory}/cgroup.procs && exec {CKPT_RUN} {sys.executable} -c '{eat}'"
    done = sandbox.plain("sh", "-c", enter)
    assert done.returncode == 137
    name = os.path.basename(sys.executable)
    assert done.stderr == f"ckpt-run: {name} was killed by SIGKILL (out of memory: the kernel ended it)\n"


def test_deepspeeds_247_is_read_as_sigkill(sandbox: Sandbox) -> None:
    launcher = sandbox.path / "deepspeed"
    launcher.write_text("#!/bin/sh\nexit 247\n")
    launcher.chmod(0o755)
    done = sandbox.run(str(launcher))
    assert done.returncode == 247
    assert "killed by SIGKILL" in done.stderr


def test_an_ordinary_failure_gets_no_word_of_ours(sandbox: Sandbox) -> None:
    assert sandbox.run("sh", "-c", "exit 1").stderr == ""


def test_a_program_that_is_not_there_is_127(sandbox: Sandbox) -> None:
    done = sandbox.run("no-such-program")
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr == "ckpt-run: no-such-program: command not found\n"


def test_a_mistyped_command_of_ours_is_named(sandbox: Sandbox) -> None:
    assert "did you mean: ckpt-run status" in sandbox.run("statsu").stderr
    assert "did you mean: ckpt-run --help" in sandbox.run("help").stderr


@pytest.mark.parametrize(("word", "code"), [("train.py", 127), ("./train.py", 126)])
def test_a_script_without_its_python_is_understood(sandbox: Sandbox, word: str, code: int) -> None:
    sandbox.script("train.py", "print(1)")
    done = sandbox.run(word, "--lr", "1")
    assert done.returncode == code
    assert f"did you mean: ckpt-run python {word} --lr 1" in done.stderr


def test_a_script_without_a_first_line_runs_in_the_shell_as_everywhere(sandbox: Sandbox) -> None:
    script = sandbox.path / "job"
    script.write_text('echo "$1 ran"\n')
    script.chmod(0o755)
    assert sandbox.run("./job", "it").stdout == "it ran\n"


def test_stdout_is_exactly_the_programs(sandbox: Sandbox) -> None:
    done = sandbox.run(sys.executable, "-c", "print(1)")
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_stdin_and_other_descriptors_pass_through(sandbox: Sandbox) -> None:
    read, write = os.pipe()
    done = sandbox.run("bash", "-c", f"cat; echo other >&{write}", input="typed\n", pass_fds=[write])
    os.close(write)
    with os.fdopen(read) as other:
        assert (done.stdout, other.read()) == ("typed\n", "other\n")


def test_a_closed_stderr_is_no_reason_to_fail(sandbox: Sandbox) -> None:
    done = sandbox.plain("sh", "-c", f"{CKPT_RUN} sh -c 'kill -9 $$' 2>&-; echo $?")
    assert done.stdout == "137\n"


def test_sigpipe_ends_the_program_as_without_us(sandbox: Sandbox) -> None:
    done = sandbox.plain("bash", "-c", f"{CKPT_RUN} yes | head -1; echo ${{PIPESTATUS[0]}}")
    assert done.stdout == "y\n141\n"


def test_exec_becomes_the_command(sandbox: Sandbox) -> None:
    process = sandbox.start("--exec", "sh", "-c", "echo $$; exit 5")
    out, _ = process.communicate(timeout=60)
    assert (int(out), process.returncode) == (process.pid, 5)


def test_exec_names_what_it_cannot_run(sandbox: Sandbox) -> None:
    assert sandbox.run("--exec", "no-such-program").returncode == 127


def test_a_removed_working_directory_is_survived(sandbox: Sandbox) -> None:
    gone = sandbox.path / "gone"
    gone.mkdir()
    shell = f"cd {gone}; rmdir {gone}; {CKPT_RUN} echo on"
    done = subprocess.run(["sh", "-c", shell], env=sandbox.env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "on\n"
