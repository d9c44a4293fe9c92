"""Two trainings in one directory, the second on other data. A first one that is done is left out.

Arguments: the output directory, and the step of the second training at which this process kills itself (0: never).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny
from datastates.llm import DecoratedCheckpointing
from transformers import TrainerCallback


class Watch(TrainerCallback):
    def __init__(self, name: str, die_at: int) -> None:
        self.name = name
        self.die_at = die_at
        self.engine: DecoratedCheckpointing | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.die_at and state.global_step == self.die_at and self.engine:
            self.engine.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(json.dumps({"training": self.name, "step": state.global_step}), flush=True)


def train(name: str, output_dir: Path, seed: int, steps: int, die_at: int = 0) -> None:
    watch = Watch(name, die_at)
    trainer = tiny.trainer(
        output_dir, model=tiny.llama(seed), data=tiny.Tokens(seed=seed), max_steps=steps, callbacks=[watch]
    )
    watch.engine = DecoratedCheckpointing({"trainer": trainer}, -1)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model(str(output_dir / name))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if not (place / "first" / "model.safetensors").exists():
        train("first", place, seed=0, steps=4)
    train("second", place, seed=1, steps=6, die_at=int(sys.argv[2]))
