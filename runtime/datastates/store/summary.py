"""What ``ckpt-run status`` shows of a root, gathered from run.json, the journals and the manifests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from datastates.store.catalog import Checkpoint
from datastates.store.document import ManifestError
from datastates.store.heartbeat import Heartbeat
from datastates.store.journal import Event, read_events
from datastates.store.layout import Root, directories
from datastates.store.loops import all_checkpoints
from datastates.store.runrecord import RUNNING, RunRecord

NONE = "none"
INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run as ``ckpt-run status`` tells it. Sizes in bytes, durations in seconds, times in seconds since 1970; None: not known.

    ``state`` is "running", "finished", "failed", "interrupted" (the record says running, but its process is gone) or "none".
    ``stall_s`` is the mean over this run's saves, of the rank that stood still longest; ``wait_s`` is what it waited at the end.
    ``commit_s`` is the mean time from save to commit. ``in_flight`` are the steps saved and neither committed nor given up.
    ``aside`` are committed checkpoints that were in the way of others.
    """

    root: str
    run: RunRecord | None
    problem: str | None
    state: str
    step: int | None
    max_steps: int | None
    newest: Checkpoint | None
    committed: int
    damaged: tuple[str, ...]
    aside: int
    aside_bytes: int
    in_flight: tuple[int, ...]
    saves: int
    stall_s: float | None
    longest_stall_s: float | None
    wait_s: float
    commit_s: float | None
    hooked: int
    world_size: int
    last_error: str | None
    updated: float | None

    @property
    def found(self) -> bool:
        """Whether there is anything to tell."""
        return self.run is not None or self.problem is not None or self.newest is not None or self.hooked > 0

    def to_json(self) -> dict[str, object]:
        """Plain values for ``--json``."""
        values: dict[str, object] = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("run", "newest")
        }
        values["run"] = _record_json(self.run) if self.run else None
        values["newest"] = _checkpoint_json(self.newest) if self.newest else None
        return values


def summarize(root: Root) -> RunSummary:
    """Gather everything. Files that are missing or damaged make fields None or ``problem``, never an exception.

    Raises:
        OSError: the root is there but cannot be read.
    """
    record, problem = _record(root)
    events = _of_run(read_events(root), record)
    heartbeat = Heartbeat.read(root, _attempt(record, events))
    checkpoints = all_checkpoints(root)
    committed = [checkpoint for checkpoint in checkpoints if checkpoint.committed]
    damaged = [
        f"{item.path.name}: {item.problem}"
        for item in checkpoints
        if not item.committed and item.directory.manifest.exists()
    ]
    aside = [found for found in _aside(root) if found.committed]
    stalls = _stalls(events)
    commits = [event.number("seconds") for event in events if event.kind == "commit"]
    return RunSummary(
        root=str(root.path),
        run=record,
        problem=problem,
        state=_state(record),
        step=_step(record, events, heartbeat),
        max_steps=_max_steps(record, heartbeat),
        newest=_newest(committed, record),
        committed=len(committed),
        damaged=tuple(damaged),
        aside=len(aside),
        aside_bytes=sum(found.manifest.size for found in aside if found.manifest),
        in_flight=_in_flight(events, record),
        saves=len(stalls),
        stall_s=sum(stalls.values()) / len(stalls) if stalls else None,
        longest_stall_s=max(stalls.values(), default=None),
        wait_s=_wait(events),
        commit_s=sum(commits) / len(commits) if commits else None,
        hooked=len({event.rank for event in events if event.kind == "hooked"}),
        world_size=_world_size(record, events),
        last_error=_last_error(events),
        updated=_updated(record, events, heartbeat),
    )


def _aside(root: Root) -> Iterator[Checkpoint]:
    for entry in directories(root.aside):
        step = entry.name.partition("-")[0]
        yield Checkpoint.load(Path(entry.path), int(step) if step.isdecimal() else None)


def _record(root: Root) -> tuple[RunRecord | None, str | None]:
    try:
        return RunRecord.read(root), None
    except ManifestError as error:
        return None, str(error)


def _of_run(events: list[Event], record: RunRecord | None) -> list[Event]:
    """The events of the run on record, or of whichever wrote last."""
    if not events:
        return []
    run_id = record.run_id if record else events[-1].run_id
    return [event for event in events if event.run_id == run_id]


