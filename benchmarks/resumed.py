"""The script that :mod:`benchmarks.resuming` starts: ``python -m benchmarks.resumed JSON``, with or without ckpt-run in front."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from benchmarks import training


class End(TrainerCallback):
    """At the first step of a resumed training: prints the time, in seconds since 1970, and ends the process."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.time()
        if state.global_step != 1:
            raise AssertionError("the training has begun from the beginning")
        print(now, flush=True)
        os._exit(0)


class SaveFirst(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_save = control.should_training_stop = True
        return control


def main(output_dir: str, model: Mapping[str, int], resume: bool | str | None) -> None:
    callback = SaveFirst() if resume is None else End()
    training.trainer(output_dir, [callback], 2, model).train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
