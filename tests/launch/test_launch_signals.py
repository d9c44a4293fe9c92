"""A signal reaches every process that trains, once, and nobody is left behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ckpt_run.signals import signal_name
from launch_tools import (
    CKPT_RUN,
    RECORDER,
    Sandbox,
    alive,
    ancestors,
    commit_checkpoint,
    finish,
    lines,
    opened_by,
    words_in,
)
from terminal import Terminal
from waiting import until


@pytest.fixture
def log(sandbox: Sandbox) -> Path:
    sandbox.script("recorder.py", RECORDER)
    return sandbox.path / "log"


def ready(log: Path, *names: str) -> None:
    """Until the recorders of these names have started."""
    for name in names:
        until(lambda name=name: "ready" in words_in(log, name), f"{name} to start")


# --- one process ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGALRM,
        signal.SIGXCPU,
        signal.SIGIO,
        signal.SIGPWR,
        signal.SIGVTALRM,
        signal.SIGPROF,
        signal.SIGRTMIN,
        signal.SIGRTMAX,
    ],
)
def test_every_signal_of_ours_reaches_a_single_program_once(
    sandbox: Sandbox, log: Path, number: signal.Signals
) -> None:
    process = sandbox.start(sys.executable, "recorder.py", str(log), "main", "0")
    ready(log, "main")
    process.send_signal(number)
    until(lambda: len(words_in(log, "main")) > 1, "the signal")
    if number not in (signal.SIGINT, signal.SIGTERM):
        process.terminate()
    code, _, err = finish(process)
    assert words_in(log, "main").count(number.name) == 1
    assert (code, err) == (0, "")


def test_no_signal_that_can_be_caught_ends_us_and_leaves_the_program_running(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    ends_nobody = {"SIGCHLD", "SIGCONT", "SIGURG", "SIGWINCH"}
    stops_a_process = {"SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU"}
    about_the_receiver = {"SIGPIPE", "SIGXFSZ", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP"}
    left_alone = ends_nobody | stops_a_process | about_the_receiver | {"SIGKILL", "SIGSYS"}
    ending = [number for number in signal.valid_signals() if signal_name(number) not in left_alone]
    started = []
    for number in ending:
        up = f"up{int(number)}"
        process = sandbox.start("sh", "-c", f"touch {up}; while :; do sleep 0.1; done")
        started.append((number, up, process))
    for number, up, process in started:
        until((tmp_path / up).exists, up)
        process.send_signal(number)
    codes = {signal_name(number): finish(process)[0] for number, _, process in started}
    assert codes == {signal_name(number): 128 + number for number in ending}


def test_a_limit_of_our_own_processor_time_is_handed_on(sandbox: Sandbox, log: Path) -> None:
    process = sandbox.start(sys.executable, "recorder.py", str(log), "main", "0")
    ready(log, "main")
    resource.prlimit(process.pid, resource.RLIMIT_CPU, (0, resource.RLIM_INFINITY))
    until(lambda: (process.send_signal(signal.SIGUSR1), "SIGXCPU" in words_in(log, "main"))[1])
    process.terminate()
    assert finish(process)[0] == 0


def test_a_program_that_dies_of_a_signal_without_a_name_is_told_with_its_number(sandbox: Sandbox) -> None:
    done = sandbox.run("sh", "-c", f"kill -{signal.SIGRTMIN + 3} $$")
    assert (done.returncode, "sh was killed by SIGRTMIN+3" in done.stderr) == (
        128 + signal.SIGRTMIN + 3,
        True,
    )


def test_a_program_that_ends_well_after_sigterm_is_a_success(sandbox: Sandbox, log: Path) -> None:
    process = sandbox.start(sys.executable, "recorder.py", str(log), "main", "7")
    ready(log, "main")
    process.terminate()
    assert finish(process)[0] == 7


def test_a_program_that_dies_of_sigterm_is_143(sandbox: Sandbox, log: Path) -> None:
    process = sandbox.start(sys.executable, "recorder.py", str(log), "main", "die")
    ready(log, "main")
    process.terminate()
    assert finish(process)[0] == 143


def test_a_stop_before_the_program_has_started_is_obeyed(sandbox: Sandbox) -> None:
    weights = commit_checkpoint(sandbox.path / "out", 100, hole=1 << 40) / "model.safetensors"
    process = sandbox.start("--output-dir", "out", "touch", "started")
    until(lambda: weights in opened_by(process.pid), "the verification, which takes minutes")
    process.terminate()
    code, _, _ = finish(process)
    assert (code, (sandbox.path / "started").exists()) == (143, False)


def test_what_the_parent_ignores_stays_ignored(sandbox: Sandbox, log: Path) -> None:
    shell = f'trap "" HUP; exec {CKPT_RUN} {sys.executable} recorder.py {log} main 0'
    process = subprocess.Popen(["sh", "-c", shell], env=sandbox.env, cwd=sandbox.path, start_new_session=True)
    ready(log, "main")
    process.send_signal(signal.SIGHUP)
    process.terminate()
    assert process.wait(60) == 0
    assert words_in(log, "main") == ["ready", "SIGTERM"]


def test_the_program_starts_with_the_signal_mask_that_we_had(sandbox: Sandbox) -> None:
    show = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    assert sandbox.run(sys.executable, "-c", show).stdout == "[]\n"


# --- launchers and ranks -------------------------------------------------------------------------------------------------

# Starts two ranks, each with a data loader's worker; itself it ignores every signal, and exits 1 when a rank has failed.
LAUNCHER = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
log, code = sys.argv[1:3]
rank = '''
import os, subprocess, sys
log, rank, code = sys.argv[1:]
subprocess.Popen([sys.executable, "recorder.py", log, "worker" + rank, "0"])
os.execv(sys.executable, [sys.executable, "recorder.py", log, "rank" + rank, code])
'''
ranks = []
signal.signal(signal.SIGTERM, signal.SIG_DFL)
for number in "01":
    env = {**os.environ, "RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": "2"}
    ranks.append(subprocess.Popen([sys.executable, "-c", rank, log, number, code], env=env, start_new_session=True))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
codes = [child.wait() for child in ranks]
sys.exit(1 if any(codes) else 0)
"""


