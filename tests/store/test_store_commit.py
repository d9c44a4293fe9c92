from __future__ import annotations

import os
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest
from datastates.store import commit
from datastates.store.catalog import Catalog, damage
from datastates.store.commit import CommitAbandoned
from datastates.store.layout import CheckpointDir, Root
from datastates.store.manifest import ManifestError, Vote, read_manifest
from datastates.store.quorum import COMMITTED, Quorum
from store_files import BY_STOCK, DAMAGES, FILES, entry, save, uncommitted, vote, write
from waiting import until

RANK = Path(__file__).with_name("store_rank.py")


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.of(tmp_path)


def written(root: Root, step: int = 10) -> CheckpointDir:
    checkpoint = root.checkpoint(step)
    checkpoint.prepare()
    write(checkpoint.path, {**FILES, **BY_STOCK})
    return checkpoint


def ranks(root: Root, step: int, how: list[str]) -> list[str]:
    """Every rank as a process of its own, all at once; what each was told."""
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(RANK),
                str(root.path),
                str(step),
                str(rank),
                str(len(how)),
                *([how[rank]] if how[rank] else []),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(len(how))
    ]
    return [process.communicate(timeout=100)[0].strip() for process in processes]


# -- voters ---------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_without_files_is_not_committed(root: Root) -> None:
    checkpoint = root.checkpoint(10)
    checkpoint.prepare()
    with pytest.raises(CommitAbandoned, match="no file was saved"):
        commit.publish(checkpoint, [vote(checkpoint, {})])
    assert not checkpoint.manifest.exists()


def test_four_ranks_in_four_processes_commit_one_checkpoint_and_all_learn_of_it(root: Root) -> None:
    assert ranks(root, 10, ["", "", "", ""]) == ["committed"] * 4
    checkpoint = Catalog(root).get(10)
    assert checkpoint.manifest and checkpoint.manifest.world_size == 4
    assert [file.path for file in checkpoint.manifest.files] == [
        *(f"rng_state_{rank}.pth" for rank in range(4)),
        "shared.json",
    ]
    assert damage(checkpoint) is None


def test_one_failed_rank_ends_the_save_for_all_with_its_words(root: Root) -> None:
    assert ranks(root, 10, ["", "error", ""]) == ["abandoned: rank 1: No space left on device"] * 3
    assert not Catalog(root).get(10).committed


def test_two_ranks_that_wrote_different_bytes_to_one_file_end_the_save(root: Root) -> None:
    told = set(ranks(root, 10, ["", "differs"]))
    assert len(told) == 1
    assert "abandoned" in told.pop()
    assert not Catalog(root).get(10).committed


def test_differing_votes_about_one_file_name_both_ranks(root: Root) -> None:
    checkpoint = written(root)
    votes = [vote(checkpoint, {"a": b"1"}, world_size=2), vote(checkpoint, {"a": b"2"}, rank=1, world_size=2)]
    with pytest.raises(CommitAbandoned, match="ranks 0 and 1 wrote different files to a"):
        commit.publish(checkpoint, votes)


def test_a_rank_that_never_votes_ends_the_wait_and_is_named(root: Root) -> None:
    checkpoint = written(root)
    commit.cast_vote(checkpoint, vote(checkpoint, FILES, world_size=3))
    with pytest.raises(CommitAbandoned, match=r"no vote from ranks 1, 2 within 0.05 s"):
        commit.collect_votes(checkpoint, "attempt1", 1, range(3), timeout=0.05)


def test_votes_of_other_attempts_and_earlier_saves_are_no_answer(root: Root) -> None:
    checkpoint = written(root)
    for stale in (vote(checkpoint, FILES, attempt="attempt0"), vote(checkpoint, FILES, save=0)):
        commit.cast_vote(checkpoint, stale)
        with pytest.raises(CommitAbandoned, match="no vote from rank 0"):
            commit.collect_votes(checkpoint, "attempt1", 1, [0], timeout=0.01)


def test_a_rank_that_went_on_to_a_later_save_ends_the_earlier_one(root: Root) -> None:
    checkpoint = written(root)
    commit.cast_vote(checkpoint, vote(checkpoint, FILES, save=2))
    with pytest.raises(CommitAbandoned, match="rank 0 has gone on to save 2"):
        commit.collect_votes(checkpoint, "attempt1", 1, [0], timeout=10)


