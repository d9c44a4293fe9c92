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
import psutil
import pytest
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
        self.output = path / "printed"
        pdsh.install(path / "bin", path / "homes")
        (path / "launcher").mkdir()
        # Or each node would build DeepSpeed's kernel in its home, which takes longer than everything else.
        extensions = f"TORCH_EXTENSIONS_DIR={os.environ['TORCH_EXTENSIONS_DIR']}\n"
        (path / "launcher" / ".deepspeed_env").write_text(extensions)

    def launch(self, job: Job) -> subprocess.Popen[bytes]:
        """``ckpt-run deepspeed`` with a script that knows nothing of it."""
        told, script = self.path / "job.json", self.path / "train_here.py"
        told.write_text(json.dumps(asdict(job)))
        script.write_text(SCRIPT.format(scripts=str(SCRIPTS), job=str(told)))
        deepspeed = str(Path(sys.executable).parent / "deepspeed")
        words = pdsh.two_nodes(self.path / "hosts", processes.free_port())
        return processes.launch(
            [sys.executable, "-m", "ckpt_run", deepspeed, *words, str(script)],
            self.output,
            cwd=self.path / "launcher",
            PATH=f"{self.path / 'bin'}{os.pathsep}{os.environ['PATH']}",
            DS_ACCELERATOR="cpu",
        )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same training by stock Trainer."""
    folder = tmp_path_factory.mktemp("stock")
    quiet = Job(str(folder / "out"), str(folder / "log"), False, None, arguments=ARGUMENTS)
    Training(quiet, 2).finish()
    return quiet


def ours(path: Path) -> Job:
    """``log`` is relative: each rank keeps its own where its node works (see :func:`seen_on`)."""
    return Job(str(path / "out"), "log", False, None, pause=0.05, arguments=ARGUMENTS)


def seen_on(nodes: Nodes, job: Job, rank: int) -> Job:
    return replace(job, log=str(nodes.path / "homes" / ("node-a", "node-b")[rank] / job.log))


def until_a_commit(process: subprocess.Popen[bytes], nodes: Nodes) -> None:
    """And a random moment longer."""
    until(
        lambda: runs.committed(nodes.path / "out") or process.poll() is not None,
        "a commit",
        processes.PATIENCE,
        nodes.output.read_text,
    )
    time.sleep(random.uniform(0, 0.3))


@NEEDS_DEEPSPEED
def test_killed_on_both_nodes_and_relaunched_equals_uninterrupted(tmp_path: Path, undisturbed: Job) -> None:
    nodes = Nodes(tmp_path)
    process = nodes.launch(ours(tmp_path))
    try:
        until_a_commit(process, nodes)
    finally:
        processes.kill_tree(process)
    ends_as_undisturbed(nodes, undisturbed)


@pytest.mark.campaign
@NEEDS_DEEPSPEED
@pytest.mark.parametrize("lost", ["node-a", "node-b"])
def test_where_one_node_is_lost_the_other_ends_by_itself_and_the_next_launch_equals_uninterrupted(
    lost: str, tmp_path: Path, undisturbed: Job
) -> None:
    nodes = Nodes(tmp_path)
    process = nodes.launch(ours(tmp_path))
    try:
        until_a_commit(process, nodes)
        for member in psutil.Process(process.pid).children(recursive=True):
            if member.environ().get("NODE") == lost:
                member.kill()
        until(
            lambda: process.poll() is not None, "the other node", processes.PATIENCE, nodes.output.read_text
        )
    finally:
        processes.kill_tree(process)
    assert process.returncode > 0
    ends_as_undisturbed(nodes, undisturbed)


def ends_as_undisturbed(nodes: Nodes, stock: Job) -> None:
    """Launched once more, after it was killed in the middle of what both nodes had committed parts of."""
    output_dir = nodes.path / "out"
    before = checkpoints.whole(output_dir)[-1]
    assert before < STEPS, "it was too fast to be killed"
    shards = {f"global_step{before}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)}
    assert shards <= checkpoints.digests(runs.checkpoint(output_dir, before)).keys()

    process = nodes.launch(replace(ours(nodes.path), pause=0.0))
    until(lambda: process.poll() is not None, "the end", processes.PATIENCE, nodes.output.read_text)
    assert process.returncode == 0, nodes.output.read_text()[-5000:]
    for rank in (0, 1):
        job, expected = seen_on(nodes, ours(nodes.path), rank), dict(losses(stock, rank))
        assert [(step, loss) for step, loss in losses(job, rank) if loss != expected[step]] == []
        assert [step for step, _ in losses(job, rank)].count(1) == 1, "it started over"
        assert lines(job, rank)[-1] == lines(stock, rank)[-1]
    last, by_stock = runs.checkpoint(output_dir, STEPS), Path(stock.output_dir) / f"checkpoint-{STEPS}"
    assert checkpoints.digests_anywhere(last) == checkpoints.digests_anywhere(by_stock)
    assert not list(output_dir.glob("checkpoint-*"))
