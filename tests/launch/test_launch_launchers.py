"""Every launcher: the hook is in its workers, the settings arrive, a SIGTERM is delivered once, nobody is left behind.

Slow, because torchrun, accelerate and deepspeed import torch several times. The workers themselves do not.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from launch_tools import RECORDER, SCRIPTS, Sandbox, alive, finish, lines, words_in
from waiting import until

# Writes down what it finds, then notes signals as the recorder does. deepspeed adds an argument of its own.
RANK = (
    """
import json, os, sys
line = {"hooked": type(sys.meta_path[0]).__name__, "argv": [w for w in sys.argv[1:] if not w.startswith("--local")]}
line["env"] = {name: os.environ.get(name) for name in ("CKPT_RUN_RUN_ID", "CKPT_RUN_RESUME", "HF_HUB_OFFLINE")}
with open("workers", "a") as file:
    file.write(json.dumps(line) + "\\n")
sys.argv = ["rank", "log", "rank", "0"]
"""
    + RECORDER
)
START = 240.0  # seconds that a launcher may take to start its workers

# name: the words before the script, and how many workers there are
LAUNCHERS = {
    "python": ([sys.executable], 1),
    "shell script": (["sh", "job.sh"], 1),
    "torchrun": ([str(SCRIPTS / "torchrun"), "--nproc-per-node", "2"], 2),
    "accelerate": ([str(SCRIPTS / "accelerate"), "launch", "--cpu", "--num_processes", "1"], 1),
    "accelerate, two ranks": (
        [str(SCRIPTS / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2"],
        2,
    ),
    "deepspeed": ([str(SCRIPTS / "deepspeed"), "--num_gpus=1"], 1),
}
JOB = f'echo begin\nexport JOB=1\n{sys.executable} "$@"\n'


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest, sandbox: Sandbox) -> tuple[list[str], int]:
    words, workers = LAUNCHERS[request.param]
    program = Path(words[0])
    assert not program.is_absolute() or program.exists(), (
        f"{program.name} is not installed: make test installs it"
    )
    sandbox.env |= {"DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore", "MASTER_PORT": str(free_port())}
    sandbox.script("job.sh", JOB)
    return words, workers


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_every_worker_is_hooked_and_told_once_to_stop(
    sandbox: Sandbox, launcher: tuple[list[str], int]
) -> None:
    words, workers = launcher
    log = sandbox.path / "log"
    script = sandbox.script("rank.py", RANK)
    process = sandbox.start("--resume", "required", *words, script, "--lr", "-1", "a b")
    until(lambda: words_in(log, "rank").count("ready") == workers, "the workers", START)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert words_in(log, "rank").count("SIGTERM") == workers, err
    assert not any(alive(int(line.split()[0])) for line in lines(log))
    assert code in (0, 143)
    for worker in workers_found(sandbox):
        assert worker["hooked"] == "TrainerFinder"
        assert worker["argv"] == ["--lr", "-1", "a b"]
        assert worker["env"]["CKPT_RUN_RESUME"] == "required"
        assert worker["env"]["HF_HUB_OFFLINE"] == "1"
    assert len({worker["env"]["CKPT_RUN_RUN_ID"] for worker in workers_found(sandbox)}) == 1


def workers_found(sandbox: Sandbox) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(sandbox.path / "workers")]


def test_python_dash_m_is_hooked(sandbox: Sandbox) -> None:
    sandbox.script("worker.py", "import sys; print(type(sys.meta_path[0]).__name__)")
    assert sandbox.run(sys.executable, "-m", "worker").stdout == "TrainerFinder\n"


def test_a_killed_rank_of_deepspeed_is_explained(sandbox: Sandbox) -> None:
    deepspeed = SCRIPTS / "deepspeed"
    assert deepspeed.exists(), "deepspeed is not installed: make test installs it"
    script = sandbox.script("die.py", f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})")
    env = {"DS_ACCELERATOR": "cpu", "MASTER_PORT": str(free_port())}
    done = sandbox.run(str(deepspeed), "--num_gpus=1", script, env=env, timeout=240)
    assert done.returncode == 247
    assert "killed by SIGKILL" in done.stderr.splitlines()[-1]