def test_a_vote_for_another_step_is_not_counted(root: Root) -> None:
    checkpoint = written(root)
    commit.cast_vote(checkpoint, vote(checkpoint, FILES, step=11))
    with pytest.raises(CommitAbandoned, match="voted for step 11 in checkpoint-10"):
        commit.collect_votes(checkpoint, "attempt1", 1, [0], timeout=10)


def test_a_damaged_vote_is_named_when_the_time_is_over(root: Root) -> None:
    checkpoint = written(root)
    commit.cast_vote(checkpoint, vote(checkpoint, FILES))
    os.truncate(checkpoint.vote(0), 40)
    with pytest.raises(CommitAbandoned, match=r"no vote from rank 0 .*rank-0.json: is not whole"):
        commit.collect_votes(checkpoint, "attempt1", 1, [0], timeout=0.01)


def test_a_vote_signed_by_another_rank_is_not_counted(root: Root) -> None:
    checkpoint = written(root)
    commit.cast_vote(checkpoint, vote(checkpoint, FILES, world_size=2))
    checkpoint.vote(0).rename(checkpoint.vote(1))
    with pytest.raises(CommitAbandoned, match="signed by rank 0"):
        commit.collect_votes(checkpoint, "attempt1", 1, [1], timeout=0.01)


def test_ranks_that_save_different_things_are_not_committed_together(root: Root) -> None:
    checkpoint = written(root)
    votes = [
        vote(checkpoint, FILES, world_size=2),
        vote(checkpoint, {}, rank=1, world_size=2, lineage="other"),
    ]
    with pytest.raises(CommitAbandoned, match="do not agree"):
        commit.publish(checkpoint, votes)
    with pytest.raises(CommitAbandoned, match="nobody voted"):
        commit.publish(checkpoint, [])


def test_cancelling_ends_the_wait_for_votes_and_for_the_outcome(root: Root) -> None:
    checkpoint = written(root)
    with pytest.raises(CommitAbandoned, match="cancelled"):
        commit.collect_votes(checkpoint, "attempt1", 1, [0], timeout=1000, cancelled=lambda: True)
    with pytest.raises(CommitAbandoned, match="cancelled"):
        commit.publish(checkpoint, [vote(checkpoint, FILES)], cancelled=lambda: True)
    assert commit.wait_outcome(checkpoint, "attempt1", 1, timeout=1000, cancelled=lambda: True) == "cancelled"
    assert not checkpoint.manifest.exists()


def test_a_vote_that_no_reader_would_accept_is_refused_where_it_is_made(root: Root) -> None:
    checkpoint = root.checkpoint(10)
    with pytest.raises(ManifestError, match="is absolute"):
        commit.cast_vote(checkpoint, vote(checkpoint, {"/etc/passwd": b""}))
    assert not checkpoint.path.exists()


# -- publishing -----------------------------------------------------------------------------------------------------------


def test_the_manifest_covers_files_that_nobody_voted_for(root: Root) -> None:
    checkpoint = save(root, 10)
    assert checkpoint.manifest
    assert {file.path for file in checkpoint.manifest.files} == FILES.keys() | BY_STOCK.keys()
    assert entry("config.json", BY_STOCK["config.json"]) in checkpoint.manifest.files


