"""Which checkpoints there are, which are whole, and where training resumes."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from datastates.store import staged
from datastates.store.checksums import Crc32
from datastates.store.commit import REMOVED
from datastates.store.layout import CheckpointDir, Root, directories
from datastates.store.lineage import OURS, STOCK, ResumePoint, other_model
from datastates.store.manifest import Manifest, ManifestError, read_abandonment, read_manifest
from datastates.store.runrecord import Fingerprint, Lineage, RunRecord
from datastates.store.stock import Story, global_step, saved_at, stock_checkpoints, stock_problem
from datastates.store.verify import FileVerdict, Progress, scan, verify_files, verify_shapes

OnSkip = Callable[[Path, str], None]
"""``on_skip(path, reason)`` is told of everything that was passed over."""

NOT_COMMITTED = "was never committed"


def why_not_committed(path: Path) -> str:
    """For a person, of a checkpoint that never was: what became of its save."""
    try:
        return f"was given up: {read_abandonment(CheckpointDir(path, 0).abandoned).reason}"
    except (OSError, ManifestError):
        return "was never committed: it is in flight, or its run was interrupted"


def ignore(path: Path, reason: str) -> None:
    """An :data:`OnSkip` that tells nobody."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A ``checkpoint-<step>`` directory as its manifest alone describes it.

    Without ``problem`` it is committed and ``manifest`` is there. Otherwise ``problem`` says why it is not: it never was, or its manifest
    is damaged or does not belong to it.
    """

    step: int
    path: Path
    manifest: Manifest | None = None
    problem: str | None = None

    @property
    def committed(self) -> bool:
        return self.manifest is not None and self.problem is None

    @property
    def directory(self) -> CheckpointDir:
        return CheckpointDir(self.path, self.step)

    @classmethod
    def load(cls, path: Path, step: int | None = None) -> Checkpoint:
        """Read the manifest of the checkpoint at ``path``, wherever it lies; ``step`` is what its name says, if anything."""
        named = -1 if step is None else step
        try:
            manifest = read_manifest(CheckpointDir(path, named).manifest)
        except FileNotFoundError:
            return cls(named, path, None, NOT_COMMITTED)
        except ManifestError as error:
            return cls(named, path, None, str(error))
        if step is not None and manifest.step != step:
            return cls(step, path, manifest, f"its manifest is that of step {manifest.step}")
        return cls(manifest.step, path, manifest)


class Catalog:
    """The checkpoints of one root, read anew at every call."""

    def __init__(self, root: Root) -> None:
        self.root = root

    def checkpoints(self) -> list[Checkpoint]:
        """Every ``checkpoint-N`` directory, committed or not, highest step first. Reads manifests only."""
        return [self.get(step) for step in self.root.steps()]

    def get(self, step: int) -> Checkpoint:
        """What is known of one step; the directory need not exist."""
        return Checkpoint.load(self.root.checkpoint(step).path, step)

    def verify(
        self,
        checkpoint: Checkpoint,
        crc32: Crc32 = zlib.crc32,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> list[FileVerdict]:
        """See :func:`verify`."""
        return verify(checkpoint, crc32, workers, progress)

    def newest(
        self,
        lineage: str | None = None,
        *,
        verify: bool = True,
        on_skip: OnSkip = ignore,
        crc32: Crc32 = zlib.crc32,
    ) -> Checkpoint | None:
        """The highest committed step (of one lineage, if named) whose files are whole; every better one that is not is named to ``on_skip``.

        Args:
            verify: read every byte; otherwise presence and sizes decide.
        """
        for checkpoint in self._candidates(lineage):
            if not checkpoint.committed:
                on_skip(checkpoint.path, checkpoint.problem or NOT_COMMITTED)
            elif _is_of(checkpoint, lineage):
                problem = damage(checkpoint, verify=verify, crc32=crc32)
                if problem is None:
                    return checkpoint
                on_skip(checkpoint.path, problem)
        return None

    def _candidates(self, lineage: str | None) -> list[Checkpoint]:
        """Highest step first. One that another training's save moved aside still counts for its own lineage, after the one in place."""
        return sorted(
            [*self.checkpoints(), *self._set_aside(lineage)],
            key=lambda checkpoint: checkpoint.step,
            reverse=True,
        )

    def _set_aside(self, lineage: str | None) -> Iterator[Checkpoint]:
        for entry in directories(self.root.aside):
            checkpoint = Checkpoint.load(Path(entry.path))
            own = lineage is not None and checkpoint.committed and _is_of(checkpoint, lineage)
            if own and not entry.name.endswith(REMOVED):
                yield checkpoint


