"""status and verify tell what is on disk, as text and as JSON, with exit codes that a script can use."""

from __future__ import annotations

import itertools
import json
import os
import pty
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from datastates.store import commit, staged
from datastates.store.journal import Journal
from datastates.store.layout import LOOP_HOME, Root
from datastates.store.manifest import FileEntry, Vote
from datastates.store.runrecord import RunRecord
from launch_tools import CKPT_RUN, Sandbox, commit_checkpoint, finish
from waiting import until


def train(output_dir: Path, run_id: str = "run1") -> None:
    """What a short training leaves: a committed checkpoint, one in flight, an error, events with timings."""
    commit_checkpoint(output_dir, 100)
    journal = Journal(Root.of(output_dir), 0, run_id, "attempt1")
    journal.event("hooked", rank=0, world_size=2, pid=os.getpid(), host=os.uname().nodename)
    journal.event("save", step=100, save=1, bytes=7, stall_s=0.012)
    journal.event("commit", step=100, seconds=2.5, bytes=7)
    journal.event("save", step=200, save=2, bytes=7, stall_s=0.014)
    journal.event("error", text="write /x: No space left on device")
    journal.close()


def loop_directory(folder: Path) -> Path:
    """Where a training loop with accelerate has saved, was started again, which counts anew, and has saved again."""
    out = folder / "out"
    out.mkdir()
    for step, name in ((2, "before"), (0, "after")):
        commit_checkpoint(folder / "trainer", step).rename(out / name)
    RunRecord.here(run_id="run1", attempt="attempt1", output_dir=str(out)).write(Root(out, out / LOOP_HOME))
    return out


# --- status --------------------------------------------------------------------------------------------------------------


def test_without_a_run_it_says_so_and_fails(sandbox: Sandbox) -> None:
    done = sandbox.run("status")
    assert (done.returncode, done.stderr) == (1, "")
    assert "no run of ckpt-run in" in done.stdout


def test_json_without_a_run_is_an_object_too(sandbox: Sandbox) -> None:
    done = sandbox.run("status", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["schema_version"], found["found"]) == (1, 1, False)


def test_everything_there_is_to_know_is_shown(sandbox: Sandbox) -> None:
    train(sandbox.path / "out")
    done = sandbox.run("status", "out")
    assert done.returncode == 0
    for told in (
        "run1",
        "running",
        "in flight   step 200",
        "step 100, 7 B in 1 file",
        "13 ms a checkpoint (longest 14 ms, 2 saves)",
        "2.5 s after the save",
        "1 of 2 hooked",
        "No space left on device",
    ):
        assert told in done.stdout, done.stdout


def test_a_training_whose_process_is_gone_was_interrupted(sandbox: Sandbox) -> None:
    tools = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    code = (
        f"import sys; sys.path[:0] = {tools!r}; import test_launch_console as t; from pathlib import Path; "
    )
    assert sandbox.plain(sys.executable, "-c", code + "t.train(Path('out').absolute())").returncode == 0
    found = json.loads(sandbox.run("status", "--json", "out").stdout)
    assert (found["state"], found["in_flight"]) == ("interrupted", [])


def test_json_has_the_fields_of_the_table(sandbox: Sandbox) -> None:
    train(sandbox.path / "out")
    found = json.loads(sandbox.run("status", "--json", "out").stdout)
    assert found["schema_version"] == 1
    assert found["run"]["run_id"] == "run1"
    assert (found["step"], found["newest"]["step"], found["newest"]["bytes"]) == (200, 100, 7)
    assert (found["hooked"], found["ranks"]) == (1, 2)
    assert found["stall_s"] == pytest.approx(0.013)
    assert found["commit_s"] == 2.5
    assert "No space left" in found["last_error"]


@pytest.mark.parametrize("place", [".", "out", "out/concurrent_checkpoint"])
def test_the_run_is_found_from_every_directory_around_it(sandbox: Sandbox, place: str) -> None:
    train(sandbox.path / "out")
    assert "run1" in sandbox.run("status", place).stdout
    assert "run1" in sandbox.run("status", cwd=sandbox.path / place).stdout


def test_of_several_trials_the_newest_is_shown(sandbox: Sandbox) -> None:
    commit_checkpoint(sandbox.path / "out/run-0", 100)
    train(sandbox.path / "out/run-1")
    assert "out/run-1/concurrent_checkpoint" in sandbox.run("status", "out").stdout


def test_the_last_launch_is_told_although_it_trained_nothing(sandbox: Sandbox) -> None:
    sandbox.run("sh", "-c", "exit 3")
    done = sandbox.run("status")
    assert done.returncode == 0
    assert "with exit code 3" in done.stdout
    assert "no Trainer of this launch has begun to train" in done.stdout
    assert "0 hooked" in done.stdout


