"""Train a small Llama-style language model on text found on this machine. No network, nothing to prepare.

An ordinary Trainer script. Nothing in it is special to ckpt-run; both of these work:

    python train_language_model.py --output_dir out
    ckpt-run python train_language_model.py --output_dir out
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

VOCABULARY = 4096
TEXT_FILES = ("*.rst", "*.md", "*.txt", "*.py")
END_OF_TEXT = "<|endoftext|>"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--corpus", default=sysconfig.get_path("stdlib"), help="file or folder of text")
    parser.add_argument("--corpus_bytes", type=int, default=4_000_000, help="read at most this much of it")
    parser.add_argument("--max_steps", type=int, default=200)
    parser.add_argument("--save_steps", type=int, default=20)
    parser.add_argument("--save_total_limit", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=4, help="sequences per step and device")
    parser.add_argument("--sequence_length", type=int, default=128, help="tokens")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deepspeed", help="DeepSpeed configuration file")
    parser.add_argument("--use_cpu", action="store_true", help="leave the GPU alone")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by some launchers")
    return parser.parse_args()


def read_corpus(path: Path, limit: int) -> list[str]:
    """The text files at `path` in a fixed order, `limit` bytes of them at most; Python's own documentation first."""
    documentation = [path / "pydoc_data" / "topics.py"]
    sources = [path] if path.is_file() else [file for kind in TEXT_FILES for file in sorted(path.glob(kind))]
    documents: list[str] = []
    for file in filter(Path.is_file, documentation + sources):
        text = file.read_bytes()[:limit]
        limit -= len(text)
        documents.append(text.decode("utf-8", errors="replace"))
    return [document for document in documents if document]


def load_tokenizer(path: Path, documents: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the documents; trained once, and read from `path` ever after."""
    if not path.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=alphabet,
            show_progress=False,
        )
        tokenizer.train_from_iterator(documents, trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".new")
        tokenizer.save(str(unfinished))
        unfinished.replace(path)  # whole or not there, whenever the machine is taken away
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def pack(
    documents: list[str], tokenizer: PreTrainedTokenizerFast, length: int
) -> list[dict[str, torch.Tensor]]:
    """All documents one after the other, cut into examples of `length` tokens."""
    encoded = tokenizer([document + END_OF_TEXT for document in documents])["input_ids"]
    tokens = torch.tensor([token for document in encoded for token in document])
    examples = tokens[: len(tokens) // length * length].view(-1, length)
    return [{"input_ids": example, "labels": example} for example in examples]


def build_model(tokenizer: PreTrainedTokenizerFast, length: int) -> LlamaForCausalLM:
    """About eleven million parameters, from scratch."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


class PrintSteps(TrainerCallback):
    """One plain line a step."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step}/{state.max_steps} loss {float(logs['loss']):.4f}", flush=True)


def main() -> None:
    args = parse_args()
    set_seed(args.seed)
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=args.max_steps // 10,
        save_steps=args.save_steps,
        save_total_limit=args.save_total_limit,
        logging_steps=1,
        seed=args.seed,
        deepspeed=args.deepspeed,
        use_cpu=args.use_cpu,
        report_to="none",
        disable_tqdm=True,
    )
    with training_args.main_process_first():
        documents = read_corpus(Path(args.corpus), args.corpus_bytes)
        tokenizer = load_tokenizer(Path(args.output_dir) / "tokenizer" / "tokenizer.json", documents)
    trainer = Trainer(
        model=build_model(tokenizer, args.sequence_length),
        args=training_args,
        train_dataset=pack(documents, tokenizer, args.sequence_length),
        processing_class=tokenizer,
        callbacks=[PrintSteps()],
    )
    trainer.remove_callback(PrinterCallback)  # PrintSteps prints instead
    trainer.train(resume_from_checkpoint="CKPT_LAST_STEP" in os.environ)
    trainer.save_model(args.output_dir)


if __name__ == "__main__":
    main()
