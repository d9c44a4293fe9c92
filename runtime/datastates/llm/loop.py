"""Training loops without the Trainer: what the saves of DeepSpeed's engines and of accelerate have in common.

A script calls ``save_checkpoint`` or ``save_state`` with a path of its own, on all ranks or on the main one alone, for a new directory or
for the one it saved into before. The files go exactly there. Rank 0 gets the directory ready (:func:`datastates.store.staged.open_directory`),
numbers the save and tells the others (:mod:`datastates.llm.words`); from then on it is a save as any other (:mod:`datastates.llm.saver`).

There is one :class:`Loop` for each directory that checkpoints lie in. It lives until the process ends, which waits for what is in flight.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from datastates import settings
from datastates.engine import crc32
from datastates.formats import intercept
from datastates.llm import decorator, fence, host_cache, instance, log, program_end
from datastates.llm.committer import Committer, Identity
from datastates.llm.fence import FENCE
from datastates.llm.ranks import Ranks
from datastates.llm.save import Manner, Save
from datastates.llm.saver import Saver
from datastates.llm.still import StillTensor, still_tensors
from datastates.llm.words import NobodyAnsweredError, Topic
from datastates.settings import SettingError, Settings
from datastates.store import last_word, launches, lineage, occupant, staged
from datastates.store.catalog import NOT_COMMITTED, Checkpoint, damage
from datastates.store.commit import polls, set_aside
from datastates.store.journal import Journal
from datastates.store.layout import CheckpointDir, Root
from datastates.store.manifest import ManifestError
from datastates.store.runrecord import Lineage, RunRecord

logger = log.logger("datastates.llm.decorator")

VISIBLE_SECONDS = 60.0
"""How long another rank waits for what rank 0 has to do after a commit: moving files into place, before anybody reads them."""

_told: set[str] = set()


@dataclass(frozen=True)
class Call:
    """One call of a script that saves.

    Args:
        root: the directory that the checkpoint lies in.
        path: the checkpoint's.
        settings: see :func:`settings_for`.
        step: by which checkpoints of a root are put in order.
        models: give names to what is saved; their buffers are copied at once.
        exclusive: whether the root is this training's alone.
        made_by_stock: stock code makes the directory, and refuses one that is there.
        shared_by_all: names of files that every rank would write, all to the same path; rank 0 does.
        pointers: see :class:`datastates.llm.save.Save`.
        voters: asked on rank 0 and on the save's thread which ranks take part; None: all.
        after_commit: called on rank 0, on the save's thread.
    """

    root: Root
    path: Path
    step: int
    settings: Settings
    ranks: Ranks
    models: Iterable[torch.nn.Module]
    exclusive: bool = True
    made_by_stock: bool = False
    shared_by_all: Callable[[str], bool] = lambda name: False
    pointers: Mapping[Path, bytes] = field(default_factory=dict)
    voters: Callable[[Topic], Collection[int]] | None = None
    after_commit: Callable[[], object] = lambda: None


class Loop:
    """The saves of this rank into one root. Used by the main thread; ``after_commit`` runs on the saves' threads."""

    def __init__(self, root: Root, ranks: Ranks, given: Settings, identity: Identity) -> None:
        self.settings = given
        self._root = root
        self._ranks = ranks
        self._models: list[torch.nn.Module] = []
        self._after: dict[int, Callable[[], object]] = {}
        self._number = 0
        engine = host_cache.engine(given, ranks)
        run_id = os.environ.get("CKPT_RUN_RUN_ID") or lineage.new_id()
        self._journal = Journal(root, ranks.rank, run_id, identity.attempt)
        self._committer = Committer(given, ranks, identity, root, self._journal, self._after_commit)
        self.saver = Saver(engine, self._committer, given, self._journal, root.path, ranks.rank, self._still)
        fence.install()
        intercept.install()
        self._journal.event(
            "hooked", rank=ranks.rank, world_size=ranks.size, pid=os.getpid(), host=os.uname().nodename
        )
        self._journal.event("train_begin", lineage=identity.lineage, ordinal=0, resume_step=0, max_steps=0)
        if ranks.rank == 0:
            self._begin_record(run_id)

    @property
    def identity(self) -> Identity:
        return self._committer.identity

    def goes_on_with(self, lineage_id: str) -> None:
        """What is saved from now on belongs to this lineage: one of its checkpoints has been loaded, or rank 0 says so."""
        if lineage_id != self.identity.lineage:
            self.saver.wait(self.settings.commit_timeout)
            self._committer.identity = Identity(self.identity.attempt, lineage_id, 0)
            self._update_record(lambda record: record.with_lineage(0, Lineage(id=lineage_id)))

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def save(
        self, call: Call, directory: CheckpointDir, number: int, topic: Topic, write: Callable[[], object]
    ) -> bool:
        """As :meth:`Saver.save`."""
        self._models = list(call.models)
        self._after[number] = call.after_commit
        voters = call.voters
        try:
            saved = self.saver.save(
                directory,
                write,
                pointers=call.pointers,
                manner=Manner(
                    number=number,
                    voters=None if voters is None else lambda: voters(topic),
                    leaves_out=call.shared_by_all if self._ranks.rank else lambda name: False,
                ),
            )
        finally:
            self._models = []
            # What steps from here on has fired the fence since this save, which is what the next one asks.
            FENCE.optimizers.begin_step()
        if self.settings.loop_saves == "wait":
            self.saver.wait_for_readers("loop_saves=wait")
            saved = saved and not self.saver.newest_is_missing
            if saved and self._ranks.rank:
                _wait_until_in_place(call)
        return saved

    def end(self, failed: bool) -> None:
        """The process ends."""
        if failed:
            self._committer.training_has_failed()
        self.saver.wait_for_all()
        if failed:
            self._journal.event("error", text=program_end.error() or "the program has failed")
        else:
            self._journal.event("finish", step=0)
        self._update_record(lambda record: record.failed() if failed else record.finished(0))
        self._journal.close()

    def _still(self, torn_before: set[str]) -> dict[int, StillTensor]:
        if self.settings.snapshot == "eager":
            return {}
        seen = FENCE.optimizers
        try:
            return still_tensors(
                seen.trusted(), torch.nn.ModuleList(self._models), torn_before, seen.trusted_engines()
            )
        except Exception:
            logger.exception("%s cannot tell what holds still: everything is copied at once", log.PREFIX)
            return {}

    def _after_commit(self, save: Save) -> None:
        self._update_record(lambda record: record.at_step(max(record.step, save.step)))
        try:
            self._after.pop(save.number, lambda: None)()
        except OSError as error:
            logger.error("%s after %s was committed: %s", log.PREFIX, save.directory.path.name, error)

    def _begin_record(self, run_id: str) -> None:
        identity = self.identity
        record = RunRecord.here(
            run_id=run_id,
            attempt=identity.attempt,
            output_dir=str(self._root.path),
            world_size=self._ranks.size,
        )
        try:
            last_word.forget(self._root)
            record.with_lineage(0, Lineage(id=identity.lineage)).write(self._root)
        except OSError as error:
            logger.error("%s the record of this run cannot be kept: %s", log.PREFIX, error)
        launches.note_output_dir(run_id, self._root.path)

    def _update_record(self, change: Callable[[RunRecord], RunRecord]) -> None:
        if self._ranks.rank != 0:
            return
        try:
            record = RunRecord.read(self._root)
            if record is not None and record.attempt == self.identity.attempt:
                change(record).write(self._root)
        except (OSError, ManifestError, KeyError) as error:
            logger.error("%s the record of this run cannot be kept: %s", log.PREFIX, error)