@pytest.mark.parametrize(("ranks_exit", "code"), [("0", 0), ("9", 143), ("die", 143)])
def test_ranks_get_it_once_launchers_and_workers_not_at_all(
    sandbox: Sandbox, log: Path, ranks_exit: str, code: int
) -> None:
    process = sandbox.start(
        sys.executable, sandbox.script("launcher.py", LAUNCHER), str(log), f"go:{ranks_exit}"
    )
    ready(log, "rank0", "rank1", "worker0", "worker1")
    process.terminate()
    until(lambda: all("SIGTERM" in words_in(log, rank) for rank in ("rank0", "rank1")))
    assert [words_in(log, name) for name in ("worker0", "worker1")] == [["ready"]] * 2
    (sandbox.path / "go").touch()
    found, _, err = finish(process)
    assert [words_in(log, name) for name in ("rank0", "rank1")] == [["ready", "SIGTERM"]] * 2
    assert found == code
    assert "ckpt-run: SIGTERM: handed to 2 training processes" in err


def test_a_rank_that_the_platform_gives_to_the_whole_job_makes_nobody_a_rank(
    sandbox: Sandbox, log: Path
) -> None:
    shell = f"{sys.executable} recorder.py {log} one 0 & {sys.executable} recorder.py {log} two 0; wait"
    process = sandbox.start("sh", "-c", shell, env={"RANK": "0", "WORLD_SIZE": "1"})
    ready(log, "one", "two")
    process.terminate()
    finish(process)
    assert words_in(log, "one") == words_in(log, "two") == ["ready", "SIGTERM"]


# A process that trains in a plain program: the hook has registered it. Its worker is in the same process group.
REGISTERED = """
import os, subprocess, sys
log = sys.argv[1]
open(os.path.join(os.environ["CKPT_RUN_PROCESSES"], str(os.getpid())), "w").close()
subprocess.Popen([sys.executable, "recorder.py", log, "worker0", "0"])
os.execv(sys.executable, [sys.executable, "recorder.py", log, "trainer", "go:0"])
"""


def test_a_registered_trainer_gets_it_alone(sandbox: Sandbox, log: Path) -> None:
    process = sandbox.start(sys.executable, sandbox.script("train.py", REGISTERED), str(log))
    ready(log, "trainer", "worker0")
    process.terminate()
    until(lambda: "SIGTERM" in words_in(log, "trainer"))
    assert words_in(log, "worker0") == ["ready"]
    (sandbox.path / "go").touch()
    assert finish(process)[0] == 0
    assert words_in(log, "trainer") == ["ready", "SIGTERM"]


def test_what_is_no_registration_in_the_hooks_folder_keeps_no_signal_from_the_trainer(
    sandbox: Sandbox, log: Path
) -> None:
    others = (
        "import os\nfolder = os.environ['CKPT_RUN_PROCESSES']\n"
        "os.mkdir(folder + '/1')\nos.symlink('nowhere', folder + '/2')\nos.mkfifo(folder + '/3')\n"
        "open(folder + '/\u00b2', 'w').close()\n"
    )
    process = sandbox.start(sys.executable, sandbox.script("train.py", others + REGISTERED), str(log))
    ready(log, "trainer", "worker0")
    process.terminate()
    until(lambda: "SIGTERM" in words_in(log, "trainer"))
    (sandbox.path / "go").touch()
    assert finish(process)[0] == 0
    assert words_in(log, "trainer") == ["ready", "SIGTERM"]


