from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from datastates.store.lineage import (
    ResumePoint,
    begin,
    differences,
    new_id,
    ordinal_of,
    other_model,
    unfinished,
    wants_fresh,
)
from datastates.store.manifest import IDENTIFIER, ManifestError
from datastates.store.runrecord import (
    Fingerprint,
    Lineage,
    RunRecord,
    parse_run_record,
    process_alive,
    process_started,
)

PATH = Path("/out/concurrent_checkpoint/checkpoint-10")


def here(run_id: str = "run2", **lineages: Lineage) -> RunRecord:
    record = RunRecord.here(run_id=run_id, attempt="attempt2", output_dir="/out")
    for name, lineage in lineages.items():
        record = record.with_lineage(int(name.removeprefix("of_")), lineage)
    return record


OLD = Lineage(id="old", state="finished", fresh_token="launch1", began=1.0)


def test_a_fresh_start_begins_a_new_lineage_without_an_origin() -> None:
    lineage, record = begin(None, 0, None, here())
    assert (lineage.origin, lineage.state, lineage.fresh_token) == (None, "running", None)
    assert IDENTIFIER.fullmatch(lineage.id)
    assert record.lineages == {0: lineage}


def test_a_fresh_start_leaves_no_trace_of_the_lineage_before() -> None:
    lineage, record = begin(here(of_0=OLD), 0, None, here())
    assert lineage.id != "old"
    assert record.lineages == {0: lineage}


def test_resuming_the_newest_of_the_current_lineage_continues_it() -> None:
    lineage, record = begin(here(of_0=OLD), 0, ResumePoint(PATH, 10, "ours", "old"), here())
    assert (lineage.id, lineage.state, lineage.began, lineage.fresh_token) == (
        "old",
        "running",
        1.0,
        "launch1",
    )
    assert record.lineages[0] == lineage


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_resuming_anything_else_begins_a_lineage_with_that_origin(kind: str) -> None:
    lineage, _ = begin(here(of_0=OLD), 0, ResumePoint(PATH, 10, kind, None), here())
    assert lineage.id != "old"
    assert lineage.origin == str(PATH)


def test_a_lineage_whose_record_was_lost_keeps_its_id() -> None:
    lineage, _ = begin(None, 0, ResumePoint(PATH, 10, "ours", "found"), here())
    assert (lineage.id, lineage.origin) == ("found", None)


def test_earlier_ordinals_are_taken_over_untouched() -> None:
    second = Lineage(id="second", began=2.0)
    _, record = begin(here(of_0=OLD, of_1=second), 1, None, here("run3"))
    assert record.lineages[0] == OLD
    assert (record.run_id, record.state) == ("run3", "running")


def test_a_run_is_finished_when_every_begun_ordinal_is() -> None:
    _, record = begin(None, 0, None, here())
    _, record = begin(record, 1, None, record)
    assert unfinished(record)
    record = record.finished(0)
    assert (record.state, unfinished(record)) == ("running", True)
    record = record.finished(1)
    assert (record.state, unfinished(record)) == ("finished", False)
    assert not unfinished(None)


def test_a_failed_run_is_unfinished() -> None:
    _, record = begin(None, 0, None, here())
    assert unfinished(record.failed())


def test_a_fresh_launch_starts_each_ordinal_over_once_and_resumes_it_in_its_own_restarts() -> None:
    record: RunRecord | None = here(of_0=OLD)
    assert wants_fresh(record, 0, "launch2")
    _, record = begin(record, 0, None, here(), fresh_token="launch2")
    assert not wants_fresh(record, 0, "launch2")
    assert wants_fresh(record, 1, "launch2")
    assert wants_fresh(record, 0, "launch3")
    assert wants_fresh(None, 0, "launch2")
    assert not wants_fresh(record, 0, None)


def test_a_resumed_lineage_remembers_the_launch_that_asked_for_it() -> None:
    lineage, _ = begin(here(of_0=OLD), 0, ResumePoint(PATH, 10, "ours", "old"), here(), fresh_token="launch1")
    assert lineage.fresh_token == "launch1"


