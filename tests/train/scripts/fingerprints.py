"""Prints the facts of one model, as the fingerprint has them, in everything that a model gets wrapped into; a JSON object by wrapper.

Arguments: an output directory, a free port.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", DS_ACCELERATOR="cpu")

import deepspeed
import tiny
import torch
from datastates.llm import fingerprint
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel


def adapted(model: torch.nn.Module) -> torch.nn.Module:
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


def partitioned() -> torch.nn.Module:
    with deepspeed.zero.Init():
        model = tiny.llama()
    assert {tuple(parameter.shape) for parameter in model.parameters()} == {(0,)}
    return model


def sharded() -> torch.nn.Module:
    model = tiny.llama()
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def compiled_layers() -> torch.nn.Module:
    model = tiny.llama()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer)
    return model


WRAPPED: dict[str, Callable[[], torch.nn.Module]] = {
    "nothing": tiny.llama,
    "torch.compile": lambda: torch.compile(tiny.llama()),
    "torch.compile of layers": compiled_layers,
    "DataParallel": lambda: DataParallel(tiny.llama()),
    "DistributedDataParallel": lambda: DistributedDataParallel(torch.compile(tiny.llama())),
    "ZeRO-3": partitioned,
    "fully_shard": sharded,
    "PEFT": lambda: adapted(tiny.llama()),
    "PEFT, compiled": lambda: torch.compile(adapted(tiny.llama())),
    "PEFT of a compiled one": lambda: adapted(torch.compile(tiny.llama())),
    "FSDP": lambda: FullyShardedDataParallel(
        tiny.llama(), use_orig_params=True, device_id=torch.device("cpu")
    ),
    "FSDP, flat": lambda: FullyShardedDataParallel(tiny.llama(), device_id=torch.device("cpu")),
    "frozen": lambda: tiny.llama().requires_grad_(False),
    "half": lambda: tiny.llama().bfloat16(),
    "lazy": lambda: torch.nn.Sequential(torch.nn.LazyLinear(3)),
}


def main(output_dir: Path, port: str) -> None:
    os.environ["MASTER_PORT"] = port
    trainer = tiny.trainer(output_dir)  # accelerate lets the one rank meet itself
    deepspeed.init_distributed("gloo")
    facts = {}
    for name, build in WRAPPED.items():
        trainer.model = build()
        found = fingerprint.of(trainer)
        assert found is not None
        facts[name] = found.model
    print(json.dumps(facts))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