def _wait_until_in_place(call: Call) -> None:
    """For what rank 0 does after a commit, of which the others have learnt by then: files move into place, and pointers lead to them."""
    for _ in polls(VISIBLE_SECONDS):
        if not staged.waits(call.path) and all(_reads(path, text) for path, text in call.pointers.items()):
            return


def _reads(path: Path, text: bytes) -> bool:
    try:
        return path.read_bytes() == text
    except OSError:
        return False


class NotCommittedError(RuntimeError):
    """A checkpoint that is to be loaded was never committed, or is damaged."""


_loops: dict[str, Loop] = {}
_given: weakref.WeakKeyDictionary[Any, Settings] = weakref.WeakKeyDictionary()
_inside: list[None] = []
_lineages: dict[str, str] = {}
"""By root, the lineage of the checkpoint that was loaded from it, for the saves to come."""


def save(call: Call, write: Callable[[CheckpointDir], object]) -> bool | None:
    """Save concurrently what ``write`` writes into the directory it is given; False when this rank's part has failed.

    None, and nothing done, when the call is left to stock code; why was told.
    """
    timeout = call.settings.commit_timeout
    topic = Topic(call.ranks, "save", str(call.path))
    if not topic.reaches_all:
        tell_once(call.ranks, "the ranks have no way to agree: saves are left to stock code")
        return None
    topic.come()
    known = _loops.get(str(call.root.path))
    if known is not None:
        known.saver.wait_for(call.path, timeout)
    try:
        word = topic.agree(lambda: _get_ready(call), timeout)
    except NobodyAnsweredError as error:
        logger.error("%s %s is saved by stock code: %s", log.PREFIX, call.path.name, error)
        return None
    if "stock" in word:
        tell_once(call.ranks, f"saves into {call.root.path} are left to stock code: {word['stock']}")
        return None
    if "trouble" in word:
        if call.ranks.rank == 0:
            logger.error(
                "%s %s was not saved, training goes on: %s", log.PREFIX, call.path.name, word["trouble"]
            )
        return False
    loop = _follow(call, word)
    directory = CheckpointDir(call.path, call.step, word["staged"])
    if loop is None:
        return None
    if not call.made_by_stock:
        directory.prepare()
    return loop.save(call, directory, word["number"], topic, lambda: write(directory))


