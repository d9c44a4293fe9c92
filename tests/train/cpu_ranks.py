"""Scripts that are started as they are, on CPU ranks.

Their training arguments are for GPUs, or say ``use_cpu``, which switches DeepSpeed off; and sharding on CPU ranks takes the patches of
:mod:`sharding`. All of it is put in place here, once transformers is there and before the script runs.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def install() -> None:
    """In this process: TrainingArguments work on CPU ranks."""
    from transformers.training_args import TrainingArguments

    _around(TrainingArguments, "__post_init__", _arguments)


def _around(owner: Any, name: str, around: Any) -> None:
    original = getattr(owner, name)
    if getattr(original, "on_cpu_ranks", False):
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        around(original, self, *args, **kwargs)

    method.on_cpu_ranks = True  # type: ignore[attr-defined]
    setattr(owner, name, method)


def _arguments(original: Any, args: Any) -> None:
    import sharding

    args.use_cpu = not args.deepspeed
    if args.deepspeed:
        configuration = json.loads(Path(args.deepspeed).read_text())
        sharding.prepare({"deepspeed": configuration, "bf16": args.bf16})
    original(args)
    # As the patches ask for it; `accelerate launch` tells it to the environment alone.
    fsdp = args.fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true"
    sharding.settle(SimpleNamespace(fsdp=fsdp, use_cpu=args.use_cpu))
