"""A stop is obeyed whenever it comes: during the start, between two starts, and when nobody seems to be left to hand it to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from launch_tools import CKPT_RUN, Sandbox, commit_checkpoint, finish, lines, opened_by
from terminal import Terminal
from waiting import until

HOLE = 1 << 40  # bytes that take minutes to verify

# ckpt-run, with something that happens at a moment which is too short to be met from outside.
AT_A_MOMENT = """
import os, signal, sys, time, weakref
from ckpt_run import environment
from ckpt_run.main import main

class Told:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGTERM)

def told_in_a_callback():
    thing = Told()
    reference = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    del thing

def told_in_a_class_body():
    type("Body", (), {"told": Told()})

def interrupted_before_the_fork():
    open("forking", "w").close()
    while signal.SIGINT not in signal.sigpending():
        time.sleep(0.01)

def before(module, name, event):
    then = getattr(module, name)
    def both():
        event()
        return then()
    setattr(module, name, both)

%s
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("where", ["told_in_a_callback", "told_in_a_class_body"])
def test_a_stop_in_the_midst_of_an_import_is_obeyed(sandbox: Sandbox, where: str) -> None:
    # Python drops exceptions in callbacks of weak references, which imports have, and changes those in class bodies.
    script = sandbox.script("moment.py", AT_A_MOMENT % f"before(environment, 'inherited', {where})")
    done = sandbox.plain(sys.executable, script, "touch", "started")
    assert (done.returncode, done.stderr) == (143, "")
    assert not (sandbox.path / "started").exists()


def test_ctrl_c_just_before_the_program_exists_is_obeyed(sandbox: Sandbox) -> None:
    moment = AT_A_MOMENT % "before(os, 'fork', interrupted_before_the_fork)"
    script = sandbox.script("moment.py", moment)
    terminal = Terminal(sandbox, script, "touch", "started", program=sys.executable)
    until((sandbox.path / "forking").exists)
    terminal.type(b"\x03")
    assert terminal.finish() == -signal.SIGINT
    assert not (sandbox.path / "started").exists()


def test_ctrl_c_during_the_start_ends_a_shells_loop(sandbox: Sandbox) -> None:
    weights = commit_checkpoint(sandbox.path / "out", 100, hole=HOLE) / "model.safetensors"
    loop = f"for i in 1 2 3; do {CKPT_RUN} --output-dir out touch started; done; echo went on"
    terminal = Terminal(sandbox, "-c", loop, program="/bin/bash")
    until(lambda: any(weights in opened_by(pid) for pid in below(terminal.pid)), "the verification")
    terminal.type(b"\x03")
    assert terminal.finish() == -signal.SIGINT
    assert b"went on" not in terminal.text
    assert not (sandbox.path / "started").exists()


# Saves a checkpoint that takes minutes to verify, and fails.
FAILS = """
import sys
from pathlib import Path
sys.path[:0] = {folders!r}
import launch_tools
with open("runs", "a") as file:
    file.write("run\\n")
launch_tools.commit_checkpoint(Path("out").absolute(), 100, hole={hole})
sys.exit(3)
"""


def test_a_stop_before_a_restart_is_obeyed(sandbox: Sandbox) -> None:
    tests = Path(__file__).absolute().parent
    text = FAILS.format(folders=[str(tests), str(tests.parent)], hole=HOLE)
    script = sandbox.script("fails.py", text)
    process = sandbox.start("--output-dir", "out", "--max-restarts", "9", sys.executable, script)
    weights = sandbox.path / "out/concurrent_checkpoint/checkpoint-100/model.safetensors"
    until(lambda: weights in opened_by(process.pid), "the verification")
    process.terminate()
    code, _, err = finish(process)
    assert (code, lines(sandbox.path / "runs")) == (143, ["run"]), err
    assert "starting it again" not in err
    assert os.listdir(sandbox.env["TMPDIR"]) == []
    assert "exit code 143" in sandbox.run("status").stdout


def test_a_program_that_ends_by_itself_at_ctrl_c_ends_with_its_own_code(sandbox: Sandbox) -> None:
    shell = "trap 'exit 5' INT; touch up; while :; do sleep 1; done"
    terminal = Terminal(sandbox, "sh", "-c", shell)
    until((sandbox.path / "up").exists)
    terminal.type(b"\x03")
    assert terminal.finish() == 5


def test_a_program_is_told_when_the_terminal_goes_away(sandbox: Sandbox) -> None:
    shell = "trap 'touch told; exit 6' HUP; touch up; while :; do sleep 0.05; done"
    terminal = Terminal(sandbox, "sh", "-c", shell)
    until((sandbox.path / "up").exists)
    assert terminal.hang_up() == 6
    assert (sandbox.path / "told").exists()


def test_a_descendant_that_is_never_the_same_for_long_is_waited_for(sandbox: Sandbox) -> None:
    relay = "import os\nfor i in range(500):\n    if os.fork(): os._exit(0)\nopen('done', 'w').close()"
    apart = {"capture_output": False, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    assert sandbox.run(sys.executable, "-c", relay, **apart).returncode == 0
    assert (sandbox.path / "done").exists()


def below(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]