def test_a_launch_that_was_killed_is_not_said_to_run(sandbox: Sandbox) -> None:
    process = sandbox.start("sh", "-c", "touch up; while true; do sleep 0.05; done")
    until((sandbox.path / "up").exists)
    until(lambda: "started" in sandbox.run("status").stdout)
    assert "gone from this host" not in sandbox.run("status").stdout
    process.kill()  # first, or it notes how the program ended
    finish(process)
    assert "gone from this host" in sandbox.run("status").stdout


def test_where_the_last_launch_saved_is_remembered(sandbox: Sandbox) -> None:
    elsewhere = sandbox.path / "far/away/from/here"
    train(elsewhere)
    sandbox.run("--output-dir", str(elsewhere), "true")
    done = sandbox.run("status")
    assert str(elsewhere) in done.stdout
    assert "what follows is an older run" in done.stdout


def test_a_rank_that_the_hook_cannot_enter_is_named(sandbox: Sandbox) -> None:
    code = "import sys; open('up', 'w').close(); sys.stdin.read()"
    process = sandbox.start("--", "env", "RANK=0", sys.executable, "-I", "-c", code, stdin=subprocess.PIPE)
    until((sandbox.path / "up").exists)
    shown = sandbox.run("status").stdout
    found = json.loads(sandbox.run("status", "--json").stdout)
    finish(process)
    assert "0 of 1 hooked" in shown
    assert "python -I: no hook is loaded there" in shown.replace(Path(sys.executable).name, "python")
    assert (found["hooked"], found["ranks"]) == (0, 1)


def test_damaged_records_are_shown_and_not_fallen_over(sandbox: Sandbox) -> None:
    train(sandbox.path / "out")
    run = sandbox.path / "out/concurrent_checkpoint/.run"
    (run / "run.json").write_bytes(b"{half")
    (run / "events-rank0.jsonl").write_bytes(b'\x00\xff\n{"time": "x"}\n[]\n{}\n')
    done = sandbox.run("status", "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "run.json" in done.stdout


def test_status_does_not_import_torch(sandbox: Sandbox) -> None:
    train(sandbox.path / "out")
    done = sandbox.plain(sys.executable, "-X", "importtime", CKPT_RUN, "status", "out")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "ckpt_run.status" in imported
    assert not imported & {"torch", "transformers", "numpy"}


def test_the_newest_of_a_training_loop_is_what_was_committed_last(sandbox: Sandbox) -> None:
    loop_directory(sandbox.path)
    newest = json.loads(sandbox.run("status", "out", "--json").stdout)["newest"]
    assert newest["path"].endswith("out/after")


# --- verify --------------------------------------------------------------------------------------------------------------


def test_whole_checkpoints_are_ok_file_by_file(sandbox: Sandbox) -> None:
    commit_checkpoint(sandbox.path / "out", 100)
    newest = commit_checkpoint(sandbox.path / "out", 200)
    done = sandbox.run("verify", "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("ok ") == 2
    assert "2 files ok" in done.stdout
    assert sandbox.run("verify", str(newest)).stdout.splitlines()[-1] == "1 file ok"
    assert sandbox.run("verify", "out/concurrent_checkpoint").returncode == 0


def test_all_checkpoints_of_a_training_loop_are_verified_by_its_directory(sandbox: Sandbox) -> None:
    out = loop_directory(sandbox.path)
    done = sandbox.run("verify", "out")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "2 files ok")
    (out / "before/model.safetensors").unlink()
    done = sandbox.run("verify", "out")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "1 file damaged or missing, 1 ok")


@pytest.mark.parametrize(
    ("data", "word", "reason"),
    [
        (b"weightz", "DAMAGED", "checksum"),
        (b"weight", "DAMAGED", "6 bytes instead of 7"),
        (None, "MISSING", "missing"),
    ],
)
def test_damage_is_named_and_fails(sandbox: Sandbox, data: bytes | None, word: str, reason: str) -> None:
    commit_checkpoint(sandbox.path / "out", 100)
    newest = commit_checkpoint(sandbox.path / "out", 200)
    (newest / "model.safetensors").unlink()
    if data is not None:
        (newest / "model.safetensors").write_bytes(data)
    for path in ("out", "out/concurrent_checkpoint", str(newest)):
        done = sandbox.run("verify", path)
        assert done.returncode == 1
        assert any(
            word in line and reason in line and "model.safetensors" in line
            for line in done.stdout.splitlines()
        )
    assert sandbox.run("verify", str(newest.with_name("checkpoint-100"))).returncode == 0


def test_a_damaged_manifest_fails(sandbox: Sandbox) -> None:
    newest = commit_checkpoint(sandbox.path / "out", 200)
    manifest = newest / ".ckpt/manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"model", b"medol"))
    done = sandbox.run("verify", "out")
    assert done.returncode == 1
    assert ".ckpt/manifest.json" in done.stdout


