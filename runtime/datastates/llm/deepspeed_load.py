"""What is looked at before DeepSpeed loads a checkpoint: whether its files fit the ranks that run now, and who reads them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datastates.llm import decorator, log

logger = log.logger("datastates.llm.decorator")

_PARTITION = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_?optim_states\.pt$")
_told: set[str] = set()


def check_world_size(engine: Any, load_dir: Any, tag: Any) -> None:
    """Raise before DeepSpeed does, and on every rank, when the partitions in ``load_dir`` were written by another number of ranks.

    Raises:
        deepspeed.runtime.zero.utils.ZeRORuntimeException: as DeepSpeed itself would, but with both numbers and the way out.
    """
    if not engine.zero_optimization() or engine.load_universal_checkpoint():
        return
    directory = Path(load_dir)
    tag = tag if tag is not None else _latest(directory)
    if tag is None:
        return
    saved, runs = partitions(directory / str(tag)), int(engine.seq_dp_world_size)
    if saved in (0, runs):
        return
    error = sys.modules["deepspeed.runtime.zero.utils"].ZeRORuntimeException
    raise error(
        f"{directory} was saved by {_ranks(saved)}, and {_ranks(runs)} would load it: DeepSpeed's ZeRO files fit only as many ranks as "
        f"have written them. Train with {_ranks(saved)}, or convert it: ckpt-run convert {directory}"
    )


def partitions(directory: Path) -> int:
    """How many data-parallel ranks have written the ZeRO files in ``directory``; 0 when there are none."""
    found = (_PARTITION.search(path.name) for path in _files(directory))
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _files(directory: Path) -> Iterable[Path]:
    return directory.iterdir() if directory.is_dir() else ()


def _latest(directory: Path) -> str | None:
    try:
        return (directory / "latest").read_text().strip()
    except OSError:
        return None  # DeepSpeed says best what is missing


def _ranks(number: int) -> str:
    return f"{number} rank" if number == 1 else f"{number} ranks"


def use_plain_files(engine: Any) -> None:
    """Let a decorated Trainer's engine write and read with ``torch.save``, whatever writer its configuration names.

    Those writers hand files over to processes and formats of their own, at times of their own: there is no telling when a checkpoint is whole.
    """
    writer = engine.checkpoint_engine
    if type(writer).__name__ == "TorchCheckpointEngine" or not _belongs_to_a_trainer(engine):
        return
    plain = sys.modules["deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine"].TorchCheckpointEngine
    writer.cleanup()
    engine.checkpoint_engine = plain(engine._config)
    name = type(writer).__name__
    if engine.global_rank == 0 and name not in _told:
        _told.add(name)
        logger.warning(
            "%s DeepSpeed's %s is left out, since nobody can tell when its checkpoints are whole: they are written concurrently, as torch.save "
            "writes them (take it out of the DeepSpeed configuration; without ckpt-run it is back)",
            log.PREFIX,
            name,
        )


def _belongs_to_a_trainer(engine: Any) -> bool:
    return any(
        engine is getattr(trainer, name, None)
        for trainer in decorator.trainers()
        for name in ("model_wrapped", "deepspeed")
    )
