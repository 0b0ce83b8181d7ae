"""The YAML of axolotl (https://docs.axolotl.ai/docs/config-reference.html)."""

from __future__ import annotations

import os
from typing import Any

from megacore.foreign.rules import ForeignConfig, Given, Project, Rule, Verdict, batch, off, only, to, where, without

_FORMATS = ("", "chat_template", "alpaca", "sharegpt", "completion")
_KEYS = {
    "field_messages": "messages",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field": "text",
    "field_system": "system",
    "field_tools": "tools",
}
"""{a key of a data set that names one of its columns: ours of data.map}."""
_SHAREGPT = {"messages": "conversations", "role": "from", "content": "value"}
_ADAPTERS = ("lora", "qlora")


def _corpora(key: str) -> Rule:
    """Return the rule of a list of data sets."""

    def rule(value: Any, config: ForeignConfig) -> Verdict:
        found, columns = list[dict[str, Any]](), dict[str, str]()
        for each in value if isinstance(value, list) else [value]:
            path, kind = str(each["path"]), each.get("type") or ""
            if not isinstance(kind, str) or kind.partition(".")[0] not in _FORMATS:
                why = f"the type {kind} of {path} is no format here: see docs/data.md, and data.map for its keys"
                return Verdict(remark=why, refused=True)
            if each.get("ds_type") and each.get("data_files"):
                files = each["data_files"]
                path = str(files if isinstance(files, str) else files[0])
            here = os.path.exists(path) or path.endswith((".json", ".jsonl", ".parquet", ".gz", ".zst"))
            revision = each.get("revision", "main")
            corpus = {"path": path if here else f"{path}@{revision}"}
            found.append(corpus | ({"split": each["split"]} if "split" in each and not here else {}))
            named = {ours: each[theirs] for theirs, ours in _KEYS.items() if theirs in each}
            named |= each.get("message_property_mappings", {})
            if named != _SHAREGPT:  # which is known by its keys
                columns |= {ours: theirs for ours, theirs in named.items() if ours != theirs}
        keys: dict[str, Any] = {key: found}
        return Verdict(keys | ({"data.map": columns} if columns else {}), "formats are known by their keys")

    return rule


def _model(value: Any, config: ForeignConfig) -> Verdict:
    revision = config.given.get("revision_of_model")
    return Verdict({"checkpoint.init": f"{value}@{revision}" if revision else value})


def _adapter(value: Any, config: ForeignConfig) -> Verdict:
    if value not in (None, "", *_ADAPTERS):
        return Verdict(remark=f"{value} is not here: only lora and qlora are", refused=True)
    keys = {"lora.rank": config.given.get("lora_r", 8)} if value else {}
    return Verdict(keys | ({"lora.base_dtype": "nf4"} if value == "qlora" else {}))


def _base(dtype: str) -> Rule:
    """Return the rule of a key that says that the model below adapters is held in fewer bits."""

    def rule(value: Any, config: ForeignConfig) -> Verdict:
        adapted = config.given.get("adapter") in _ADAPTERS
        if value and not adapted:
            return Verdict(remark="a base in fewer bits is for adapters: adapter: qlora", refused=True)
        return Verdict({"lora.base_dtype": dtype} if value else {})

    return rule


def _recompute(value: Any, config: ForeignConfig) -> Verdict:
    on = value not in (False, None, "false")
    keys: dict[str, Any] = {"memory.recompute": "full" if on else "none"}
    return Verdict(keys | ({"memory.offload_activations": True} if value in ("offload", "unsloth") else {}))


def _warmup_ratio(value: Any, config: ForeignConfig) -> Verdict:
    steps = config.given.get("max_steps")
    if not isinstance(steps, int) or steps < 1:
        return Verdict(remark="schedule.warmup_steps counts steps: megacore finetune --dry-run says how many there are")
    return Verdict({"schedule.warmup_steps": round(float(value) * steps)})


