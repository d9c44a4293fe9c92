"""A Trainer trains a model of 42 million parameters, and saves or does not."""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

WARM_UP = 4
STEPS = 28


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, 8192, (128,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


class Clock(TrainerCallback):
    """When each step ended. It has no event at the beginning of a step, which could stand behind the fence."""

    def __init__(self) -> None:
        self.ended: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended[state.global_step] = time.perf_counter()


def visit(contestant: str, folder: str, save_steps: int) -> dict[str, float]:
    """Seconds from the end of the warm-up's last step, at which it saves, to the end of the last step.

    ``stall`` is what a step with a save before it takes longer than the median of the others, in ``stock Trainer`` all of the save; it is left
    out where every step has one.
    """
    set_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=10,
        num_attention_heads=8,
        max_position_embeddings=128,
    )
    clock = Clock()
    with tempfile.TemporaryDirectory(dir=folder) as output_dir:
        args = TrainingArguments(
            output_dir=output_dir,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            save_strategy="no" if contestant == "without saves" else "steps",
            save_steps=save_steps,
            save_total_limit=2,
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=Rows(), callbacks=[clock])
        if contestant == "ckpt-run":
            from datastates.llm import DecoratedCheckpointing

            DecoratedCheckpointing({"trainer": trainer}, -1)
        trainer.train()
    took = {step: clock.ended[step] - clock.ended[step - 1] for step in range(WARM_UP + 1, STEPS + 1)}
    with_save = [seconds for step, seconds in took.items() if (step - 1) % save_steps == 0]
    others = [seconds for step, seconds in took.items() if (step - 1) % save_steps]
    figures = {"seconds": clock.ended[STEPS] - clock.ended[WARM_UP]}
    if others:
        figures["stall"] = statistics.median(with_save) - statistics.median(others)
    return figures
