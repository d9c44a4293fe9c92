"""Small trainings for the tests: real Trainers on random tokens or vectors, seconds each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sharding
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Tokens(torch.utils.data.Dataset):
    """``length`` sequences of random tokens, the same for the same seed."""

    def __init__(self, length: int = 64, width: int = 16, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(0, 128, (length, width), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def llama(seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """A Llama of about 60,000 parameters with dropout, so that RNG state matters."""
    set_seed(seed)
    defaults = dict(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(LlamaConfig(**{**defaults, **config}))


def arguments(output_dir: Path, **changes: Any) -> TrainingArguments:
    defaults = dict(
        output_dir=str(output_dir),
        max_steps=8,
        save_steps=2,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    if transformers.__version__ < "5":
        defaults["logging_dir"] = "logs"  # or training_args.bin holds the second at which it was made
    return TrainingArguments(**{**defaults, **changes})


def trainer(
    output_dir: Path,
    model: torch.nn.Module | None = None,
    cls: type[Trainer] = Trainer,
    data: Any = None,
    callbacks: list[Any] | None = None,
    processing_class: Any = None,
    optimizers: Any = (None, None),
    **changes: Any,
) -> Trainer:
    """A Trainer on the tiny Llama (or ``model``); ``changes`` go to TrainingArguments."""
    data = data or Tokens()
    args = arguments(output_dir, **changes)
    sharding.settle(args)
    return cls(
        model=model if model is not None else llama(),
        args=args,
        train_dataset=data,
        eval_dataset=data,
        callbacks=callbacks,
        processing_class=processing_class,
        optimizers=optimizers,
    )


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of everything in the model's state dict."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