def _roles(value: Any, config: ForeignConfig) -> Verdict:
    assistant = not value or [*value] in (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"])
    return Verdict(remark="the assistant is trained on (chat.train_on)", refused=not assistant)


def _lora_key(key: str, made: Any = None) -> Rule:
    carried = to(key, made)
    return lambda value, config: (
        carried(value, config) if config.given.get("adapter") in _ADAPTERS else Verdict(remark="there are no adapters")
    )


_RULES: dict[str, Rule] = {
    "base_model": _model,
    "revision_of_model": without("goes behind the model's name"),
    "datasets": _corpora("data.train"),
    "test_datasets": _corpora("data.validation"),
    "pretraining_dataset": off("tokenize it (megacore tokenize), and train with megacore train"),
    "val_set_size": to("data.validation_fraction", float, "shares up to 1; a number of rows is not known here"),
    "chat_template": only("tokenizer_default", None, why="save the template in a file, and name it by chat.template"),
    "chat_template_jinja": off("save the template in a file, and name it by chat.template"),
    "roles_to_train": _roles,
    "train_on_inputs": where(
        {False: {"chat.train_on": "assistant"}, True: {"chat.train_on": "all"}}, "is true or false"
    ),
    "output_dir": to("out"),
    "adapter": _adapter,
    "lora_r": without("goes with adapter"),
    "lora_alpha": _lora_key("lora.alpha", float),
    "lora_dropout": _lora_key("lora.dropout", float),
    "lora_target_modules": _lora_key("lora.targets", list),
    "lora_target_linear": where({True: {"lora.targets": ["*"]}, False: {}, None: {}}, "is true or false"),
    "peft_use_rslora": _lora_key("lora.rslora", bool),
    "peft_use_dora": off("DoRA is not here"),
    "lora_modules_to_save": off("adapters are trained alone: leave it out, or train all weights"),
    "load_in_8bit": _base("int8"),
    "load_in_4bit": _base("nf4"),
    "bnb_config_kwargs*": without("scales are not quantised once more here"),
    "sequence_len": to("data.sequence_length"),
    "sample_packing": to("chat.pack", bool),
    "excess_length_strategy": to("chat.too_long", {"drop": "drop", "truncate": "cut"}),
    "gradient_accumulation_steps": batch(None, "micro_batch_size", ("context_parallel_size", "tensor_parallel_size")),
    "micro_batch_size": to("batch.micro_size"),
    "num_epochs": to("train.epochs", float),
    "max_steps": to("train.steps"),
    "optimizer": only(
        "adamw_torch", "adamw_torch_fused", "adamw_hf", why="only AdamW is carried: see optimizer.name for Muon"
    ),
    "learning_rate": to("optimizer.lr", float),
    "adam_beta1": without("goes with adam_beta2"),
    "adam_beta2": lambda value, config: Verdict(
        {"optimizer.betas": [float(config.given.get("adam_beta1", 0.9)), float(value)]}
    ),
    "adam_epsilon": to("optimizer.eps", float),
    "weight_decay": to("optimizer.weight_decay", float, "here of matrices alone"),
    "max_grad_norm": to("optimizer.clip", float),
    "lr_scheduler": to(
        "schedule.name",
        {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"},
    ),
    "cosine_min_lr_ratio": to("schedule.min_ratio", float),
    "warmup_steps": to("schedule.warmup_steps", int),
    "warmup_ratio": _warmup_ratio,
    "bf16": where(
        {value: {"train.precision": "bf16"} if value else {} for value in (True, "auto", False, None)},
        "is true, false or auto",
    ),
    "fp16": where({True: {"train.precision": "fp16"}, False: {}, None: {}}, "is true or false"),
    "gradient_checkpointing": _recompute,
    "gradient_checkpointing_kwargs*": without("numbers are the same"),
    "torch_compile": to("train.compile", {True: True, False: False, "auto": True, None: False}),
    "context_parallel_size": to("mesh.cp"),
    "sequence_parallel_degree": to("mesh.cp"),
    "tensor_parallel_size": to("mesh.tp"),
    "dp_replicate_size": to("zero.replicas"),
    "dp_shard_size": without("dp is what is left of the ranks"),
    "logging_steps": to("log.every"),
    "eval_steps": to("evaluate.every"),
    "save_steps": to("checkpoint.every"),
    "save_total_limit": to("checkpoint.keep"),
    "load_best_model_at_end": to("checkpoint.best", bool),
    "early_stopping_patience": to("evaluate.patience"),
    "auto_resume_from_checkpoints": where(
        {True: {"checkpoint.resume": "auto"}, False: {}, None: {}}, "is true or false"
    ),
    "resume_from_checkpoint": off("--resume takes a checkpoint of Megacore's"),
    "seed": lambda value, config: Verdict({"train.seed": value, "data.seed": value}),
    "hub_model_id": to("checkpoint.push"),
    "use_tensorboard": to("log.tensorboard", bool),
    "wandb_project": to("log.wandb", lambda name: name or None),
    "wandb_*": without("the environment says it (WANDB_...)"),
    "deepspeed": off("import that JSON too, and put its keys beside these"),
    "fsdp": off("zero.shard=parameters, and zero.replicas for HYBRID_SHARD"),
    "fsdp_config*": off("zero.shard=parameters, and zero.replicas for HYBRID_SHARD"),
    "rl": to("preference.loss", {name: name for name in ("dpo", "ipo", "simpo", "orpo")}),
    **{key: to("preference.beta", float) for key in ("rl_beta", "dpo_beta", "orpo_alpha")},
    "simpo_gamma": to("preference.gamma", float),
    "neftune_noise_alpha": off("noise on embeddings is not here"),
    "special_tokens.pad_token": without("nothing is padded here"),
    "special_tokens.*": off("tokens are those of the model's tokenizer"),
    "special_tokens": off("tokens are those of the model's tokenizer"),
    "tokens": off("tokens cannot be added"),
    "unfrozen_parameters": to("train.only", list),
}
_WITHOUT = {
    "kernels are chosen here (docs/kernels.md)": "flash_attention flash_attn_* sdp_attention xformers_attention "
    "eager_attention plugins liger_* lora_*kernel",
    "is said in steps here: evaluate.every": "evals_per_epoch eval_strategy",
    "is said in steps here: checkpoint.every": "saves_per_epoch save_strategy",
    "is found in the model's folder": "model_type tokenizer_type tokenizer_config is_*_derived_model trust_remote_code",
    "prepared data lie in the run's folder": "dataset_prepared_path dataset_processes dataset_num_proc "
    "shuffle_merged_datasets",
    "rows are packed and of one length": "pad_to_sequence_len eval_sample_packing sample_packing_* eval_batch_size",
    "says nothing of the training": "strict debug local_rank ddp* tf32 group_by_length dataloader_* axolotl_*",
}


def _defaults(given: Given) -> Given:
    """Return the values of the Trainer for what is left out."""
    found = {"weight_decay": 0.0, "adam_beta2": 0.999, "cosine_min_lr_ratio": 0.0, "sample_packing": False}
    found |= {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "train_on_inputs": False}
    return found | ({"lora_alpha": 16} if given.get("adapter") in _ADAPTERS else {})


AXOLOTL = Project("axolotl", _RULES, _WITHOUT, _defaults)
