"""``ckpt-run status``: what the newest run is doing. Reads files and /proc only; torch is not imported."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from datastates.store.launches import LaunchRecord
from datastates.store.runrecord import FINISHED
from datastates.store.summary import RunSummary, summarize
from datastates.units import size
from rich.console import Console
from rich.text import Text

from ckpt_run import find_run, hooked
from ckpt_run.wording import ago, count, duration

SCHEMA_VERSION = 1
NO_RUN = 1

STYLES = {"running": "bold green", "finished": "green", "failed": "bold red", "interrupted": "bold yellow"}


def show(directory: Path | None, as_json: bool) -> int:
    """Print the newest run at ``directory`` (None: of the working directory); the exit code."""
    launch = find_run.last_launch() if directory is None else None
    root = find_run.root_at(directory or _place_of(launch))
    summary = summarize(root) if root else None
    if summary is not None and not summary.found:
        summary = None
    found = summary is not None or launch is not None
    if as_json:
        print(json.dumps(_as_json(summary, launch), indent=1))
    elif found:
        _print(summary, launch)
    else:
        print(f"no run of ckpt-run in {directory or Path.cwd()}; start one with: ckpt-run python train.py")
    return 0 if found else NO_RUN


def _place_of(launch: LaunchRecord | None) -> Path:
    known = launch is not None and launch.output_dir is not None and Path(launch.output_dir).is_dir()
    return Path(launch.output_dir) if known and launch and launch.output_dir else Path.cwd()


def _as_json(summary: RunSummary | None, launch: LaunchRecord | None) -> dict[str, object]:
    return {
        "schema_version": SCHEMA_VERSION,
        "found": summary is not None or launch is not None,
        "launch": asdict(launch) if launch else None,
        "hooked": _hooked(summary, launch),
        "ranks": _ranks(summary, launch),
        **(summary.to_json() if summary else {"run": None, "state": "none"}),
    }


# --- a table of two columns ----------------------------------------------------------------------------------------------


def _print(summary: RunSummary | None, launch: LaunchRecord | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    rows = [
        *_launch_rows(summary, launch),
        *(_run_rows(summary) if summary else []),
        *_rank_rows(summary, launch),
    ]
    for label, value in rows:
        console.print(Text.assemble((f"{label:<12}", "dim"), value))


def _launch_rows(summary: RunSummary | None, launch: LaunchRecord | None) -> list[tuple[str, Text]]:
    if launch is None:
        return []
    from ckpt_run.messages import shell_words

    rows = [("command", Text(shell_words(list(launch.command))))]
    state = f"started {ago(launch.started)}"
    if launch.ended is None and not hooked.runs_here(launch.run_id):
        state += ", and is gone from this host without a word: killed?"
    if launch.exit_code is not None and launch.ended is not None:
        state = f"ended {ago(launch.ended)} with exit code {launch.exit_code}"
    restarts = f", {count(launch.restarts, 'restart')}" if launch.restarts else ""
    rows.append(("launch", Text(state + restarts)))
    if launch.off:
        rows.append(
            ("", Text(f"Trainer saved by itself, since ckpt-run could not: {launch.off}", style="red"))
        )
    elif not _is_of(summary, launch):
        told = f"no Trainer of this launch has begun to train{' yet' if launch.state == 'running' else ''}"
        rows.append(("", Text(told + ("; what follows is an older run" if summary and summary.run else ""))))
    return rows


def _run_rows(summary: RunSummary) -> list[tuple[str, Text]]:
    run = summary.run
    rows = [("root", Text(summary.root))]
    if run:
        rows.append(("run", Text(f"{run.run_id} on {run.host}, started {ago(run.started)}")))
    updated = f", last heard of {ago(summary.updated)}" if summary.updated else ""
    rows.append(("state", Text.assemble((summary.state, STYLES.get(summary.state, "")), updated)))
    if run and run.state == FINISHED and not run.ended_well and run.process_is_gone:
        rows.append(("", Text("the program did not end well after it: started again, it goes on from there")))
    if summary.step is not None:
        goal = f" of {summary.max_steps}" if summary.max_steps else ""
        rows.append(("step", Text(f"{summary.step}{goal}")))
    rows.append(("newest", _newest(summary)))
    if summary.aside:
        told = f"{count(summary.aside, 'checkpoint')}, {size(summary.aside_bytes)}, in the way of newer ones and moved to .aside: yours to delete"
        rows.append(("aside", Text(told)))
    if summary.in_flight:
        rows.append(("in flight", Text(", ".join(f"step {step}" for step in summary.in_flight))))
    rows += _timing_rows(summary)
    if summary.problem:
        rows.append(("problem", Text(summary.problem, style="red")))
    rows += [("damaged", Text(text, style="red")) for text in summary.damaged]
    if summary.last_error:
        rows.append(("last error", Text(summary.last_error, style="red")))
    return rows


def _newest(summary: RunSummary) -> Text:
    newest = summary.newest
    if newest is None or newest.manifest is None:
        return Text("no checkpoint is committed yet")
    manifest = newest.manifest
    others = f"; {summary.committed} are kept" if summary.committed > 1 else ""
    files = count(len(manifest.files), "file")
    name = f"step {newest.step}"
    if newest.path.name != f"checkpoint-{newest.step}":
        name = f"{newest.path.name} ({name})"
    return Text(f"{name}, {size(manifest.size)} in {files}, committed {ago(manifest.created)}{others}")


def _timing_rows(summary: RunSummary) -> list[tuple[str, Text]]:
    rows = []
    if summary.stall_s is not None and summary.longest_stall_s is not None:
        longest = f"longest {duration(summary.longest_stall_s)}, {count(summary.saves, 'save')}"
        waited = f"; waited {duration(summary.wait_s)} for readers and at the end" if summary.wait_s else ""
        rows.append(("stall", Text(f"{duration(summary.stall_s)} a checkpoint ({longest}){waited}")))
    if summary.commit_s is not None:
        rows.append(("commit", Text(f"{duration(summary.commit_s)} after the save")))
    return rows


# --- ranks ---------------------------------------------------------------------------------------------------------------


def _is_of(summary: RunSummary | None, launch: LaunchRecord) -> bool:
    return summary is not None and summary.run is not None and summary.run.run_id == launch.run_id


def _hooked(summary: RunSummary | None, launch: LaunchRecord | None) -> int:
    return summary.hooked if summary and (launch is None or _is_of(summary, launch)) else 0


def _ranks(summary: RunSummary | None, launch: LaunchRecord | None) -> int:
    """How many ranks there are: as the hooked ones say, or as many as run here now."""
    said = summary.world_size if summary and (launch is None or _is_of(summary, launch)) else 0
    run_id = launch.run_id if launch else summary.run.run_id if summary and summary.run else ""
    return max(said, len(hooked.ranks(run_id)))


def _rank_rows(summary: RunSummary | None, launch: LaunchRecord | None) -> list[tuple[str, Text]]:
    ranks = _ranks(summary, launch)
    number = _hooked(summary, launch)
    of = f" of {ranks}" if ranks else ""
    rows = [
        ("ranks", Text(f"{number}{of} hooked", style="" if number and number == ranks else "bold yellow"))
    ]
    if number == 0 and not _is_explained(launch):
        rows += [("", Text(line)) for line in hooked.why_none(launch.run_id if launch else "")]
    elif number < ranks:
        rows.append(
            ("", Text("the other ranks do not save with ckpt-run: was their Python started in the same way?"))
        )
    return rows


def _is_explained(launch: LaunchRecord | None) -> bool:
    """Whether it is known why no rank is hooked, or the command may have ended before there could be one."""
    return launch is not None and (launch.decorated or bool(launch.exit_code))
