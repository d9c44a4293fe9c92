"""Many ranks: what a save costs them, what happens when one fails, dies or hangs at any point, and when the file system is slow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import light_ranks
import pytest
from datastates.store import commit
from datastates.store.catalog import Catalog, damage
from datastates.store.layout import Root
from light_ranks import Job

SCRIPT = Path(light_ranks.__file__)
STEPS = [10, 20, 30]
STOCK = {f"stock{number}.json" for number in range(Job.stock)}

Told = list[dict[str, Any]]


def start(job: Job) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), light_ranks.encode(job)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> Told:
    told: Told = json.loads(process.communicate(timeout=300)[0])
    return told


def whole(job: Job) -> list[int]:
    """The steps that are committed, every byte of them checked: each names the files of all ranks, and what stock code left."""
    catalog = Catalog(Root.of(job.output_dir))
    expected = {f"state_{rank}.pt" for rank in range(job.world)} | STOCK
    committed = [checkpoint for checkpoint in catalog.checkpoints() if checkpoint.committed]
    for checkpoint in committed:
        assert damage(checkpoint) is None
        assert checkpoint.manifest is not None
        assert {file.path for file in checkpoint.manifest.files} == expected
    return sorted(checkpoint.step for checkpoint in committed)


# -- what it costs --------------------------------------------------------------------------------------------------------


def check_costs(job: Job, told: Told) -> None:
    """Of each save: calls to the file system, as docs/design.md counts them."""
    longest = max(commit.LAST_POLL_SECONDS, (job.world - 1) * commit.SECONDS_PER_WAITER)
    for rank in told[1:]:
        for save, (calls, seconds) in enumerate(zip(rank["calls"], rank["seconds"], strict=True)):
            looks = calls["lstat"]
            assert looks <= 8 + seconds / longest
            assert calls["open"] <= 2 + 3 * looks
            others = {name: calls[name] for name in calls if name not in ("open", "lstat")}
            # Three for its file and its vote. Each of two directories, at first of four, may be another's by the time it is made: the first
            # look, then for each one call that fails or succeeds and one that asks what is there.
            assert sum(others.values()) <= (8 if save else 14), others
            assert not {"listdir", "scandir"} & others.keys()
    for calls, seconds in zip(told[0]["calls"], told[0]["seconds"], strict=True):
        assert calls["listdir"] <= 2 * (8 + seconds / commit.LAST_POLL_SECONDS)
        assert calls["open"] <= job.world + 3 * job.stock + 20
        assert calls["stat"] + calls["lstat"] <= job.world + 2 * job.stock + 40
        assert calls["fsync"] <= job.stock + 20
        assert calls["scandir"] == 1


def test_sixteen_ranks_commit_and_each_asks_the_file_system_little(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "out"), 16, STEPS)
    told = end(start(job))
    assert [rank["outcomes"] for rank in told] == [["", "", ""]] * 16
    assert whole(job) == STEPS
    check_costs(job, told)


@pytest.mark.campaign
@pytest.mark.parametrize("pause", [0.0, 0.02])
def test_256_ranks_commit_and_each_asks_the_file_system_little(pause: float, tmp_path: Path) -> None:
    job = Job(str(tmp_path / "out"), 256, STEPS, pause=pause)
    told = end(start(job))
    assert [rank["outcomes"] for rank in told] == [["", "", ""]] * 256
    assert whole(job) == STEPS
    check_costs(job, told)


@pytest.mark.campaign
@pytest.mark.parametrize(("rank", "what"), [(255, "KILL"), (0, "KILL"), (255, "STOP"), (255, "ENOSPC")])
def test_of_256_ranks_one_that_ends_costs_its_save_alone(rank: int, what: str, tmp_path: Path) -> None:
    fault = {"at": "written", "do": what, "rank": rank, "save": 2}
    job = Job(str(tmp_path / "out"), 256, [10, 20], timeout=30, faults=[fault])
    told = end(start(job))
    assert len(told) == (256 if what == "ENOSPC" else 255)
    assert {rank["outcomes"][0] for rank in told} == {""}
    assert all(f"rank {rank}" in each["outcomes"][1] for each in told if each["rank"] != rank)
    assert whole(job) == [10]
    again = Job(job.output_dir, 256, [20, 30], attempt="attempt2")
    commit.sweep(Root.of(job.output_dir), "attempt2")
    assert {outcome for rank in end(start(again)) for outcome in rank["outcomes"]} == {""}
    assert whole(again) == [10, 20, 30]


# -- one rank of four ends --------------------------------------------------------------------------------------------------

MEMBER = ["begun", "written", "renamed", "cast_vote", "cast_vote!"]
COMMITTER = [*MEMBER, "collect_votes", "collected", "publish", "write_durably", "write_durably!", "published"]
ENDS = [
    (rank, at, what)
    for rank, places in ((2, MEMBER), (0, COMMITTER))
    for at in places
    for what in (["KILL", "STOP"] if at in ("written", "cast_vote!", "collected") else ["KILL"])
]
AFTER_THE_COMMIT = {"write_durably!", "published"}
VOTED = {(2, "cast_vote!")}
"""A rank that has voted has done all that the commit needs of it."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str, str], tuple[Job, Told]]:
    """All of them at once: they wait, mostly."""
    jobs = {}
    for number, (rank, at, what) in enumerate(ENDS):
        fault = {"at": at, "do": what, "rank": rank, "save": 2}
        folder = tmp_path_factory.mktemp(f"ended{number}")
        jobs[rank, at, what] = Job(str(folder / "out"), 4, [10, 20], timeout=4, faults=[fault])
    running = {case: start(job) for case, job in jobs.items()}
    return {case: (jobs[case], end(process)) for case, process in running.items()}


