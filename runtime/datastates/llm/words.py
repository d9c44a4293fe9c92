"""What rank 0 tells the others about a save or a load of a training loop, outside of any collective.

Some scripts save on the main process alone, so nobody may wait for a rank that never comes. The words go through the store by which the
ranks have found each other: to say one waits for nobody, and who has to hear one looks again and again, within a time limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from datastates.llm.ranks import Ranks
from datastates.store.commit import polls

LONGEST_POLL_SECONDS = 0.05
HEARING_SECONDS = 10.0

_calls: Counter[tuple[str, str]] = Counter()


class NobodyAnsweredError(RuntimeError):
    """A rank has waited in vain for what rank 0 has to say."""


class Topic:
    """One call that several ranks make: the ``n``-th of its kind about one path, as every rank counts for itself."""

    def __init__(self, ranks: Ranks, kind: str, path: str) -> None:
        self._ranks = ranks
        self._store = None if ranks.size == 1 else _store()
        self._about = f"{kind} {path}"
        _calls[kind, path] += 1
        digest = hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:16]
        self._key = f"ckpt-run/{kind}/{digest}/{_calls[kind, path]}"

    @property
    def reaches_all(self) -> bool:
        """Whether the ranks have a way to hear each other."""
        return self._ranks.size == 1 or self._store is not None

    def agree(self, decide: Callable[[], dict[str, Any]], timeout: float) -> dict[str, Any]:
        """What rank 0's ``decide`` answers, on every rank; it must not raise. An ``error`` in it ends the program: the others hear it first.

        Raises:
            NobodyAnsweredError: rank 0 has not come here within ``timeout`` seconds, or is gone.
        """
        if self._ranks.rank == 0:
            word = decide()
            if self._store is not None:
                self._store.set(self._key, json.dumps(word))
                self._wait_until_heard(word)
            return word
        try:
            for _ in polls(timeout, longest=LONGEST_POLL_SECONDS):
                if self._store.check([self._key]):
                    answer: dict[str, Any] = json.loads(self._store.get(self._key))
                    self._store.add(f"{self._key}/heard", 1)
                    return answer
        except dist.DistError as error:
            raise NobodyAnsweredError(f"rank 0 is gone: {error}") from error
        raise NobodyAnsweredError(f"rank 0 has not come to {self._about} within {timeout:g} s")

    def _wait_until_heard(self, word: dict[str, Any]) -> None:
        """The store may live in rank 0's process, and end with it."""
        if "error" in word:
            for _ in polls(HEARING_SECONDS, longest=LONGEST_POLL_SECONDS):
                if self._store.add(f"{self._key}/heard", 0) >= self._ranks.size - 1:
                    return

    def come(self) -> None:
        """Let rank 0 know that this rank takes part."""
        if self._store is not None:
            self._store.set(f"{self._key}/{self._ranks.rank}", "here")

    def came(self, rank: int) -> bool:
        """Whether ``rank`` takes part, as far as is known now. Rank 0 does; where nobody can be asked any more, all do."""
        try:
            return rank == 0 or bool(self._store.check([f"{self._key}/{rank}"]))
        except dist.DistError:
            return True


def _store() -> Any:
    """The store of the default process group; None where there is none (MPI)."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    store: Any = None
    with contextlib.suppress(ValueError, KeyError, AttributeError):
        store = dist.distributed_c10d._get_default_store()
    return store
