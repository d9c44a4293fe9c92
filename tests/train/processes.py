"""Trainings in processes of their own, which can be killed.

Most are forked from a server that has imported torch and transformers already: half a second instead of six. A test that is about a
launcher starts it for real.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

SCRIPTS = Path(__file__).parent / "scripts"
PATIENCE = 240.0
"""Seconds after which a process that should have ended counts as hung. DeepSpeed's first training in an environment builds a kernel."""

sys.path.insert(0, str(SCRIPTS))

from train import Job  # noqa: E402, F401 - tests import it from here

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    [
        "transformers.models.llama.modeling_llama",
        "transformers.trainer",
        "datastates.llm.attachment",
        "deepspeed",
    ]
)


class Training:
    """The ranks of one training, each a process in a session of its own; the job belongs to the script that runs it."""

    def __init__(self, job: Any, ranks: int = 1) -> None:
        self.job = job
        self.ranks = ranks
        port = free_port()
        self._processes: list[BaseProcess] = []
        for rank in range(ranks):
            alone = ranks == 1 and "fsdp" not in getattr(job, "arguments", {})
            place = {} if alone else _place(rank, ranks, port)
            process = _server.Process(
                target=_run, args=(type(job).__module__, asdict(job), place, self.output(rank))
            )
            process.start()
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [int(process.pid or 0) for process in self._processes]

    def output(self, rank: int = 0) -> str:
        return f"{self.job.log}-rank{rank}.out"

    def text(self, rank: int = 0) -> str:
        """Everything that a rank has printed or logged, over all runs with the same log."""
        path = Path(self.output(rank))
        return path.read_text() if path.exists() else ""

    def kill(self) -> None:
        """SIGKILL to every rank and whatever it started."""
        for process in self._processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                process.kill()  # it has not become a group's leader yet, or is gone
        self.join()

    def join(self) -> list[int]:
        """Wait until all ranks have ended; their exit codes (-9: killed)."""
        deadline = time.monotonic() + PATIENCE
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(self._processes) if process.is_alive()]
        if hung:
            for process in self._processes:
                process.kill()
            raise AssertionError(f"ranks {hung} have not ended\n" + self.text(hung[0])[-5000:])
        return [int(process.exitcode or 0) for process in self._processes]

    def finish(self) -> dict[str, Any]:
        """Wait for the end, which must be a good one; what rank 0 told in the end."""
        codes = self.join()
        assert codes == [0] * self.ranks, f"exit codes {codes}\n{self.text()[-5000:]}"
        return [line for line in lines(self.job) if "weights" in line][-1]


def lines(job: Any, rank: int = 0) -> list[dict[str, Any]]:
    """What a rank has logged so far; a line that a kill cut short is left out."""
    path = Path(f"{job.log}-rank{rank}.jsonl")
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses(job: Any, rank: int = 0) -> list[tuple[int, float]]:
    """(step, loss) in the order in which they were logged, over all runs with the same log."""
    return [(line["step"], line["loss"]) for line in lines(job, rank) if "loss" in line]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launch(
    command: Iterable[str], output: Path, cwd: Path | None = None, **environment: str
) -> subprocess.Popen[bytes]:
    """Start a real command in a session of its own, its output going to a file."""
    with output.open("ab") as stream:
        return subprocess.Popen(
            list(command),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=cwd,
            env={**os.environ, **environment},
        )


def train_after(folder: Path, lines: str) -> Path:
    """A script that runs ``lines`` and then is train.py."""
    script = folder / "script.py"
    script.write_text(
        f"{lines}\n"
        "import runpy, sys\n"
        f"sys.argv[0] = {str(SCRIPTS / 'train.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    return script


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a command and everything below it, in whatever session: launchers put ranks into sessions of their own."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(family, timeout=PATIENCE)


OCCUPANT = """
import sys
from datastates.store.layout import Root
from datastates.store.occupant import occupy
print(occupy(Root.of(sys.argv[1]), "the other training"), flush=True)
sys.stdin.read()
"""


@contextmanager
def occupied(output_dir: Path) -> Iterator[None]:
    """By a process that has the directory and does nothing with it, as one that hangs."""
    command = [sys.executable, "-c", OCCUPANT, str(output_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as held:
        try:
            assert held.stdout is not None
            assert held.stdout.readline() == "None\n"
            yield
        finally:
            held.kill()


def _place(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _run(script: str, job: dict[str, Any], environment: dict[str, str], output: str) -> None:
    os.setsid()
    multiprocessing.set_start_method(
        "fork", force=True
    )  # for data loaders, as in a process that was started by hand
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    module = importlib.import_module(script)
    module.main(module.Job(**job))