def _get_ready(call: Call) -> dict[str, Any]:
    """Rank 0, before anybody writes: what all ranks have to know. Never raises, since they wait for it."""
    try:
        loop = _loops.get(str(call.root.path)) or _begin(call)
    except (OSError, RuntimeError) as error:
        return {"stock": str(error)}
    number = loop.next_number()
    attempt = loop.identity.attempt
    try:
        if call.made_by_stock:
            _make_way(call, attempt)
            directory = CheckpointDir(call.path, call.step)
        else:
            directory = staged.open_directory(call.path, call.step, attempt, number)
    except OSError as error:
        return {"trouble": f"{type(error).__name__}: {error}"}
    return {
        "attempt": attempt,
        "lineage": loop.identity.lineage,
        "number": number,
        "staged": directory.staged,
    }


def _make_way(call: Call, attempt: str) -> None:
    """Stock code refuses a directory that is there. A whole checkpoint is refused rightly; a damaged one has been passed over by the load."""
    if staged.uncommitted(call.path):
        staged.remove(call.path)
        return
    found = Checkpoint.load(call.path)
    problem = None if found.problem == NOT_COMMITTED else damage(found, crc32=crc32)
    if problem is not None:
        moved = set_aside(CheckpointDir(call.path, call.step), attempt, call.root)
        logger.warning("%s %s: %s; it was moved to %s", log.PREFIX, call.path, problem, moved)


def _begin(call: Call) -> Loop:
    """Rank 0's loop of a root. Raises OSError or RuntimeError where it cannot be had."""
    root = str(call.root.path)
    if call.exclusive:
        name = f"process {os.getpid()} on {os.uname().nodename} ({' '.join(sys.orig_argv)})"
        other = occupant.occupy(call.root, name)
        if other is not None:
            raise RuntimeError(f"{other} saves into it now")
    identity = Identity(lineage.new_id(), _lineages.get(root) or lineage.new_id(), 0)
    return _keep(root, Loop(call.root, call.ranks, call.settings, identity))