# -- which training a call is -------------------------------------------------------------------------------------------

LLAMA = {"class": "Llama", "names": "#1", "elements": "100"}
WIDER = {"class": "Llama", "names": "#1", "elements": "200"}
ARGUMENTS = {"max_steps": "4", "learning_rate": "0.1", "seed": "1", "rows": "64"}


def known(model: dict[str, str] | None = None, **changes: str) -> Fingerprint:
    return Fingerprint(model=LLAMA if model is None else model, training={**ARGUMENTS, **changes})


def trainings(*fingerprints: Fingerprint | None) -> RunRecord:
    """A record of a script whose ``train()`` calls had these fingerprints."""
    each = (Lineage(id=f"l{n}", fingerprint=one) for n, one in enumerate(fingerprints))
    return here(**{f"of_{n}": lineage for n, lineage in enumerate(each)})


SECOND = known(max_steps="6", learning_rate="0.2", rows="48")


def test_without_a_fingerprint_the_ordinal_tells_which_training_a_call_is() -> None:
    record = trainings(known(), SECOND)
    assert ordinal_of(record, 0, None) == 0
    assert ordinal_of(None, 3, known()) == 3
    old = trainings(None, None)
    assert [ordinal_of(old, ordinal, SECOND) for ordinal in (0, 1, 2)] == [0, 1, 2]


def test_a_call_is_the_training_with_its_fingerprint_although_earlier_ones_are_left_out() -> None:
    record = trainings(known(), SECOND, known(rows="7"))
    assert ordinal_of(record, 0, known()) == 0
    assert ordinal_of(record, 0, SECOND) == 1
    assert ordinal_of(record, 1, SECOND) == 1
    assert ordinal_of(record, 0, known(rows="7")) == 2


@pytest.mark.parametrize(
    "change", [{"max_steps": "9"}, {"learning_rate": "0.7"}, {"seed": "5", "rows": "50"}]
)
def test_a_training_is_known_by_what_was_not_changed(change: dict[str, str]) -> None:
    record = trainings(known(), SECOND)
    first, second = ({**one.training, **change} for one in (known(), SECOND))
    assert ordinal_of(record, 0, known(**first)) == 0
    assert ordinal_of(record, 0, known(**second)) == 1


def test_trainings_are_never_taken_out_of_their_order() -> None:
    assert ordinal_of(trainings(known(), SECOND), 1, known()) == 1
    assert ordinal_of(trainings(known(), SECOND), 2, known()) == 2


def test_of_trainings_that_are_alike_in_as_many_facts_the_first_is_taken() -> None:
    assert ordinal_of(trainings(known(), known(), known()), 0, known()) == 0
    assert ordinal_of(trainings(known(), known(), known()), 1, known()) == 1
    assert ordinal_of(trainings(known(seed="8"), known(rows="8")), 0, known()) == 0


def test_a_single_training_goes_on_whatever_was_changed_about_it() -> None:
    other = known(max_steps="1", learning_rate="2", seed="3", rows="4")
    assert ordinal_of(trainings(known()), 0, other) == 0
    assert ordinal_of(trainings(known()), 0, Fingerprint(model=LLAMA)) == 0


def test_a_training_of_another_model_is_passed_over_however_alike_its_arguments_are() -> None:
    assert ordinal_of(trainings(known(WIDER), known(max_steps="9", rows="9")), 0, known()) == 1


def test_where_all_trainings_are_of_other_models_the_order_tells_and_it_is_told_how_they_differ() -> None:
    record = trainings(known(WIDER), known({**LLAMA, "names": "#2"}))
    assert ordinal_of(record, 0, known()) == 0
    assert ordinal_of(record, 1, known()) == 1
    assert other_model(record.lineages[0], known(rows="9")) == "elements 200 there and 100 here"
    assert other_model(record.lineages[1], known()) == "names"


