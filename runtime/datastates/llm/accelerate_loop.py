"""``accelerator.save_state`` and ``accelerator.load_state``, called by a training loop.

The directory that the script names, or that accelerate makes up (``checkpoints/checkpoint_N``), is the checkpoint.

Where nothing is sharded some scripts save on the main process alone, which stock code allows. So ``save_state`` has no meeting of ours, and
rank 0 finds out whose files belong to the checkpoint: each rank that calls makes itself known. The first time that one does not come rank 0
waits a little with the commit; then it knows that this line of the script runs on fewer ranks.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from datastates.engine import crc32
from datastates.llm import fsdp, log, loop
from datastates.llm.ranks import Ranks
from datastates.llm.replaced import counted_calls
from datastates.llm.words import Topic
from datastates.store import staged
from datastates.store.catalog import NOT_COMMITTED, Checkpoint, damage
from datastates.store.commit import polls
from datastates.store.layout import LOOP_HOME, PRIVATE, CheckpointDir, Root

logger = log.logger("datastates.llm.decorator")

GRACE_SECONDS = 30.0
"""How long a rank may come later to a save than rank 0, before it counts as one that does not take part."""

_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
_SHARED_NAMES = re.compile(r"dl_state_dict(_\d+)?\.bin|scaler\.pt")
"""Files that every rank writes to one path: stock code keeps the last one's, we rank 0's."""
_NUMBER = re.compile(r"[0-9]+")
_OUR_FILES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_absent: dict[str, frozenset[int]] = {}
"""By line of a script, the ranks that did not come to its last save."""


def save_state(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Instead of ``accelerator.save_state``; the answer is the directory, as always."""
    settings = loop.settings_for(accelerator)
    given = _bound(original, accelerator, args, kwargs)
    place = _place_of(accelerator, given.get("output_dir"))
    obstacle = _obstacle(accelerator) if settings else ""
    if settings is None or place is None or obstacle:
        if obstacle:
            loop.tell_once(_ranks(accelerator), f"{obstacle}: accelerate saves by itself")
        return original(accelerator, *args, **kwargs)
    ranks, config = _ranks(accelerator), accelerator.project_configuration
    misled = ranks.size != accelerator.num_processes
    if misled:
        loop.tell_once(
            ranks,
            f"{ranks.size} ranks are running, but the accelerator of each believes to be alone: they would write the same files. Only "
            "rank 0 saves, and each rank its part of what DeepSpeed has spread over them",
        )
    automatic, limit, iteration = config.automatic_checkpoint_naming, config.total_limit, config.iteration
    sharded = _is_sharded(accelerator)
    call = loop.Call(
        _root_of(accelerator, place),
        place,
        _step(accelerator),
        settings,
        ranks,
        accelerator._models,
        exclusive=automatic,
        made_by_stock=automatic,
        shared_by_all=_is_of_one_rank if misled else lambda name: not sharded and _is_shared(name),
        voters=None if sharded or ranks.size == 1 else _participants(ranks, _line_of_script()),
        after_commit=lambda: _rotate(place, limit) if automatic and limit else None,
    )
    saved = loop.save(call, lambda directory: _write(original, accelerator, given, directory))
    if saved is None:
        return original(accelerator, *args, **kwargs)
    config.iteration = iteration + 1
    return place if automatic else Path(given["output_dir"])


def _write(
    original: Callable[..., Any], accelerator: Any, given: dict[str, Any], directory: CheckpointDir
) -> None:
    config = accelerator.project_configuration
    limit, config.total_limit = config.total_limit, None  # old ones go when this one is committed
    where = {"output_dir": str(directory.files)} if directory.staged else {}
    try:
        with _meeting_kept(accelerator, config.automatic_checkpoint_naming, directory):
            original(accelerator, **{**given, **where})
    finally:
        config.total_limit = limit


@contextmanager
def _meeting_kept(accelerator: Any, automatic: bool, directory: CheckpointDir) -> Iterator[None]:
    """With automatic naming the ranks meet before they write; a rank that fails before attends it all the same.

    Until then stock code refuses a directory that is there. Right after it the directory shows that it is ours and not committed: killed among
    the files, it would pass for a checkpoint of stock code's.
    """

    def prepare() -> None:
        if automatic:
            with suppress(OSError):  # stock code fails at the same, in the next moment
                directory.prepare()

    with counted_calls(accelerator, "wait_for_everyone", prepare) as met:
        try:
            yield
        except Exception:
            if automatic and not met:
                accelerator.wait_for_everyone()
            raise


