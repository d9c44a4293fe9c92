"""Sharded trainings on CPU ranks: what accelerate and Trainer refuse to set up there, and nothing else.

Neither sets up DeepSpeed or FSDP for several ranks without accelerators. The patches stand here, in the tests' own harness, each with its
reason; the product has none of them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import os
from typing import Any

import torch

ZERO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "bf16": {"enabled": "auto"},
}
"""A DeepSpeed configuration without its zero_optimization; torch's AdamW, since DeepSpeed's own would have to be compiled."""


def zero(stage: int, changes: dict[str, Any] | None = None, **zero_optimization: Any) -> dict[str, Any]:
    """Training arguments for ZeRO ``stage``; ``changes`` go to the configuration's top level."""
    configuration = {**ZERO, "zero_optimization": {"stage": stage, **zero_optimization}, **(changes or {})}
    return {"deepspeed": configuration, "use_cpu": False, "optim": "adamw_torch"}


def misled(stage: int) -> dict[str, Any]:
    """As :func:`zero`, but each rank's Trainer is left to believe that it is alone, as accelerate lets it on CPUs.

    A batch size of all ranks together could not be right then, neither for the Trainer nor for DeepSpeed.
    """
    arguments = zero(stage)
    del arguments["deepspeed"]["train_batch_size"]
    return arguments


def fsdp(version: int = 2, state_dict_type: str = "SHARDED_STATE_DICT", **changes: Any) -> dict[str, Any]:
    """Training arguments for FSDP; ``changes`` go to ``fsdp_config``."""
    configuration: dict[str, Any] = {
        "version": version,
        "fsdp_version": version,
        "state_dict_type": state_dict_type,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        **({"sync_module_states": False} if version == 1 else {}),
        **changes,
    }
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": configuration}


def has_files_of_each_rank() -> bool:
    """Whether accelerate can write FSDP's shards without torch.distributed.checkpoint, as files of each rank."""
    from accelerate.utils import save_fsdp_model

    return "use_dcp" in inspect.signature(save_fsdp_model).parameters


def write_files_of_each_rank() -> None:
    """``use_dcp=False`` for accelerate's functions, as a script says it: neither Trainer nor ``save_state`` hands it on, and no setting does.

    Trainer loads neither model nor optimizer where it does not find the names of other files: a script of that kind has to load by itself.
    """
    for module in map(importlib.import_module, ("accelerate.accelerator", "transformers.trainer")):
        for name in ("save_fsdp_model", "save_fsdp_optimizer", "load_fsdp_model", "load_fsdp_optimizer"):
            setattr(module, name, functools.partial(getattr(module, name), use_dcp=False))
    trainer: Any = importlib.import_module("transformers.trainer")

    def load_model(self: Any, path: str, model: Any = None) -> None:
        trainer.load_fsdp_model(self.accelerator.state.fsdp_plugin, self.accelerator, self.model, path)

    def load_optimizer(self: Any, path: str | None) -> None:
        if path is None:
            return
        plugin = self.accelerator.state.fsdp_plugin
        trainer.load_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.model, path)
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(path, "scheduler.pt"), weights_only=True))

    trainer.Trainer._load_from_checkpoint = load_model
    trainer.Trainer._load_optimizer_and_scheduler = load_optimizer


def prepare(arguments: dict[str, Any]) -> None:
    """Before TrainingArguments: ranks of a DeepSpeed training on CPUs find each other; FSDP's files are those that are asked for."""
    if not arguments.get("fsdp_config", {}).pop("use_dcp", True):
        write_files_of_each_rank()
    if "deepspeed" not in arguments:
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if "RANK" not in os.environ:
        # DeepSpeed asks MPI who it is unless a launcher has said so.
        alone = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
        os.environ.update(alone)
    os.environ.update(
        CROSS_RANK="0", CROSS_SIZE="1"
    )  # as its own launcher does; some writers of checkpoints ask
    if int(os.environ["WORLD_SIZE"]) > 1 and "train_batch_size" in arguments["deepspeed"]:
        # accelerate has no backend for CPU ranks unless cpu=True, which disables DeepSpeed; each rank would believe to be alone.
        PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_CPU)
    if arguments.get("bf16"):
        # Trainer has no bf16 on CPUs unless use_cpu=True, which disables DeepSpeed.
        import transformers.training_args

        transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    if arguments.get("fp16"):
        # DeepSpeed asks whether the processor is fast at it. torch can do it on any.
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        CPU_Accelerator.is_fp16_supported = lambda self: True
    import deepspeed.runtime.zero.stage_1_and_2 as zero_1_and_2

    # gloo writes into views of a tensor that autograd follows, which torch 2.13 refuses.
    zero_1_and_2.all_gather_dp_groups = torch.no_grad()(zero_1_and_2.all_gather_dp_groups)


def settle(args: Any) -> None:
    """Between TrainingArguments and Trainer: accelerate takes the gloo ranks for ones that it can shard over."""
    if not (args.fsdp and args.use_cpu):
        return
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if not torch.distributed.is_initialized():  # a single rank, which may shard over itself
        torch.distributed.init_process_group("gloo")
    PartialState._shared_state.update(distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu"))


def finish(trainer: Any) -> None:
    """After the Trainer was built: FSDP on CPU is what it shall believe in."""
    if trainer.args.fsdp and torch.distributed.get_backend() == "gloo":
        trainer.args.use_cpu = True


def parts(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of every parameter and buffer: all of it where nothing is sharded."""
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_tensor"):
            found[name] = parameter.ds_tensor
    return {
        name: (tensor.to_local() if hasattr(tensor, "to_local") else tensor).reshape(-1)
        for name, tensor in found.items()
    }


def digest(trainer: Any) -> str:
    """Of every bit of the whole model and its optimizer's state, wherever the parts lie: the same on any number of FSDP2's ranks."""
    state = dict(trainer.model.state_dict())
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    for parameter, kept in trainer.optimizer.state.items():
        state.update({f"{names.get(id(parameter))}.{key}": value for key, value in kept.items()})
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        whole = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu()
        digest.update(
            name.encode() + whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()
