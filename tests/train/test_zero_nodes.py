"""ZeRO over two nodes, as deepspeed starts it there: killed and relaunched, it ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import checkpoints
import pdsh
import processes
import runs
from desk import NEEDS_DEEPSPEED
from processes import SCRIPTS, Job, Training, lines, losses
from sharding import zero
from waiting import until

SCRIPT = """
import json, sys
sys.path.insert(0, {scripts!r})
import train
with open({job!r}) as file:
    train.main(train.Job(**json.load(file)))
"""
STEPS = 12
ARGUMENTS = {"max_steps": STEPS, "save_steps": 2, **zero(2)}


class Nodes:
    """Two nodes that see the same file system below ``path``. Each has a working directory of its own, as has the machine that launches."""

    def __init__(self, path: Path) -> None:
        self.path = path
        pdsh.install(path / "bin", path / "homes")
        (path / "launcher").mkdir()

    def launch(self, job: Job) -> subprocess.Popen[bytes]:
        """``ckpt-run deepspeed`` with a script that knows nothing of it."""
        told, script = self.path / "job.json", self.path / "train_here.py"
        told.write_text(json.dumps(asdict(job)))
        script.write_text(SCRIPT.format(scripts=str(SCRIPTS), job=str(told)))
        deepspeed = str(Path(sys.executable).parent / "deepspeed")
        words = pdsh.two_nodes(self.path / "hosts", processes.free_port())
        return processes.launch(
            [sys.executable, "-m", "ckpt_run", deepspeed, *words, str(script)],
            Path(f"{job.log}.out"),
            cwd=self.path / "launcher",
            PATH=f"{self.path / 'bin'}{os.pathsep}{os.environ['PATH']}",
            DS_ACCELERATOR="cpu",
        )


@NEEDS_DEEPSPEED
def test_killed_on_both_nodes_and_relaunched_equals_uninterrupted(tmp_path: Path) -> None:
    quiet = Job(str(tmp_path / "stock"), str(tmp_path / "stock-log"), False, None, arguments=ARGUMENTS)
    Training(quiet, 2).finish()
    nodes = Nodes(tmp_path)
    job = Job(str(tmp_path / "out"), str(tmp_path / "log"), False, None, pause=0.05, arguments=ARGUMENTS)
    output = Path(f"{job.log}.out")

    process = nodes.launch(job)
    try:
        until(
            lambda: runs.committed(tmp_path / "out") or process.poll() is not None,
            "a commit",
            seen=output.read_text,
        )
        time.sleep(random.uniform(0, 0.3))
    finally:
        processes.kill_tree(process)
    before = checkpoints.whole(tmp_path / "out")[-1]
    assert before < STEPS, "it was too fast to be killed"
    shards = {f"global_step{before}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)}
    assert shards <= checkpoints.digests(runs.checkpoint(tmp_path / "out", before)).keys()

    process = nodes.launch(replace(job, pause=0.0))
    until(lambda: process.poll() is not None, "the end", processes.PATIENCE, output.read_text)
    assert process.returncode == 0, output.read_text()[-5000:]
    for rank in (0, 1):
        expected = dict(losses(quiet, rank))
        assert [(step, loss) for step, loss in losses(job, rank) if loss != expected[step]] == []
        assert [step for step, _ in losses(job, rank)].count(1) == 1, "it started over"
        assert lines(job, rank)[-1] == lines(quiet, rank)[-1]
    assert not list((tmp_path / "out").glob("checkpoint-*"))
