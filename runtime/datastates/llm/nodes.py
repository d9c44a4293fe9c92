"""``save_on_each_node``: every node saves on a disk of its own, and its first rank commits there.

No node sees the others' files, so what a training resumes from is agreed at its start: the newest checkpoint that every node has, of the
same save. Each committing rank offers what it would resume from; as long as the offers differ, all look for an older one. From then on
the nodes are as one: they share the attempt and the lineage, and each keeps its own record.

Which ranks share a node, the launcher says. Whether they share a disk is looked at (:func:`unseen`): a directory that all nodes see although
they should not, or that one rank does not see although it should, is refused before anything is saved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datastates.engine import crc32
from datastates.llm import log, plan, ranks, resume
from datastates.llm.plan import Plan
from datastates.llm.ranks import Ranks
from datastates.settings import Settings
from datastates.store import commit
from datastates.store.catalog import Catalog, Checkpoint, damage
from datastates.store.layout import Root
from datastates.store.lineage import OURS, ResumePoint
from datastates.store.manifest import ManifestError
from datastates.store.runrecord import RunRecord

logger = log.logger("datastates.llm.decorator")

VISIBLE_SECONDS = 10.0
"""How long a file that rank 0 has written may take to be seen by another rank of the same directory."""

_NODE_VARIABLES = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")


@dataclass(frozen=True)
class Offer:
    """What a node would resume from; ``mark`` tells apart two saves of one step. Without a step: nothing, or why it cannot tell."""

    step: int | None
    mark: str = ""
    trouble: str = ""


def of(trainer: Any) -> Ranks:
    """This process's place, with the ranks of its node where every node saves for itself. A collective then; main thread only."""
    place = Ranks.of(trainer)
    if place.alone or not getattr(trainer.args, "save_on_each_node", False):
        return place
    return _grouped(place, ranks.gather(place, (_node(), place.local_rank)))


def _node() -> str:
    number = next((os.environ[name] for name in _NODE_VARIABLES if os.environ.get(name)), "")
    return f"{os.uname().nodename}/{number}"


def _grouped(place: Ranks, everybody: Sequence[tuple[str, int]]) -> Ranks:
    """Only a rank that is the first of its node writes the model: a node without one, or with two, cannot be told from these words."""
    names = list(dict.fromkeys(name for name, _ in everybody))
    groups = [
        sorted((local, rank) for rank, (name, local) in enumerate(everybody) if name == node)
        for node in names
    ]
    if any([local for local, _ in group].count(0) != 1 for group in groups):
        groups = _by_order(everybody)
    mine = next(number for number, group in enumerate(groups) if place.rank in [rank for _, rank in group])
    if len(groups) == 1:
        return place
    return replace(place, together=tuple(rank for _, rank in groups[mine]), node=mine, nodes=len(groups))


def _by_order(everybody: Sequence[tuple[str, int]]) -> list[list[tuple[int, int]]]:
    """Launchers number ranks node by node: each first local rank begins another one."""
    groups: list[list[tuple[int, int]]] = []
    for rank, (_, local) in enumerate(everybody):
        if local == 0 or not groups:
            groups.append([])
        groups[-1].append((local, rank))
    return [sorted(group) for group in groups]


def decide(
    place: Ranks, args: Any, settings: Settings, request: resume.Request, root: str, ordinal: int
) -> Plan | resume.NothingToResumeError:
    """As :func:`datastates.llm.plan.decide`, for all nodes together and called by every rank. Main thread only."""
    names = [name for name in ranks.gather(place, plan.name() if place.leads else None) if name]
    node = _Node(root, ordinal, request, settings, len(place.voters)) if place.leads else None
    obstacle = _agree(place, node)
    if isinstance(obstacle, resume.NothingToResumeError):
        return obstacle
    if obstacle:
        return plan.in_trouble(root, ordinal, RuntimeError(obstacle), request.path)
    first = node.set_out(args, names, None) if node is not None and place.rank == 0 else None
    first = ranks.tell(place, first, args.device)
    mine = first if place.rank == 0 else node.set_out(args, names, first) if node is not None else None
    answer: Plan = ranks.gather(place, mine)[place.committer]
    return replace(answer, root=root)


def _agree(place: Ranks, node: _Node | None) -> resume.NothingToResumeError | str:
    """Until all nodes offer the same. Returns why nothing can be saved, or the error that ends the training; "" when all is well."""
    offer = node.offer(None) if node else None
    offers: dict[int, Offer] = {}
    while True:
        offers = {rank: found for rank, found in enumerate(ranks.gather(place, offer)) if found is not None}
        trouble = next((f"rank {rank}: {each.trouble}" for rank, each in offers.items() if each.trouble), "")
        if trouble or len(set(offers.values())) == 1:
            break
        steps = {each.step for each in offers.values()}
        below = -1 if None in steps else min(step for step in steps if step is not None) - (len(steps) == 1)
        _tell_difference(place, offers)
        offer = node.offer(below) if node else None
    refused = [error for error in ranks.gather(place, node.refused if node else None) if error is not None]
    if refused and not trouble and all(each.step is None for each in offers.values()):
        error: resume.NothingToResumeError = refused[0]
        return error
    return trouble


