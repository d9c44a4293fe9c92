"""The commit protocol: how files of many ranks become one checkpoint, or nothing.

What is assumed of the machine: a rename is atomic; what was fsynced before a rename is on disk when the new name is; processes and machines
may die at any point; disks may fill up, and mounts may die. Nothing is assumed of clocks, and no collective is used: ranks speak through
files in ``checkpoint-N/.ckpt/``. At the start of ``train()`` all ranks have agreed on the *attempt*, a random id; the *save* is the running
number of a save within it. Both are in every document, so an answer from another time is never mistaken for one.

1. Every rank makes ``.ckpt/`` (:meth:`CheckpointDir.prepare`, which waits for no disk) and writes its files under temporary names in it. *On disk: a directory
   without a manifest. It is not a checkpoint; no reader takes it for one.*
2. A rank's files are durable: they are renamed to their final names, and the directories fsynced. *Still no manifest.*
3. The rank votes (:func:`cast_vote`): ``rank-R.json`` names its files, sizes and checksums, or carries an error. A vote appears whole, but
   nothing makes it durable: it is for the living, and after a power cut nobody asks for it.
4. The committer waits for every vote (:func:`collect_votes`). An error vote, a missing vote after the time limit, or two votes that
   disagree about a file end the save: :class:`CommitAbandoned`.
5. The committer publishes (:func:`publish`): it looks at every file the votes name, and looks again for a while if the file system does
   not show one yet; makes the files durable that stock code wrote by
   itself, and adds them with their checksums; fsyncs the directories, those above the output directory too, the first time; and only then
   gives the manifest its name.
   **That rename is the commit.** Killed before it, there is no checkpoint; killed after it, there is a whole one.
6. Or it gives up (:func:`abandon`): ``abandoned.json`` says why, so that every wait ends (:func:`wait_outcome`). A committer that died says
   nothing; then waits end by their own time limit.
7. The next ``train()`` moves what was never committed to ``.aside`` (:func:`sweep`) before any rank writes. Only such leftovers are ever
   deleted here, all but the newest. A committed checkpoint that stands in the way is moved (:func:`set_aside`), never deleted or changed.

What it costs, for N ranks and F files: a rank writes one vote and then asks by name for the outcome, in pauses that grow with N, so that
all ranks together ask no more than a hundred times a second. The committer lists one directory at each look and reads each vote once; then
it looks once at each of the F files and lists each directory once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from datastates.store.checksums import Crc32, crc32_of_range
from datastates.store.durable import (
    fsync_ancestors,
    fsync_directory,
    fsync_file,
    make_directories,
    remove_temporaries,
    write_durably,
    write_whole,
)
from datastates.store.layout import PRIVATE, CheckpointDir, Root, directories, rank_of
from datastates.store.manifest import (
    Abandonment,
    FileEntry,
    Manifest,
    ManifestError,
    Vote,
    parse_vote,
    read_abandonment,
    read_manifest,
    read_vote,
)
from datastates.store.verify import scan, verify_shapes

LAST_POLL_SECONDS = 0.2
SECONDS_PER_WAITER = 0.01
"""The longest pause of each of N processes that wait for the same word is at least N times this: a shared file system serves them all."""
MAX_REASON = 4000
REMOVED = ".removed"
"""Ends the name of a directory in ``.aside`` that is being deleted on purpose."""

GONE = "its directory was removed while it was saved"

_STABLE_TRIES = 3


class CommitAbandoned(Exception):  # noqa: N818 - an outcome of the protocol, not a fault
    """A save that will not be committed; ``reason`` says why in words for the log."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class VotesCancelled(CommitAbandoned):
    """Nobody waits any longer for the votes of the ranks that are ``missing``."""

    def __init__(self, missing: list[int]) -> None:
        super().__init__(f"cancelled: no vote from {named(missing)}")
        self.missing = missing


def never() -> bool:
    return False


