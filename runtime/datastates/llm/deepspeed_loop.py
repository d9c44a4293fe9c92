"""``engine.save_checkpoint`` and ``engine.load_checkpoint`` of DeepSpeed, called by a training loop.

A tag's directory is the checkpoint. ``latest`` is written when that is committed, by rank 0, and never before.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from datastates.engine import crc32
from datastates.llm import log, loop
from datastates.llm.deepspeed_meetings import writers_forgiven
from datastates.llm.meetings import PutOff
from datastates.llm.ranks import Ranks
from datastates.llm.words import Topic
from datastates.store import staged
from datastates.store.catalog import NOT_COMMITTED, Checkpoint, damage
from datastates.store.layout import LOOP_HOME, CheckpointDir, Root
from datastates.store.loops import loop_checkpoints

logger = log.logger("datastates.llm.decorator")

LATEST = "latest"


def save_checkpoint(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Instead of ``engine.save_checkpoint``: True when this rank's part is on its way, False when it has failed."""
    settings = loop.settings_for(engine)
    obstacle = _obstacle(engine) if settings else ""
    if settings is None or obstacle:
        if obstacle:
            loop.tell_once(_ranks(), f"{obstacle}: DeepSpeed saves by itself")
        return original(engine, *args, **kwargs)
    given = _bound(original, engine, args, kwargs)
    tag = given["tag"]
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    root = _root(given["save_dir"])
    call = loop.Call(
        root,
        root.path / tag,
        int(engine.global_steps),
        settings,
        _ranks(),
        [engine.module],
        pointers={root.path / LATEST: tag.encode()} if given["save_latest"] else {},
    )
    saved = loop.save(call, lambda directory: _write(engine, given, tag, directory))
    return original(engine, *args, **kwargs) if saved is None else saved


def _write(engine: Any, given: dict[str, Any], tag: str, directory: CheckpointDir) -> None:
    where = {"save_dir": given["save_dir"], "tag": tag}
    if directory.staged:
        where = {"save_dir": str(directory.files.parent), "tag": directory.files.name}
    put_off = PutOff(given["save_dir"])
    with writers_forgiven(engine, put_off):
        engine.save_checkpoint(
            **{**given, **where, "save_latest": False}
        )  # which is stock's, inside of a save
    if put_off.errors:
        raise put_off.errors[0]
    if directory.staged and engine.global_rank == 0:
        # zero_to_fp32.py lies beside the tags
        for entry in directory.files.parent.iterdir():
            if entry.is_file():
                entry.replace(Path(given["save_dir"]) / entry.name)


def load_checkpoint(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Instead of ``engine.load_checkpoint``.

    Raises:
        loop.NotCommittedError: on every rank: the tag was never committed; or, where none was given, ``latest`` leads to one that is damaged and
            there is no older one.
    """
    settings = loop.settings_for(engine)
    given = _bound(original, engine, args, kwargs)
    # A universal checkpoint is made by DeepSpeed's tool, has a pointer of its own, and was never saved by us.
    universal = given["tag"] is None and engine.load_universal_checkpoint()
    if settings is None or universal or not isinstance(given["load_dir"], (str, os.PathLike)):
        return original(engine, *args, **kwargs)
    loop.wait_for_readers()
    root, ranks = _root(given["load_dir"]), _ranks()
    topic = Topic(ranks, "load", str(root.path))
    if not topic.reaches_all:
        return original(engine, *args, **kwargs)
    word = topic.agree(lambda: _choose(root, given["tag"]), settings.commit_timeout)
    if word.get("error"):
        raise loop.NotCommittedError(word["error"])
    if word.get("lineage"):
        loop.go_on_with(root, word["lineage"])
    with loop.inside():
        return original(engine, **{**given, "tag": word["tag"]})


def _choose(root: Root, tag: Any) -> dict[str, Any]:
    """Rank 0: the tag to load, and whose it is; or the error that all ranks raise."""
    try:
        return _choose_tag(root, None if tag is None else str(tag))
    except OSError as error:
        return {"error": f"{root.path} cannot be read: {error}"}


def _choose_tag(root: Root, tag: str | None) -> dict[str, Any]:
    named = tag if tag is not None else _latest(root)
    if named is None:
        return {"tag": None}
    found, problem = _look_at(root.path / named, as_it_is=tag is not None)
    if tag is None and not (named and os.path.isdir(found.path)):
        found, problem = Checkpoint(-1, found.path), f"is not there, and {LATEST!r} leads to it"
    if problem is None:
        return {"tag": named, "lineage": found.manifest.lineage if found.committed and found.manifest else ""}
    older = _newest(root, without=named, like=found)
    if tag is not None or older is None:
        advice = f"; the newest committed one is {_tag_of(root, older)!r}" if older else ""
        return {"error": f"the checkpoint {named!r} in {root.path} {problem}{advice}"}
    logger.error("%s skipping %s: %s", log.PREFIX, found.path, problem)
    logger.info("%s loading %s, step %d", log.PREFIX, older.path, older.step)
    assert older.manifest is not None
    return {"tag": _tag_of(root, older), "lineage": older.manifest.lineage}


def _look_at(path: Path, as_it_is: bool) -> tuple[Checkpoint, str | None]:
    """What is at ``path``, and why it is not to be loaded, if so. A stock checkpoint has nothing to be compared with."""
    staged.settle(path)
    found = Checkpoint.load(path)
    if staged.uncommitted(path):
        return found, "was never committed"
    if as_it_is or found.problem == NOT_COMMITTED:
        return found, None
    return found, damage(found, crc32=crc32)


def _newest(root: Root, without: str, like: Checkpoint) -> Checkpoint | None:
    """The newest whole checkpoint of the same training, or of any where that is not known."""
    for found in loop_checkpoints(root):
        if found.path == root.path / without or not found.committed or found.manifest is None:
            continue
        staged.settle(found.path)
        same = like.manifest is None or found.manifest.lineage == like.manifest.lineage
        if same and damage(found, crc32=crc32) is None:
            return found
    return None


def _tag_of(root: Root, checkpoint: Checkpoint) -> str:
    return checkpoint.path.relative_to(root.path).as_posix()


def _latest(root: Root) -> str | None:
    """What ``latest`` says; None, and DeepSpeed says why, when there is none. After a power cut it may say nothing, or anything."""
    try:
        return (root.path / LATEST).read_bytes().decode(errors="replace").replace("\0", "").strip()
    except FileNotFoundError:
        return None


def _obstacle(engine: Any) -> str:
    """Why this engine's saves cannot be concurrent, "" when they can."""
    writer = type(getattr(engine, "checkpoint_engine", None)).__name__
    if writer != "TorchCheckpointEngine":
        return f"checkpoints are written by {writer}"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    if engine.use_node_local_storage() and local < dist.get_world_size():
        return "checkpoints are written to disks of the nodes (use_node_local_storage)"
    return ""


def _ranks() -> Ranks:
    size, rank = dist.get_world_size(), dist.get_rank()
    local_size = min(size, max(int(os.environ.get("LOCAL_WORLD_SIZE", size)), 1))
    return Ranks(rank, size, int(os.environ.get("LOCAL_RANK", rank % local_size)), local_size)


def _root(directory: str | os.PathLike[str]) -> Root:
    path = Path(os.path.abspath(directory))
    return Root(path, path / LOOP_HOME)


def _bound(
    original: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments by name, with their defaults."""
    bound = inspect.signature(original).bind(engine, *args, **kwargs)
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[1:])