def _tell_difference(place: Ranks, offers: dict[int, Offer]) -> None:
    if place.rank == 0:
        had = ", ".join(
            f"rank {rank} {'nothing' if each.step is None else f'step {each.step}'}"
            for rank, each in offers.items()
        )
        logger.warning(
            "%s the nodes do not hold the same newest checkpoint (%s): looking for an older one",
            log.PREFIX,
            had,
        )


class _Node:
    """What the committing rank of one node knows."""

    def __init__(
        self, root: str, ordinal: int, request: resume.Request, settings: Settings, voters: int
    ) -> None:
        self._root = root
        self._place = Root.of(str(Path(root).parent))
        self._ordinal = ordinal
        self._request = request
        self._settings = settings
        self._voters = voters
        self._record: RunRecord | None = None
        self._choice: ResumePoint | None = None
        self.refused: resume.NothingToResumeError | None = None
        """Where the settings require a checkpoint: why there is none."""

    def offer(self, below: int | None) -> Offer:
        """The newest checkpoint of this node, none above ``below``."""
        try:
            if below is None:
                output_dir = str(self._place.path.parent)
                self._record = resume.run_record(output_dir)
                self._choice = resume.choose(
                    self._request, self._settings, output_dir, self._ordinal, self._record
                )
            elif self._choice is not None and self._choice.step > below:
                self._choice = self._older(self._choice, below)
                self._tell_choice()
        except resume.NothingToResumeError as error:
            self.refused = error
        except Exception as error:
            logger.debug("no offer", exc_info=True)
            return Offer(None, trouble=f"{type(error).__name__}: {error}")
        return self._offer(self._choice)

    def _offer(self, choice: ResumePoint | None) -> Offer:
        if choice is None:
            return Offer(None)
        if self._request.path is not None:
            return Offer(0, "as the script says")
        manifest = Checkpoint.load(choice.path).manifest
        return Offer(choice.step, f"{manifest.attempt}/{manifest.save}" if manifest else choice.kind)

    def _older(self, choice: ResumePoint, below: int) -> ResumePoint | None:
        for found in self._newest_first(choice.lineage):
            if found.step <= below and damage(found, crc32=crc32) is None:
                return ResumePoint(found.path, found.step, OURS, choice.lineage)
        return None

    def _tell_choice(self) -> None:
        if self._choice is not None:
            logger.info("%s resuming at step %d from %s", log.PREFIX, self._choice.step, self._choice.path)
            return
        nothing = f"the nodes have no checkpoint in common under {self._place.path.parent}"
        if self._settings.resume == "required":
            self.refused = resume.NothingToResumeError(f"--resume required, and {nothing}")
        logger.error("%s No Checkpoint found with step: -1: %s", log.PREFIX, nothing, extra=log.TWO_FORMS)

    def _newest_first(self, lineage: str | None) -> list[Checkpoint]:
        return [
            found
            for found in Catalog(self._place).checkpoints()
            if found.committed and found.manifest and found.manifest.lineage == lineage
        ]

    def set_out(self, args: Any, names: Sequence[str], like: Plan | None) -> Plan:
        """This node's plan, which follows that of rank 0; without ``like`` it is rank 0's."""
        siblings = [name for name in names if name != plan.name()]
        made = plan.set_out(
            args,
            self._settings,
            self._root,
            self._ordinal,
            self._choice,
            self._record,
            self._request.fingerprint,
            like,
            siblings,
            self._voters,
        )
        if made.trouble:
            return made
        try:
            self._set_newer_aside(made)
        except OSError as error:
            return replace(made, trouble=str(error))
        return made

    def _set_newer_aside(self, made: Plan) -> None:
        """What this node has of the lineage beyond the step that all agreed on is no checkpoint of them all, and would count as the newest."""
        for found in self._newest_first(made.lineage) if made.resume_step else []:
            if found.step > made.resume_step:
                moved = commit.set_aside(found.directory, made.attempt)
                logger.info("%s %s is not on every node, and is now %s", log.PREFIX, found.path.name, moved)


def unseen(place: Ranks, made: Plan, root: Root) -> str:
    """Whether this rank sees the disk that its committing rank writes to; "" when it does, else what is wrong.

    To be called when that rank has written run.json. A network file system may take a moment to show it.
    """
    if place.size == 1 or (place.leads and place.nodes == 1):
        return ""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while True:
        found = _keeper(root)
        if found == (made.attempt, *made.keeper):
            return ""
        if place.nodes > 1 and found is not None and found[0] == made.attempt:
            return f"{root.path} is one directory for all nodes: leave out save_on_each_node"
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    advice = "" if place.nodes > 1 else "; where each node has a disk of its own, save_on_each_node is needed"
    return f"{root.path} is not the directory that rank {place.committer} saves into{advice}"


def _keeper(root: Root) -> tuple[str, str, int, float] | None:
    try:
        os.listdir(root.run_dir)  # a network file system looks again, and does not answer from memory
        record = RunRecord.read(root)
    except (OSError, ManifestError):
        return None
    return (record.attempt, record.host, record.pid, record.started) if record else None
