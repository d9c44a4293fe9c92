# ruff: noqa: I001
"""Binds get_last_checkpoint before anything of ours is imported, and asks before and after a Trainer is decorated."""

from transformers.trainer_utils import get_last_checkpoint

import json
import sys
from pathlib import Path

import transformers.trainer

from datastates.llm import DecoratedCheckpointing

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny

output_dir = sys.argv[1]
answers = [get_last_checkpoint(output_dir)]
DecoratedCheckpointing({"trainer": tiny.trainer(Path(output_dir))}, -1)
answers += [get_last_checkpoint(output_dir), transformers.trainer.get_last_checkpoint(output_dir)]
print(json.dumps(answers))
