from __future__ import annotations

import json
import os
import shutil
import time
import zlib
from pathlib import Path

import pytest
from datastates.store import commit
from datastates.store.catalog import (
    Catalog,
    Checkpoint,
    damage,
    explicit_point,
    last_step,
    resume_point,
    verify,
)
from datastates.store.layout import Root
from datastates.store.lineage import ResumePoint
from datastates.store.runrecord import Fingerprint, Lineage
from store_files import BY_STOCK, DAMAGES, FILES, record, save, stock, uncommitted, write


class Skips(list[tuple[str, str]]):
    def __call__(self, path: Path, reason: str) -> None:
        self.append((path.name, reason))

    def reason(self, name: str) -> str:
        return " | ".join(reason for path, reason in self if path == name)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.of(tmp_path)


@pytest.fixture
def skips() -> Skips:
    return Skips()


LINEAGE = {0: Lineage(id="lineage1", began=0.0)}


# -- verifying ------------------------------------------------------------------------------------------------------------


def test_a_whole_checkpoint_has_a_good_verdict_for_every_file(root: Root) -> None:
    verdicts = verify(save(root, 10))
    assert {verdict.path for verdict in verdicts} == FILES.keys() | BY_STOCK.keys()
    assert all(verdict.ok and not verdict.reason for verdict in verdicts)


@pytest.mark.parametrize("name", sorted(FILES.keys() | BY_STOCK.keys()))
@pytest.mark.parametrize("kind", DAMAGES)
def test_every_damage_to_every_file_is_named(root: Root, kind: str, name: str) -> None:
    checkpoint = save(root, 10)
    DAMAGES[kind][0](checkpoint.path / name)
    bad = [verdict for verdict in verify(checkpoint) if not verdict.ok]
    assert [verdict.path for verdict in bad] == [name]
    assert DAMAGES[kind][1] in bad[0].reason
    assert damage(checkpoint) == f"{name} {bad[0].reason}"


def test_two_files_that_were_swapped_are_both_named(root: Root) -> None:
    checkpoint = save(root, 10)
    one, other = checkpoint.path / "model.safetensors", checkpoint.path / "optimizer.pt"
    a, b = one.read_bytes(), other.read_bytes()
    assert len(a) == len(b)
    one.write_bytes(b)
    other.write_bytes(a)
    assert [verdict.path for verdict in verify(checkpoint) if not verdict.ok] == [
        "model.safetensors",
        "optimizer.pt",
    ]
    assert damage(checkpoint, verify=False) is None
    assert "and 1 more" in str(damage(checkpoint))


def test_files_added_later_are_no_damage_and_are_remarked_on(root: Root) -> None:
    checkpoint = save(root, 10)
    write(checkpoint.path, {"notes.txt": b"mine", "sub/more.txt": b"mine", ".ckpt/left.part": b"half"})
    remarked = [
        (verdict.path, verdict.ok)
        for verdict in verify(checkpoint)
        if verdict.reason == "not in the manifest"
    ]
    assert remarked == [("notes.txt", True), ("sub/more.txt", True)]
    assert damage(checkpoint) is None


def test_a_link_inside_the_checkpoint_is_followed_and_one_out_of_it_is_damage(
    root: Root, tmp_path: Path
) -> None:
    checkpoint = save(root, 10)
    model = checkpoint.path / "model.safetensors"
    model.rename(checkpoint.path / "real")
    model.symlink_to("real")
    assert damage(checkpoint) is None
    model.unlink()
    (checkpoint.path / "real").rename(tmp_path / "outside")
    model.symlink_to(tmp_path / "outside")
    assert "symbolic link that leads out" in str(damage(checkpoint))


def test_a_checkpoint_reached_through_links_is_whole(root: Root, tmp_path: Path) -> None:
    save(root, 10)
    shutil.move(root.path, tmp_path / "other disk")
    root.path.symlink_to(tmp_path / "other disk")
    assert damage(Catalog(root).get(10)) is None


def test_a_loop_of_links_is_damage(root: Root) -> None:
    checkpoint = save(root, 10)
    (checkpoint.path / "optimizer.pt").unlink()
    (checkpoint.path / "optimizer.pt").symlink_to("optimizer.pt")
    assert "cannot be read" in str(damage(checkpoint))


@pytest.mark.parametrize("keep", [0, 1, 100, -2])
def test_a_truncated_manifest_is_named_and_its_checkpoint_not_taken(
    root: Root, keep: int, skips: Skips
) -> None:
    save(root, 10)
    manifest = save(root, 20).directory.manifest
    os.truncate(manifest, keep if keep >= 0 else manifest.stat().st_size + keep)
    checkpoint = Catalog(root).get(20)
    assert not checkpoint.committed
    assert [(verdict.path, verdict.ok) for verdict in verify(checkpoint)] == [(".ckpt/manifest.json", False)]
    assert Catalog(root).newest(on_skip=skips) == Catalog(root).get(10)
    assert "manifest.json" in skips.reason("checkpoint-20")