def _follow(call: Call, word: Mapping[str, Any]) -> Loop | None:
    root = str(call.root.path)
    loop = _loops.get(root)
    if loop is None:
        try:
            identity = Identity(word["attempt"], word["lineage"], 0)
            loop = _keep(root, Loop(call.root, call.ranks, call.settings, identity))
        except OSError as error:
            logger.error("%s this rank cannot save: %s", log.PREFIX, error)
            return None
    loop.goes_on_with(word["lineage"])
    return loop


def _keep(root: str, loop: Loop) -> Loop:
    if not _loops:
        program_end.at_end(_end)  # after the engine's own, hence called before it
        os.register_at_fork(after_in_child=_loops.clear)
    _loops[root] = loop
    return loop


def _end(failed: bool) -> None:
    while _loops:
        _loops.pop(next(iter(_loops))).end(failed)


# -- what else is asked about loops -----------------------------------------------------------------------------------------


def is_bystander(owner: Any) -> bool:
    """Whether a save of ``owner`` is part of another one, or belongs to a Trainer."""
    if intercept.collecting() or _inside:
        return True
    return any(
        owner is getattr(trainer, name, None)
        for trainer in decorator.trainers()
        for name in ("model_wrapped", "deepspeed", "accelerator")
    )


@contextmanager
def inside() -> Iterator[None]:
    """While stock code loads, which may load through other methods that are wrapped as well."""
    _inside.append(None)
    try:
        yield
    finally:
        _inside.pop()


def wait_for_readers() -> None:
    """Somebody is about to load: everything that this process saved is committed or given up."""
    for loop in _loops.values():
        loop.saver.wait_for_readers("a checkpoint is loaded")


def go_on_with(root: Root, lineage_id: str) -> None:
    """A checkpoint of this lineage has been loaded from ``root``."""
    _lineages[str(root.path)] = lineage_id
    loop = _loops.get(str(root.path))
    if loop is not None:
        loop.goes_on_with(lineage_id)


def tell_once(ranks: Ranks, text: str) -> None:
    """A warning for people, on rank 0 and once in a process."""
    if text not in _told:
        _told.add(text)
        if ranks.rank == 0:
            logger.warning("%s %s", log.PREFIX, text)


def settings_for(owner: Any) -> Settings | None:
    """What the script has set for an engine or an accelerator, or the environment says.

    None where stock code saves and loads: the call is part of another one, or it is to be so, or, after an error, what was set cannot be used.
    """
    if is_bystander(owner):
        return None
    try:
        found = _given.get(owner) or settings.load()
    except SettingError as error:
        if str(error) not in _told:
            _told.add(str(error))
            logger.error("%s is off, checkpoints are saved by stock code: %s", log.PREFIX, error)
        return None
    return None if found.loop_saves == "off" else found


class Attachment:
    """What a script that decorates an engine or an accelerator by itself is given."""

    def __init__(self, owner: Any, given: Settings, answers: Mapping[str, Callable[..., Any]]) -> None:
        _given[owner] = given
        for name, answer in answers.items():
            instance.wrap(owner, name, _calling(answer, _stock(owner, name), weakref.ref(owner)))

    def wait(self, timeout: float | None) -> bool:
        """Until every checkpoint in flight has its outcome; False when some have none after ``timeout`` seconds each."""
        return all([loop.saver.wait(timeout) for loop in _loops.values()])


def _calling(
    answer: Callable[..., Any], stock: Callable[..., Any], owner: Callable[[], Any]
) -> Callable[..., Any]:
    return lambda original, *args, **kwargs: answer(stock, owner(), *args, **kwargs)


def _stock(owner: Any, name: str) -> Callable[..., Any]:
    """The class's own method, below what the hook may have put around it."""
    method: Any = getattr(type(owner), name)
    while getattr(method, "ckpt_run", False):
        method = method.__wrapped__
    return method  # type: ignore[no-any-return]