def test_what_was_never_committed_fails_only_when_it_is_named(sandbox: Sandbox) -> None:
    newest = commit_checkpoint(sandbox.path / "out", 200)
    Root.of(sandbox.path / "out").checkpoint(300).prepare()
    assert sandbox.run("verify", "out").returncode == 0
    done = sandbox.run("verify", str(newest.with_name("checkpoint-300")))
    assert done.returncode == 1
    assert "never committed" in done.stdout


def newer_ones(out: Path) -> Iterator[None]:
    """A training with ``save_total_limit=1``."""
    for step in itertools.count(1):
        commit_checkpoint(out, step)
        commit.delete(Root.of(out).checkpoint(step - 1))
        yield


def one_name_again_and_again(out: Path) -> Iterator[None]:
    """A training loop that always saves into ``last``."""
    path = Root.of(out).path / "last"
    for number in itertools.count(1):
        directory = staged.open_directory(path, number, "attempt1", number)
        data = str(number).encode() * 50_000
        (directory.files / "model").write_bytes(data)
        vote = Vote(
            attempt="attempt1",
            save=number,
            step=number,
            rank=0,
            world_size=1,
            lineage="lineage1",
            ordinal=0,
            files=(FileEntry("model", len(data), zlib.crc32(data)),),
        )
        commit.cast_vote(directory, vote)
        if directory.staged:
            staged.replace(directory)
        commit.publish(directory, [vote], others=[])
        staged.settle(path)
        yield


@pytest.mark.parametrize(
    ("saves", "path"),
    [(newer_ones, "out"), (one_name_again_and_again, "out/concurrent_checkpoint/last")],
    ids=["newer ones", "one name again and again"],
)
def test_verify_calls_nothing_damaged_while_training_goes_on(
    saves: Callable[[Path], Iterator[None]], path: str, sandbox: Sandbox
) -> None:
    steps = saves(sandbox.path / "out")
    next(steps)
    over = threading.Event()

    def train() -> None:
        while not over.wait(0.002):
            next(steps)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        told = [sandbox.run("verify", path).stdout for _ in range(10)]
    finally:
        over.set()
        thread.join()
    assert [text for text in told if "MISSING" in text or "DAMAGED" in text] == []
    assert sandbox.run("verify", path).returncode == 0


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_nothing_to_verify_says_so_and_fails(sandbox: Sandbox, path: str) -> None:
    done = sandbox.run("verify", path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.count("\n") == 1


def test_nothing_is_unpickled(sandbox: Sandbox) -> None:
    bomb = b"cos\nsystem\n(S'touch exploded'\ntR."
    commit_checkpoint(sandbox.path / "out", 100, bomb)
    assert sandbox.run("verify", "out").returncode == 0
    assert not (sandbox.path / "exploded").exists()


# --- both ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["status", "verify"])
def test_help_has_an_example(sandbox: Sandbox, name: str) -> None:
    done = sandbox.run(name, "--help")
    assert done.returncode == 0
    assert f"    ckpt-run {name} out" in done.stdout


@pytest.mark.parametrize("words", [("status", "out"), ("verify", "out")])
def test_a_pipe_gets_plain_text_and_long_lines_whole(sandbox: Sandbox, words: tuple[str, str]) -> None:
    output_dir = sandbox.path / ("long/" * 20) / "out"
    train(output_dir)
    done = sandbox.run(words[0], str(output_dir))
    assert "\x1b" not in done.stdout
    assert str(output_dir) in done.stdout


@pytest.mark.parametrize("name", ["status", "verify"])
def test_a_terminal_gets_colour_unless_it_is_not_wanted(sandbox: Sandbox, name: str) -> None:
    train(sandbox.path / "out")
    assert "\x1b[" in on_terminal(sandbox, name, TERM="xterm-256color")
    assert "\x1b[3" not in on_terminal(sandbox, name, TERM="xterm-256color", NO_COLOR="1")


def on_terminal(sandbox: Sandbox, name: str, **variables: str) -> str:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [CKPT_RUN, name, "out"],
        cwd=sandbox.path,
        env={**sandbox.env, **variables},
        stdout=slave,
        stderr=subprocess.DEVNULL,
    )
    os.close(slave)
    text = b""
    try:
        while data := os.read(master, 4096):
            text += data
    except OSError:  # the other end is closed
        pass
    os.close(master)
    process.wait(60)
    return text.decode()


@pytest.mark.parametrize("name", ["status", "verify"])
def test_a_path_that_the_locale_cannot_write_is_shown_all_the_same(sandbox: Sandbox, name: str) -> None:
    train(sandbox.path / "o\u00fct")
    env = {"LANG": "C", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = sandbox.run(name, "o\u00fct", env=env)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_early_is_no_error(sandbox: Sandbox) -> None:
    train(sandbox.path / "out")
    done = sandbox.plain("bash", "-c", f"{CKPT_RUN} verify out | true")
    assert done.stderr == ""


def test_a_wrong_option_is_wrong_usage(sandbox: Sandbox) -> None:
    assert sandbox.run("status", "--no-such").returncode == 2
    assert sandbox.run("verify").returncode == 2
