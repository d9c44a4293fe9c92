"""The process tree below us, read from /proc, and which of its members a signal is for."""

from __future__ import annotations

import contextlib
import os

RANK_NAMES = (b"RANK", b"LOCAL_RANK", b"WORLD_SIZE", b"MASTER_PORT")


class Process:
    """One line of the process table: its parent and process group; ``gone`` when it only waits to be reaped."""

    __slots__ = ("gone", "group", "parent", "pid")

    def __init__(self, pid: int, parent: int, group: int, gone: bool) -> None:
        self.pid = pid
        self.parent = parent
        self.group = group
        self.gone = gone


def table() -> dict[int, Process]:
    """Every process that we may see."""
    found = {}
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    for pid in pids:
        process = read_process(pid)
        if process is not None:
            found[pid] = process
    return found


def read_process(pid: int) -> Process | None:
    """None when there is no such process (any more)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # pid (name) state parent group ...; the name may hold spaces and parentheses
            state, parent, group = file.read().rpartition(b")")[2].split()[:3]
    except (OSError, ValueError):
        return None
    return Process(pid, int(parent), int(group), state in (b"Z", b"X"))


def descendants(root: int, without: frozenset[int] = frozenset()) -> list[Process]:
    """The living processes below ``root``, parents before children, leaving out ``without`` and what is below them."""
    children: dict[int, list[Process]] = {}
    for process in table().values():
        children.setdefault(process.parent, []).append(process)
    found = [process for process in children.get(root, []) if process.pid not in without]
    for process in found:
        found.extend(children.get(process.pid, []))
    return [process for process in found if not process.gone]


def is_ancestor(pid: int) -> bool:
    """Whether ``pid`` is a process that we were started from."""
    process = read_process(os.getppid())
    while process is not None and process.pid != pid:
        process = read_process(process.parent) if process.parent else None
    return process is not None


def environment(pid: int) -> dict[bytes, bytes]:
    """What the process was started with; empty when it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return {}
    return dict(entry.partition(b"=")[::2] for entry in entries if b"=" in entry)


def command_line(pid: int) -> list[str]:
    """Its arguments; empty when they cannot be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    except OSError:
        return []


def registered(folder: str | None) -> dict[int, str]:
    """The processes in which the hook has decorated a Trainer, and each one's output directory ('' if not known)."""
    found: dict[int, str] = {}
    if folder is None:
        return found
    try:
        with os.scandir(folder) as entries:
            paths = {int(entry.name): entry.path for entry in entries if entry.name.isdecimal()}
    except OSError:
        return found
    from datastates.store.regular import open_descriptor

    for pid, path in paths.items():
        with (
            contextlib.suppress(OSError),  # no file of the hook's
            open(path, encoding="utf-8", errors="surrogateescape", opener=open_descriptor) as file,
        ):
            found[pid] = file.read()
    return found


def trainers(root: int, folder: str | None, without: frozenset[int] = frozenset()) -> list[int]:
    """The processes below ``root`` that train: a signal for the training is for exactly these, each once.

    They are the ones in which a Trainer was decorated, and the topmost ones that a launcher gave a RANK. Not the
    launchers, which would stop on their own or hand a signal on a second time; not the data loader's workers, which
    inherit RANK: when they die the trainer dies of an error before it can save.
    """
    below = descendants(root, without)
    known = registered(folder).keys() & {process.pid for process in below}
    own_rank = _rank(dict(os.environb))
    parents = {process.pid: process.parent for process in below}
    candidates = [
        process.pid for process in below if process.pid in known or _has_rank(process.pid, own_rank)
    ]
    above_known = {ancestor for pid in known for ancestor in ancestors(pid, parents)}
    chosen: list[int] = []
    for pid in candidates:
        is_launcher = pid not in known and pid in above_known
        is_worker = any(ancestor in chosen for ancestor in ancestors(pid, parents))
        if not is_launcher and not is_worker:
            chosen.append(pid)
    return chosen


def ancestors(pid: int, parents: dict[int, int]) -> list[int]:
    """The processes above ``pid`` that are in ``parents``, nearest first."""
    found = []
    while (pid := parents.get(pid, 0)) in parents:
        found.append(pid)
    return found


def _has_rank(pid: int, own_rank: tuple[bytes | None, ...]) -> bool:
    """Whether a launcher below us gave it its rank: some platforms set RANK for the whole job, us included."""
    rank = _rank(environment(pid))
    return rank[0] is not None and rank != own_rank


def _rank(variables: dict[bytes, bytes]) -> tuple[bytes | None, ...]:
    return tuple(variables.get(name) for name in RANK_NAMES)
