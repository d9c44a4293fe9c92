"""What lives inside the training process: checkpoints that are saved while the next forward and backward run.

    from datastates.llm import DecoratedCheckpointing

    engine = DecoratedCheckpointing(runtime_config={"host_cache_size": 50, "trainer": trainer}, rank=-1)

Under ``ckpt-run``, or with its hook in PYTHONPATH, every Trainer is decorated without this line.
"""

from __future__ import annotations

import sys

from datastates.llm.decorator import DecoratedCheckpointing, attach, prepare

__all__ = ["DecoratedCheckpointing", "attach", "prepare"]

if "transformers.trainer_utils" in sys.modules:
    prepare()
