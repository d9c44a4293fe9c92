"""With --max-restarts a failed command starts again, from the newest checkpoint, and only a failed one."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from launch_tools import CKPT_RUN, RECORDER, Sandbox, commit_checkpoint, finish, lines, words_in
from waiting import until

# Notes its environment; fails as often as its argument says.
FAILING = """
import json, os, sys
with open("log", "a") as log:
    log.write(json.dumps({k: v for k, v in os.environ.items() if k.startswith("CKPT_")}) + "\\n")
sys.exit(3 if len(open("log").readlines()) <= int(sys.argv[1]) else 0)
"""


@pytest.fixture
def failing(sandbox: Sandbox) -> str:
    return sandbox.script("failing.py", FAILING)


def environments(sandbox: Sandbox) -> list[dict[str, str]]:
    return [json.loads(line) for line in lines(sandbox.path / "log")]


def test_it_starts_again_until_it_succeeds(sandbox: Sandbox, failing: str) -> None:
    done = sandbox.run("--max-restarts", "5", sys.executable, failing, "2")
    assert (done.returncode, len(environments(sandbox))) == (0, 3)
    assert "failed with exit code 3: starting it again from the beginning (restart 2 of 5)" in done.stderr


def test_it_starts_again_no_more_often_than_allowed(sandbox: Sandbox, failing: str) -> None:
    done = sandbox.run("--max-restarts=2", sys.executable, failing, "9")
    assert (done.returncode, len(environments(sandbox))) == (3, 3)


def test_without_the_option_it_fails_at_once(sandbox: Sandbox, failing: str) -> None:
    done = sandbox.run(sys.executable, failing, "9")
    assert (done.returncode, len(environments(sandbox)), done.stderr) == (3, 1, "")


def test_a_killed_command_starts_again(sandbox: Sandbox) -> None:
    done = sandbox.run(
        "--max-restarts", "1", "sh", "-c", "test -e second && exit 0; touch second; kill -9 $$"
    )
    assert done.returncode == 0
    assert "sh was killed by SIGKILL" in done.stderr
    assert "failed with exit code 137: starting it again" in done.stderr


def test_a_restart_is_told_the_newest_step(sandbox: Sandbox, failing: str) -> None:
    maker = sandbox.script(
        "maker.py",
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path; import launch_tools, runpy\n"
        "launch_tools.commit_checkpoint(Path('out').absolute(), 10 * (1 + len(launch_tools.lines('log'))))\n"
        f"sys.argv = ['failing', '2']; runpy.run_path({failing!r})\n",
    )
    done = sandbox.run("--output-dir", "out", "--max-restarts", "3", sys.executable, maker)
    assert done.returncode == 0, done.stderr
    assert [env.get("CKPT_LAST_STEP") for env in environments(sandbox)] == [None, "10", "20"]
    assert "starting it again from step 20 (restart 2 of 3)" in done.stderr
    assert len({env["CKPT_RUN_RUN_ID"] for env in environments(sandbox)}) == 1


def test_a_fresh_start_that_failed_before_it_began_is_still_fresh(sandbox: Sandbox, failing: str) -> None:
    commit_checkpoint(sandbox.path / "out", 500)
    sandbox.run("--fresh", "--output-dir", "out", "--max-restarts", "1", sys.executable, failing, "1")
    assert [env.get("CKPT_LAST_STEP") for env in environments(sandbox)] == [None, None]


def test_a_fresh_start_that_had_begun_goes_on_from_its_own_checkpoint(sandbox: Sandbox, failing: str) -> None:
    begin = sandbox.script(
        "begin.py",
        f"import os, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from dataclasses import replace; from pathlib import Path; import launch_tools, runpy\n"
        "from datastates.store.layout import Root; from datastates.store.runrecord import RunRecord\n"
        "if not launch_tools.lines('log'):\n"
        "    launch_tools.commit_checkpoint(Path('out').absolute(), 30)\n"
        "    root = Root.of('out'); record = RunRecord.read(root)\n"
        "    record.with_lineage(0, replace(record.lineages[0], fresh_token=os.environ['CKPT_RUN_FRESH'])).write(root)\n"
        f"sys.argv = ['failing', '1']; runpy.run_path({failing!r})\n",
    )
    done = sandbox.run("--fresh", "--output-dir", "out", "--max-restarts", "1", sys.executable, begin)
    assert done.returncode == 0, done.stderr
    assert [env.get("CKPT_LAST_STEP") for env in environments(sandbox)] == [None, "30"]


def test_what_was_told_to_stop_is_not_started_again(sandbox: Sandbox) -> None:
    sandbox.script("recorder.py", RECORDER)
    process = sandbox.start("--max-restarts", "5", sys.executable, "recorder.py", "log", "main", "die")
    until(lambda: words_in(sandbox.path / "log", "main"))
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143
    assert words_in(sandbox.path / "log", "main") == ["ready", "SIGTERM"]


def test_what_cannot_be_run_is_not_tried_again(sandbox: Sandbox) -> None:
    done = sandbox.run("--max-restarts", "5", "no-such-program")
    assert (done.returncode, len(done.stderr.splitlines())) == (127, 1)


def test_what_a_failed_command_left_behind_is_ended_before_the_restart(sandbox: Sandbox) -> None:
    sandbox.script("recorder.py", RECORDER)
    once = f"test -e second && exit 0; touch second; setsid {sys.executable} recorder.py log left 0 & "
    wait = "while ! test -s log; do sleep 0.02; done; exit 1"
    done = sandbox.run("--max-restarts", "1", "sh", "-c", f"test -e second && exit 0; {once} {wait}")
    assert done.returncode == 0, done.stderr
    assert words_in(sandbox.path / "log", "left") == ["ready", "SIGTERM"]


def test_below_another_ckpt_run_only_the_outer_one_restarts(sandbox: Sandbox, failing: str) -> None:
    words = ("--max-restarts", "1", CKPT_RUN, "--max-restarts", "7", sys.executable, failing, "9")
    done = sandbox.run(*words)
    assert (done.returncode, len(environments(sandbox))) == (3, 2)
    assert "counts for the outer ckpt-run only" in done.stderr