@pytest.mark.parametrize(("rank", "at", "what"), ENDS)
def test_a_rank_that_dies_or_hangs_costs_its_save_and_all_others_are_told_which(
    rank: int, at: str, what: str, ended: dict[tuple[int, str, str], tuple[Job, Told]]
) -> None:
    job, told = ended[rank, at, what]
    assert [each["rank"] for each in told] == [other for other in range(4) if other != rank]
    assert [each["outcomes"][0] for each in told] == ["", "", ""]
    outcomes = {each["outcomes"][1] for each in told}
    if at in AFTER_THE_COMMIT or (rank, at) in VOTED:
        assert outcomes == {""}
        assert whole(job) == [10, 20]
        return
    assert whole(job) == [10]
    assert len(outcomes) == 1
    expected = (
        "rank 0, which commits, has said nothing within 8 s"
        if rank == 0
        else "no vote from rank 2 within 4 s"
    )
    assert expected in outcomes.pop()


@pytest.mark.parametrize(("rank", "at", "what"), ENDS[::4])
def test_after_a_rank_has_ended_the_next_attempt_saves_the_same_step(
    rank: int, at: str, what: str, ended: dict[tuple[int, str, str], tuple[Job, Told]]
) -> None:
    first, _ = ended[rank, at, what]
    before = whole(first)
    job = Job(first.output_dir, 4, [20, 30] if before == [10] else [30], attempt="attempt2")
    commit.sweep(Root.of(job.output_dir), "attempt2")
    assert {outcome for each in end(start(job)) for outcome in each["outcomes"]} == {""}
    assert whole(job) == [10, 20, 30]


FAILURES = [
    (2, "written", "ENOSPC"),
    (2, "written", "EIO"),
    (2, "cast_vote", "EDQUOT"),
    (0, "written", "ENOSPC"),
    (0, "cast_vote", "EIO"),
    (0, "collected", "ENOSPC"),
    (0, "write_durably", "ENOSPC"),
]


@pytest.mark.parametrize(("rank", "at", "what"), FAILURES)
def test_a_rank_that_fails_costs_one_save_and_the_next_works(
    rank: int, at: str, what: str, tmp_path: Path
) -> None:
    fault = {"at": at, "do": what, "rank": rank, "save": 2}
    job = Job(str(tmp_path / "out"), 4, STEPS, faults=[fault])
    told = end(start(job))
    assert [(each["outcomes"][0], each["outcomes"][2]) for each in told] == [("", "")] * 4
    reasons = [each["outcomes"][1] for each in told]
    assert all(reasons)
    assert whole(job) == [10, 30]
    if rank:
        assert all(f"rank {rank}" in reason for reason in reasons[:rank])


# -- a slow file system -----------------------------------------------------------------------------------------------------

SLOW: dict[str, dict[str, float]] = {
    "a rename takes long": {"rename": 0.4},
    "an entry appears late": {"entry": 0.7},
    "a listing lags": {"listing": 0.7},
    "files appear after their votes": {"data": 0.7},
    "all of it": {"rename": 0.3, "entry": 0.7, "listing": 1.0},
}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Job, Told]]:
    jobs = {
        name: Job(str(tmp_path_factory.mktemp("slow") / "out"), 4, STEPS, lag=lag, patience=60)
        for name, lag in SLOW.items()
    }
    running = {name: start(job) for name, job in jobs.items()}
    return {name: (jobs[name], end(process)) for name, process in running.items()}


@pytest.mark.parametrize("how", SLOW)
def test_on_a_slow_file_system_every_save_is_committed_whole(
    how: str, slow: dict[str, tuple[Job, Told]]
) -> None:
    job, told = slow[how]
    assert [each["outcomes"] for each in told] == [["", "", ""]] * 4
    assert whole(job) == STEPS


@pytest.mark.parametrize(
    ("lag", "limits", "reason"),
    [
        ({"entry": 3.0}, {"timeout": 1}, "no vote from ranks 1, 2, 3 within 1 s"),
        ({"data": 3.0}, {"patience": 0.1}, "is missing"),
    ],
)
def test_what_is_not_seen_in_time_is_refused_in_clear_words_and_never_committed(
    lag: dict[str, float], limits: dict[str, float], reason: str, tmp_path: Path
) -> None:
    job = Job(str(tmp_path / "out"), 4, [10], lag=lag, **limits)  # type: ignore[arg-type]
    told = end(start(job))
    assert reason in told[0]["outcomes"][0]
    assert not Catalog(Root.of(job.output_dir)).get(10).committed