def verify(
    checkpoint: Checkpoint,
    crc32: Crc32 = zlib.crc32,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[FileVerdict]:
    """A verdict for every file of a checkpoint, all bytes read; files that were added after the commit are ok and remarked on.

    A checkpoint without a usable manifest has one verdict: its manifest's. Files that are committed and wait to be moved into place are
    read where they wait.
    """
    if checkpoint.manifest is None or checkpoint.problem:
        return [
            FileVerdict(
                checkpoint.directory.manifest.relative_to(checkpoint.path).as_posix(),
                False,
                checkpoint.problem or NOT_COMMITTED,
            )
        ]
    entries = checkpoint.manifest.files
    named = {entry.path for entry in entries}
    added = [
        FileVerdict(path, True, "not in the manifest") for path in scan(checkpoint.path) if path not in named
    ]
    verdicts = {
        verdict.path: verdict
        for directory, files in staged.places(checkpoint.path, checkpoint.manifest).items()
        for verdict in verify_files(directory, files, crc32, workers, progress)
    }
    return [verdicts[entry.path] for entry in entries] + added


def damage(checkpoint: Checkpoint, *, verify: bool = True, crc32: Crc32 = zlib.crc32) -> str | None:
    """The first thing that is wrong with a checkpoint, None when it is whole; files are read only when all sizes are right."""
    if checkpoint.manifest is None or checkpoint.problem:
        return checkpoint.problem or NOT_COMMITTED
    entries = checkpoint.manifest.files
    bad = [verdict for verdict in verify_shapes(checkpoint.path, entries) if not verdict.ok]
    if not bad and verify:
        bad = [verdict for verdict in verify_files(checkpoint.path, entries, crc32) if not verdict.ok]
    if not bad:
        return None
    more = f" (and {len(bad) - 1} more files)" if len(bad) > 1 else ""
    return f"{bad[0].path} {bad[0].reason}{more}"


def resume_point(
    output_dir: str | os.PathLike[str],
    ordinal: int = 0,
    *,
    fingerprint: Fingerprint | None = None,
    verify: bool = True,
    on_skip: OnSkip = ignore,
    crc32: Crc32 = zlib.crc32,
) -> ResumePoint | None:
    """Where the ``train()`` call of ``ordinal`` resumes; None: nowhere, it starts from the beginning.

    1. The newest whole checkpoint of the ordinal's current lineage.
    2. While it has none: its origin, if that is whole.
    3. When run.json is lost or unreadable: the newest whole checkpoint of the lineage that committed last.
    4. A stock ``checkpoint-N`` of the output directory, unless a training that began fresh in here is newer.
    5. Instead of what 1 to 3 give: a stock ``checkpoint-N`` that goes on from it. Where we could not save, or were not there, Trainer saved by
       itself. Of a higher step, saved later, with everything in its log that was logged until then; and no copy of a checkpoint of ours.

    An older lineage is never resumed silently: ``on_skip`` is told of it when nothing else was found. What another model left is never
    resumed at all, nor a stock checkpoint beside it.

    Args:
        fingerprint: of the ``train()`` call, None when it is not known.
        verify: read every byte of a candidate; otherwise presence and sizes decide.
    """
    return _Search(Root.of(output_dir), ordinal, fingerprint, verify, on_skip, crc32).run()


def explicit_point(
    output_dir: str | os.PathLike[str],
    ordinal: int,
    path: str | os.PathLike[str],
    *,
    fingerprint: Fingerprint | None = None,
    verify: bool = True,
    crc32: Crc32 = zlib.crc32,
) -> ResumePoint:
    """The resume point for a path that the script gave, which is used as it is: only its step and its lineage are looked up.

    It continues the ordinal's lineage when it is that lineage's newest whole checkpoint.
    """
    explicit = Path(os.path.abspath(path))
    checkpoint = Checkpoint.load(explicit)
    step = checkpoint.step if checkpoint.committed else global_step(explicit)
    kind = OURS if checkpoint.committed else STOCK
    found = resume_point(output_dir, ordinal, fingerprint=fingerprint, verify=False)
    same = found is not None and _same(found.path, explicit)
    if not same and verify and found is not None and kind == OURS:
        found = resume_point(output_dir, ordinal, fingerprint=fingerprint, crc32=crc32)
        same = found is not None and _same(found.path, explicit)
    return ResumePoint(
        explicit, -1 if step is None else step, kind, found.lineage if found and same else None
    )


def last_step(output_dir: str | os.PathLike[str]) -> int | None:
    """The step that the first ``train()`` call would resume from, judged by presence and sizes; None when there is none."""
    point = resume_point(output_dir, verify=False)
    return point.step if point else None


@dataclass(frozen=True, slots=True)
class _Search:
    root: Root
    ordinal: int
    fingerprint: Fingerprint | None
    verify: bool
    on_skip: OnSkip
    crc32: Crc32

    def run(self) -> ResumePoint | None:
        try:
            record = RunRecord.read(self.root)
        except ManifestError as error:
            self.on_skip(error.file, error.reason)
            record = None
        lineages = record.lineages if record else {}
        lineage = lineages.get(self.ordinal)
        difference = other_model(lineage, self.fingerprint)
        if difference:
            self._name_other_model(difference)
            return None
        point = self._of_lineage(lineage) if lineage else None
        if record is None:
            point = self._of_any_lineage()
        if point is not None:
            return self._saved_by_trainer(point, lineage, alone=len(lineages) == 1) or point
        if lineage or self.ordinal == 0:
            fresh = [known.began for known in lineages.values() if known.origin is None]
            point = self._of_stock(max(fresh, default=0.0))
        if point is None and record is not None:
            self._name_older(lineage)
        return point

    def _of_lineage(self, lineage: Lineage) -> ResumePoint | None:
        checkpoint = self._newest(lineage.id)
        if checkpoint:
            return ResumePoint(checkpoint.path, checkpoint.step, OURS, lineage.id)
        return self._of_origin(lineage) if lineage.origin else None

    def _of_origin(self, lineage: Lineage) -> ResumePoint | None:
        path = Path(lineage.origin or "")
        checkpoint = Checkpoint.load(path)
        if checkpoint.problem == NOT_COMMITTED:
            problem, step, kind = stock_problem(path), global_step(path), STOCK
        else:
            problem, step, kind = (
                damage(checkpoint, verify=self.verify, crc32=self.crc32),
                checkpoint.step,
                OURS,
            )
        if problem or step is None:
            self.on_skip(path, problem or "tells no step")
            return None
        return ResumePoint(path, step, kind, lineage.id)

    def _of_any_lineage(self) -> ResumePoint | None:
        """Without a record the lineage that committed last is the current one; of the same ordinal, since another is another model."""
        manifests = [
            checkpoint.manifest for checkpoint in Catalog(self.root).checkpoints() if checkpoint.committed
        ]
        own = [manifest for manifest in manifests if manifest and manifest.ordinal == self.ordinal]
        for lineage in _latest_first(own):
            checkpoint = self._newest(lineage)
            if checkpoint:
                self.on_skip(
                    self.root.run_record, f"tells no lineage: taking the one that committed last, {lineage}"
                )
                return ResumePoint(checkpoint.path, checkpoint.step, OURS, lineage)
        return None

    def _of_stock(self, newer_than: float) -> ResumePoint | None:
        for step, path in stock_checkpoints(self.root.path.parent):
            problem = stock_problem(path)
            if problem is None and saved_at(path) < newer_than:
                problem = "is older than the training that began here afterwards"
            if problem is None:
                return ResumePoint(path, step, STOCK, None)
            self.on_skip(path, problem)
        return None

    def _saved_by_trainer(
        self, ours: ResumePoint, lineage: Lineage | None, alone: bool
    ) -> ResumePoint | None:
        """What Trainer has saved by itself in the same training since then. The newest that is of another training is named.

        Args:
            alone: whether it is the only training in here. Otherwise it has to show in the log which of them goes on.
        """
        later, stranger_told = [*self._stock_since(ours, lineage)], False
        before = Story.read(ours.path) if later else None
        for step, path in later:
            problem = stock_problem(path)
            if problem:
                self.on_skip(path, problem)
            elif (
                before
                and (story := Story.read(path))
                and story.goes_on_from(before)
                and (alone or before.entries)
            ):
                return ResumePoint(path, step, STOCK, ours.lineage)
            elif not stranger_told:
                stranger_told = True
                self.on_skip(
                    path,
                    f"was saved later than {ours.path}, but its log does not go on from there; to go on from it, name it:"
                    " resume_from_checkpoint=<path>",
                )
        return None

    def _stock_since(self, ours: ResumePoint, lineage: Lineage | None) -> Iterator[tuple[int, Path]]:
        """Highest step first. One of a step that we have committed may be a copy of ours, and share its damage."""
        manifest = Checkpoint.load(ours.path).manifest
        since = max(manifest.created if manifest else saved_at(ours.path), lineage.began if lineage else 0.0)
        for step, path in stock_checkpoints(self.root.path.parent):
            newer = step > ours.step and saved_at(path) > since
            if newer and Catalog(self.root).get(step).problem == NOT_COMMITTED:
                yield step, path

    def _newest(self, lineage: str) -> Checkpoint | None:
        return Catalog(self.root).newest(lineage, verify=self.verify, on_skip=self.on_skip, crc32=self.crc32)

    def _name_older(self, current: Lineage | None) -> None:
        for checkpoint in Catalog(self.root).checkpoints():
            if checkpoint.committed and not (current and _is_of(checkpoint, current.id)):
                self.on_skip(
                    checkpoint.path,
                    "belongs to an earlier training; to go on from it, name it: resume_from_checkpoint=<path>",
                )
                return

    def _name_other_model(self, difference: str) -> None:
        if any(checkpoint.committed for checkpoint in Catalog(self.root).checkpoints()):
            self.on_skip(
                self.root.path,
                f"its checkpoints belong to another model ({difference}), and stay as they are; give this training an output directory"
                " of its own",
            )


def _is_of(checkpoint: Checkpoint, lineage: str | None) -> bool:
    return lineage is None or (checkpoint.manifest is not None and checkpoint.manifest.lineage == lineage)


def _latest_first(manifests: list[Manifest]) -> list[str]:
    latest: dict[str, float] = {}
    for manifest in manifests:
        latest[manifest.lineage] = max(manifest.created, latest.get(manifest.lineage, 0.0))
    return sorted(latest, key=lambda lineage: latest[lineage], reverse=True)


def _same(one: Path, other: Path) -> bool:
    return one == other or one.resolve() == other.resolve()