def test_what_is_not_known_is_no_other_model() -> None:
    assert other_model(Lineage(id="l1", fingerprint=known(WIDER)), known({})) == ""
    assert other_model(Lineage(id="l1", fingerprint=known({})), known()) == ""
    assert other_model(Lineage(id="l1", fingerprint=known()), None) == ""
    assert other_model(Lineage(id="l1"), known()) == ""
    assert other_model(None, known()) == ""


def test_a_training_of_an_unknown_model_is_known_by_the_rest() -> None:
    unknown = known({}, rows="48")
    assert ordinal_of(trainings(known(WIDER)), 0, unknown) == 0
    assert ordinal_of(trainings(known(), known(WIDER, rows="48")), 0, unknown) == 1
    assert ordinal_of(trainings(unknown), 0, known()) == 0
    assert ordinal_of(trainings(known(WIDER), None), 0, known()) == 1


def test_facts_that_only_one_side_tells_count_neither_way() -> None:
    assert differences({"seed": "1"}, {"seed": "1", "rows": "2"}) == ""
    assert differences({"seed": "1", "rows": "2"}, {"seed": "3"}) == "seed 1 there and 3 here"
    newer = Fingerprint(model={**LLAMA, "shapes": "#3"}, training=ARGUMENTS)
    assert ordinal_of(trainings(known()), 0, newer) == 0


def test_a_training_that_was_found_is_found_again_from_there() -> None:
    record = trainings(known(), SECOND, known(WIDER))
    for fingerprint in (known(), SECOND, known(WIDER), known(rows="48")):
        found = ordinal_of(record, 0, fingerprint)
        assert ordinal_of(record, found, fingerprint) == found


def test_a_lineage_keeps_the_fingerprint_of_its_newest_launch() -> None:
    _, record = begin(None, 0, None, here(), fingerprint=known())
    own = ResumePoint(PATH, 10, "ours", record.lineages[0].id)
    lineage, record = begin(record, 0, own, here(), fingerprint=known({}, max_steps="9"))
    assert lineage.fingerprint == known(max_steps="9")
    lineage, _ = begin(record, 0, own, here())
    assert lineage.fingerprint == known(max_steps="9")
    lineage, _ = begin(record, 0, None, here())
    assert lineage.fingerprint is None


def test_a_record_from_before_there_were_fingerprints_is_read() -> None:
    record = trainings(known(), None)
    assert parse_run_record(record.encode(), PATH) == record
    body = json.loads(record.encode())
    for lineage in body["lineages"].values():
        del lineage["fingerprint"]
    old = parse_run_record(json.dumps(body).encode(), PATH)
    without = {number: replace(one, fingerprint=None) for number, one in record.lineages.items()}
    assert old == replace(record, lineages=without)


@pytest.mark.parametrize("damage", [7, "text", [], {"model": {}}, {"model": {"class": 1}, "training": {}}])
def test_a_damaged_fingerprint_makes_no_record(damage: object) -> None:
    body = json.loads(trainings(known()).encode())
    body["lineages"]["0"]["fingerprint"] = damage
    with pytest.raises(ManifestError):
        parse_run_record(json.dumps(body).encode(), PATH)


def test_ids_are_short_and_differ() -> None:
    ids = {new_id() for _ in range(1000)}
    assert len(ids) > 990
    assert all(IDENTIFIER.fullmatch(one) and len(one) == 8 for one in ids)


def test_a_living_process_is_told_from_a_dead_one_a_zombie_and_another_with_its_number() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = process_started(process.pid)
    assert started
    assert process_alive(process.pid, started)
    assert not process_alive(process.pid, started + 1)
    assert process.stdin
    process.stdin.close()
    with open(f"/proc/{process.pid}/stat", "rb") as stat:
        while b") Z " not in stat.read():
            stat.seek(0)
    assert not process_alive(process.pid, started)
    process.wait()
    assert not process_alive(process.pid, None)
    assert not process_alive(2**40, None)