def test_ranks_that_a_launcher_starts_again_are_told_as_well(sandbox: Sandbox, log: Path) -> None:
    rank = f"RANK=0 {sys.executable} recorder.py {log}"
    process = sandbox.start("sh", "-c", f"trap : TERM; {rank} first 3; {rank} second 0")
    ready(log, "first")
    process.terminate()
    finish(process)
    assert words_in(log, "first") == ["ready", "SIGTERM"]
    assert words_in(log, "second") in (
        [],
        ["ready", "SIGTERM"],
    )  # it may have been told before it could write


def test_a_launcher_that_dies_leaves_no_rank_alone(sandbox: Sandbox, log: Path) -> None:
    saving = sandbox.script(
        "rank.py",
        "import signal, sys, time\n"
        "def save(*_):\n    time.sleep(1)\n    open('saved', 'w').close()\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nopen('up', 'w').close()\nwhile True: time.sleep(0.1)\n",
    )
    process = sandbox.start("sh", "-c", f"RANK=0 setsid {sys.executable} {saving} & wait")
    until((sandbox.path / "up").exists)
    launcher = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    os.kill(launcher, signal.SIGKILL)
    process.terminate()
    code, _, _ = finish(process)
    assert (sandbox.path / "saved").exists()
    assert code in (137, 143)  # the launcher was killed, and we were told to stop


def test_a_program_is_told_to_stop_when_we_are_killed(sandbox: Sandbox, log: Path) -> None:
    process = sandbox.start(sys.executable, "recorder.py", str(log), "main", "0")
    ready(log, "main")
    program = int(lines(log)[0].split()[0])
    process.kill()
    until(lambda: not alive(program), "the program to end")
    assert words_in(log, "main") == ["ready", "SIGTERM"]


def test_a_restarted_program_is_told_to_stop_when_we_are_killed(sandbox: Sandbox, log: Path) -> None:
    again = f"test -e once || {{ touch once; exit 3; }}; exec {sys.executable} recorder.py {log} main 0"
    process = sandbox.start("--max-restarts", "1", "sh", "-c", again)
    ready(log, "main")
    program = int(lines(log)[0].split()[0])
    process.kill()
    until(lambda: not alive(program), "the program to end")
    assert words_in(log, "main") == ["ready", "SIGTERM"]


def test_with_exec_the_end_of_our_parent_tells_nobody_to_stop(sandbox: Sandbox, log: Path) -> None:
    shell = f"{CKPT_RUN} --exec {sys.executable} recorder.py {log} main 0 & touch shell; wait"
    parent = subprocess.Popen(["sh", "-c", shell], env=sandbox.env, cwd=sandbox.path, start_new_session=True)
    ready(log, "main")
    program = int(lines(log)[0].split()[0])
    parent.kill()
    parent.wait()
    os.kill(program, signal.SIGUSR1)
    until(lambda: "SIGUSR1" in words_in(log, "main"))
    os.kill(program, signal.SIGKILL)
    assert words_in(log, "main") == ["ready", "SIGUSR1"]


# --- until the last one is gone ------------------------------------------------------------------------------------------


