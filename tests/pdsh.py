"""A stand-in for pdsh, by which deepspeed reaches other nodes: it runs what it is given for each node on this machine.

deepspeed lets every node go to the directory of the launch. That is a path, and on another node something else lies there: hence the node's
own directory in its place.
"""

from __future__ import annotations

import sys
from pathlib import Path

_TEXT = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
nodes = words[words.index("-w") + 1].split(",")
command = words[words.index("-w") + 2:]
if any("pkill" in word for word in command):
    sys.exit("pkill would end other people's processes too")
here = "cd " + os.path.abspath(".") + ";"
if here not in command:
    sys.exit("deepspeed no longer says where to go: " + " ".join(command))
running = []
for number, node in enumerate(nodes):
    home = os.path.join({homes!r}, node)
    os.makedirs(home, exist_ok=True)
    line = " ".join("cd " + home + ";" if word == here else word for word in command).replace("%n", str(number))
    env = ["env", "-i", "HOME=" + home, "PATH=/usr/bin:/bin", "NODE=" + node, "OMP_NUM_THREADS=1", "PYTHONWARNINGS=ignore"]
    running.append(subprocess.Popen(env + ["sh", "-c", line], cwd=home))
codes = [process.wait() for process in running]
sys.exit(max(255 if code < 0 else code for code in codes))  # as ssh says it where the other side has vanished
"""


def executable(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def install(folder: Path, homes: Path) -> None:
    """Put it into ``folder``, for PATH. A node's processes run in a directory of the node's own in ``homes``, with no environment but what a
    login over ssh gives.
    """
    executable(folder, "pdsh", _TEXT.format(python=sys.executable, homes=str(homes)))


def two_nodes(hosts: Path, port: int) -> list[str]:
    """The words that make deepspeed start one rank on each of two nodes."""
    hosts.write_text("node-a slots=1\nnode-b slots=1\n")
    return ["--hostfile", str(hosts), "--no_ssh_check", "--master_addr=127.0.0.1", f"--master_port={port}"]