def cast_vote(checkpoint: CheckpointDir, vote: Vote) -> None:
    """Publish one rank's vote. Call it when the rank's files are durable under their final names.

    Raises:
        ManifestError: no reader would accept the vote (a file outside the checkpoint, for example).
        OSError: it could not be written, or the directory is gone, and the files that the vote names with it.
    """
    data = vote.encode()
    parse_vote(data, checkpoint.vote(vote.rank))
    try:
        write_whole(checkpoint.vote(vote.rank), data)
    except FileNotFoundError:
        if vote.files:
            raise FileNotFoundError(errno.ENOENT, GONE, str(checkpoint.path)) from None
        checkpoint.prepare()
        write_whole(checkpoint.vote(vote.rank), data)


def failed_vote(vote: Vote, error: str) -> Vote:
    """The vote of the same rank that its files will never be durable."""
    return replace(vote, files=(), error=error[:MAX_REASON], created=time.time())


def collect_votes(
    checkpoint: CheckpointDir,
    attempt: str,
    save: int,
    ranks: Collection[int],
    timeout: float,
    cancelled: Callable[[], bool] = never,
) -> list[Vote]:
    """Wait until every one of ``ranks`` has voted for this save; their votes in order of rank. To be called by one that has voted itself.

    Votes of other attempts and of earlier saves are passed over.

    Raises:
        CommitAbandoned: a rank voted with an error or has gone on to a later save, the directory is gone, or ``timeout`` seconds are over.
        VotesCancelled: ``cancelled`` said so.
    """
    votes: dict[int, Vote] = {}
    trouble: dict[int, str] = {}
    for _ in polls(timeout, cancelled):
        pending = set(ranks) - votes.keys()
        for rank, found in _read_votes(checkpoint, pending):
            if isinstance(found, str):
                trouble[rank] = found
            elif found.attempt == attempt and found.save >= save:
                votes[rank] = _accept(found, checkpoint, save)
        if votes.keys() >= set(ranks):
            return [votes[rank] for rank in sorted(votes)]
    missing = sorted(set(ranks) - votes.keys())
    if cancelled():
        raise VotesCancelled(missing)
    raise CommitAbandoned(_nobody_voted(missing, trouble, timeout))


def publish(
    checkpoint: CheckpointDir,
    votes: Sequence[Vote],
    *,
    rank: int = 0,
    crc32: Crc32 = zlib.crc32,
    cancelled: Callable[[], bool] = never,
    patience: float = 0.0,
    others: Iterable[str] | None = None,
) -> Manifest:
    """Commit the checkpoint that ``votes`` describe; ``rank`` is the committer's.

    Every file in the directory that no vote names is made durable, checksummed and added. Publishing the same save again changes nothing.
    A staged checkpoint takes the place of the one whose manifest is there.

    Args:
        others: the files to add, where the directory is not ours alone: whatever else appears in it is the user's.
        patience: seconds that a file which was voted for may take to be seen here; a network file system may be late.

    Raises:
        CommitAbandoned: the votes contradict each other or the disk, the directory holds another commit or no file, or ``cancelled`` said so.
        OSError: a file could not be read or made durable, or the manifest not be written.
    """
    first = _agreed(votes)
    published = _published(checkpoint, first)
    if published:
        return published
    entries = merge(votes)
    _check_presence(checkpoint, entries.values(), patience, cancelled)
    for path in scan(checkpoint.files) if others is None else others:
        if cancelled():
            raise CommitAbandoned("cancelled")
        if path not in entries:
            entries |= _take_in(checkpoint, path, crc32)
    # Some scripts save elsewhere by themselves. A checkpoint of nothing would be resumed from, and older ones would go for it.
    if not entries:
        raise CommitAbandoned("no file was saved")
    manifest = Manifest(
        attempt=first.attempt,
        save=first.save,
        step=first.step,
        rank=rank,
        world_size=first.world_size,
        lineage=first.lineage,
        ordinal=first.ordinal,
        node=first.node,
        nodes=first.nodes,
        voters=len(votes) if first.nodes > 1 else 0,
        files=tuple(entries[path] for path in sorted(entries)),
    )
    _fsync_directories(checkpoint, entries)
    if cancelled():
        raise CommitAbandoned("cancelled")
    write_durably(checkpoint.manifest, manifest.encode())
    return manifest


