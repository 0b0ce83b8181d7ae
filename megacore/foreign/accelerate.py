"""The file of `accelerate config`, for FSDP (https://huggingface.co/docs/accelerate/usage_guides/fsdp)."""

from __future__ import annotations

from typing import Any

from megacore.foreign.rules import ForeignConfig, Given, Project, Rule, Verdict, only, to, where, without

_FLAG = {True: True, False: False, "true": True, "false": False}
_SHARDS = {
    **dict.fromkeys(("FULL_SHARD", 1, "1"), "parameters"),
    **dict.fromkeys(("SHARD_GRAD_OP", 2, "2"), "gradients"),
    **dict.fromkeys(("NO_SHARD", 3, "3"), "none"),
    **dict.fromkeys(("HYBRID_SHARD", 4, "4"), "parameters"),
    **dict.fromkeys(("HYBRID_SHARD_ZERO2", 5, "5"), "gradients"),
}


def _strategy(value: Any, config: ForeignConfig) -> Verdict:
    if value not in _SHARDS:
        return Verdict(remark=f"{value} is none of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD", refused=True)
    keys: dict[str, Any] = {"zero.shard": _SHARDS[value]}
    if str(value).startswith("HYBRID") or value in (4, 5, "4", "5"):  # within a node
        keys["zero.replicas"] = config.given.get("num_machines", 1)
    return Verdict(keys)


def _reshard(value: Any, config: ForeignConfig) -> Verdict:
    if value in _FLAG and type(value) is not int:  # 1 is the first of the strategies, which equals True
        return Verdict({"zero.shard": "parameters" if _FLAG[value] else "gradients"})
    return _strategy(value, config)


_OFFLOADED = {"memory.offload_parameters": True, "memory.offload_optimizer": "host"}
_RULES: dict[str, Rule] = {
    "distributed_type": only(
        "FSDP",
        "MULTI_GPU",
        "MULTI_CPU",
        "NO",
        why="import the file that it names: DeepSpeed's JSON, or Megatron's arguments",
    ),
    "mixed_precision": to("train.precision", {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}),
    "use_cpu": where({True: {"train.device": "cpu"}, False: {}}, "is true or false"),
    "dynamo_config.dynamo_backend": lambda value, config: Verdict(
        {"train.compile": str(value).upper() not in ("NO", "EAGER")}
    ),
    "dynamo_config.*": without("blocks are compiled whole here (train.compile)"),
    "fsdp_config.fsdp_sharding_strategy": _strategy,
    "fsdp_config.fsdp_reshard_after_forward": _reshard,
    "fsdp_config.fsdp_offload_params": where(
        {value: _OFFLOADED if on else {} for value, on in _FLAG.items()}, "is true or false"
    ),
    "fsdp_config.fsdp_activation_checkpointing": to(
        "memory.recompute", {value: "full" if on else "none" for value, on in _FLAG.items()}
    ),
    "fsdp_config.fsdp_version": without("the numbers are the same"),
    "fsdp_config.fsdp_state_dict_type": without("checkpoints are shards, and go to any layout (docs/checkpoints.md)"),
    "fsdp_config.*": without("what is gathered together, and when, is decided here"),
    "parallelism_config.parallelism_config_tp_size": to("mesh.tp", int),
    "parallelism_config.parallelism_config_cp_size": to("mesh.cp", int),
    "parallelism_config.parallelism_config_dp_replicate_size": to("zero.replicas", int),
    "parallelism_config.parallelism_config_dp_shard_size": without("dp is what is left of the ranks"),
    "parallelism_config.parallelism_config_cp_comm_strategy": to(
        "context.exchange", {"allgather": "gather", "alltoall": "ring"}
    ),
    "debug": without("what goes wrong is said, and where each rank stands"),
}
_WITHOUT = {
    "how ranks are started: NPROC_PER_NODE, NNODES, NODE_RANK and MASTER_ADDR (docs/launch.md)": "num_processes "
    "num_machines machine_rank main_process_ip main_process_port gpu_ids rdzv_backend same_network compute_environment "
    "enable_cpu_affinity main_training_function",
    "weights are loaded as shards, by each rank its own": "fsdp_config.fsdp_cpu_ram_efficient_loading "
    "fsdp_config.fsdp_sync_module_states",
    "is for TPUs": "downcast_bf16 tpu_*",
}


def _defaults(given: Given) -> Given:
    named = {f"fsdp_config.fsdp_{key}" for key in ("sharding_strategy", "reshard_after_forward")} & given.keys()
    shards = any(key.startswith("fsdp_config.") for key in given) and not named
    return {"mixed_precision": "no"} | ({"fsdp_config.fsdp_reshard_after_forward": True} if shards else {})


ACCELERATE = Project("accelerate", _RULES, _WITHOUT, _defaults)