def _state(record: RunRecord | None) -> str:
    if record is None:
        return NONE
    if record.state == RUNNING and record.process_is_gone:
        return INTERRUPTED
    return record.state


def _attempt(record: RunRecord | None, events: list[Event]) -> str:
    """The last one. When a launch is started again, its record is there before it has an event of its own."""
    if record and not (events and events[-1].time >= record.started):
        return record.attempt
    return events[-1].attempt if events else ""


def _step(record: RunRecord | None, events: list[Event], heartbeat: Heartbeat | None) -> int | None:
    """The highest step of the last attempt."""
    last = _attempt(record, events)
    steps = [
        event.whole("step")
        for event in events
        if event.attempt == last and event.kind in ("save", "commit", "finish", "resume")
    ]
    if heartbeat:
        steps.append(heartbeat.step)
    if record:
        steps.append(record.step)
    return max(steps, default=None)


def _max_steps(record: RunRecord | None, heartbeat: Heartbeat | None) -> int | None:
    """The arguments do not tell it where training is counted in epochs."""
    if heartbeat and heartbeat.max_steps:
        return heartbeat.max_steps
    return record.max_steps if record else None


def _updated(record: RunRecord | None, events: list[Event], heartbeat: Heartbeat | None) -> float | None:
    if not events:
        return record.updated if record else None
    return max(*(event.time for event in events), heartbeat.time if heartbeat else 0.0)


def _newest(committed: list[Checkpoint], record: RunRecord | None) -> Checkpoint | None:
    """The newest of the current lineages, or of any when none of theirs is there."""
    lineages = {lineage.id for lineage in record.lineages.values()} if record else set()
    own = [item for item in committed if item.manifest and item.manifest.lineage in lineages]
    return next(iter(own or committed), None)


def _in_flight(events: list[Event], record: RunRecord | None) -> tuple[int, ...]:
    if _state(record) not in (RUNNING, NONE) or not events:
        return ()
    open_steps: set[int] = set()
    last = _attempt(record, events)
    for event in events:
        if event.attempt != last:
            continue
        if event.kind == "save":
            open_steps.add(event.whole("step"))
        elif event.kind in ("commit", "abandon"):
            open_steps.discard(event.whole("step"))
    return tuple(sorted(open_steps))


def _stalls(events: list[Event]) -> dict[tuple[str, int], float]:
    """Seconds for each save (attempt and step): in the call and at fences, of the slowest rank."""
    by_rank: dict[tuple[str, int], dict[int, float]] = {}
    for event in events:
        key = (event.attempt, event.whole("step"))
        if event.kind == "save":
            by_rank.setdefault(key, {})
        if event.kind in ("save", "fence") and key in by_rank:
            ranks = by_rank[key]
            ranks[event.rank] = ranks.get(event.rank, 0.0) + event.number("stall_s")
    return {key: max(ranks.values(), default=0.0) for key, ranks in by_rank.items()}


def _wait(events: list[Event]) -> float:
    by_rank: dict[int, float] = {}
    for event in events:
        if event.kind == "wait":
            by_rank[event.rank] = by_rank.get(event.rank, 0.0) + event.number("seconds")
    return max(by_rank.values(), default=0.0)


def _world_size(record: RunRecord | None, events: list[Event]) -> int:
    told = [event.whole("world_size", 1) for event in events if event.kind == "hooked"]
    return max(told[-1] if told else 0, record.world_size if record else 0)


def _last_error(events: list[Event]) -> str | None:
    texts = [
        event.text("text") or event.text("reason") for event in events if event.kind in ("error", "abandon")
    ]
    return texts[-1] if texts else None


def _record_json(record: RunRecord) -> dict[str, object]:
    return asdict(record)


def _checkpoint_json(checkpoint: Checkpoint) -> dict[str, object]:
    manifest = checkpoint.manifest
    return {
        "step": checkpoint.step,
        "path": str(checkpoint.path),
        "bytes": manifest.size if manifest else None,
        "files": len(manifest.files) if manifest else None,
        "created": manifest.created if manifest else None,
        "world_size": manifest.world_size if manifest else None,
    }
