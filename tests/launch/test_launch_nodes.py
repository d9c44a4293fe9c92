"""More than one node: hook and settings arrive, whatever else deepspeed finds in the way.

The nodes are directories of this machine (see :mod:`pdsh`).
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pdsh
import pytest
from launch_tools import HOOK, PRINT_ENVIRONMENT, SCRIPTS, Sandbox, lines, printed_environment
from pdsh import executable
from test_launch_launchers import START, free_port

RANK = """
import json, os, sys
found = {"env": dict(os.environ), "hooked": [type(finder).__module__ for finder in sys.meta_path][:1], "path": sys.path}
found["theirs"] = getattr(sys, "users_ran", 0)
with open("rank-" + os.environ["RANK"], "w") as file:
    json.dump(found, file)
"""


@pytest.fixture
def two_nodes(sandbox: Sandbox) -> list[str]:
    """The words that make deepspeed start one rank on each of two nodes."""
    pdsh.install(sandbox.path / "bin", sandbox.path / "homes")
    sandbox.env |= {
        "PATH": f"{sandbox.path / 'bin'}{os.pathsep}{sandbox.env['PATH']}",
        "DS_ACCELERATOR": "cpu",
    }
    return pdsh.two_nodes(sandbox.path / "hosts", free_port())


def test_hook_and_settings_arrive_on_every_node(sandbox: Sandbox, two_nodes: list[str]) -> None:
    sandbox.script("sitecustomize.py", "import sys; sys.users_ran = getattr(sys, 'users_ran', 0) + 1\n")
    left = [
        "# mine",
        "",
        "MINE=a b",
        f"PYTHONPATH={sandbox.path}:/users",
        "CKPT_RUN_LAUNCHER=1",
        "CKPT_RUN_RUN_ID=older",
        "PYTHON_CKPT_RUN=older",
    ]
    sandbox.script(".deepspeed_env", "\n".join(left))
    words = ["--resume", "required", "--output-dir", "out put", str(SCRIPTS / "deepspeed"), *two_nodes]
    done = sandbox.run(*words, sandbox.script("rank.py", RANK), timeout=START, env={"HF_HUB_OFFLINE": "0"})
    assert done.returncode == 0, done.stderr[-5000:]
    places = [sandbox.path / "homes" / name for name in ("node-a/rank-0", "node-b/rank-1")]
    found = [json.loads(place.read_text()) for place in places]
    assert [rank["env"]["NODE"] for rank in found] == ["node-a", "node-b"]
    for rank in found:
        assert rank["hooked"] == ["sitecustomize"]
        assert rank["theirs"] == 1
        check_path(rank)
        check_settings(rank["env"])
    assert len({rank["env"]["CKPT_RUN_RUN_ID"] for rank in found} - {"older"}) == 1
    assert lines(sandbox.path / ".deepspeed_env") == left
    assert not list(Path(sandbox.env["TMPDIR"]).glob("ckpt-run*"))


def check_path(rank: dict[str, Any]) -> None:
    entries = rank["env"]["PYTHONPATH"].split(os.pathsep)
    assert entries[0] == HOOK
    assert entries.count(HOOK) == 1
    assert "/users" in entries


def check_settings(env: dict[str, str]) -> None:
    expected = {
        "CKPT_RUN_RESUME": "required",
        "CKPT_RUN_OUTPUT_DIR": "out put",
        "HF_HUB_OFFLINE": "0",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "CHECKPOINT_VENDOR": HOOK,
        "MINE": "a b",
    }
    assert {name: env.get(name) for name in expected} == expected
    assert "CKPT_RUN_PROCESSES" not in env
    assert "CKPT_RUN_LAUNCHER" not in env


# --- the file that accelerate fills for deepspeed -----------------------------------------------------------------------

# In the place of deepspeed: tells what it would read.
SHOW_FILE = """#!{python}
import json, os
path = os.environ["DS_ENV_FILE"]
with open(path) as file:
    print(json.dumps([path, os.stat(path).st_mode, file.read().splitlines()]))
"""


def env_file(sandbox: Sandbox, *words: str, **env: str) -> tuple[str, int, list[str]]:
    """Path, mode and lines of the file that a command's deepspeed is given."""
    executable(sandbox.path / "bin", "deepspeed", SHOW_FILE.format(python=sys.executable))
    sandbox.env["PATH"] = f"{sandbox.path / 'bin'}{os.pathsep}{sandbox.env['PATH']}"
    done = sandbox.run(*words, timeout=START, env=env)
    assert done.returncode == 0, done.stderr[-5000:]
    path, mode, found = json.loads(done.stdout.splitlines()[-1])
    return path, mode, found


def test_the_file_is_the_launchs_own_with_the_users_lines_and_gone_at_the_end(sandbox: Sandbox) -> None:
    (sandbox.home / ".deepspeed_env").write_text("HOME_LINE=1\n# words = words\n\nno value\n")
    sandbox.script(".deepspeed_env", "HERE=2\nLAST=a=b c")
    path, mode, found = env_file(sandbox, "deepspeed", "train.py")
    assert Path(path).is_absolute()
    assert stat.S_IMODE(mode) == 0o600
    assert found == ["HOME_LINE=1", "HERE=2", "LAST=a=b c"]
    assert not Path(path).exists()


def test_a_file_that_the_user_names_is_the_one_whose_lines_are_taken(sandbox: Sandbox) -> None:
    sandbox.script(".deepspeed_env", "HERE=2\n")
    named = sandbox.script("named", "NAMED=1\n")
    assert env_file(sandbox, "deepspeed", "train.py", DS_ENV_FILE=named)[2] == ["NAMED=1"]
    assert env_file(sandbox, "deepspeed", "train.py", DS_ENV_FILE="named")[2] == ["NAMED=1"]
    assert lines(named) == ["NAMED=1"]


def test_accelerate_leaves_no_secret_in_the_working_directory(sandbox: Sandbox) -> None:
    hosts = sandbox.script("hosts", "node-a slots=1\nnode-b slots=1\n")
    words = [
        "--use_deepspeed",
        "--num_machines=2",
        "--num_processes=2",
        "--machine_rank=0",
        "--mixed_precision=no",
    ]
    words += ["--main_process_ip=127.0.0.1", f"--main_process_port={free_port()}", "--dynamo_backend=no"]
    words += ["--deepspeed_multinode_launcher=pdsh", f"--deepspeed_hostfile={hosts}"]
    accelerate = str(SCRIPTS / "accelerate")
    path, mode, found = env_file(sandbox, accelerate, "launch", *words, "train.py", HF_TOKEN="secret")
    assert "HF_TOKEN=secret" in found, "the other nodes need it"
    assert stat.S_IMODE(mode) == 0o600
    assert not Path(path).exists()
    assert not (sandbox.path / ".deepspeed_env").exists()


def test_other_commands_are_given_no_such_file(sandbox: Sandbox) -> None:
    done = sandbox.run(sys.executable, "-c", PRINT_ENVIRONMENT)
    assert "DS_ENV_FILE" not in printed_environment(done.stdout)