def test_a_manifest_of_another_step_does_not_make_a_commit(root: Root, skips: Skips) -> None:
    save(root, 10)
    save(root, 20).path.rename(root.checkpoint(30).path)
    assert Catalog(root).newest(on_skip=skips) == Catalog(root).get(10)
    assert skips.reason("checkpoint-30") == "its manifest is that of step 20"


def test_big_files_are_verified_in_ranges_and_progress_reaches_the_total(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datastates.store.verify.RANGE_BYTES", 1000)
    checkpoint = save(root, 10)
    told: list[tuple[int, int]] = []
    assert all(
        verdict.ok
        for verdict in verify(checkpoint, workers=3, progress=lambda done, total: told.append((done, total)))
    )
    assert checkpoint.manifest
    size = checkpoint.manifest.size
    assert told[-1] == (size, size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    DAMAGES["flipped"][0](checkpoint.path / "optimizer.pt")
    assert "optimizer.pt has checksum" in str(damage(checkpoint))


def test_any_crc32_function_of_that_signature_may_verify(root: Root) -> None:
    seen = 0

    def counting(data: memoryview, value: int) -> int:
        nonlocal seen
        seen += len(data)
        return zlib.crc32(data, value)

    checkpoint = save(root, 10)
    assert all(verdict.ok for verdict in verify(checkpoint, crc32=counting, workers=1))
    assert checkpoint.manifest and seen == checkpoint.manifest.size


def test_an_interrupted_verification_reads_no_further(root: Root) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(save(root, 10), progress=stop)


# -- listing --------------------------------------------------------------------------------------------------------------


def test_checkpoints_are_listed_newest_first_with_what_is_wrong(root: Root) -> None:
    for step in (9, 100, 20):
        save(root, step)
    uncommitted(root, 300)
    listed = Catalog(root).checkpoints()
    assert [(item.step, item.committed) for item in listed] == [
        (300, False),
        (100, True),
        (20, True),
        (9, True),
    ]
    assert listed[0].problem == "was never committed"


def test_where_there_is_no_root_there_are_no_checkpoints(tmp_path: Path) -> None:
    assert Catalog(Root.of(tmp_path / "nowhere")).checkpoints() == []
    assert resume_point(tmp_path / "nowhere") is None
    assert last_step(tmp_path / "nowhere") is None


def test_a_link_that_leads_round_in_a_circle_is_no_checkpoint_and_hides_none(
    root: Root, skips: Skips
) -> None:
    save(root, 100)
    for circle in (
        root.path / "checkpoint-200",
        root.aside / "300-attempt",
        root.path.parent / "checkpoint-400",
    ):
        circle.parent.mkdir(exist_ok=True)
        circle.symlink_to(circle.name)
    assert root.steps() == [100]
    assert [item.step for item in Catalog(root).checkpoints()] == [100]
    assert resume_point(root.path.parent, on_skip=skips) is not None


def test_a_checkpoint_anywhere_can_be_loaded_by_its_path(root: Root, tmp_path: Path) -> None:
    shutil.copytree(save(root, 10).path, tmp_path / "best model")
    checkpoint = Checkpoint.load(tmp_path / "best model")
    assert (checkpoint.step, checkpoint.committed, damage(checkpoint)) == (10, True, None)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_newest_is_named_and_the_next_older_one_taken(root: Root, kind: str, skips: Skips) -> None:
    save(root, 10)
    DAMAGES[kind][0](save(root, 20).path / "model.safetensors")
    newest = Catalog(root).newest("lineage1", on_skip=skips)
    assert newest and newest.step == 10
    assert skips.reason("checkpoint-20").startswith("model.safetensors ")


# -- resuming -------------------------------------------------------------------------------------------------------------


def ours(root: Root, step: int, lineage: str | None = "lineage1") -> ResumePoint:
    return ResumePoint(root.checkpoint(step).path, step, "ours", lineage)


def test_training_resumes_from_the_newest_whole_checkpoint_of_its_lineage(
    root: Root, tmp_path: Path, skips: Skips
) -> None:
    record(root, LINEAGE)
    save(root, 10)
    save(root, 20)
    save(root, 30, lineage="older")
    uncommitted(root, 40)
    assert resume_point(tmp_path, on_skip=skips) == ours(root, 20)
    assert skips == [("checkpoint-40", "was never committed")]
    assert last_step(tmp_path) == 20


def test_without_verification_sizes_still_decide(root: Root, tmp_path: Path) -> None:
    record(root, LINEAGE)
    save(root, 10)
    DAMAGES["flipped"][0](save(root, 20).path / "model.safetensors")
    DAMAGES["short"][0](save(root, 30).path / "model.safetensors")
    assert resume_point(tmp_path, verify=False) == ours(root, 20)
    assert resume_point(tmp_path) == ours(root, 10)


def test_an_older_lineage_is_never_resumed_silently(root: Root, tmp_path: Path, skips: Skips) -> None:
    save(root, 50, lineage="older")
    record(root, LINEAGE)
    assert resume_point(tmp_path, on_skip=skips) is None
    assert "belongs to an earlier training" in skips.reason("checkpoint-50")


def test_two_trainings_in_one_script_each_resume_their_own(root: Root, tmp_path: Path) -> None:
    record(root, {0: Lineage(id="first", state="finished"), 1: Lineage(id="second")})
    save(root, 10, lineage="first")
    save(root, 20, lineage="second", ordinal=1)
    assert resume_point(tmp_path, 0) == ours(root, 10, "first")
    assert resume_point(tmp_path, 1) == ours(root, 20, "second")
    assert resume_point(tmp_path, 2) is None


def test_what_another_model_left_is_told_and_not_resumed(root: Root, tmp_path: Path, skips: Skips) -> None:
    llama, gpt = (Fingerprint(model={"class": name}) for name in ("Llama", "GPT"))
    record(root, {0: Lineage(id="lineage1", fingerprint=llama)})
    stock(tmp_path, 30)
    assert resume_point(tmp_path, fingerprint=gpt, on_skip=skips) is None
    assert skips == []
    save(root, 10)
    assert resume_point(tmp_path, fingerprint=gpt, on_skip=skips) is None
    assert "another model (class Llama there and GPT here)" in skips.reason("concurrent_checkpoint")
    assert resume_point(tmp_path, fingerprint=llama) == ours(root, 10)
    assert explicit_point(tmp_path, 0, root.checkpoint(10).path, fingerprint=gpt) == ours(root, 10, None)


def test_what_a_second_training_moved_aside_still_counts_for_the_first(root: Root, tmp_path: Path) -> None:
    record(root, {0: Lineage(id="first", state="finished"), 1: Lineage(id="second")})
    save(root, 10, lineage="first")
    save(root, 20, lineage="first")
    aside = commit.set_aside(root.checkpoint(20), "attempt2")
    save(root, 20, lineage="second", ordinal=1)
    assert aside
    assert resume_point(tmp_path, 0) == ResumePoint(aside, 20, "ours", "first")
    assert resume_point(tmp_path, 1) == ours(root, 20, "second")
    commit.set_aside(root.checkpoint(20), "attempt3")
    newest = Catalog(root).newest()
    assert newest and newest.path == root.checkpoint(10).path


def test_a_lineage_without_checkpoints_resumes_from_its_origin(
    root: Root, tmp_path: Path, skips: Skips
) -> None:
    origin = save(root, 10, lineage="older").path
    record(root, {0: Lineage(id="lineage1", origin=str(origin))})
    assert resume_point(tmp_path) == ours(root, 10)
    DAMAGES["flipped"][0](origin / "optimizer.pt")
    assert resume_point(tmp_path, on_skip=skips) is None
    assert "optimizer.pt" in skips.reason("checkpoint-10")


def test_a_stock_origin_that_still_looks_whole_is_resumed(root: Root, tmp_path: Path, skips: Skips) -> None:
    origin = stock(tmp_path, 10)
    record(root, {0: Lineage(id="lineage1", origin=str(origin))})
    assert resume_point(tmp_path) == ResumePoint(origin, 10, "stock", "lineage1")
    shutil.rmtree(origin)
    assert resume_point(tmp_path, on_skip=skips) is None
    assert "is no directory" in skips.reason("checkpoint-10")


@pytest.mark.parametrize("state", ["lost", "empty", "zeroed", "nonsense", "a directory"])
def test_without_a_usable_record_the_lineage_that_committed_last_is_taken_and_told(
    root: Root, tmp_path: Path, state: str, skips: Skips
) -> None:
    save(root, 90, lineage="older")
    save(root, 10, lineage="newer")
    save(root, 20, lineage="newer")
    save(root, 500, lineage="other", ordinal=1)
    record(root, LINEAGE)
    run = root.run_record
    if state in ("lost", "a directory"):
        run.unlink()
    if state == "a directory":
        run.mkdir()
    if state in ("empty", "zeroed", "nonsense"):
        run.write_bytes({"empty": b"", "zeroed": bytes(300), "nonsense": b'{"version": 1}'}[state])
    assert resume_point(tmp_path, on_skip=skips) == ours(root, 20, "newer")
    assert resume_point(tmp_path, 1) == ours(root, 500, "other")
    assert "the one that committed last, newer" in skips.reason("run.json")


def test_a_stock_checkpoint_is_resumed_where_nothing_of_ours_is(tmp_path: Path, skips: Skips) -> None:
    stock(tmp_path, 9)
    path = stock(tmp_path, 100)
    write(tmp_path / "checkpoint-200", {"config.json": b"{}"})
    write(tmp_path / "tmp-checkpoint-300", {"config.json": b"{}"})
    assert resume_point(tmp_path, on_skip=skips) == ResumePoint(path, 100, "stock", None)
    assert "trainer_state.json is missing" in skips.reason("checkpoint-200")
    assert last_step(tmp_path) == 100
    assert resume_point(tmp_path, 1) is None


def test_a_stock_checkpoint_older_than_a_fresh_training_is_never_taken(
    root: Root, tmp_path: Path, skips: Skips
) -> None:
    path = stock(tmp_path, 100)
    os.utime(path / "trainer_state.json", (1000, 1000))
    record(root, {0: Lineage(id="lineage1", began=2000.0)})
    assert resume_point(tmp_path, on_skip=skips) is None
    assert "is older than the training" in skips.reason("checkpoint-100")
    os.utime(path / "trainer_state.json", (3000, 3000))
    assert resume_point(tmp_path) == ResumePoint(path, 100, "stock", None)


def test_ours_are_preferred_to_older_stock_checkpoints_of_higher_steps(
    root: Root, tmp_path: Path, skips: Skips
) -> None:
    stock(tmp_path, 1000)
    record(root, LINEAGE)
    save(root, 10)
    assert resume_point(tmp_path, on_skip=skips) == ours(root, 10)
    assert skips == []


# -- what Trainer saved by itself after ours ------------------------------------------------------------------------------


def logged(path: Path, step: int, losses: dict[int, float]) -> Path:
    """What Trainer's state says of the log, and the time at which it was written: now, and a little."""
    write(path, log_of(step, losses))
    state = path / "trainer_state.json"
    os.utime(state, (time.time() + step, time.time() + step))
    return path


def log_of(step: int, losses: dict[int, float]) -> dict[str, bytes]:
    """As :func:`logged`, for a checkpoint that is about to be committed."""
    entries = [{"step": at, "loss": loss} for at, loss in losses.items()]
    return {"trainer_state.json": json.dumps({"global_step": step, "log_history": entries}).encode()}


OURS_LOGGED = {5: 2.0, 10: float("nan")}


def test_trainers_own_later_checkpoint_of_the_same_training_is_newer_than_ours(
    root: Root, tmp_path: Path
) -> None:
    record(root, LINEAGE)
    save(root, 10, by_stock=log_of(10, OURS_LOGGED))
    logged(stock(tmp_path, 20), 20, {**OURS_LOGGED, 15: 1.0})
    path = logged(stock(tmp_path, 30), 30, {**OURS_LOGGED, 15: 1.0, 30: 0.5})
    assert resume_point(tmp_path) == ResumePoint(path, 30, "stock", "lineage1")
    assert last_step(tmp_path) == 30
    (path / "model.safetensors").write_bytes(b"cut")
    assert last_step(tmp_path) == 20
    save(root, 40, by_stock=log_of(40, OURS_LOGGED))
    assert resume_point(tmp_path) == ours(root, 40)


STRANGERS: dict[str, dict[int, float]] = {
    "began anew": {5: 2.5, 10: 1.5, 15: 1.0},
    "went on from an earlier step": {5: 2.0, 10: 1.4, 15: 1.0},
    "logged less": {5: 2.0},
    "logged nothing": {},
    "logged more before": {**OURS_LOGGED, 8: 1.0},
}


@pytest.mark.parametrize("losses", STRANGERS.values(), ids=list(STRANGERS))
def test_trainers_own_later_checkpoint_of_another_training_is_named_and_not_taken(
    root: Root, tmp_path: Path, losses: dict[int, float], skips: Skips
) -> None:
    record(root, LINEAGE)
    save(root, 10, by_stock=log_of(10, OURS_LOGGED))
    logged(stock(tmp_path, 20), 20, losses)
    logged(stock(tmp_path, 30), 30, losses)
    assert resume_point(tmp_path, on_skip=skips) == ours(root, 10)
    assert [name for name, _ in skips] == ["checkpoint-30"]
    assert "its log does not go on from there" in skips.reason("checkpoint-30")


def test_where_nothing_was_logged_the_time_decides_unless_there_are_several_trainings(
    root: Root, tmp_path: Path
) -> None:
    record(root, LINEAGE)
    save(root, 10)
    path = logged(stock(tmp_path, 20), 20, {15: 1.0})
    assert resume_point(tmp_path) == ResumePoint(path, 20, "stock", "lineage1")
    os.utime(path / "trainer_state.json", (1000, 1000))
    assert resume_point(tmp_path) == ours(root, 10)
    logged(path, 20, {15: 1.0})
    record(root, {**LINEAGE, 1: Lineage(id="lineage2", began=0.0)})
    assert resume_point(tmp_path) == ours(root, 10)
    logged(path, 20, {5: 2.0, 15: 1.0})
    record(root, LINEAGE)
    assert resume_point(tmp_path) == ours(root, 10), "something was logged before where ours has nothing"


def test_what_trainer_saved_before_this_training_began_never_goes_on_from_its_origin(
    root: Root, tmp_path: Path
) -> None:
    origin = save(root, 10, lineage="older").path
    path = logged(stock(tmp_path, 20), 20, {})
    record(root, {0: Lineage(id="lineage1", origin=str(origin), began=time.time() + 1000)})
    assert resume_point(tmp_path) == ours(root, 10)
    record(root, {0: Lineage(id="lineage1", origin=str(origin), began=time.time() - 1000)})
    assert resume_point(tmp_path) == ResumePoint(path, 20, "stock", "lineage1")


def test_trainers_own_copy_of_a_checkpoint_of_ours_that_is_damaged_is_not_taken(
    root: Root, tmp_path: Path
) -> None:
    record(root, LINEAGE)
    save(root, 10)
    DAMAGES["flipped"][0](save(root, 20).path / "optimizer.pt")
    logged(stock(tmp_path, 20), 20, {})
    assert resume_point(tmp_path) == ours(root, 10)


def test_a_stock_checkpoint_of_a_step_whose_save_was_killed_is_no_copy_of_ours(
    root: Root, tmp_path: Path
) -> None:
    record(root, LINEAGE)
    save(root, 10)
    uncommitted(root, 20)
    path = logged(stock(tmp_path, 20), 20, {})
    assert resume_point(tmp_path) == ResumePoint(path, 20, "stock", "lineage1")


def test_without_a_run_record_trainers_own_is_taken_when_its_log_goes_on_from_ours(
    root: Root, tmp_path: Path
) -> None:
    save(root, 10, by_stock=log_of(10, OURS_LOGGED))
    path = logged(stock(tmp_path, 20), 20, {**OURS_LOGGED, 15: 1.0})
    assert resume_point(tmp_path) == ResumePoint(path, 20, "stock", "lineage1")


def test_the_path_of_trainers_own_that_goes_on_from_ours_continues_the_lineage_and_that_of_ours_begins_one(
    root: Root, tmp_path: Path
) -> None:
    record(root, LINEAGE)
    save(root, 10)
    path = logged(stock(tmp_path, 20), 20, {})
    assert explicit_point(tmp_path, 0, path) == ResumePoint(path, 20, "stock", "lineage1")
    assert explicit_point(tmp_path, 0, root.checkpoint(10).path) == ours(root, 10, None)


def test_an_explicit_path_goes_on_with_the_lineage_only_when_it_is_its_newest(
    root: Root, tmp_path: Path
) -> None:
    record(root, LINEAGE)
    save(root, 10)
    save(root, 20)
    assert explicit_point(tmp_path, 0, root.checkpoint(20).path) == ours(root, 20)
    assert explicit_point(tmp_path, 0, root.checkpoint(10).path) == ours(root, 10, None)
    DAMAGES["flipped"][0](root.checkpoint(20).path / "optimizer.pt")
    assert explicit_point(tmp_path, 0, root.checkpoint(10).path) == ours(root, 10)


def test_an_explicit_path_is_used_as_given_whatever_it_holds(root: Root, tmp_path: Path) -> None:
    assert explicit_point(tmp_path, 0, tmp_path / "nothing") == ResumePoint(
        tmp_path / "nothing", -1, "stock", None
    )
    path = stock(tmp_path, 30)
    assert explicit_point(tmp_path, 0, path) == ResumePoint(path, 30, "stock", None)
    record(root, {0: Lineage(id="lineage1", origin=str(path))})
    assert explicit_point(tmp_path, 0, path) == ResumePoint(path, 30, "stock", "lineage1")
