"""How a save grows with bytes, tensors, ranks and how often there is one: a model, and what it foretells. docs/scale.md tells its assumptions.

``python -m benchmarks.scale`` foretells :data:`SCENARIOS`; the case ``scale`` of ``python -m benchmarks`` holds the model against real saves.

Time goes in pieces in which nothing changes its rate. All ranks do the same at the same time, and share what they share evenly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

GB = 10**9
_TICK = 1e-9
"""Seconds; rounding must not hold time still."""


@dataclass(frozen=True)
class Machine:
    """What ranks stand on. Rates are in bytes a second.

    Args:
        copy: of one rank's memory into its host cache.
        disk: of what one node writes to.
        shared: of what all nodes together write to; infinite with disks of their own.
        save: seconds that a save call takes with no tensor in it.
        tensor: seconds that each tensor adds.
        commit: seconds from the last byte to the commit with one rank.
        vote: seconds that each rank adds.
        calls: that the file server answers in a second; infinite with disks of their own.
    """

    copy: float
    disk: float
    shared: float = math.inf
    save: float = 0.01
    tensor: float = 40e-6
    commit: float = 0.05
    vote: float = 0.003
    calls: float = math.inf


@dataclass(frozen=True)
class Job:
    """One training. ``nbytes`` and ``tensors`` are one rank's; ``quiet`` are the seconds of a step before the optimizer; ``every``: steps.

    ``eager``: bytes that are copied in the call. ``cache``: bytes of one rank's host cache.
    """

    nbytes: float
    tensors: int
    step: float
    quiet: float
    every: int
    cache: float
    ranks: int = 1
    per_node: int = 8
    eager: float = 0.0


@dataclass
class Simulation:
    """One rank of a job. Bytes are copied and written in the order in which they were saved, so two counts tell where each save is."""

    machine: Machine
    job: Job
    now: float = 0.0
    stalled: float = 0.0
    saved: float = 0.0
    copied: float = 0.0
    written: float = 0.0
    most_cached: float = 0.0
    began: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)

    @property
    def writes(self) -> float:
        """Bytes that this rank writes in a second, when there are any."""
        neighbours = min(self.job.per_node, self.job.ranks)
        return min(self.machine.disk / neighbours, self.machine.shared / self.job.ranks)

    @property
    def commit(self) -> float:
        """Seconds from a rank's last byte to the commit."""
        return self.machine.commit + self.machine.vote * self.job.ranks

    def run(self, steps: int) -> None:
        """Train, and wait for what is in flight at the end."""
        for step in range(1, steps + 1):
            self._pass(self.job.quiet)
            self.fence()
            self._pass(self.job.step - self.job.quiet)
            if step % self.job.every == 0:
                self.save()
        self.finish()

    def finish(self) -> None:
        """Until all is durable."""
        while self.written < self.saved:
            self._pass(self._piece())

    def fence(self) -> None:
        """Until all is copied."""
        self._wait_until_copied(self.saved)

    def save(self) -> None:
        """The call: it waits until all of the save before is copied, and copies what is eager itself."""
        began = self.now
        self.fence()
        self._stall(self.machine.save + self.machine.tensor * self.job.tensors)
        self.began.append(began)
        self.saved += self.job.nbytes
        self._wait_until_copied(self.saved - self.job.nbytes + self.job.eager)

    def _wait_until_copied(self, nbytes: float) -> None:
        while self.copied < nbytes:
            self._stall(self._piece(nbytes))

    def _stall(self, seconds: float) -> None:
        self._pass(seconds)
        self.stalled += seconds

    def _rates(self) -> tuple[float, float]:
        """Of copying and writing. A cache that is full is filled as fast as it is emptied, and an empty one emptied as fast as it is filled."""
        copying = self.machine.copy if self.copied < self.saved else 0.0
        if self.copied - self.written >= self.job.cache:
            copying = min(copying, self.writes)
        writing = self.writes if self.written < self.copied else min(self.writes, copying)
        return copying, writing

    def _piece(self, copied: float = math.inf) -> float:
        """Seconds for which the rates stay what they are; at most until ``copied`` bytes are."""
        copying, writing = self._rates()
        filling = copying - writing
        ends = [
            (min(copied, self.saved) - self.copied, copying),
            (self.job.cache - (self.copied - self.written), filling),
            (self.copied - self.written, -filling),
            (self._next_durable() - self.written, writing),
        ]
        return max(min(left / rate for left, rate in ends if left > 0 and rate > 0), _TICK)

    def _next_durable(self) -> float:
        return self.job.nbytes * (len(self.durable) + 1)

    def _pass(self, seconds: float) -> None:
        while seconds > 0:
            piece = min(seconds, self._piece()) if self.written < self.saved else seconds
            copying, writing = self._rates()
            self.copied = min(self.copied + copying * piece, self.saved)
            self.written = min(self.written + writing * piece, self.copied)
            self.now += piece
            seconds -= piece
            self.most_cached = max(self.most_cached, self.copied - self.written)
            if self.written > self._next_durable() - 1:
                self.written = max(self.written, self._next_durable())
                self.durable.append(self.now + self.commit - self.began[len(self.durable)])


