"""`megacore import`: configs of other projects, against recipes that were written by hand of the same meaning."""

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from megacore import foreign
from megacore.config import SECTIONS, Config
from megacore.foreign.megatron import arguments
from megacore.recipe import load
from megacore.recipe_yaml import flat
from megacore.tools import tables
from megacore.tools.import_recipe import main

OFFLOADED = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 12, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pin_memory": True},
        "offload_param": {"device": "cpu"},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
    },
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "steps_per_print": 2000,
}
SCALED = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500, "total_num_steps": 10000},
    },
    "fp16": {"enabled": True, "loss_scale": 0, "min_loss_scale": 1},
    "communication_data_type": "bfp16",
    "zero_optimization": {"stage": 2, "mics_shard_size": 4},
}
FSDP = """
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  {fsdp_sharding_strategy: HYBRID_SHARD, fsdp_activation_checkpointing: true, fsdp_offload_params: false}
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
revision_of_model: abc
load_in_8bit: false
roles_to_train: [assistant]
lora_modules_to_save: []
datasets:
  - {path: teknium/GPT4, type: alpaca, split: train_sft}
  - {path: own.jsonl, type: chat_template, field_messages: talk, message_property_mappings: {role: who, content: says}}
val_set_size: 0.1
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
sequence_len: 2048
gradient_accumulation_steps: 4
micro_batch_size: 2
max_steps: 200
warmup_ratio: 0.1
optimizer: adamw_torch_fused
learning_rate: 2e-4
rl: simpo
rl_beta: 2.5
bf16: auto
gradient_checkpointing: true
flash_attention: true
evals_per_epoch: 4
"""
MEGATRON = r"""#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=2
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096
    --ffn-hidden-size 14336 # of each
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length ${SEQ:-8192}
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --attention-dropout 0 --hidden-dropout 0
    --swiglu --disable-bias-linear --normalization RMSNorm
    --untie-embeddings-and-output-weights
    --init-method-std 0.01 )
torchrun --nproc_per_node 8 pretrain_gpt.py ${MODEL_ARGS[@]} --bf16 --tensor-model-parallel-size $TP \
    --grad-reduce-in-bf16 \
    --sequence-parallel --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 128 \
    --rampup-batch-size 32 32 6400 --train-samples 128000 --lr-warmup-samples 12800 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine \
    --adam-beta2=0.95 --weight-decay 0.1 --data-path 0.3 /data/a 0.7 /data/b --split 99,1,0 --save $SAVED | tee log
"""
GPT2 = """--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024
--micro-batch-size 4 --global-batch-size 32 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000 --vocab-size 50257
--lr-warmup-fraction .01 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --data-path my-gpt2
--microbatch-group-size-per-virtual-pipeline-stage 6
"""
CASES: Mapping[str, tuple[str, str, list[str], Mapping[str, Any]]] = {
    "deepspeed, ZeRO-3 offloaded": (
        "ds.json",
        json.dumps(OFFLOADED),
        [],
        {
            "loss_scale": {"growth_interval": 500, "initial": 4096.0},
            "zero": {"shard": "parameters"},
            "memory": {"offload_optimizer": "file", "offload_folder": "/nvme", "offload_parameters": True},
            "log": {"every": 2000},
        },
    ),
    "deepspeed, fp16": (
        "ds.json",
        json.dumps(SCALED),
        ["--gpus", "8"],
        {
            "batch": {"micro_size": 4, "global_size": 64},
            "optimizer": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7, "clip": None},
            "schedule": {"name": "linear", "warmup_steps": 500, "min_ratio": 0.0},
            "train": {"steps": 10000, "precision": "fp16"},
            "loss_scale": {"initial": 65536.0, "growth_interval": 1000, "minimum": 1.0},
            "zero": {"shard": "gradients", "replicas": 2, "compress": "bf16"},
        },
    ),
    "accelerate": (
        "fsdp.yaml",
        FSDP,
        [],
        {
            "zero": {"shard": "parameters", "replicas": 2},
            "memory": {"recompute": "full"},
            "train": {"precision": "bf16"},
        },
    ),
    "axolotl": (
        "lora.yml",
        AXOLOTL,
        ["--gpus", "2"],
        {
            "checkpoint": {"init": "NousResearch/Llama-3.2-1B@abc"},
            "data": {
                "train": [{"path": "teknium/GPT4@main", "split": "train_sft"}, {"path": "own.jsonl"}],
                "map": {"messages": "talk", "role": "who", "content": "says"},
                "validation_fraction": 0.1,
                "sequence_length": 2048,
            },
            "lora": {"rank": 16, "alpha": 32.0, "targets": ["*"]},
            "batch": {"global_size": 16, "micro_size": 2},
            "train": {"steps": 200, "precision": "bf16"},
            "schedule": {"warmup_steps": 20, "min_ratio": 0.0},
            "optimizer": {"lr": 2e-4, "weight_decay": 0.0, "betas": [0.9, 0.999]},
            "memory": {"recompute": "full"},
            "chat": {"pack": False, "train_on": "assistant"},
            "preference": {"loss": "simpo", "beta": 2.5},
        },
    ),
    "megatron, LLaMA": (
        "train.sh",
        MEGATRON,
        [],
        {
            "model": {
                "family": "llama",
                "num_hidden_layers": 32,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 8192,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
                "attention_dropout": 0,
                "tie_word_embeddings": False,
                "initializer_range": 0.01,
                "rms_norm_eps": 1e-5,
            },
            "data": {
                "sequence_length": 8192,
                "train": [{"path": "/data/a", "weight": 0.3}, {"path": "/data/b", "weight": 0.7}],
                "validation_fraction": 0.01,
            },
            "batch": {"micro_size": 1, "global_size": 128, "ramp": [32, 32, 6400]},
            "train": {"steps": 67 + 34 + 22 + 950, "precision": "bf16"},
            "schedule": {"name": "cosine", "warmup_steps": 67 + 34 + 22 + 50, "min_ratio": 3e-5 / 3e-4},
            "optimizer": {"lr": 3e-4, "weight_decay": 0.1, "betas": [0.9, 0.95]},
            "mesh": {"tp": 2},
            "zero": {"shard": "optimizer", "compress": "bf16"},
        },
    ),
    "megatron, GPT-2": (
        "gpt2.args",
        GPT2,
        [],
        {
            "model": {
                "family": "gpt2",
                "n_layer": 12,
                "n_embd": 768,
                "n_head": 12,
                "n_positions": 1024,
                "vocab_size": 50257,
                "tie_word_embeddings": True,
                **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1),
            },
            "data": {
                "sequence_length": 1024,
                "train": [{"path": "my-gpt2"}],
                "validation_fraction": round(30 / 999, 6),
            },
            "batch": {"micro_size": 4, "global_size": 32},
            "optimizer": {"lr": 1.5e-4, "betas": [0.9, 0.999], "weight_decay": 0.01},
            "train": {"steps": 500000, "precision": "fp32"},
            "schedule": {"name": "linear", "decay_steps": 316800, "warmup_steps": 3200, "min_ratio": 0.0},
            "mesh": {"pp": 4},
            "pipeline": {"chunks": 3, "schedule": "interleaved", "group": 6},
        },
    ),
}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one line each, which these tests read."""
    monkeypatch.setattr(tables, "WIDTH", 1000)


@pytest.mark.parametrize("case", CASES)
def test_configs_become_recipes_of_the_same_meaning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    name, text, options, recipe = CASES[case]
    (tmp_path / name).write_text(text)
    out = tmp_path / "recipe.yaml"
    assert main([str(tmp_path / name), *options, "--out", str(out)]) == 0, capsys.readouterr().err
    assert yaml.safe_load(out.read_text()) == recipe
    load(out)
    account = capsys.readouterr().err
    keys = flat(yaml.safe_load(text)) if not case.startswith("megatron") else arguments(text)
    assert [key for key in keys if key not in account] == []


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", {"zero_optimization": {"stage": 2}, "x": 1}, "x  .*REFUSED: unknown here"),
        ("a.json", {"optimizer": {"type": "Lion"}}, "REFUSED: only AdamW is carried"),
        ("a.json", {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, "2 x 3 x .*--gpus N"),
        ("a.json", {"optimizer.params.lr": 1, "scheduler.params.warmup_max_lr": 2}, "makes optimizer.lr 1.0, and this"),
        ("a.yml", {"base_model": "x", "adapter": "ia3"}, "REFUSED: ia3 is not here: only lora and qlora are"),
        ("a.yml", {"base_model": "x", "load_in_4bit": True}, "REFUSED: a base in fewer bits is for adapters"),
        ("a.yml", {"base_model": "x", "adapter": "qlora", "load_in_8bit": True}, "makes lora.base_dtype nf4, and this"),
        ("a.yml", {"base_model": "x", "datasets": [{"path": "y", "type": "cot"}]}, "the type cot of y is no format"),
        ("a.yml", {"distributed_type": "DEEPSPEED"}, "import the file that it names"),
        ("a.sh", "--num-layers 2 --swiglu", "REFUSED: no family has these parts"),
        ("a.yml", {"model": {}}, "it is not clear whose config it is"),
        ("a.yml", {"base_model": "x", "datasets": "y"}, "datasets +y +REFUSED: y is not understood"),
        ("a.yml", {"base_model": "x", "roles_to_train": ["user"]}, "REFUSED: the assistant is trained on"),
        ("a.sh", "--num-layers 2 --split a,b", "REFUSED: a,b is not understood"),
        ("a.json", "{", "is no JSON or YAML"),
    ],
)  # fmt: skip
def test_what_cannot_be_carried_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: Any, says: str
) -> None:
    (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text))
    assert main([str(tmp_path / name), "--out", str(tmp_path / "recipe.yaml")]) == 2
    assert re.search(says, capsys.readouterr().err) and not (tmp_path / "recipe.yaml").exists()


SHARDS = {"1": "parameters", "2": "gradients", "true": "parameters", "false": "gradients", "NO_SHARD": "none"}


@pytest.mark.parametrize(("value", "shard"), SHARDS.items())
def test_fsdp_reshards_by_flag_or_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str, shard: str
) -> None:
    (tmp_path / "a.yml").write_text(f"distributed_type: FSDP\nfsdp_config: {{fsdp_reshard_after_forward: {value}}}\n")
    assert main([str(tmp_path / "a.yml")]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["zero"] == {"shard": shard}


@pytest.mark.parametrize(("adapter", "bits", "dtype"), [("qlora", 4, "nf4"), ("lora", 4, "nf4"), ("lora", 8, "int8")])
def test_adapters_beside_fewer_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], adapter: str, bits: int, dtype: str
) -> None:
    (tmp_path / "a.yml").write_text(f"base_model: x\nadapter: {adapter}\nload_in_{bits}bit: true\nlora_dropout: 0.05\n")
    assert main([str(tmp_path / "a.yml"), "--gpus", "1"]) == 0
    wanted = {"rank": 8, "alpha": 16.0, "dropout": 0.05, "base_dtype": dtype}
    assert yaml.safe_load(capsys.readouterr().out)["lora"] == wanted


def test_what_is_ignored_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "a.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 2}, "x": 1}))
    assert main([str(config), "--ignore", "x"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["zero"] == {"shard": "gradients"}
    assert main([str(config), "--ignore", "y"]) == 2 and "has no y to ignore" in capsys.readouterr().err
    assert main([str(config), "--ignore", "x", "--out", str(config)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_all_keys_that_rules_name_are_keys_of_a_recipe() -> None:
    known = {f"{name}.{each.name}" for name, section in SECTIONS.items() for each in fields(section)}
    known |= {each.name for each in fields(Config)}
    text = "".join(path.read_text() for path in Path(str(foreign.__file__)).parent.glob("*.py"))
    named = re.findall(rf'"((?:{"|".join(SECTIONS)})\.\w+)"', text) + re.findall(r'\bto\(\s*"([^"]+)"', text)
    ours = {key for key in named if not key.startswith(("model.", "optimizer.type", "optimizer.params"))}
    assert len(ours) > 50 and ours - known - {"optimizer.legacy_fusion", "tensorboard.enabled"} == set()
