"""Models that a job can name, besides the tiny Llama."""

from __future__ import annotations

import itertools
from typing import Any

import tiny
import torch
from transformers import set_seed


def build(kind: str, **config: Any) -> torch.nn.Module:
    """``kind``: a function of this module."""
    model: torch.nn.Module = globals()[kind](**config)
    return model


def llama(**config: Any) -> torch.nn.Module:
    return tiny.llama(**config)


def lora(**config: Any) -> torch.nn.Module:
    """Most parameters are frozen, and left out of DeepSpeed's files by Trainer."""
    from peft import LoraConfig, get_peft_model

    set_seed(0)
    targets = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(tiny.llama(**config), LoraConfig(r=16, lora_dropout=0.1, target_modules=targets))


def experts(number: int = 2, width: int = 64) -> torch.nn.Module:
    """A layer of experts, spread over the ranks by DeepSpeed; only with its own optimizer does it put them in a group of their own."""
    import deepspeed
    from deepspeed.moe.layer import MoE

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(128, width)
            self.layer = MoE(
                hidden_size=width,
                expert=torch.nn.Sequential(
                    torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
                ),
                num_experts=number,
                ep_size=number,
                k=1,
                use_rts=False,
            )
            self.head = torch.nn.Linear(width, 128)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden, balance, _ = self.layer(self.embed(input_ids))
            logits = self.head(hidden)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return {"loss": loss + 0.01 * balance}

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo")
    set_seed(0)
    return Experts()


def restless(through: str, **config: Any) -> torch.nn.Module:
    """Changes a weight in each forward pass: one number ``in place``, which only a version counter sees, or all through ``data``, which none does."""
    model = tiny.llama(**config)
    weight = model.lm_head.weight

    def change(*_: Any) -> None:
        with torch.no_grad():
            (weight[5, 5] if through == "in place" else weight.data).mul_(1.01)

    model.register_forward_pre_hook(change)
    return model


def overwriting(**config: Any) -> torch.nn.Module:
    """Sets a master weight and a piece of optimizer state before each forward pass, by DeepSpeed's own functions for it."""
    from deepspeed import utils

    model = tiny.llama(**config)
    weight = model.lm_head.weight

    passes = itertools.count()

    def change(*_: Any) -> None:
        if next(passes):  # there is no optimizer state before the first step
            utils.safe_set_full_fp32_param(weight, utils.safe_get_full_fp32_param(weight) * 1.01)
            momentum = utils.safe_get_full_optimizer_state(weight, "exp_avg")
            utils.safe_set_full_optimizer_state(weight, momentum * 0.9, "exp_avg")

    model.register_forward_pre_hook(change)
    return model