@dataclass(frozen=True)
class Told:
    """Of one save, in the long run: seconds, bytes, calls to the file server; ``used``: of each resource, the part that saving takes."""

    stall: float
    durable: float
    interval: float
    host_memory: float
    calls: float
    used: dict[str, float]

    @property
    def first(self) -> str:
        """The resource that ends it first when everything grows."""
        return max(self.used, key=lambda name: self.used[name])


def foretell(machine: Machine, job: Job, saves: int = 100) -> Told:
    """Simulate ``saves`` saves, and take the later half, when it has settled."""
    simulation = Simulation(machine, job)
    simulation.run(saves * job.every)
    warm = Simulation(machine, job)
    warm.run(saves // 2 * job.every)
    interval = job.step * job.every
    stall = (simulation.stalled - warm.stalled) / (saves - saves // 2)
    calls = calls_of_a_save(job.ranks)
    return Told(
        stall=stall,
        durable=simulation.durable[-1],
        interval=interval,
        host_memory=min(job.per_node, job.ranks) * simulation.most_cached,
        calls=calls,
        used={
            "writing": job.nbytes / simulation.writes / interval,
            "the host cache": max(job.nbytes - simulation.writes * job.quiet, 0) / job.cache,
            "copying before the optimizer's step": job.nbytes / machine.copy / job.quiet
            if job.quiet
            else math.inf,
            "the training thread": (machine.save + machine.tensor * job.tensors) / interval,
            "the file server's calls": calls / machine.calls / interval,
        },
    )


def calls_of_a_save(ranks: int) -> float:
    """To the file server, as docs/design.md counts them: 14 and eight looks for each rank, what the committer asks about all of them."""
    return ranks * (14 + 8 * 4) + 2 * ranks + 60


# -- what it foretells ------------------------------------------------------------------------------------------------------

BYTES_PER_PARAMETER = 14
"""bf16 weights, and in fp32 the weights and AdamW's two moments."""
FLOPS = 400e12
"""Of one GPU in training, in a second; six for each parameter and token."""
COPY = 20 * GB
"""From a GPU into pinned memory, in a second."""
NVME = 3 * GB
"""Written by a node to its own disks, in a second."""


def of_a_language_model(
    billions: float, ranks: int, tokens: float, every: int, cache: float, tensors: int
) -> Job:
    """Sharded evenly over ``ranks`` GPUs, eight on a node; forward and backward take nine tenths of a step of ``tokens`` tokens."""
    parameters = billions * 1e9
    step = 6 * parameters * tokens / (ranks * FLOPS)
    nbytes = BYTES_PER_PARAMETER * parameters / ranks
    return Job(nbytes, tensors, step, 0.9 * step, every, cache, ranks)


_ON_8 = of_a_language_model(8, 8, 0.5e6, every=50, cache=16 * GB, tensors=1200)
_ON_256 = of_a_language_model(70, 256, 4e6, every=50, cache=16 * GB, tensors=2900)
_OWN_DISKS = Machine(copy=COPY, disk=NVME)
_FILE_SERVER = replace(_OWN_DISKS, shared=GB, calls=5000)
_PARALLEL = replace(_OWN_DISKS, shared=20 * GB, calls=20_000)

SCENARIOS: dict[str, tuple[Machine, Job]] = {
    "8 B on 8 GPUs, own disks": (_OWN_DISKS, _ON_8),
    "8 B on 8 GPUs, own disks, 4 GB of cache": (_OWN_DISKS, replace(_ON_8, cache=4 * GB)),
    "8 B on 8 GPUs, file server": (_FILE_SERVER, _ON_8),
    "70 B on 64 GPUs, own disks": (_OWN_DISKS, of_a_language_model(70, 64, 1e6, 50, 16 * GB, 2900)),
    "70 B on 256 GPUs, own disks": (_OWN_DISKS, _ON_256),
    "70 B on 256 GPUs, own disks, every step": (_OWN_DISKS, replace(_ON_256, every=1)),
    "70 B on 256 GPUs, parallel file system": (_PARALLEL, _ON_256),
    "70 B on 256 GPUs, parallel file system, every step": (_PARALLEL, replace(_ON_256, every=1)),
    "70 B on 256 GPUs, file server": (_FILE_SERVER, _ON_256),
}
"""16 GB of host cache a rank, a file server of 1 GB/s and a parallel file system of 20 GB/s, unless it says otherwise."""


def main() -> None:
    """Print :data:`SCENARIOS` as a table in Markdown."""
    print(
        "| training | saved every | stall | part of training | durable after | host memory of a node | used most |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for name, (machine, job) in SCENARIOS.items():
        told = foretell(machine, job)
        cells = [
            name,
            f"{told.interval:.0f} s",
            f"{told.stall:.2f} s",
            f"{told.stall / (told.interval + told.stall):.2%}",
            f"{told.durable:.1f} s",
            f"{told.host_memory / GB:.0f} GB",
            f"{told.first}, {told.used[told.first]:.0%}",
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
