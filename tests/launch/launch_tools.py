"""Run the real command in a clean environment, with real programs that write down what happens to them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datastates
import psutil
from datastates.store import commit
from datastates.store.layout import Root
from datastates.store.manifest import FileEntry, Vote
from datastates.store.runrecord import Lineage, RunRecord

SCRIPTS = Path(sysconfig.get_path("scripts"))
CKPT_RUN = str(SCRIPTS / "ckpt-run")
HOOK = str(Path(datastates.__file__).absolute().parent / "_hook")
BOUND = 60.0  # seconds: no test waits longer for anything

# Writes "<pid> <name> <signal>" for every signal; ends on SIGTERM and SIGINT: with the code given, by the signal ("die"), or
# not at all ("stay"). "go:..." is the same once there is a file named go: until then it is saving, so to speak.
RECORDER = """
import os, signal, sys, time
log, name, code = sys.argv[1:4]
out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def note(word):
    os.write(out, f"{os.getpid()} {name} {word}\\n".encode())
def got(number, frame):
    note(signal.Signals(number).name)
    while number == signal.SIGTERM and code.startswith("go:") and not os.path.exists("go"):
        time.sleep(0.01)
    end = code.removeprefix("go:")
    if number == signal.SIGTERM and end == "die":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    if number in (signal.SIGTERM, signal.SIGINT) and end != "stay":
        sys.exit(int(end))
for number in (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU,
    signal.SIGIO, signal.SIGPWR, signal.SIGVTALRM, signal.SIGPROF, signal.SIGRTMIN, signal.SIGRTMAX,
):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, got)
note("ready")
while True:
    time.sleep(0.1)  # a signal that comes just before signal.pause() would be looked at after the next one only
"""


class Sandbox:
    """A directory of its own, with an environment that has nothing of the surrounding one but PATH."""

    def __init__(self, path: Path, temporary: str) -> None:
        """``temporary`` has to be a short path: multiprocessing makes sockets below it, whose names are limited to 107 bytes."""
        self.path = path
        self.home = path / "home"
        self.home.mkdir()
        self.at_close: list[Callable[[], None]] = []
        self._started: list[subprocess.Popen[str]] = []
        self.env = {
            "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.home),
            "XDG_STATE_HOME": str(path / "state"),
            "TMPDIR": temporary,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run ckpt-run to its end, without a terminal."""
        return self.plain(CKPT_RUN, *words, **options)

    def plain(
        self, *words: str, env: dict[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run any command in this environment. ``env`` is added to it."""
        given = {
            "capture_output": True,
            "text": True,
            "cwd": self.path,
            "timeout": BOUND,
            "start_new_session": True,
        }
        return subprocess.run(list(words), env={**self.env, **(env or {})}, **{**given, **options})

    def start(self, *words: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Start ckpt-run, without a terminal, and leave it running."""
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": self.path}
        given["start_new_session"] = True
        process = subprocess.Popen(
            [CKPT_RUN, *words], env={**self.env, **(env or {})}, **{**given, **options}
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        """Leave nothing running that a failed test did not end."""
        for end in self.at_close:
            end()
        for process in self._started:
            if process.poll() is None:
                family = psutil.Process(process.pid)
                for member in [*family.children(recursive=True), family]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        member.kill()
                process.wait()

    def script(self, name: str, text: str) -> str:
        path = self.path / name
        path.write_text(text)
        return str(path)

    def package(self, folder: str, files: dict[str, str]) -> str:
        """Files below a folder for PYTHONPATH; its path."""
        for name, text in files.items():
            path = self.path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(self.path / folder)


def lines(path: Path | str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def words_in(path: Path | str, name: str) -> list[str]:
    """What the recorder called ``name`` wrote down, in order."""
    return [line.split()[2] for line in lines(path) if line.split()[1] == name]


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for its end: exit code, stdout, stderr."""
    out, err = process.communicate(timeout=BOUND)
    return process.returncode, out, err


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def opened_by(pid: int) -> list[Path]:
    """The files that the process has open."""
    found = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(Path(os.readlink(f"/proc/{pid}/fd/{descriptor}")))
    return found


def printed_environment(text: str) -> dict[str, str]:
    return json.loads(text)


PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


def commit_checkpoint(
    output_dir: Path, step: int, data: bytes = b"weights", state: str = "running", hole: int = 0
) -> Path:
    """A committed checkpoint and the record of the training that made it, through the store itself.

    ``hole`` zeros follow the data, at no cost on the disk; what they make of the checksum is left out.
    """
    root = Root.of(output_dir)
    checkpoint = root.checkpoint(step)
    checkpoint.prepare()
    (checkpoint.path / "model.safetensors").write_bytes(data)
    os.truncate(checkpoint.path / "model.safetensors", len(data) + hole)
    entry = FileEntry("model.safetensors", len(data) + hole, zlib.crc32(data))
    vote = Vote(
        attempt="attempt1",
        save=1,
        step=step,
        rank=0,
        world_size=1,
        lineage="lineage1",
        ordinal=0,
        files=(entry,),
    )
    commit.cast_vote(checkpoint, vote)
    commit.publish(checkpoint, commit.collect_votes(checkpoint, "attempt1", 1, [0], timeout=10))
    record = RunRecord.here(run_id="run1", attempt="attempt1", output_dir=str(output_dir))
    record.with_lineage(0, Lineage(id="lineage1", state=state)).write(root)
    return checkpoint.path


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


def python() -> str:
    return sys.executable