def abandon(checkpoint: CheckpointDir, attempt: str, save: int, reason: str) -> bool:
    """Tell every rank that this save will not be committed, durably. False, and nothing said, when it already was committed.

    Raises:
        OSError: it could not be written; waits then end by their time limit.
    """
    manifest = _manifest_or_none(checkpoint)
    if manifest and (manifest.attempt, manifest.save) == (attempt, save):
        return False
    checkpoint.prepare()
    write_durably(
        checkpoint.abandoned, Abandonment(attempt=attempt, save=save, reason=reason[:MAX_REASON]).encode()
    )
    return True


def wait_outcome(
    checkpoint: CheckpointDir,
    attempt: str,
    save: int,
    timeout: float,
    cancelled: Callable[[], bool] = never,
    waiting: int = 1,
) -> str:
    """Wait for a save's end: ``"committed"``, ``"abandoned: <reason>"``, ``"gone"``, ``"timeout"`` or ``"cancelled"``. Never raises.

    Gone is the directory, in which this rank has voted.

    Args:
        waiting: how many processes wait for this word; the more, the longer the pauses.
    """
    for _ in polls(timeout, cancelled, max(LAST_POLL_SECONDS, waiting * SECONDS_PER_WAITER)):
        there = look_again(checkpoint.private)
        outcome = _outcome(checkpoint, attempt, save)
        if outcome or not there:
            return outcome or "gone"
    return "cancelled" if cancelled() else "timeout"


def sweep(root: Root, attempt: str, spare: Path | None = None) -> list[Path]:
    """Clear the root for a new attempt, before any rank writes: what was never committed goes to ``.aside/<step>-<attempt>``.

    Of everything there that never was committed and is ours (has a ``.ckpt``), the one written to last is kept and the rest deleted. A
    checkpoint whose manifest is damaged was committed once: it stays. So does ``spare``: a path that a person named to resume from.

    Returns:
        Where the directories are that were moved.

    Raises:
        OSError: the file system refuses; what could not be moved is where it was.
    """
    moved = []
    for step in root.steps():
        checkpoint = root.checkpoint(step)
        if not _was_committed(checkpoint) and checkpoint.path != spare:
            target = _move_aside(checkpoint, attempt)
            moved += [target] if target else []
    _delete_leftovers(root)
    remove_temporaries(root.run_record)
    remove_temporaries(root.heartbeat)
    return moved


def set_aside(checkpoint: CheckpointDir, attempt: str, root: Root | None = None) -> Path | None:
    """Move a checkpoint out of the way, whole, to ``.aside/<step>-<attempt>`` of its root; it is never deleted automatically.

    No rank may be writing to it: the committer calls this before any rank passes the save's first meeting point. None when there is none.
    """
    return _move_aside(checkpoint, attempt, root=root)


def delete(checkpoint: CheckpointDir) -> None:
    """Delete a checkpoint, whole or not, so that no moment shows half of it: it leaves its place by a rename first.

    Killed in the middle, the next :func:`sweep` deletes the rest. A symbolic link is removed, not what it leads to.
    """
    target = _move_aside(checkpoint, "gone", REMOVED)
    if target:
        _delete_tree(target)


def look_again(directory: Path) -> bool:
    """Let a network file system ask its server what is in a directory: it remembers for up to a minute which names were not there.

    Returns:
        False when there is no such directory.
    """
    try:
        os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return True


def polls(
    timeout: float, cancelled: Callable[[], bool] = never, longest: float = LAST_POLL_SECONDS
) -> Iterator[None]:
    """Yield at once, then after pauses that double six times until they are ``longest`` seconds, and a last time when ``timeout`` seconds
    are over or ``cancelled``."""
    deadline = time.monotonic() + timeout
    pause = longest / 64
    while True:
        over = time.monotonic() >= deadline or cancelled()
        yield
        if over:
            return
        time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        pause = min(pause * 2, longest)


def merge(votes: Iterable[Vote]) -> dict[str, FileEntry]:
    """Every file the votes name, by path. Two ranks may name one file if they agree about it.

    Raises:
        CommitAbandoned: they do not.
    """
    entries: dict[str, FileEntry] = {}
    owners: dict[str, int] = {}
    for vote in votes:
        for entry in vote.files:
            if entries.setdefault(entry.path, entry) != entry:
                raise CommitAbandoned(
                    f"ranks {owners[entry.path]} and {vote.rank} wrote different files to {entry.path}"
                )
            owners.setdefault(entry.path, vote.rank)
    return entries


