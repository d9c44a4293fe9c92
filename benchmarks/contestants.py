"""Ways to save a state while something trains. Each is used as its own documentation says, and waits as long as that asks it to.

Whoever measures calls, for each save: :meth:`Contestant.save`; :meth:`Contestant.fence` just before the state is changed; and
:meth:`Contestant.wait`, which returns when the contestant itself calls the checkpoint done. What that means differs, so ``durable`` tells
whether the data have been through fsync by then.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.states import State


class Contestant:
    """A way to save ``state``, which stays the same object, below ``folder``.

    Args:
        cache: bytes of host memory that it may stage in, where it can be told.
    """

    name: ClassVar[str]
    durable: ClassVar[bool]
    needs: ClassVar[str] = "torch"
    """The package that it takes."""

    def __init__(self, folder: Path, state: State, cache: int) -> None:
        self.folder = folder
        self.state = state
        self.cache = cache

    @classmethod
    def missing(cls) -> str:
        """Why it cannot run here."""
        return "" if importlib.util.find_spec(cls.needs) else f"{cls.needs} is not installed"

    def save(self, step: int) -> None:
        raise NotImplementedError

    def fence(self) -> None:
        """Until the state may be changed."""

    def wait(self) -> None:
        """Until the save is done."""

    def load(self, step: int) -> State:
        """What the file of a step holds."""
        loaded: State = torch.load(self._file(step), weights_only=True)
        return loaded

    def remove(self, step: int) -> None:
        path = self._file(step)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    def close(self) -> None:
        """End what it has started."""

    def _file(self, step: int) -> Path:
        return self.folder / f"{step}"


class TorchSave(Contestant):
    """What the stock Trainer does."""

    name = "torch.save"
    durable = False

    def save(self, step: int) -> None:
        torch.save(self.state, self._file(step))


class TorchSaveSynced(TorchSave):
    """What the stock Trainer would have to do for files that survive a power cut."""

    name = "torch.save and fsync"
    durable = True

    def save(self, step: int) -> None:
        super().save(step)
        with open(self._file(step), "rb") as stream:
            os.fsync(stream.fileno())


class Safetensors(Contestant):
    name = "safetensors"
    durable = False
    needs = "safetensors"

    def save(self, step: int) -> None:
        from safetensors.torch import save_file

        save_file(self.state, self._file(step))

    def load(self, step: int) -> State:
        from safetensors.torch import load_file

        return load_file(self._file(step))


class Dcp(Contestant):
    """torch.distributed.checkpoint, in one process."""

    name = "DCP save"
    durable = True

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state, checkpoint_id=str(self._file(step)), no_dist=True)

    def load(self, step: int) -> State:
        import torch.distributed.checkpoint as dcp

        loaded = {name: torch.empty_like(tensor) for name, tensor in self.state.items()}
        dcp.load(loaded, checkpoint_id=str(self._file(step)), no_dist=True)
        return loaded


class DcpAsync(Dcp):
    """``async_save`` on a thread, with one stager whose memory is used again."""

    name = "DCP async_save, thread"
    _process = False

    def __init__(self, folder: Path, state: State, cache: int) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(folder, state, cache)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self._process,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        self._done: Any = None

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.wait()  # as DCP asks for
        self._done = dcp.async_save(
            self.state, checkpoint_id=str(self._file(step)), async_stager=self._stager, **self._how()
        )

    def _how(self) -> dict[str, Any]:
        return {"no_dist": True}

    def wait(self) -> None:
        if self._done is not None:
            getattr(self._done, "upload_completion", self._done).result()
            self._done = None

    def close(self) -> None:
        self._stager.close()


class DcpProcess(DcpAsync):
    """``async_save`` in a process of its own. It needs a process group."""

    name = "DCP async_save, process"
    _process = True

    def __init__(self, folder: Path, state: State, cache: int) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), RANK="0", WORLD_SIZE="1")
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        super().__init__(folder, state, cache)

    def _how(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        return {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}

    def close(self) -> None:
        import torch.distributed as dist

        super().close()
        dist.destroy_process_group()


class Torchsnapshot(Contestant):
    name = "torchsnapshot async_take"
    durable = False
    needs = "torchsnapshot"

    def save(self, step: int) -> None:
        from torchsnapshot import Snapshot, StateDict

        self._pending = Snapshot.async_take(str(self._file(step)), {"state": StateDict(**self.state)})

    def wait(self) -> None:
        self._pending.wait()

    def load(self, step: int) -> State:
        from torchsnapshot import Snapshot, StateDict

        loaded = StateDict(**{name: torch.empty_like(tensor) for name, tensor in self.state.items()})
        Snapshot(str(self._file(step))).restore({"state": loaded})
        return dict(loaded)


class CkptRun(Contestant):
    """The code that every save of a Trainer goes through, with ``torch.save`` as the writer and all of the state holding still until the fence."""

    name = "ckpt-run"
    durable = True
    needs = "datastates"

    def __init__(self, folder: Path, state: State, cache: int) -> None:
        from datastates import settings as table
        from datastates.engine import Engine
        from datastates.formats import intercept
        from datastates.llm.committer import Committer, Identity
        from datastates.llm.ranks import Ranks
        from datastates.llm.saver import Saver
        from datastates.llm.still import StillTensor
        from datastates.store.journal import Journal
        from datastates.store.layout import Root

        super().__init__(folder, state, cache)
        self._root = Root.of(folder)
        self._root.path.mkdir(parents=True)
        self._engine = Engine(cache)
        settings, place = table.load({}, {}), Ranks(0, 1, 0, 1)
        journal = Journal(self._root, 0, "benchmark", "benchmark")
        identity = Identity("benchmark", "benchmark", 0)
        committer = Committer(settings, place, identity, self._root, journal, lambda save: None)

        def still(torn: set[str]) -> dict[int, StillTensor]:
            if torn:
                raise AssertionError(f"{torn} changed before the fence")
            found = (StillTensor.of(name, tensor) for name, tensor in self.state.items())
            return {entry.address: entry for entry in found}

        intercept.install()
        self._saver = Saver(self._engine, committer, settings, journal, self._root.path, 0, still)

    def save(self, step: int) -> None:
        directory = self._root.checkpoint(step)
        directory.path.mkdir()
        if not self._saver.save(directory, lambda: torch.save(self.state, self._file(step))):
            raise AssertionError("the save was refused")

    def fence(self) -> None:
        from datastates.llm.fence import FENCE

        FENCE.wait()

    def wait(self) -> None:
        self._saver.wait(None)
        if self._saver.newest_is_missing:
            raise AssertionError("the checkpoint was not committed")

    def remove(self, step: int) -> None:
        shutil.rmtree(self._root.checkpoint(step).path)

    def close(self) -> None:
        self._engine.close(60)

    def _file(self, step: int) -> Path:
        return self._root.checkpoint(step).path / "state.pt"


ALL: dict[str, type[Contestant]] = {
    one.name: one
    for one in (
        CkptRun,
        TorchSave,
        TorchSaveSynced,
        Safetensors,
        Dcp,
        DcpAsync,
        DcpProcess,
        Torchsnapshot,
    )
}