def test_it_stays_until_the_last_descendant_is_gone(sandbox: Sandbox) -> None:
    process = sandbox.start(
        "sh", "-c", "(setsid sh -c 'while ! test -e go; do sleep 0.02; done; touch done') & exit 4"
    )
    until(lambda: Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    assert process.poll() is None
    (sandbox.path / "go").touch()
    code, _, _ = finish(process)
    assert (code, (sandbox.path / "done").exists()) == (4, True)


def test_what_is_left_running_can_be_told_to_stop(sandbox: Sandbox, log: Path) -> None:
    process = sandbox.start("sh", "-c", f"setsid {sys.executable} recorder.py {log} left 0 & exit 4")
    ready(log, "left")
    process.terminate()
    assert finish(process)[0] == 4
    assert words_in(log, "left") == ["ready", "SIGTERM"]


def test_children_of_the_shell_that_became_us_are_not_waited_for(sandbox: Sandbox) -> None:
    shell = f"sleep 1000 >/dev/null & echo $!; exec {CKPT_RUN} true"
    done = subprocess.run(
        ["sh", "-c", shell],
        env=sandbox.env,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    stranger = int(done.stdout)
    assert (done.returncode, alive(stranger)) == (0, True)
    os.kill(stranger, signal.SIGKILL)


# --- a terminal ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_arrives_once(sandbox: Sandbox, log: Path) -> None:
    terminal = Terminal(sandbox, sys.executable, "recorder.py", str(log), "main", "stay")
    ready(log, "main")
    terminal.type(b"\x03")
    until(lambda: "SIGINT" in words_in(log, "main"))
    os.kill(terminal.pid, signal.SIGUSR1)  # what was sent before this has arrived when this has
    until(lambda: "SIGUSR1" in words_in(log, "main"))
    assert words_in(log, "main") == ["ready", "SIGINT", "SIGUSR1"]
    os.kill(int(lines(log)[0].split()[0]), signal.SIGKILL)
    assert terminal.finish() == 137


def test_ctrl_c_ends_a_program_as_without_us(sandbox: Sandbox) -> None:
    terminal = Terminal(
        sandbox, sys.executable, "-c", "import time\nopen('up', 'w').close()\nwhile True: time.sleep(1)"
    )
    until((sandbox.path / "up").exists)
    terminal.type(b"\x03")
    assert terminal.finish() in (130, -signal.SIGINT)
    assert terminal.text.count(b"KeyboardInterrupt") == 1


def test_ctrl_c_ends_a_shells_loop_around_us(sandbox: Sandbox) -> None:
    loop = f"for i in 1 2 3; do {CKPT_RUN} {sys.executable} sleeper.py; done; echo went on"
    sandbox.script(
        "sleeper.py",
        "import os, time\n"
        "with open('up', 'a') as up: up.write('x')\n"
        "os.makedirs('ready')\n"  # Python loses a Ctrl-C that arrives while it lets go of a file
        "while True: time.sleep(1)",
    )
    terminal = Terminal(sandbox, "-c", loop, program="/bin/bash")
    until((sandbox.path / "ready").exists)
    terminal.type(b"\x03")
    terminal.finish()
    assert (sandbox.path / "up").read_text() == "x"
    assert b"went on" not in terminal.text


def test_a_program_can_read_from_the_terminal(sandbox: Sandbox) -> None:
    terminal = Terminal(sandbox, sys.executable, "-c", "print('got', input())")
    terminal.type(b"typed\n")
    assert terminal.finish() == 0
    assert b"got typed" in terminal.text


def test_a_signal_to_us_alone_is_handed_on_at_a_terminal_too(sandbox: Sandbox, log: Path) -> None:
    terminal = Terminal(sandbox, sys.executable, "recorder.py", str(log), "main", "0")
    ready(log, "main")
    os.kill(terminal.pid, signal.SIGINT)
    assert terminal.finish() == 0
    assert words_in(log, "main") == ["ready", "SIGINT"]


# --- one inside another --------------------------------------------------------------------------------------------------


def test_below_another_ckpt_run_there_is_one_that_hands_on(sandbox: Sandbox, log: Path) -> None:
    process = sandbox.start(
        CKPT_RUN, "sh", "-c", f"{CKPT_RUN} {sys.executable} recorder.py {log} main 0; exit $?"
    )
    ready(log, "main")
    above = [
        Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        for pid in ancestors(int(lines(log)[0].split()[0]))
    ]
    assert sum(words[1:2] == [CKPT_RUN] for words in above) == 1
    process.terminate()
    finish(process)
    assert words_in(log, "main") == ["ready", "SIGTERM"]


def test_below_another_it_is_the_same_run_with_its_own_options(sandbox: Sandbox) -> None:
    show = "import os; print(os.environ['CKPT_RUN_RUN_ID'], os.environ['CKPT_RUN_RESUME'], os.environ.get('HF_HUB_OFFLINE'))"
    shell = f'echo $CKPT_RUN_RUN_ID; {CKPT_RUN} --resume never --online {sys.executable} -c "{show}"'
    outer, inner = sandbox.run("sh", "-c", shell).stdout.splitlines()
    assert inner == f"{outer} never None"


def test_a_shell_left_over_from_an_older_run_starts_one_of_its_own(sandbox: Sandbox) -> None:
    show = "import os; print(os.environ['CKPT_RUN_RUN_ID'], os.environ['CKPT_RUN_LAUNCHER'])"
    older = {"CKPT_RUN_RUN_ID": "older", "CKPT_RUN_LAUNCHER": "999999999", "CKPT_RUN_PROCESSES": "/nowhere"}
    process = sandbox.start(sys.executable, "-c", show, env=older)
    run_id, launcher = finish(process)[1].split()
    assert run_id != "older"
    assert int(launcher) == process.pid