def _read_votes(checkpoint: CheckpointDir, pending: Collection[int]) -> Iterator[tuple[int, Vote | str]]:
    """The votes of ``pending`` ranks that are there, or what is wrong with them; one listing finds all (and refreshes a network file
    system's idea of the directory)."""
    try:
        present = {rank_of(path.name) for path in checkpoint.private.iterdir()}
    except FileNotFoundError:
        raise CommitAbandoned(GONE) from None
    except OSError as error:
        for rank in pending:
            yield rank, f"{checkpoint.private} cannot be read: {error.strerror}"
        return
    for rank in sorted(pending):
        if rank not in present:
            continue
        try:
            vote = read_vote(checkpoint.vote(rank))
            yield rank, vote if vote.rank == rank else f"its vote is signed by rank {vote.rank}"
        except FileNotFoundError:
            continue
        except ManifestError as error:
            yield rank, str(error)


def _accept(vote: Vote, checkpoint: CheckpointDir, save: int) -> Vote:
    if vote.save > save:
        raise CommitAbandoned(f"rank {vote.rank} has gone on to save {vote.save}")
    if vote.error is not None:
        raise CommitAbandoned(f"rank {vote.rank}: {vote.error}")
    if vote.step != checkpoint.step:
        raise CommitAbandoned(f"rank {vote.rank} voted for step {vote.step} in {checkpoint.path.name}")
    return vote


def _nobody_voted(missing: list[int], trouble: dict[int, str], timeout: float) -> str:
    known = next((f" ({trouble[rank]})" for rank in missing if rank in trouble), "")
    return f"no vote from {named(missing)} within {timeout:g} s{known}"


def named(missing: list[int]) -> str:
    """``rank 3``, or ``ranks 3, 7``; of many, the first eight."""
    shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return f"{'rank' if len(missing) == 1 else 'ranks'} {shown}"


def _agreed(votes: Sequence[Vote]) -> Vote:
    """The first vote, once all agree with it about what is being saved."""
    if not votes:
        raise CommitAbandoned("nobody voted")
    facts = {
        (
            vote.attempt,
            vote.save,
            vote.step,
            vote.world_size,
            vote.lineage,
            vote.ordinal,
            vote.node,
            vote.nodes,
        )
        for vote in votes
    }
    if len(facts) > 1:
        raise CommitAbandoned("the ranks do not agree on what is being saved")
    for vote in votes:
        if vote.error is not None:
            raise CommitAbandoned(f"rank {vote.rank}: {vote.error}")
    return votes[0]


def _published(checkpoint: CheckpointDir, vote: Vote) -> Manifest | None:
    """The manifest, if this very save was already published."""
    try:
        manifest = read_manifest(checkpoint.manifest)
    except FileNotFoundError:
        return None
    except ManifestError as error:
        if checkpoint.staged:
            return None
        raise CommitAbandoned(f"there is another commit already: {error}") from None
    if (manifest.attempt, manifest.save) != (vote.attempt, vote.save):
        if checkpoint.staged:
            return None
        raise CommitAbandoned(
            f"{checkpoint.path.name} is already committed, by save {manifest.save} of attempt {manifest.attempt}"
        )
    return manifest


def _check_presence(
    checkpoint: CheckpointDir, entries: Iterable[FileEntry], patience: float, cancelled: Callable[[], bool]
) -> None:
    bad = list(entries)
    problems: list[str] = []
    for _ in polls(patience, cancelled, max(LAST_POLL_SECONDS, len(bad) * SECONDS_PER_WAITER)):
        verdicts = verify_shapes(checkpoint.files, bad)
        bad = [entry for entry, verdict in zip(bad, verdicts, strict=True) if not verdict.ok]
        if not bad:
            return
        problems = [f"{verdict.path} {verdict.reason}" for verdict in verdicts if not verdict.ok]
        if not checkpoint.private.is_dir():
            raise CommitAbandoned(GONE)
    raise CommitAbandoned("cancelled" if cancelled() else problems[0])


