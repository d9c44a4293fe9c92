"""Several nodes with disks of their own (``save_on_each_node``): each commits for itself, and all resume from what all have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import checkpoints
import on_nodes
import pytest
import runs
from datastates.store.catalog import Catalog
from datastates.store.layout import Root
from on_nodes import Job
from processes import Training, lines, losses
from transformers import PreTrainedModel

ARGUMENTS: dict[str, Any] = {"max_steps": 8, "save_steps": 2, "save_on_each_node": True}
MODEL_ON_EACH_NODE = pytest.mark.skipif(
    hasattr(PreTrainedModel, "should_save_on_this_rank"),
    reason="transformers writes the model on the first node alone since 5.17, whatever save_on_each_node says",
)
KILLED_IN_COMMIT = {"at": "datastates.store.commit:publish", "do": "kill", "nth": 3, "rank": 1}


def job(directory: Path, **changes: Any) -> Job:
    return Job(
        output_dir="out",
        log=str(directory / "log"),
        disks=str(directory),
        **{"arguments": ARGUMENTS, "orderly": True, **changes},
    )


def out(training: Training, node: int) -> Path:
    return on_nodes.disk(training.job, node) / "out"


def whole(training: Training) -> list[list[int]]:
    """The committed steps of each node, every byte of them checked."""
    return [checkpoints.whole(out(training, node)) for node in range(training.job.nodes)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, dict[str, Any]]:
    training = Training(job(tmp_path_factory.mktemp("undisturbed")), 2)
    return training, training.finish()


@pytest.fixture
def lost(tmp_path: Path) -> Training:
    """A training whose second node died while it committed step 6, which the first one has."""
    training = Training(job(tmp_path, faults=[KILLED_IN_COMMIT]), 2)
    assert training.join() == [1, -9]
    assert whole(training) == [[2, 4, 6], [2, 4]]
    return training


def again(training: Training, **changes: Any) -> Training:
    """The same job launched once more, without its faults."""
    return Training(job(Path(training.job.disks), **changes), training.ranks)


@MODEL_ON_EACH_NODE
def test_each_node_commits_its_own_files_in_its_own_directory(
    undisturbed: tuple[Training, dict[str, Any]],
) -> None:
    training, _ = undisturbed
    assert whole(training) == [[2, 4, 6, 8]] * 2
    manifests = [Catalog(Root.of(out(training, node))).get(8).manifest for node in (0, 1)]
    for node, manifest in enumerate(manifests):
        assert manifest is not None
        assert (manifest.node, manifest.nodes, manifest.voters, manifest.world_size) == (node, 2, 1, 2)
        files = {file.path for file in manifest.files}
        assert {"model.safetensors", "optimizer.pt", "trainer_state.json", f"rng_state_{node}.pth"} <= files
        assert f"rng_state_{1 - node}.pth" not in files
    assert len({(manifest.attempt, manifest.lineage) for manifest in manifests if manifest}) == 1


def test_both_nodes_end_with_the_same_weights(undisturbed: tuple[Training, dict[str, Any]]) -> None:
    training, end = undisturbed
    assert lines(training.job, rank=1)[-1]["weights"] == end["weights"]


@MODEL_ON_EACH_NODE
def test_where_a_node_died_before_its_commit_both_resume_from_the_step_before(
    lost: Training, undisturbed: tuple[Training, dict[str, Any]]
) -> None:
    done = len(losses(lost.job))
    training = again(lost)
    assert training.finish()["weights"] == undisturbed[1]["weights"]
    assert losses(training.job)[done][0] == 5
    assert "do not hold the same newest checkpoint (rank 0 step 6, rank 1 step 4)" in training.text(0)
    assert whole(training) == [[2, 4, 6, 8]] * 2
    attempts = {
        Catalog(Root.of(out(training, node))).get(6).manifest.attempt  # type: ignore[union-attr]
        for node in (0, 1)
    }
    assert len(attempts) == 1
    aside = [path.name.split("-")[0] for path in Root.of(out(training, 0)).aside.iterdir()]
    assert aside == ["6"]


@MODEL_ON_EACH_NODE
def test_a_checkpoint_stays_until_every_node_has_a_newer_one(tmp_path: Path) -> None:
    limited = {**ARGUMENTS, "save_total_limit": 1}
    training = Training(job(tmp_path, arguments=limited, faults=[KILLED_IN_COMMIT]), 2)
    assert training.join() == [1, -9]
    assert whole(training) == [[4, 6], [2, 4]]  # at the save of step 4 all had step 2
    after = again(training, arguments=limited)
    after.finish()
    assert [steps[-1] for steps in whole(after)] == [8, 8]
    assert all(len(steps) <= 2 for steps in whole(after))


def test_a_node_with_an_empty_disk_makes_all_start_from_the_beginning_and_says_so(
    lost: Training, undisturbed: tuple[Training, dict[str, Any]]
) -> None:
    shutil.rmtree(out(lost, 1))
    training = again(lost)
    assert training.finish()["weights"] == undisturbed[1]["weights"]
    assert "(rank 0 step 6, rank 1 nothing)" in training.text(0)
    assert "No Checkpoint found with step: -1: the nodes have no checkpoint in common" in training.text(0)
    assert whole(training) == [[2, 4, 6, 8]] * 2


def test_where_a_checkpoint_is_required_and_one_node_has_none_no_rank_trains(lost: Training) -> None:
    shutil.rmtree(out(lost, 1))
    done = len(losses(lost.job))
    training = again(lost, resume=None, settings={"resume": "required"})
    assert training.join() == [1, 1]
    assert all("NothingToResumeError" in training.text(rank) for rank in (0, 1))
    assert len(losses(lost.job)) == done


@MODEL_ON_EACH_NODE
def test_a_damaged_checkpoint_on_one_node_is_passed_over_on_both(
    undisturbed: tuple[Training, dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copytree(undisturbed[0].job.disks, tmp_path, dirs_exist_ok=True)
    training = Training(job(tmp_path, arguments={**ARGUMENTS, "max_steps": 10}), 2)
    victim = runs.checkpoint(out(training, 1), 8) / "model.safetensors"
    training.kill()
    victim.write_bytes(bytes(victim.stat().st_size))
    done = len(losses(training.job))
    training = Training(training.job, 2)
    training.finish()
    assert losses(training.job)[done][0] == 7
    assert "skipping" in training.text(1)


LEFT_TO_TRAINER = [
    {"at": "datastates.llm.host_cache:engine", "do": "ENOMEM", "rank": 1},
    {"at": "transformers.trainer_callback:TrainerState.save_to_json", "do": "kill", "when": "after"},
]


@MODEL_ON_EACH_NODE
@pytest.mark.parametrize("killed_again", [False, True], ids=["", "killed before all had a newer one"])
def test_what_trainer_saved_by_itself_on_every_node_is_gone_on_from(
    killed_again: bool, tmp_path: Path, undisturbed: tuple[Training, dict[str, Any]]
) -> None:
    limited = {**ARGUMENTS, "save_total_limit": 1}
    first = Training(job(tmp_path, faults=[{**KILLED_IN_COMMIT, "rank": None}]), 2)
    assert 0 not in first.join()
    assert whole(first) == [[2, 4]] * 2
    off = again(first, arguments=limited, faults=LEFT_TO_TRAINER)
    assert off.join() == [-9, -9], off.text(1)
    assert all((out(off, node) / "checkpoint-6").is_dir() for node in (0, 1))
    begins = 7
    if killed_again:
        assert again(off, arguments=limited, faults=[{**KILLED_IN_COMMIT, "nth": 1}]).join()[1] == -9
        assert whole(off) == [[4, 8], [2, 4]]
        begins = 5
    done = len(losses(off.job))
    after = again(off, arguments=limited)
    assert after.finish()["weights"] == undisturbed[1]["weights"]
    assert losses(after.job)[done][0] == begins
    assert [steps[-1] for steps in whole(after)] == [8, 8]


def test_the_ranks_of_a_node_vote_for_one_checkpoint_there(tmp_path: Path) -> None:
    training = Training(job(tmp_path, arguments={**ARGUMENTS, "max_steps": 4}), 4)
    training.finish()
    assert whole(training) == [[2, 4]] * 2
    for node in (0, 1):
        manifest = json.loads((runs.checkpoint(out(training, node), 4) / ".ckpt/manifest.json").read_text())
        assert (manifest["rank"], manifest["node"], manifest["voters"]) == (2 * node, node, 2)
        names = {file["path"] for file in manifest["files"]}
        assert {f"rng_state_{rank}.pth" for rank in (2 * node, 2 * node + 1)} <= names


def test_one_directory_for_all_nodes_is_refused_and_trainer_saves_by_itself(tmp_path: Path) -> None:
    training = Training(job(tmp_path, one_disk=True), 2)
    training.finish()
    [line] = [line for line in training.text(0).splitlines() if "is off for this training" in line]
    assert "is one directory for all nodes: leave out save_on_each_node" in line
    assert checkpoints.whole(out(training, 0)) == []
    assert (out(training, 0) / "checkpoint-8").is_dir()


def test_disks_of_their_own_without_save_on_each_node_are_refused_in_clear_words(tmp_path: Path) -> None:
    training = Training(job(tmp_path, arguments={**ARGUMENTS, "save_on_each_node": False}), 2)
    training.finish()
    [line] = [line for line in training.text(0).splitlines() if "is off for this training" in line]
    assert "rank 1" in line
    assert "is not the directory that rank 0 saves into" in line
    assert "save_on_each_node is needed" in line
    assert whole(training) == [[], []]
