"""The JSON of DeepSpeed (https://www.deepspeed.ai/docs/config-json/), also as Hugging Face's Trainer takes it.

Where a value is ``auto``, that Trainer fills it in from arguments that are not in the file.
"""

from __future__ import annotations

from typing import Any

from megacore.foreign.rules import ForeignConfig, Given, Project, Rule, Verdict, batch, off, only, to, where, without

_OURS = "how gradients travel is decided here, and no numbers depend on it"


def _mics(value: Any, config: ForeignConfig) -> Verdict:
    if value in (-1, None):
        return Verdict(remark="off")
    if not config.gpus or config.gpus % value:
        return Verdict(remark=f"zero.replicas is the number of GPUs / {value}: give that, --gpus N", refused=True)
    return Verdict({"zero.replicas": config.gpus // value})


_ADAM = only("Adam", "AdamW", why="only AdamW is carried: see optimizer.name for Muon")
_RULES: dict[str, Rule] = {
    "train_batch_size": to("batch.global_size"),
    "train_micro_batch_size_per_gpu": to("batch.micro_size"),
    "gradient_accumulation_steps": batch(
        "train_batch_size", "train_micro_batch_size_per_gpu", ("tensor_parallel.autotp_size", "sequence_parallel_size")
    ),
    "gradient_clipping": to("optimizer.clip", lambda value: float(value) or None),
    "optimizer.type": _ADAM,
    "optimizer.params.lr": to("optimizer.lr", float),
    "optimizer.params.betas": to("optimizer.betas", list),
    "optimizer.params.eps": to("optimizer.eps", float),
    "optimizer.params.weight_decay": to("optimizer.weight_decay", float, "here of matrices alone"),
    "optimizer.params.adam_w_mode": only(True, why="Adam's own decay, in the gradient, is not here"),
    "optimizer.params.bias_correction": only(True, why="moments are corrected for their beginning here"),
    "scheduler.type": to(
        "schedule.name", {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    ),
    "scheduler.params.warmup_min_lr": only(0, 0.0, why="the warm-up begins at 0 here"),
    "scheduler.params.warmup_min_ratio": only(0, 0.0, why="the warm-up begins at 0 here"),
    "scheduler.params.warmup_max_lr": to("optimizer.lr", float),
    "scheduler.params.warmup_num_steps": to("schedule.warmup_steps"),
    "scheduler.params.warmup_type": lambda value, config: Verdict(
        remark="so here too" if value == "linear" else "it rises in a straight line here, in as many steps"
    ),
    "scheduler.params.total_num_steps": to("train.steps"),
    "scheduler.params.cos_min_ratio": to("schedule.min_ratio", float),
    "min_ratio": to("schedule.min_ratio", float),
    "bf16.enabled": where({True: {"train.precision": "bf16"}, False: {}}, "is true or false"),
    "fp16.enabled": where({True: {"train.precision": "fp16"}, False: {}}, "is true or false"),
    "precision": to("train.precision"),
    "fp16.loss_scale": off("the scale is dynamic here"),
    "fp16.initial_scale_power": to("loss_scale.initial", lambda power: float(2 ** int(power))),
    "fp16.loss_scale_window": to("loss_scale.growth_interval"),
    "fp16.min_loss_scale": to("loss_scale.minimum", float),
    "fp16.hysteresis": without("each overflow halves the scale here"),
    "fp16.fp16_master_weights_and_grads": off("masters are fp32 here: optimizer.master_weights=false has none"),
    "fp16.*": without("has no counterpart here, and no numbers depend on it"),
    "bf16.*": without("gradients are added up in fp32 here"),
    "zero_optimization.stage": to("zero.shard", {0: "none", 1: "optimizer", 2: "gradients", 3: "parameters"}),
    "zero_optimization.offload_optimizer.device": to(
        "memory.offload_optimizer", {"none": "none", "cpu": "host", "nvme": "file"}
    ),
    "zero_optimization.cpu_offload": where({True: {"memory.offload_optimizer": "host"}, False: {}}, "is true or false"),
    "zero_optimization.offload_optimizer.nvme_path": to("memory.offload_folder"),
    "zero_optimization.offload_optimizer.ratio": only(1, 1.0, why="all of the states are offloaded here, or none"),
    "zero_optimization.offload_param.device": where(
        {"none": {}, "cpu": {"memory.offload_parameters": True}}, "parameters are on the device or in host memory here"
    ),
    "zero_optimization.zero_quantized_weights": off("weights are gathered as they are here"),
    "zero_optimization.zero_quantized_gradients": off("gradients are summed as they are here"),
    "zero_optimization.mics_shard_size": _mics,
    "zero_optimization.*": without("how messages and memory are cut up; nothing of it is to be set here"),
    "tensor_parallel.autotp_size": to("mesh.tp"),
    "sequence_parallel_size": to("mesh.cp"),
    "activation_checkpointing.cpu_checkpointing": where(
        {True: {"memory.offload_activations": True}, False: {}}, "is true or false"
    ),
    "activation_checkpointing.*": without("the model's code turns it on there: here it is memory.recompute"),
    "steps_per_print": to("log.every"),
    "tensorboard.enabled": to("log.tensorboard"),
    "tensorboard.*": without("the files go to the run's folder"),
    "wandb.enabled": without("log.wandb names the project"),
    "wandb.project": to("log.wandb"),
    "wandb.*": without("the environment says it (WANDB_...)"),
    "communication_data_type": lambda value, config: (
        Verdict({"zero.compress": "bf16"}) if value in ("bf16", "bfp16") else Verdict(remark=_OURS)
    ),
    "data_types.grad_accum_dtype": only("fp32", None, why="gradients are added up in fp32 here"),
    "zero_allow_untested_optimizer": without("the optimizer is AdamW"),
    "zero_force_ds_cpu_optimizer": without("which code updates follows from memory.offload_optimizer"),
    "aio.*": without("the disk's own figures are used"),
    "checkpoint.*": without("docs/checkpoints.md: each rank writes its share, in the background"),
    "elasticity.*": without("NNODES=LEAST:MOST on each node (docs/reliability.md)"),
    "flops_profiler.*": without("megacore plan counts FLOPs; log.profile records a step"),
    **{
        f"{key}.enabled": off("is not here")
        for key in ("curriculum_learning", "progressive_layer_drop", "eigenvalue", "quantize_training", "autotuning")
    },
    "autotuning.*": without("megacore plan --fit finds layouts"),
}
_WITHOUT = {
    "the fused kernel is chosen here": "optimizer.params.torch_adam optimizer.params.fused optimizer.legacy_fusion",
    _OURS: "seq_parallel_communication_data_type fp32_allreduce prescale_gradients gradient_predivide_factor "
    "sparse_gradients",
    "says nothing of the training": "wall_clock_breakdown dump_state comms_logger.* csv_monitor.* memory_breakdown",
}


def _defaults(given: Given) -> Given:
    """Return what is left out: no clipping, no decay, and fp32 unless the file says otherwise."""
    sized = any(given.get(f"{name}.enabled") in (True, "auto") for name in ("fp16", "bf16"))
    found: dict[str, Any] = {} if sized else {"precision": "fp32"}
    found["gradient_clipping"] = 0.0
    if "optimizer.type" in given:
        found |= {"optimizer.params.betas": [0.9, 0.999], "optimizer.params.weight_decay": 0.0}
    if given.get("scheduler.type") == "WarmupDecayLR":
        found["min_ratio"] = 0.0
    if given.get("scheduler.type") == "WarmupCosineLR":
        found["scheduler.params.cos_min_ratio"] = 0.0001
    if given.get("fp16.enabled") is True:
        found |= {"fp16.initial_scale_power": 16, "fp16.loss_scale_window": 1000}
    return found


_AUTO = "auto: the Trainer's arguments say it, which are not in the file"
DEEPSPEED = Project("DeepSpeed", _RULES, _WITHOUT, _defaults, lambda value: _AUTO if value == "auto" else "")
