"""Carry on with what on_demand_train.py began, from the newest good checkpoint below the same --output_dir.

ckpt-run python on_demand_resume.py
ckpt-run deepspeed --num_gpus=4 on_demand_resume.py --deepspeed ds_config_zero2.json
ckpt-run accelerate launch --config_file fsdp_config.yaml on_demand_resume.py
"""

import argparse
import logging

from datasets import load_dataset
from datastates.llm import DecoratedCheckpointing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model_path", default="/models/Llama-3.2-1B", help="folder of a model and its tokenizer"
    )
    parser.add_argument(
        "--data_path", default="/data/wikitext-2", help="folder with train.* and validation.*"
    )
    parser.add_argument("--output_dir", default="results")
    parser.add_argument("--max_steps", type=int, default=1000)
    parser.add_argument("--save_steps", type=int, default=50)
    parser.add_argument("--eval_steps", type=int, default=80)
    parser.add_argument("--max_length", type=int, default=512, help="tokens")
    parser.add_argument("--deepspeed", help="a DeepSpeed configuration, for example ds_config_zero2.json")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    return parser.parse_args()


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    args = parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model_path, local_files_only=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    dataset = load_dataset(args.data_path)

    def tokenize(examples):
        return tokenizer(examples["text"], truncation=True, max_length=args.max_length, padding="max_length")

    dataset = dataset.map(tokenize, batched=True, remove_columns=["text"])
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        bf16=True,
        save_strategy="steps",
        save_steps=args.save_steps,
        save_total_limit=3,
        eval_strategy="steps",
        eval_steps=args.eval_steps,
        logging_steps=10,
        deepspeed=args.deepspeed,
        report_to="none",
    )
    # After TrainingArguments: under ZeRO-3 the model is then built in pieces, one on each GPU.
    model = AutoModelForCausalLM.from_pretrained(args.model_path, local_files_only=True)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False),
    )
    config = {
        "host_cache_size": 50,  # GiB of host memory for each rank
        "parser_threads": 1,
        "pin_host_cache": True,
        "trainer": trainer,
    }
    DecoratedCheckpointing(runtime_config=config, rank=args.local_rank)
    trainer.train(resume_from_checkpoint=True)


if __name__ == "__main__":
    main()