def test_every_file_is_durable_before_the_manifest_has_its_name(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[Path] = set()
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        if not (root.path / "checkpoint-10/.ckpt/manifest.json").exists():
            synced.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    checkpoint = written(root)
    commit.cast_vote(checkpoint, vote(checkpoint, FILES))
    monkeypatch.setattr(os, "fsync", spy)
    commit.publish(checkpoint, [vote(checkpoint, FILES)])
    unvoted = {checkpoint.path / name for name in BY_STOCK}
    holding = {checkpoint.path / "sub", checkpoint.path, root.path, *root.path.parents}
    holding = {path for path in holding if path.stat().st_dev == root.path.stat().st_dev}
    assert unvoted | holding <= synced


def test_making_a_checkpoints_directory_waits_for_no_disk(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    root.checkpoint(10).prepare()
    root.checkpoint(10).prepare()
    assert root.checkpoint(10).private.is_dir()
    assert synced == []


@pytest.mark.parametrize("kind", ["missing", "short", "long", "a directory", "a pipe"])
def test_a_file_that_is_not_what_was_voted_for_is_never_committed(root: Root, kind: str) -> None:
    checkpoint = written(root)
    DAMAGES[kind][0](checkpoint.path / "optimizer.pt")
    with pytest.raises(CommitAbandoned, match=f"optimizer.pt {DAMAGES[kind][1]}|optimizer.pt has"):
        commit.publish(checkpoint, [vote(checkpoint, FILES)])
    assert not checkpoint.manifest.exists()


def test_a_link_out_of_the_checkpoint_is_neither_followed_nor_committed(root: Root, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    write(outside, {"secret": b"x", "optimizer.pt": FILES["optimizer.pt"]})
    checkpoint = written(root)
    (checkpoint.path / "directory").symlink_to(outside)
    (checkpoint.path / "file").symlink_to(outside / "secret")
    manifest = commit.publish(checkpoint, [vote(checkpoint, FILES)])
    assert {file.path for file in manifest.files} == FILES.keys() | BY_STOCK.keys()
    other = written(root, 20)
    (other.path / "optimizer.pt").unlink()
    (other.path / "optimizer.pt").symlink_to(outside / "optimizer.pt")
    with pytest.raises(CommitAbandoned, match="symbolic link that leads out"):
        commit.publish(other, [vote(other, FILES)])


def test_publishing_the_same_save_twice_changes_nothing(root: Root) -> None:
    checkpoint = written(root)
    first = commit.publish(checkpoint, [vote(checkpoint, FILES)])
    assert commit.publish(checkpoint, [vote(checkpoint, FILES)]) == first


def test_a_committed_checkpoint_is_never_changed_by_another_save(root: Root) -> None:
    checkpoint = save(root, 10).directory
    before = checkpoint.manifest.read_bytes()
    with pytest.raises(CommitAbandoned, match="already committed, by save 1 of attempt attempt1"):
        commit.publish(checkpoint, [vote(checkpoint, FILES, attempt="attempt2")])
    assert checkpoint.manifest.read_bytes() == before
    os.truncate(checkpoint.manifest, 30)
    with pytest.raises(CommitAbandoned, match="another commit already"):
        commit.publish(checkpoint, [vote(checkpoint, FILES, attempt="attempt2")])


def test_a_file_that_is_still_being_written_ends_the_save(root: Root) -> None:
    checkpoint = written(root)
    path = checkpoint.path / "config.json"

    def write_on(data: memoryview, value: int) -> int:
        with path.open("ab") as stream:
            stream.write(b"more")
        return zlib.crc32(data, value)

    with pytest.raises(CommitAbandoned, match=r"config.json is still being written"):
        commit.publish(checkpoint, [vote(checkpoint, FILES)], crc32=write_on)
    assert not checkpoint.manifest.exists()


# -- outcomes -------------------------------------------------------------------------------------------------------------


def test_waits_end_with_the_outcome_whenever_it_is_published(root: Root) -> None:
    checkpoint = written(root)
    told: list[str] = []
    waiter = threading.Thread(
        target=lambda: told.append(commit.wait_outcome(checkpoint, "attempt1", 1, timeout=60))
    )
    waiter.start()
    commit.abandon(checkpoint, "attempt0", 1, "of another attempt")
    commit.abandon(checkpoint, "attempt1", 0, "of another save")
    commit.abandon(checkpoint, "attempt1", 1, "rank 3 is gone")
    waiter.join(60)
    assert told == ["abandoned: rank 3 is gone"]


def test_without_any_word_a_wait_ends_by_its_time_limit(root: Root) -> None:
    assert commit.wait_outcome(written(root), "attempt1", 1, timeout=0.01) == "timeout"


def test_a_wait_ends_when_the_checkpoint_has_expired_before_anybody_looked(root: Root) -> None:
    checkpoint = save(root, 10).directory
    commit.delete(checkpoint)
    assert commit.wait_outcome(checkpoint, "attempt1", 1, timeout=1000) == "gone"


def test_to_a_rank_that_looks_late_an_expired_checkpoint_was_committed(root: Root) -> None:
    """``save_total_limit=1`` and quick saves: the next commit comes before this rank has looked."""
    checkpoint = written(root)
    first, second = (Quorum(root, "attempt1", rank, 0, (0, 1), timeout=1000) for rank in (0, 1))
    told: list[str] = []
    ballot = vote(checkpoint, {}, rank=1, world_size=2)
    other = threading.Thread(target=lambda: told.append(second.follow(checkpoint, ballot)))

    def commit_and_expire(votes: list[Vote]) -> None:
        commit.publish(checkpoint, votes)
        commit.delete(checkpoint)

    other.start()
    assert first.lead(checkpoint, vote(checkpoint, FILES, world_size=2), commit_and_expire) == COMMITTED
    other.join(60)
    assert told == [COMMITTED]


def test_a_commit_stands_though_somebody_gives_up_afterwards(root: Root) -> None:
    checkpoint = save(root, 10).directory
    assert commit.abandon(checkpoint, "attempt1", 1, "too late") is False
    assert commit.wait_outcome(checkpoint, "attempt1", 1, timeout=10) == "committed"


def test_an_earlier_save_of_a_step_learns_that_a_later_one_took_its_place(root: Root) -> None:
    checkpoint = save(root, 10, save=2).directory
    assert commit.wait_outcome(checkpoint, "attempt1", 1, timeout=10) == "abandoned: replaced by save 2"


def test_a_save_given_up_can_be_made_again_in_the_same_place(root: Root) -> None:
    checkpoint = written(root)
    commit.cast_vote(checkpoint, commit.failed_vote(vote(checkpoint, FILES), "disk full"))
    commit.abandon(checkpoint, "attempt1", 1, "disk full")
    save(root, 10, save=2)
    assert commit.wait_outcome(checkpoint, "attempt1", 2, timeout=10) == "committed"
    assert damage(Catalog(root).get(10)) is None


# -- sweeping -------------------------------------------------------------------------------------------------------------


def contents(path: Path) -> list[str]:
    return sorted(item.name for item in path.iterdir()) if path.exists() else []


def test_what_was_never_committed_is_moved_aside_and_commits_stay(root: Root) -> None:
    save(root, 10)
    uncommitted(root, 20)
    assert commit.sweep(root, "attempt2") == [root.aside / "20-attempt2"]
    assert contents(root.path) == [".aside", "checkpoint-10"]
    assert damage(Catalog(root).get(10)) is None


def test_all_leftovers_but_the_one_written_last_are_deleted(root: Root) -> None:
    for number, step in enumerate((30, 20, 40)):
        checkpoint = uncommitted(root, step)
        for path in (checkpoint.private, checkpoint.path):
            os.utime(path, (number, number))
        commit.sweep(root, f"attempt{step}")
    assert contents(root.aside) == ["40-attempt40"]


def test_what_was_once_committed_is_never_deleted_by_sweeping(root: Root) -> None:
    save(root, 10)
    save(root, 20)
    commit.set_aside(root.checkpoint(10), "attempt2")
    os.truncate(root.checkpoint(20).manifest, 10)
    for attempt in ("attempt3", "attempt4"):
        uncommitted(root, 30)
        commit.sweep(root, attempt)
    assert contents(root.path) == [".aside", "checkpoint-20"]
    assert "10-attempt2" in contents(root.aside)
    assert read_manifest(root.aside / "10-attempt2/.ckpt/manifest.json").step == 10


def test_a_directory_that_a_person_put_there_is_moved_and_never_deleted(root: Root) -> None:
    for step in (10, 20):
        write(root.checkpoint(step).path, FILES)
        commit.sweep(root, f"attempt{step}")
    commit.sweep(root, "attempt3")
    assert contents(root.aside) == ["10-attempt10", "20-attempt20"]


def test_a_path_that_a_person_named_to_resume_from_is_left_in_place(root: Root) -> None:
    checkpoint = uncommitted(root, 10)
    assert commit.sweep(root, "attempt2", spare=checkpoint.path) == []


def test_other_names_are_left_alone(root: Root) -> None:
    for name in ("checkpoint-10.tmp", "checkpoint-007", "notes", "checkpoint-"):
        write(root.path / name, {"x": b""})
    (root.path / "checkpoint-8").write_text("a file")
    before = contents(root.path)
    commit.sweep(root, "attempt2")
    assert contents(root.path) == before


def test_what_killed_writers_of_the_run_record_and_the_heartbeat_left_is_swept(root: Root) -> None:
    write(root.run_dir, {"run.json": b"{}", ".run.json.0123abcd.tmp": b"half", "events-rank0.jsonl": b""})
    write(root.run_dir, {".heartbeat.json.0123abcd.tmp": b"half"})
    commit.sweep(root, "attempt2")
    assert contents(root.run_dir) == ["events-rank0.jsonl", "run.json"]


def test_sweeping_where_nothing_is_does_nothing(root: Root) -> None:
    assert commit.sweep(root, "attempt1") == []
    assert not root.path.exists()


def test_setting_aside_twice_keeps_both(root: Root) -> None:
    for attempt in ("attempt1", "attempt2"):
        save(root, 10, attempt=attempt)
        commit.set_aside(root.checkpoint(10), "attempt3")
    assert contents(root.aside) == ["10-attempt3", "10-attempt3-2"]
    assert commit.set_aside(root.checkpoint(10), "attempt3") is None


def test_a_deletion_that_was_interrupted_is_finished_by_the_next_sweep(root: Root) -> None:
    save(root, 10)
    root.aside.mkdir()
    root.checkpoint(10).path.rename(root.aside / f"10-gone{commit.REMOVED}")
    commit.sweep(root, "attempt2")
    assert contents(root.aside) == []


def test_deleting_a_link_leaves_what_it_leads_to(root: Root, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", {"x": b"precious"})
    root.path.mkdir()
    root.checkpoint(10).path.symlink_to(tmp_path / "elsewhere")
    commit.delete(root.checkpoint(10))
    assert contents(root.path) == [".aside"]
    assert (tmp_path / "elsewhere/x").read_bytes() == b"precious"


def test_sweeps_of_two_processes_at_once_lose_nothing_committed(root: Root) -> None:
    for step in range(10, 200, 10):
        save(root, step) if step % 20 else uncommitted(root, step)
    code = (
        "import sys; from pathlib import Path; from datastates.store import commit, layout; "
        "commit.sweep(layout.Root(Path(sys.argv[1])), sys.argv[2])"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(root.path), f"attempt{n}"]) for n in range(4)
    ]
    until(lambda: all(process.poll() is not None for process in processes), "every rank to end")
    assert [process.returncode for process in processes] == [0] * 4
    assert root.steps() == sorted((step for step in range(10, 200, 10) if step % 20), reverse=True)
    assert all(damage(checkpoint) is None for checkpoint in Catalog(root).checkpoints())


# -- a rank whose training has failed -------------------------------------------------------------------------------------


def failed(root: Root, rank: int, patience: float) -> Quorum:
    return Quorum(root, "attempt1", rank, 0, (0, 1, 2), 1000, failed=lambda: True, patience=patience)


def test_once_training_has_failed_here_the_votes_of_others_are_waited_for_no_longer_than_patience(
    root: Root,
) -> None:
    checkpoint = written(root)
    mine = vote(checkpoint, FILES, world_size=3)
    reason = failed(root, 0, 0.1).lead(checkpoint, mine, lambda votes: pytest.fail("published"))
    assert reason == "ranks 1, 2 said nothing within 0 s after training had failed here"
    theirs = vote(checkpoint, {}, rank=1, world_size=3)
    assert Quorum(root, "attempt1", 1, 0, (0, 1, 2), 1000).follow(checkpoint, theirs) == reason


def test_once_training_has_failed_here_the_committing_rank_is_waited_for_no_longer_than_patience(
    root: Root,
) -> None:
    checkpoint = written(root)
    mine = vote(checkpoint, {}, rank=1, world_size=3)
    reason = failed(root, 1, 0.1).follow(checkpoint, mine)
    assert reason == "rank 0, which commits, said nothing within 0 s after training had failed here"


def test_a_vote_that_comes_after_training_has_failed_here_still_makes_the_commit(root: Root) -> None:
    checkpoint = written(root)
    commit.cast_vote(checkpoint, vote(checkpoint, {}, rank=1, world_size=3))
    mine = vote(checkpoint, FILES, world_size=3)
    late = vote(checkpoint, {}, rank=2, world_size=3)
    timer = threading.Timer(0.2, commit.cast_vote, (checkpoint, late))
    timer.start()
    try:
        reason = failed(root, 0, 1000).lead(checkpoint, mine, lambda votes: commit.publish(checkpoint, votes))
    finally:
        timer.join()
    assert reason == COMMITTED
    assert [found.step for found in Catalog(root).checkpoints() if found.committed] == [10]
