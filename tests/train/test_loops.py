"""Training loops without the Trainer: DeepSpeed's engine and accelerate, each as under ckpt-run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import sharding
from datastates.store.catalog import Checkpoint, damage
from processes import SCRIPTS, Training, free_port, lines, losses
from waiting import until

from loops import Job  # isort: skip - the scripts' folder is on the path since processes

PUBLISH = "datastates.store.commit:publish"
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "deepspeed": (2, {"way": "deepspeed"}),
    "accelerate, two ranks": (2, {"way": "accelerate"}),
    "accelerate, one process": (1, {"way": "accelerate"}),
}
SHARDED: dict[str, tuple[int, dict[str, Any]]] = {
    "accelerate, DeepSpeed": (2, {"way": "accelerate", "shard": "deepspeed"}),
    "accelerate, FSDP2": (2, {"way": "accelerate", "shard": "fsdp"}),
}
PER_RANK = "accelerate, FSDP2 in files of each rank"
ALL = WAYS | SHARDED
since_1_15 = pytest.mark.skipif(
    not sharding.has_files_of_each_rank(), reason="accelerate has use_dcp=False since 1.15"
)
EVERY = [*ALL, pytest.param(PER_RANK, marks=since_1_15)]
if sharding.has_files_of_each_rank():
    ALL[PER_RANK] = (2, {"way": "accelerate", "shard": "fsdp per rank"})


def job(directory: Path, **changes: Any) -> Job:
    return Job(output_dir=str(directory / "ours"), log=str(directory / "log"), **changes)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def whole(path: Path) -> bool:
    return damage(Checkpoint.load(path)) is None


def told(training: Training, text: str, rank: int = 0) -> list[str]:
    return [line for line in training.text(rank).splitlines() if text in line]


def answers(training: Training, rank: int = 0) -> list[Any]:
    return [line["answer"] for line in lines(training.job, rank) if "answer" in line]


def resumed(training: Training) -> list[int]:
    return [line["resumed"] for line in lines(training.job) if "resumed" in line]


def killed(directory: Path, ranks: int, **changes: Any) -> Training:
    """A training whose rank 0 kills itself; the others go with it."""
    training = Training(job(directory, **changes), ranks)
    until(lambda: not os.path.exists(f"/proc/{training.pids[0]}") or _is_zombie(training.pids[0]), "the kill")
    training.kill()
    assert training.join()[0] == -signal.SIGKILL, training.text()
    return training


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Training]:
    """For each way a training that saves as that tool itself does."""
    trainings = {}
    for way, (ranks, how) in ALL.items():
        directory = tmp_path_factory.mktemp("stock")
        trainings[way] = Training(job(directory, hooked=False, resume=False, **how), ranks)
        trainings[way].finish()
    return trainings


@pytest.mark.parametrize("way", [*WAYS, pytest.param(PER_RANK, marks=since_1_15)])
def test_files_lie_where_the_tool_itself_puts_them_byte_for_byte(
    way: str, stock: dict[str, Training], tmp_path: Path
) -> None:
    ranks, how = ALL[way]
    training = Training(job(tmp_path, resume=False, **how), ranks)
    training.finish()
    ours = {
        name: digest
        for name, digest in checkpoints.digests(tmp_path / "ours").items()
        if not name.startswith(".ckpt-run/")
    }
    assert ours == checkpoints.digests(Path(stock[way].job.output_dir))
    for step in (2, 4, 6, 8):
        assert whole(tmp_path / f"ours/step_{step}")
    assert losses(training.job) == losses(stock[way].job)
    for rank in range(ranks):
        returned = [os.path.basename(str(answer)) for answer in answers(training, rank)]
        assert returned == [os.path.basename(str(answer)) for answer in answers(stock[way], rank)]


@pytest.mark.parametrize(
    ("way", "name"),
    [
        *((way, "step_{step}") for way in WAYS),
        *((way, "last") for way in ALL if way != PER_RANK),
        *(pytest.param(PER_RANK, name, marks=since_1_15) for name in ("step_{step}", "last")),
    ],
)
def test_killed_and_started_again_it_ends_as_if_undisturbed(
    way: str, name: str, stock: dict[str, Training], tmp_path: Path
) -> None:
    ranks, how = ALL[way]
    seen: dict[int, float] = {}
    for reached in (3, 6):
        training = Training(job(tmp_path, name=name, pause=0.05, **how), ranks)
        until(lambda: max(dict(losses(training.job)), default=0) >= reached, "a step", seen=training.text)  # noqa: B023
        training.kill()
        seen |= dict(losses(training.job))
    training = Training(job(tmp_path, name=name, **how), ranks)
    end = training.finish()
    assert end["weights"] == lines(stock[way].job)[-1]["weights"]
    assert seen | dict(losses(training.job)) == dict(losses(stock[way].job))
    assert damage(Checkpoint.load(tmp_path / "ours" / name.format(step=8))) is None, training.text()


KILLS = {
    "before the commit": ({"at": PUBLISH, "nth": 3}, 4),
    "after the commit": ({"at": PUBLISH, "nth": 3, "when": "after"}, 6),
    "while its files are moved into place": ({"at": "datastates.store.staged:_remove_replaced", "nth": 2}, 6),
}


def ckpt_run(*words: str | Path) -> str:
    """What the command prints; it must end well."""
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_run", *map(str, words)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_that_are_ok(path: Path) -> list[str]:
    """Those for which ``ckpt-run verify`` says so."""
    words = [line.split() for line in ckpt_run("verify", path).splitlines()]
    return sorted(line[-1] for line in words if line[0] == "ok")


@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("way", ["deepspeed", "accelerate, one process"])
def test_a_name_that_is_saved_again_leads_to_a_whole_checkpoint_whenever_the_kill_comes(
    way: str, kill: str, stock: dict[str, Training], tmp_path: Path
) -> None:
    ranks, how = WAYS[way]
    fault, step = KILLS[kill]
    killed(tmp_path, ranks, name="last", orderly=True, faults=[{**fault, "do": "kill", "rank": 0}], **how)
    files = sorted(checkpoints.digests(Path(stock[way].job.output_dir) / f"step_{step}"))
    assert files_that_are_ok(tmp_path / "ours/last") == files
    assert "damaged" not in ckpt_run("status", tmp_path / "ours")
    if kill == "before the commit":
        assert whole(tmp_path / "ours/last"), "nobody has to know of us to load the one before"
    training = Training(job(tmp_path, name="last", **how), ranks)
    assert training.finish()["weights"] == lines(stock[way].job)[-1]["weights"]
    assert resumed(training) == [0, step]


def test_a_name_that_never_was_committed_is_refused_and_the_newest_committed_one_named(
    tmp_path: Path, stock: dict[str, Training]
) -> None:
    for way, newest in (("deepspeed", "'step_4'"), ("accelerate, one process", "step_4")):
        ranks, how = WAYS[way]
        directory = tmp_path / how["way"]
        directory.mkdir()
        kill = {"at": PUBLISH, "nth": 3, "do": "kill", "rank": 0}
        killed(directory, ranks, orderly=True, faults=[kill], **how)
        given = "step_6" if how["way"] == "deepspeed" else str(directory / "ours/step_6")
        training = Training(job(directory, resume=given, **how), ranks)
        assert training.join() == [1] * ranks
        for rank in range(ranks):
            assert "was never committed; the newest committed one is" in training.text(rank)
            assert newest in training.text(rank)


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damaged", ["mp_rank_00_model_states.pt", ".ckpt/manifest.json"])
def test_where_latest_is_damaged_the_tag_before_is_loaded(
    damaged: str, stock: dict[str, Training], tmp_path: Path
) -> None:
    Training(job(tmp_path, steps=6), 2).finish()
    assert (tmp_path / "ours/latest").read_text() == "step_6"
    flip_a_bit(tmp_path / "ours/step_6" / damaged)
    training = Training(job(tmp_path), 2)
    assert training.finish()["weights"] == lines(stock["deepspeed"].job)[-1]["weights"]
    assert resumed(training) == [0, 4]
    assert len(told(training, "skipping")) == 1


def remove_newest(directory: Path) -> None:
    shutil.rmtree(directory / "step_6")


def cut_latest(directory: Path) -> None:
    (directory / "latest").write_bytes(b"")


def blank_latest(directory: Path) -> None:
    (directory / "latest").write_bytes(b"\0\xff\0\0\0\0")


@pytest.mark.parametrize(("harm", "step"), [(remove_newest, 4), (cut_latest, 6), (blank_latest, 6)])
def test_where_latest_leads_to_nothing_the_newest_committed_tag_is_loaded(
    harm: Callable[[Path], None], step: int, stock: dict[str, Training], tmp_path: Path
) -> None:
    Training(job(tmp_path, steps=6), 2).finish()
    harm(tmp_path / "ours")
    training = Training(job(tmp_path), 2)
    assert training.finish()["weights"] == lines(stock["deepspeed"].job)[-1]["weights"]
    assert resumed(training) == [0, step]
    [line] = told(training, "skipping")
    assert "is not there, and 'latest' leads to it" in line


def test_latest_is_written_with_the_commit(tmp_path: Path) -> None:
    kill = {"at": PUBLISH, "do": "kill", "rank": 0}
    killed(tmp_path, 2, faults=[kill])
    assert not (tmp_path / "ours/latest").exists()
    assert (tmp_path / "ours/step_2").exists()


# -- disks that fail ------------------------------------------------------------------------------------------------------

FAILURES = {
    "the commit": ("deepspeed", {"at": PUBLISH, "do": "ENOSPC", "nth": 2, "times": 1, "rank": 0}),
    "DeepSpeed's own files on rank 0": (
        "deepspeed",
        {
            "at": "deepspeed.runtime.engine:DeepSpeedEngine._copy_recovery_script",
            "do": "ENOSPC",
            "nth": 2,
            "times": 1,
            "rank": 0,
        },
    ),
    "the writer on rank 1": (
        "deepspeed",
        {
            "at": "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine:TorchCheckpointEngine.save",
            "do": "EIO",
            "nth": 2,
            "times": 1,
            "rank": 1,
        },
    ),
    "getting the directory ready": (
        "deepspeed",
        {"at": "datastates.store.staged:open_directory", "do": "EROFS", "nth": 2, "times": 1, "rank": 0},
    ),
    "accelerate's own files": (
        "accelerate, two ranks",
        {
            "at": "accelerate.accelerator:save_accelerator_state",
            "do": "ENOSPC",
            "nth": 2,
            "times": 1,
            "rank": 0,
        },
    ),
}


@pytest.mark.parametrize(
    ("failure", "name"),
    [
        *((failure, "step_{step}") for failure in FAILURES),
        ("the commit", "last"),
        ("DeepSpeed's own files on rank 0", "last"),
    ],
)
def test_a_disk_that_fails_costs_one_checkpoint_and_nobody_waits_for_ever(
    failure: str, name: str, stock: dict[str, Training], tmp_path: Path
) -> None:
    way, fault = FAILURES[failure]
    ranks, how = WAYS[way]
    training = Training(job(tmp_path, name=name, orderly=True, faults=[fault], **how), ranks)
    assert training.finish()["weights"] == lines(stock[way].job)[-1]["weights"]
    errors = [line for rank in range(ranks) for line in told(training, "[ERROR]", rank)]
    assert all("training goes on" in line for line in errors)
    assert len(errors) in (1, 2)
    found = {step: (tmp_path / f"ours/step_{step}") for step in (2, 4, 6, 8)}
    if name == "last":
        assert whole(tmp_path / "ours/last")
    else:
        assert [step for step, path in found.items() if whole(path)] == [2, 6, 8]


def test_a_swap_folder_that_does_not_fit_costs_that_checkpoint_and_no_rank_waits_for_it(
    stock: dict[str, Training], tmp_path: Path
) -> None:
    """What DeepSpeed keeps on NVMe it copies into the checkpoint with shutil.copytree, whose error has no number."""
    full = {"at": "shutil:copyfile", "about": "step_4/offloaded_tensors", "do": "ENOSPC", "rank": 1}
    training = Training(job(tmp_path, swap=True, resume=False, orderly=True, faults=[full]), 2)
    assert training.finish()["weights"] == lines(stock["deepspeed"].job)[-1]["weights"]
    assert [whole(tmp_path / f"ours/step_{step}") for step in (2, 4, 6, 8)] == [True, False, True, True]
    swapped = {"offloaded_tensors/rank00/0.swp", "offloaded_tensors/rank01/0.swp"}
    assert swapped <= set(files_that_are_ok(tmp_path / "ours/step_8"))
    errors = [line for rank in (0, 1) for line in told(training, "[ERROR]", rank)]
    assert len(errors) == 2
    assert all("step_4" in line and "No space left on device" in line for line in errors)


# -- accelerate's ways -------------------------------------------------------------------------------------------------------


def test_saving_on_the_main_process_alone_waits_for_nobody(
    stock: dict[str, Training], tmp_path: Path
) -> None:
    training = Training(job(tmp_path, way="accelerate", main_only=True, grace=1.0), 2)
    assert training.finish()["weights"] == lines(stock["accelerate, two ranks"].job)[-1]["weights"]
    assert [whole(tmp_path / f"ours/step_{step}") for step in (2, 4, 6, 8)] == [True] * 4
    assert len(told(training, "ranks 1 do not save here")) == 1


def test_ranks_whose_accelerators_believe_to_be_alone_do_not_write_over_each_other(tmp_path: Path) -> None:
    training = Training(job(tmp_path, way="accelerate", shard="misled", resume=False), 2)
    training.finish()
    for step in (2, 4, 6, 8):
        assert whole(tmp_path / f"ours/step_{step}")
    assert len(told(training, "believes to be alone")) == 1
    votes = [json.loads((tmp_path / f"ours/step_8/.ckpt/rank-{rank}.json").read_text()) for rank in (0, 1)]
    files = [{file["path"] for file in vote["files"]} for vote in votes]
    assert files[0] & files[1] == set()
    assert files[1] == {"pytorch_model/zero_pp_rank_1_mp_rank_00_optim_states.pt"}


def test_automatic_naming_keeps_what_total_limit_says_and_resumes_from_the_newest_whole_one(
    stock: dict[str, Training], tmp_path: Path
) -> None:
    how: dict[str, Any] = {"way": "accelerate", "name": "", "total_limit": 2}
    kill = {"at": PUBLISH, "nth": 4, "do": "kill", "rank": 0}
    killed(tmp_path, 2, orderly=True, faults=[kill], **how)
    folder = tmp_path / "ours/checkpoints"
    assert names(folder) == ["checkpoint_1", "checkpoint_2", "checkpoint_3"], "the fourth is not committed"
    training = Training(job(tmp_path, **how), 2)
    assert training.finish()["weights"] == lines(stock["accelerate, two ranks"].job)[-1]["weights"]
    assert resumed(training) == [0, 6]
    assert sorted(os.listdir(folder)) == ["checkpoint_2", "checkpoint_3"]
    assert [whole(folder / name) for name in names(folder)] == [True, True]


@pytest.mark.parametrize("load", [True, "checkpoints/checkpoint_2"])
def test_after_a_load_automatic_naming_counts_on_without_being_told(
    load: bool | str, stock: dict[str, Training], tmp_path: Path
) -> None:
    how: dict[str, Any] = {"way": "accelerate", "name": "", "counts": False}
    kill = {"at": PUBLISH, "nth": 4, "do": "kill", "rank": 0}
    killed(tmp_path, 2, orderly=True, faults=[kill], **how)
    if isinstance(load, str):
        load = str(tmp_path / "ours" / load)
    training = Training(job(tmp_path, resume=load, **how), 2)
    assert training.finish()["weights"] == lines(stock["accelerate, two ranks"].job)[-1]["weights"]
    folder = tmp_path / "ours/checkpoints"
    assert sorted(os.listdir(folder)) == [f"checkpoint_{number}" for number in range(4)]
    assert all(whole(folder / name) for name in names(folder))


AMONG_THE_FILES = {
    "at": "accelerate.accelerator:save_accelerator_state",
    "when": "after",
    "do": "kill",
    "rank": 0,
}


@pytest.mark.parametrize("way", [way for way in ALL if way.startswith("accelerate")])
def test_killed_among_the_files_of_a_save_automatic_naming_resumes_from_the_one_before(
    way: str, stock: dict[str, Training], tmp_path: Path
) -> None:
    ranks, how = ALL[way]
    killed(tmp_path, ranks, name="", orderly=True, faults=[{**AMONG_THE_FILES, "nth": 3}], **how)
    assert len(names(tmp_path / "ours/checkpoints")) == 3
    training = Training(job(tmp_path, name="", **how), ranks)
    assert training.finish()["weights"] == lines(stock[way].job)[-1]["weights"]
    assert resumed(training) == [0, 4]
    assert [whole(tmp_path / f"ours/checkpoints/checkpoint_{number}") for number in range(4)] == [True] * 4


def test_where_nothing_was_ever_committed_automatic_naming_says_how_to_begin_again(tmp_path: Path) -> None:
    killed(tmp_path, 1, way="accelerate", name="", faults=[AMONG_THE_FILES])
    training = Training(job(tmp_path, way="accelerate", name=""))
    assert training.join() == [1]
    assert f"remove {tmp_path}/ours/checkpoints to start from the beginning" in training.text()


@pytest.mark.parametrize("damaged", ["optimizer.bin", ".ckpt/manifest.json"])
def test_a_damaged_checkpoint_moves_aside_when_automatic_naming_comes_to_its_number_again(
    damaged: str, stock: dict[str, Training], tmp_path: Path
) -> None:
    how: dict[str, Any] = {"way": "accelerate", "name": ""}
    Training(job(tmp_path, steps=6, **how), 2).finish()
    folder = tmp_path / "ours/checkpoints"
    flip_a_bit(folder / "checkpoint_2" / damaged)
    training = Training(job(tmp_path, **how), 2)
    assert training.finish()["weights"] == lines(stock["accelerate, two ranks"].job)[-1]["weights"]
    assert resumed(training) == [0, 4]
    assert sorted(os.listdir(folder)) == [f"checkpoint_{number}" for number in range(4)]
    assert all(whole(folder / name) for name in names(folder))
    (aside,) = (tmp_path / "ours/.ckpt-run/.aside").iterdir()
    assert not whole(aside)


def test_total_limit_never_takes_the_only_committed_checkpoint(tmp_path: Path) -> None:
    fault = {"at": PUBLISH, "nth": 2, "do": "ENOSPC"}
    training = Training(job(tmp_path, way="accelerate", name="", total_limit=1, faults=[fault]))
    training.finish()
    assert whole(tmp_path / "ours/checkpoints/checkpoint_0")


@pytest.mark.parametrize("way", [pytest.param(PER_RANK, marks=since_1_15)])
def test_files_of_each_rank_are_refused_by_another_number_of_ranks(way: str, tmp_path: Path) -> None:
    ranks, how = ALL[way]
    Training(job(tmp_path, steps=2, **how), ranks).finish()
    training = Training(job(tmp_path, **how), 3)
    assert training.join() == [1] * 3
    for rank in range(3):
        assert "was saved by 2 rank(s), and 3 would load it" in training.text(rank)


@pytest.mark.parametrize("way", EVERY)
def test_from_the_second_save_on_memory_is_copied_late(way: str, tmp_path: Path) -> None:
    ranks, how = ALL[way]
    wide = {"hidden_size": 128, "intermediate_size": 256}
    Training(job(tmp_path, resume=False, orderly=True, steps=4, model=wide, **how), ranks).finish()
    journal = (tmp_path / "ours/.ckpt-run/.run/events-rank0.jsonl").read_text().splitlines()
    first, second = (event for event in map(json.loads, journal) if event["kind"] == "save")
    assert first["late_bytes"] < second["late_bytes"]
    assert second["late_bytes"] > 0.8 * second["bytes"]


# -- settings ----------------------------------------------------------------------------------------------------------------


def test_a_script_that_reads_at_once_can_have_the_call_wait(tmp_path: Path) -> None:
    wait = {"CKPT_RUN_LOOP_SAVES": "wait"}
    slow = {"at": PUBLISH, "do": "sleep", "amount": 0.2}
    training = Training(job(tmp_path, way="accelerate", settings=wait, faults=[slow]))
    training.finish()
    assert all(line["seconds"] > 0.2 for line in lines(training.job) if "saved" in line)


@pytest.mark.parametrize("name", ["last", "step_{step}"])
def test_every_rank_that_had_the_call_wait_may_read_at_once(name: str, tmp_path: Path) -> None:
    wait = {"CKPT_RUN_LOOP_SAVES": "wait"}
    slow = {"at": "datastates.store.staged:settle", "do": "sleep", "amount": 0.3, "rank": 0}
    late = {"at": "datastates.llm.committer:_write", "do": "sleep", "amount": 0.3, "rank": 0}
    training = Training(job(tmp_path, name=name, read=True, settings=wait, faults=[slow, late]), 2)
    training.finish()
    for rank in (0, 1):
        assert [line["read"] for line in lines(training.job, rank) if "read" in line] == [2, 4, 6, 8]


@pytest.mark.parametrize("way", ["deepspeed", "accelerate, one process"])
def test_a_script_can_ask_for_it_by_itself(way: str, stock: dict[str, Training], tmp_path: Path) -> None:
    ranks, how = WAYS[way]
    training = Training(job(tmp_path, hooked="script", **how), ranks)
    assert training.finish()["weights"] == lines(stock[way].job)[-1]["weights"]
    assert [whole(tmp_path / f"ours/step_{step}") for step in (2, 4, 6, 8)] == [True] * 4


def test_switched_off_it_leaves_no_trace(tmp_path: Path) -> None:
    Training(job(tmp_path, way="accelerate", settings={"CKPT_RUN_LOOP_SAVES": "off"})).finish()
    assert list((tmp_path / "ours").rglob(".ckpt*")) == []


def test_two_trainings_do_not_save_into_one_directory(tmp_path: Path) -> None:
    first = Training(job(tmp_path, pause=0.5), 2)
    until(lambda: (tmp_path / "ours/latest").exists(), "a checkpoint", seen=first.text)
    second = Training(Job(output_dir=str(tmp_path / "ours"), log=str(tmp_path / "second"), name="other"), 2)
    second.finish()
    [line] = told(second, "are left to stock code")
    assert f"process {first.pids[0]}" in line
    assert not (tmp_path / "ours/other/.ckpt").exists()
    first.kill()


# -- the real command ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", ["deepspeed", pytest.param("accelerate, one process", marks=pytest.mark.campaign)]
)
def test_under_ckpt_run_the_hook_finds_the_loop_by_itself(
    way: str, stock: dict[str, Training], tmp_path: Path
) -> None:
    ranks, how = WAYS[way]
    arguments = job(tmp_path, hooked=False, **how).__dict__
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    script = [str(SCRIPTS / "loops.py"), json.dumps(arguments)]
    launcher = shutil.which("ckpt-run", path=os.path.dirname(sys.executable))
    assert launcher is not None
    done = subprocess.run(
        [launcher, *command, *script],
        env=environment,
        cwd=tmp_path,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert lines(job(tmp_path))[-1]["weights"] == lines(stock[way].job)[-1]["weights"]
    assert whole(tmp_path / "ours/step_8")
    for where in ([], [str(tmp_path / "ours")]):
        status = subprocess.run(
            [launcher, "status", *where], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert status.returncode == 0, status.stderr
        assert "step_8" in status.stdout, status.stdout