def _take_in(checkpoint: CheckpointDir, name: str, crc32: Crc32) -> dict[str, FileEntry]:
    """Make a file durable that somebody else wrote, and checksum it; it must hold still meanwhile. Nothing when it is gone again."""
    path = checkpoint.files / name
    for _ in range(_STABLE_TRIES):
        try:
            before = path.lstat()
            fsync_file(path)
            value = crc32_of_range(path, 0, before.st_size, crc32)
            after = path.lstat()
        except FileNotFoundError:
            return {}
        except EOFError:
            continue
        if (before.st_ino, before.st_size, before.st_mtime_ns) == (
            after.st_ino,
            after.st_size,
            after.st_mtime_ns,
        ):
            return {name: FileEntry(name, before.st_size, value)}
    raise CommitAbandoned(f"{name} is still being written")


def _fsync_directories(checkpoint: CheckpointDir, paths: Iterable[str]) -> None:
    """Every directory that holds a file, and those above: a name is durable when its directory is."""
    inside = {
        parent
        for path in paths
        for parent in (checkpoint.files / path).parents
        if parent.is_relative_to(checkpoint.path)
    }
    output_dir = checkpoint.path.parent.parent
    for directory in sorted({*inside, checkpoint.path, checkpoint.path.parent}, reverse=True):
        fsync_directory(directory)
    with contextlib.suppress(PermissionError):  # what we may not read has been there before us
        fsync_directory(output_dir)
    _fsync_above(output_dir)


@functools.cache
def _fsync_above(output_dir: Path) -> None:
    """Trainer makes the output directory and does not fsync. Once in a process: nobody makes them again."""
    fsync_ancestors(output_dir)


def _outcome(checkpoint: CheckpointDir, attempt: str, save: int) -> str | None:
    manifest = _manifest_or_none(checkpoint)
    if manifest and manifest.attempt == attempt:
        if manifest.save == save:
            return "committed"
        if manifest.save > save:
            return f"abandoned: replaced by save {manifest.save}"
    try:
        abandonment = read_abandonment(checkpoint.abandoned)
    except (FileNotFoundError, ManifestError):
        return None
    if (abandonment.attempt, abandonment.save) == (attempt, save):
        return f"abandoned: {abandonment.reason}"
    return None


def _manifest_or_none(checkpoint: CheckpointDir) -> Manifest | None:
    try:
        return read_manifest(checkpoint.manifest)
    except (FileNotFoundError, ManifestError):
        return None


def _was_committed(checkpoint: CheckpointDir) -> bool:
    """Whether a manifest was ever published here, readable or not. In doubt (the directory cannot be read) it was."""
    try:
        checkpoint.manifest.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _move_aside(
    checkpoint: CheckpointDir, attempt: str, ending: str = "", root: Root | None = None
) -> Path | None:
    root = root or checkpoint.root
    if not os.path.lexists(checkpoint.path):
        return None
    make_directories(root.aside)
    for number in range(1, 10_000):
        again = f"-{number}" if number > 1 else ""
        target = root.aside / f"{checkpoint.step}-{attempt}{again}{ending}"
        if os.path.lexists(target):
            continue
        try:
            os.rename(checkpoint.path, target)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                continue
            raise
        fsync_directory(root.path)
        return target
    raise FileExistsError(f"{root.aside} is full of {checkpoint.step}-{attempt}")


def _delete_leftovers(root: Root) -> None:
    found = [Path(entry.path) for entry in directories(root.aside)]
    doomed = [path for path in found if path.name.endswith(REMOVED)]
    leftovers = [path for path in found if path not in doomed and _is_leftover(path)]
    leftovers.sort(key=_last_written)
    for path in doomed + leftovers[:-1]:
        _delete_tree(path)


def _is_leftover(path: Path) -> bool:
    """Ours and never committed. What has no ``.ckpt`` may be a person's, put there by hand."""
    private = path / PRIVATE
    return private.is_dir() and not path.is_symlink() and not _was_committed(CheckpointDir(path, 0))


def _last_written(path: Path) -> int:
    def changed(directory: Path) -> int:
        try:
            return directory.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    return max(changed(path), changed(path / PRIVATE))


def _delete_tree(path: Path) -> None:
    if path.is_symlink():
        path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        if os.path.lexists(path):  # another process deletes it too; whoever is last finishes
            shutil.rmtree(path, ignore_errors=True)