def _participants(ranks: Ranks, line: str) -> Callable[[Topic], Collection[int]]:
    """Who saves at this line of the script; asked on rank 0 and off the main thread."""

    def ask(topic: Topic) -> list[int]:
        absent = _absent.get(line, frozenset())
        expected = [rank for rank in range(ranks.size) if rank not in absent]
        for _ in polls(GRACE_SECONDS):
            if all(map(topic.came, expected)):
                break
        came = [rank for rank in range(ranks.size) if topic.came(rank)]
        missing = frozenset(range(ranks.size)) - frozenset(came)
        if missing - absent:
            names = ", ".join(map(str, sorted(missing)))
            loop.tell_once(
                ranks, f"{line}: ranks {names} do not save here, the checkpoint is what the others have"
            )
        _absent[line] = missing
        return came

    return ask


def _line_of_script() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OUR_FILES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _rotate(newest: Path, limit: int) -> None:
    """accelerate's ``total_limit``, counted from the checkpoint that has just been committed. Rank 0, on the save's thread."""
    older = [path for path in _numbered(newest.parent) if _number(path) < _number(newest)]
    for path in older:
        if staged.uncommitted(path):
            staged.remove(path)
    whole = [path for path in older if path.exists()]
    for path in whole[: max(len(whole) - limit + 1, 0)]:
        staged.remove(path)


