"""transformers' Trainer, TRL's SFTTrainer and PEFT on the work of `finetune.py`: `python finetune_peers.py MODE`.

Weights, gradients and AdamW's state are in bf16, but those of adapters, which PEFT keeps in fp32; so is what `Trainer`
computes the loss of, all logits upcast to fp32. With `--autocast` weights, gradients and AdamW's state are in fp32, and
products are in bf16.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks import steps
from benchmarks.finetune_work import LORA, LR, Work


class Clock(TrainerCallback):
    """When each step has ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


class Counted:
    """A trainer that counts the tokens of real text of each microbatch, and keeps its loss."""

    def training_step(self, model: Any, inputs: Mapping[str, torch.Tensor], *others: Any, **more: Any) -> torch.Tensor:
        mask = inputs.get("attention_mask")
        self.tokens.append(int(inputs["input_ids"].numel() if mask is None else mask.sum()))
        loss: torch.Tensor = super().training_step(model, inputs, *others, **more)  # type: ignore[misc]
        self.losses.append(float(loss))
        return loss

    @cached_property
    def tokens(self) -> list[int]:
        return []

    @cached_property
    def losses(self) -> list[float]:
        return []


class CountedTrainer(Counted, Trainer):
    pass


MODES = ("padded", "flattened", "trl", "trl-wrapped")
IGNORED = -100


def with_labels(row: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Tokens and what counts of them, as transformers wants it."""
    pairs = zip(row["input_ids"], row["counted"], strict=True)
    return {"input_ids": row["input_ids"], "labels": [token if counts else IGNORED for token, counts in pairs]}


def settings(arguments: argparse.Namespace, work: Work, folder: str) -> dict[str, Any]:
    """Of all trainers."""
    return {
        "output_dir": folder,
        "max_steps": arguments.warm_up + arguments.steps,
        "gradient_accumulation_steps": work.accumulation,
        "gradient_checkpointing": False,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "bf16": arguments.autocast,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "seed": 0,
        "disable_tqdm": True,
    }


def trainer(arguments: argparse.Namespace, work: Work, folder: str) -> Any:
    """The trainer of a mode. Those that do not pack have as many chats a microbatch as fill the rows of the others."""
    dtype = torch.float32 if arguments.autocast else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_pretrained(work.model, dtype=dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    rows = Dataset.from_list([with_labels(json.loads(line)) for line in work.prepared.read_text().splitlines()])
    common = settings(arguments, work, folder)
    if arguments.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **LORA))
    if arguments.mode in ("padded", "flattened"):
        together = round(work.rows * work.length * len(rows) / sum(map(len, rows["input_ids"])))
        flat = arguments.mode == "flattened"
        collator = DataCollatorWithFlattening() if flat else DataCollatorForSeq2Seq(tokenizer, padding="longest")
        return CountedTrainer(
            model,
            TrainingArguments(
                **common,
                per_device_train_batch_size=together,
                train_sampling_strategy="random" if flat else "group_by_length",
            ),
            train_dataset=rows,
            data_collator=collator,
        )
    from trl import SFTConfig, SFTTrainer

    class CountedSFT(Counted, SFTTrainer):
        pass

    return CountedSFT(
        model,
        SFTConfig(
            **common,
            per_device_train_batch_size=work.rows,
            max_length=work.length,
            packing=True,
            packing_strategy="wrapped" if arguments.mode == "trl-wrapped" else "bfd",
        ),
        train_dataset=rows,
        processing_class=tokenizer,
    )


def main() -> None:
    parser = steps.parser(__doc__, MODES)
    parser.add_argument("--work", type=Path, required=True, help="what `finetune.py` has written")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--autocast", action="store_true", help="fp32 weights, products in bf16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    work = Work.read(arguments.work)
    with tempfile.TemporaryDirectory() as folder:
        made, clock = trainer(arguments, work, folder), Clock()
        made.add_callback(clock)
        began = time.perf_counter()
        made.train()
    marks = [began, *clock.ends]
    seconds = [after - before for before, after in zip(marks, clock.ends, strict=False)]
    tokens = [sum(made.tokens[i : i + work.accumulation]) for i in range(0, len(made.tokens), work.accumulation)]
    # Each microbatch's loss is its share of the step's mean.
    losses = [sum(made.losses[i : i + work.accumulation]) for i in range(0, len(made.losses), work.accumulation)]
    steps.tell(seconds, (losses[0], losses[-1]), arguments.warm_up, tokens)


if __name__ == "__main__":
    main()
