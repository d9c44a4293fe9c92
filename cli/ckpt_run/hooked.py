"""Whether the hook got into the processes of a launch, as far as /proc of this host can tell."""

from __future__ import annotations

from pathlib import PurePath

from ckpt_run import environment, processes

SWITCHES = {"E": "-E", "I": "-I", "S": "-S"}
TAKES_VALUE = ("-c", "-m", "-W", "-X")

GENERAL = (
    "A Trainer that trained in this launch was not decorated, or there was none. The hook is not loaded by a Python",
    "that is started with -E, -I or -S or with an environment of its own (env -i), nor where another folder with a",
    "sitecustomize.py stands before it in PYTHONPATH. CKPT_RUN_DEBUG=1 ckpt-run ... tells where it is loaded; in such",
    "a Python the lines of DecoratedCheckpointing in the script itself do the same.",
)


def ranks(run_id: str) -> list[int]:
    """The running processes of a launch on this host that a launcher gave a RANK, not those that they started."""
    members = _members(run_id)
    with_rank = {pid for pid in members if b"RANK" in processes.environment(pid)}
    return [pid for pid in with_rank if members[pid].parent not in with_rank]


def runs_here(run_id: str) -> bool:
    """Whether any process of the launch lives on this host."""
    return bool(_members(run_id))


def why_none(run_id: str) -> list[str]:
    """Lines that explain why no rank is hooked: what is seen in running processes, or what it usually is."""
    seen = []
    for pid in _members(run_id):
        words = processes.command_line(pid)
        switches = switches_against_hook(words)
        if switches:
            seen.append(
                f"process {pid} runs {PurePath(words[0]).name} {' '.join(switches)}: no hook is loaded there"
            )
    return seen or list(GENERAL)


def switches_against_hook(words: list[str]) -> list[str]:
    """Of a Python's command line, the options with which it ignores PYTHONPATH or loads no sitecustomize."""
    if not words or not PurePath(words[0]).name.startswith("python"):
        return []
    found = []
    for word in words[1:]:
        if not word.startswith("-") or word.startswith("--") or word[:2] in TAKES_VALUE:
            break
        found += [switch for letter, switch in SWITCHES.items() if letter in word]
    return found


def _members(run_id: str) -> dict[int, processes.Process]:
    """The living processes that were started with the run's id."""
    if not run_id:
        return {}
    name, value = environment.RUN_ID.encode(), run_id.encode()
    return {
        pid: process
        for pid, process in processes.table().items()
        if not process.gone and processes.environment(pid).get(name) == value
    }