def load_state(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Instead of ``accelerator.load_state``.

    Raises:
        loop.NotCommittedError: the directory was never committed; or, with automatic naming, none that is there is whole.
        fsdp.WorldSizeError: its files hold the shards of another number of ranks.
    """
    settings = loop.settings_for(accelerator)
    given = _bound(original, accelerator, args, kwargs)
    if settings is None:
        return original(accelerator, *args, **kwargs)
    loop.wait_for_readers()
    named = given.get("input_dir")
    if named is not None:
        path: Path | None = Path(os.path.abspath(os.path.expanduser(named)))
        _require_committed(path, _ranks(accelerator))
    else:
        path = _newest(accelerator, settings.commit_timeout)
    if path is None:
        return original(accelerator, *args, **kwargs)
    if getattr(accelerator.distributed_type, "name", "") == "FSDP":
        fsdp.check_world_size(path, accelerator.num_processes)
    found = Checkpoint.load(path)
    if found.committed and found.manifest:
        loop.go_on_with(_root_of(accelerator, path), found.manifest.lineage)
    with loop.inside():
        answer = original(accelerator, **{**given, "input_dir": str(path) if named is None else named})
    _count_on_from(accelerator, path)
    return answer


def _count_on_from(accelerator: Any, loaded: Path) -> None:
    """accelerate counts saves from 0 in every process, and with automatic naming refuses a number that is there: the next save would fail."""
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming and loaded.parent == _folder_of(accelerator):
        numbers = _NUMBER.findall(loaded.name)
        config.iteration = max(config.iteration, int(numbers[0]) + 1 if numbers else 0)


def _folder_of(accelerator: Any) -> Path:
    """Where automatic naming puts the checkpoints."""
    return Path(os.path.abspath(accelerator.project_dir)) / "checkpoints"


def _require_committed(path: Path, ranks: Ranks) -> None:
    if ranks.rank == 0:
        staged.settle(path)
    for _ in polls(loop.VISIBLE_SECONDS):
        if not staged.waits(path):
            break
    if not staged.uncommitted(path):
        return
    others = [Checkpoint.load(folder.parent) for folder in path.parent.glob(f"*/{PRIVATE}")]
    known = [(found.manifest.created, found.path) for found in others if found.committed and found.manifest]
    advice = f"; the newest committed one is {max(known)[1]}" if known else ""
    raise loop.NotCommittedError(f"the checkpoint {path} was never committed{advice}")


def _newest(accelerator: Any, timeout: float) -> Path | None:
    """With automatic naming the newest checkpoint that is whole, the same on every rank; None where stock code has to say why not."""
    config = accelerator.project_configuration
    if not config.automatic_checkpoint_naming:
        return None
    folder = _folder_of(accelerator)
    topic = Topic(_ranks(accelerator), "load", str(folder))
    if not topic.reaches_all:
        return None
    word = topic.agree(lambda: _choose(folder), timeout)
    if "error" in word:
        raise loop.NotCommittedError(word["error"])
    return Path(word["path"]) if word["path"] else None


def _choose(folder: Path) -> dict[str, Any]:
    """Rank 0: what all ranks load. What stock code wrote has nothing to be compared with."""
    problems = []
    once_whole = False
    try:
        for path in reversed(_numbered(folder)):
            staged.settle(path)
            found = Checkpoint.load(path)
            stock = found.problem == NOT_COMMITTED and not staged.uncommitted(path)
            once_whole = once_whole or found.problem != NOT_COMMITTED
            problem = None if stock else damage(found, crc32=crc32)
            if problem is None:
                return {"path": str(path)}
            problems.append(f"{path} {problem}")
            logger.error("%s skipping %s: %s", log.PREFIX, path, problem)
    except OSError as error:
        return {"error": f"{folder} cannot be read: {error}"}
    if not problems:
        return {"path": ""}
    advice = "" if once_whole else f"; nothing in there ever was: remove {folder} to start from the beginning"
    return {"error": f"no checkpoint in {folder} is whole: {problems[0]}{advice}"}


def _numbered(folder: Path) -> list[Path]:
    """The checkpoints of accelerate's automatic naming, oldest first."""
    try:
        names = [name for name in os.listdir(folder) if _NUMBER.search(name)]
    except FileNotFoundError:
        return []
    return sorted((folder / name for name in names), key=_number)


def _number(path: Path) -> int:
    return int(_NUMBER.findall(path.name)[0])


# -- one accelerator --------------------------------------------------------------------------------------------------------


def _place_of(accelerator: Any, output_dir: Any) -> Path | None:
    """The directory that will be the checkpoint; None where stock code has to say what is wrong."""
    if accelerator.project_configuration.automatic_checkpoint_naming:
        if accelerator.project_dir is None:
            return None
        folder = Path(os.path.abspath(accelerator.project_dir)) / "checkpoints"
        return folder / f"checkpoint_{accelerator.save_iteration}"
    return None if output_dir is None else Path(os.path.abspath(output_dir))


def _root_of(accelerator: Any, place: Path) -> Root:
    """In a folder of accelerate's own every name has to be a checkpoint's: ours lies beside it."""
    parent = place.parent
    automatic = accelerator.project_configuration.automatic_checkpoint_naming
    return Root(parent, (parent.parent if automatic else parent) / LOOP_HOME)


def _step(accelerator: Any) -> int:
    engines = [model for model in accelerator._models if hasattr(model, "global_steps")]
    return int(engines[0].global_steps if engines else accelerator.project_configuration.iteration)


def _is_sharded(accelerator: Any) -> bool:
    kind = getattr(accelerator.distributed_type, "name", "")
    return kind in _SHARDED or getattr(accelerator, "parallelism_config", None) is not None


def _obstacle(accelerator: Any) -> str:
    """Why this accelerator's saves cannot be concurrent, "" when they can."""
    if getattr(accelerator.distributed_type, "name", "") == "XLA":
        return "XLA"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    if accelerator.project_configuration.save_on_each_node and local < accelerator.num_processes:
        return "checkpoints are written to disks of the nodes (save_on_each_node)"
    return ""


def _ranks(accelerator: Any) -> Ranks:
    """As the accelerator counts; or as DeepSpeed does, where accelerate has found no way to let CPU ranks speak."""
    size, rank = int(accelerator.num_processes), int(accelerator.process_index)
    local_rank = int(accelerator.local_process_index)
    sharded = getattr(accelerator.distributed_type, "name", "") == "DEEPSPEED"
    if size == 1 and sharded and dist.is_available() and dist.is_initialized():
        size, rank = dist.get_world_size(), dist.get_rank()
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = min(size, max(int(os.environ.get("LOCAL_WORLD_SIZE", size)), 1))
    return Ranks(rank, size, local_rank, local_size)


def _is_shared(name: str) -> bool:
    return _SHARED_NAMES.fullmatch(name) is not None


def _is_of_one_rank(name: str) -> bool:
    """Whether a file of that name is no part of what DeepSpeed spreads over the ranks."""
    return not name.endswith("_states.pt")


def _bound(
    original: Callable[..., Any], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments by name, with their defaults, those for whatever is below among them."""
    bound = inspect.signature(original).bind(owner, *args, **kwargs)
    bound.apply_defaults()
    named = dict(list(bound.arguments.items())[1:])
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(name)
    return named
