"""The table of layouts: what is trained, how it is spread, and one in how many of its pairs has its turn in a session.

``test_layouts.py`` asks of each pair that it computes what one process computes.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from math import gcd
from pathlib import Path
from random import Random
from typing import Any

import pytest
from extended_family import extended
from families import drawn
from oracle import Case, Run

from megacore.models.lora import Lora
from megacore.models.registry import FAMILIES, configure
from megacore.models.tuning import Tuning
from megacore.parallel.balance import Coefficients
from megacore.parallel.enum_errors import Recompute, ZeroShard
from megacore.parallel.memory.recompute import Activations
from megacore.parallel.weights.layout import MeshShape
from megacore.training.states.muon import Muon
from megacore.training.states.offload import Offload

Pair = tuple[Case, Run]

RUNGS: tuple[ZeroShard, ...] = ("none", "optimizer", "gradients", "parameters")
SHARDED = RUNGS[1:]
# Windows that are smaller than most parts.
HOST, FILE = Offload(None, 1 << 15), Offload(Path(tempfile.gettempdir()), 1 << 15)


def interleaved(mesh: MeshShape, **others: Any) -> Run:
    """Two chunks in each stage."""
    return Run(mesh, 2, "interleaved", **others)


# -- dense models

LLAMA = {
    "family": "llama",
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 16,
}
GPT2 = {"family": "gpt2", "vocab_size": 101, "n_positions": 16, "n_embd": 24, "n_layer": 3, "n_head": 4}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
BIASES = {"attention_bias": True, "mlp_bias": True}
TIES = {"tie_word_embeddings": True, "intermediate_size": 27}  # padded
# All of the builder's parts at once, sinks among them.
PARTS = {
    "family": "extended",
    "windows": [3, 0, 5],
    "local_rope": True,
    "softcap": 2.0,
    "sinks": True,
    "norms": True,
    "offset": 1.0,
    "head_bias": True,
    "intermediate_size": 27,  # padded
}

UNTIED = Case("llama", LLAMA, ignored=0.3)
TIED = Case(
    "llama-tied-biases",
    LLAMA | BIASES | TIES | {"pad_token_id": 82},
    ignored=0.3,
    label_smoothing=0.1,
    z_loss=1e-2,
)
TIED_ENDS = Case("gpt2", GPT2 | NO_DROPOUT)
DOCUMENTS = Case("llama-documents", LLAMA | {"pad_token_id": -3}, ignored=0.3, documents=True)
POSITIONS = Case(
    "gpt2-untied-documents", GPT2 | NO_DROPOUT | {"tie_word_embeddings": False, "n_inner": 51}, documents=True
)
CASES = [UNTIED, TIED, TIED_ENDS, DOCUMENTS, POSITIONS]
# What each family draws; with another seed for each family, so that those of one kind differ in more than their kind.
DRAWN = [
    tuple(
        Case(f"{name}-drawn{'-documents' * documents}", drawn(name, seed, vocab=101), ignored=0.3, documents=documents)
        for documents in (False, True)
    )
    for seed, name in enumerate(FAMILIES)
]
BUILT = [
    Case(f"built-{name}", LLAMA | PARTS | {"parallel": parallel}, ignored=0.3, documents=True)
    for name, parallel in (("in-turn", False), ("side-by-side", True))
]

MESHES = [
    MeshShape(tp=tp, pp=pp, dp=dp) for tp in (1, 2, 4) for pp in (1, 2, 4) for dp in (1, 2) if 1 < tp * pp * dp <= 8
]
RUNS = [
    *(run for mesh in MESHES for run in (Run(mesh), interleaved(mesh))),
    interleaved(MeshShape()),
    Run(),  # one sequence after the other: the one process that all are compared with takes them at once
    Run(MeshShape(tp=2, pp=2), schedule="gpipe", micro=2),
    Run(MeshShape(pp=2, dp=2), chunks=2, schedule="gpipe"),
    Run(MeshShape(tp=2, pp=2), layers=(3, 1)),
    interleaved(MeshShape(pp=2, dp=2), layers=(1, 3, 1, 2)),
    Run(MeshShape(pp=4, tp=2), layers=(1, 1, 2, 1)),
    Run(MeshShape(dp=2, ep=2, tp=2)),
]
# Weight gradients by themselves, with everything that their operands depend on.
SPLIT = [
    Run(MeshShape(pp=2), schedule="zb-h1"),
    Run(MeshShape(tp=2, pp=2), schedule="zb-h1"),
    Run(MeshShape(pp=2, dp=2), 2, "zb-interleaved", shard="gradients"),
    Run(MeshShape(pp=2, dp=2), 2, "zb-interleaved", shard="parameters"),
    Run(MeshShape(pp=2, dp=2), 2, "zb-v", shard="parameters"),
    Run(MeshShape(tp=2, pp=2), 2, "zb-v", shard="optimizer"),
    Run(MeshShape(pp=3, dp=2), 3, "zb-interleaved", activations=Activations("selective", True), shard="parameters"),
    Run(MeshShape(pp=4, tp=2), schedule="zb-h1", activations=Activations("full")),
    Run(MeshShape(pp=2), 2, "zb-v", activations=(Activations("selective", True), Activations("full"))),
    Run(MeshShape(tp=2, pp=2), 2, "dualpipe-v", shard="optimizer"),
    Run(MeshShape(pp=2, dp=2), 2, "dualpipe-v", activations=Activations("full"), shard="parameters"),
    Run(MeshShape(pp=4), 2, "dualpipe-v", shard="gradients"),
]
# Orders that are searched for, and groups of other sizes than the schedule's own.
ORDERS = [
    interleaved(MeshShape(tp=2, pp=2), group=4),
    Run(MeshShape(tp=2, pp=2), 2, "zb-interleaved", shard="gradients", group=4),
    Run(MeshShape(pp=4), drawn=1),
    Run(MeshShape(pp=3, dp=2), 3, "interleaved", shard="gradients", drawn=2),
    Run(MeshShape(pp=4), schedule="zb-h1", activations=Activations("full"), drawn=3),
    Run(MeshShape(tp=2, pp=2), 2, "zb-v", drawn=4),
    Run(MeshShape(pp=2, dp=2), 3, "zb-interleaved", shard="parameters", drawn=5),
]
# A case of each family everywhere; the other cases on layouts of each kind.
EVERYWHERE = (UNTIED, TIED_ENDS)
ELSEWHERE = ("tp2-pp2-dp2", "tp4-pp2-v2", "tp4", "tp2-pp4", "pp4-dp2-v2", "tp4-dp2")
QUICK = ("tp2-pp2-dp2", "tp4-pp2-v2")
# Layouts of each kind; each family meets every second one with packed documents.
OF_FAMILIES = [
    Run(MeshShape(tp=4)),  # kv heads shared
    Run(MeshShape(tp=2, pp=2, dp=2)),
    interleaved(MeshShape(tp=4, pp=2)),
    interleaved(MeshShape(pp=2, dp=2), layers=(1, 3, 1, 2)),
    Run(MeshShape(tp=2, dp=2), shard="parameters"),
    Run(MeshShape(tp=2, pp=2, dp=2), shard="parameters", activations=Activations("selective"), loss_chunk=5),
    Run(MeshShape(tp=2, pp=4)),
    Run(MeshShape(dp=2, ep=2, tp=2), shard="gradients", activations=Activations("full")),
]


# -- the rungs of data parallelism, what is kept of a forward, and what lives elsewhere

LADDER: list[Pair] = [
    (UNTIED, Run(MeshShape(dp=2))),
    (TIED_ENDS, Run(MeshShape(dp=4))),
    (TIED, Run(MeshShape(tp=4))),  # shared kv heads; without dp the ranks share out the norms
    (UNTIED, Run(MeshShape(tp=2, dp=2), micro=2)),
    (TIED, Run(MeshShape(tp=4, dp=2))),
    (TIED_ENDS, Run(MeshShape(pp=2, dp=2))),
    (TIED_ENDS, interleaved(MeshShape(dp=2))),  # a tied table in two chunks of one rank
    (TIED, interleaved(MeshShape(pp=2, dp=2))),
    (UNTIED, Run(MeshShape(pp=2, dp=2), schedule="gpipe")),
    (TIED, Run(MeshShape(tp=2, pp=2, dp=2))),
    (TIED_ENDS, Run(MeshShape(pp=4, dp=2))),
    (UNTIED, Run(MeshShape(dp=2, ep=2, tp=2))),
    (UNTIED, Run(MeshShape(dp=4), replicas=2)),
    (TIED_ENDS, Run(MeshShape(pp=2, dp=4), replicas=2)),
    (TIED, Run(MeshShape(tp=2, dp=4), replicas=2)),
    (UNTIED, Run(MeshShape(dp=2), replicas=2)),  # groups of one
]
RECOMPUTED = [
    interleaved(MeshShape(pp=2, dp=2), shard=shard, activations=activations, loss_chunk=5)
    for shard in SHARDED
    for activations in (Activations("full"), Activations("selective", True))
]
OFFLOADED: list[Pair] = [
    (TIED, Run(MeshShape(tp=4), offload=FILE)),  # spans with gaps
    (TIED_ENDS, Run(MeshShape(pp=2, dp=2), shard="optimizer", offload=HOST)),
    (TIED, Run(MeshShape(tp=2, pp=2, dp=2), shard="gradients", offload=FILE)),
    (UNTIED, Run(MeshShape(tp=2, dp=4), replicas=2, shard="parameters", offload=FILE)),
    (TIED, Run(MeshShape(tp=4, dp=2), shard="parameters", offload=HOST, offload_parameters=True)),
    (TIED_ENDS, interleaved(MeshShape(pp=2, dp=2), shard="parameters", offload=FILE, offload_parameters=True)),
    (UNTIED, Run(MeshShape(), shard="parameters", offload=HOST, offload_parameters=True)),
]
KEPT = [
    Activations("selective"),
    Activations("full"),
    Activations("none", offload=True),
    Activations("selective", offload=True),
    Activations("full", offload=True),
]
OF_STAGES = Activations("full"), Activations(offload=True), Activations("selective"), Activations()
OF_MEMORY = [
    Run(),
    Run(MeshShape(tp=2)),
    Run(MeshShape(dp=2)),
    interleaved(MeshShape(pp=2)),
    Run(MeshShape(tp=2, pp=2)),
]
LOSS_CHUNKS = [
    replace(run, loss_chunk=chunk, activations=kept)
    for run, chunk, kept in zip(OF_MEMORY, (5, 4, 12, 7, 100), [Activations(), *KEPT[:2], *KEPT[3:]], strict=True)
]
MLP_CHUNKS = [
    Run(activations=Activations(mlp_chunk=5)),
    Run(MeshShape(tp=2), micro=2, activations=Activations("full", mlp_chunk=7)),
    Run(MeshShape(tp=2, dp=2), shard="parameters", activations=Activations("selective", mlp_chunk=4)),
    Run(MeshShape(dp=2), shard="gradients", micro=2, activations=Activations("full", offload=True, mlp_chunk=5)),
    Run(MeshShape(tp=2, pp=2), loss_chunk=5, activations=Activations(mlp_chunk=8)),
    Run(MeshShape(cp=2), micro=2, activations=Activations("full", mlp_chunk=5)),
]
SIDE_BY_SIDE = Case("gptj", drawn("gptj", 3, vocab=101), ignored=0.3, documents=True)
ADAPTED = replace(TIED, name="lora", tuning=Tuning(Lora(3, 2.0, ("*",))))


# -- adapters, and what is frozen

EACH = Tuning(Lora(4, 8.0, ("*",)))
MIXTRAL = drawn("mixtral", 1)
ALL = Case("lora-all", LLAMA, ignored=0.3, tuning=EACH)
SOME = Case(
    "lora-some", LLAMA | BIASES | TIES, tuning=Tuning(Lora(3, 2.0, ("q_proj", "attn.qkv.v", "mlp"), rslora=True))
)
CONV = Case("lora-gpt2", GPT2 | NO_DROPOUT, tuning=Tuning(Lora(2, 4.0, ("attn", "c_fc"))))
ENDS = Case("freeze-first", LLAMA, tuning=Tuning(freeze=("embed", "layers.0", "layers.1.mlp")))
ONLY = Case("only-attention", GPT2 | NO_DROPOUT, tuning=Tuning(only=("attn", "embed", "norm"), freeze=("attn.*.bias",)))
MIDDLE = Case("only-middle", LLAMA | TIES, tuning=Tuning(only=("layers.1",)))
MIXED_LORA = Case("lora-experts", MIXTRAL, ignored=0.3, tuning=EACH)
DOWN = Case("lora-down", MIXTRAL, tuning=Tuning(Lora(3, 2.0, ("experts.down", "router"))))
ROUTERS = Case("only-routers", MIXTRAL, tuning=Tuning(only=("router", "experts"), freeze=("experts.down",)))
TUNED = [ALL, SOME, CONV, ENDS, ONLY, MIDDLE, MIXED_LORA, DOWN, ROUTERS]
TUNED_FAMILIES = [
    # Of zamba2's other draw a change of one bit changes gradients by 4e-8.
    Case(f"lora-{name}-drawn", drawn(name, 5 if name == "zamba2" else 2), sequences=2, tuning=EACH)
    for name in FAMILIES
]

TUNING_RUNS = {
    "tp": Run(MeshShape(tp=4)),  # kv heads shared
    "interleaved": interleaved(MeshShape(pp=2, tp=2)),
    "full": Run(MeshShape(pp=2, dp=2), activations=Activations("full")),
    "optimizer": Run(MeshShape(tp=2, dp=2), shard="optimizer"),
    "gradients": Run(MeshShape(pp=2, dp=2), shard="gradients"),
    "parameters": Run(MeshShape(tp=2, pp=2, dp=2), shard="parameters"),
    "offload": Run(MeshShape(dp=2), shard="parameters", activations=Activations("selective", True)),
    "parameters-full": interleaved(
        MeshShape(pp=2, dp=2), activations=Activations("full"), shard="parameters", loss_chunk=5
    ),
    "folded": Run(MeshShape(ep=2, tp=2), shard="parameters"),
    "features": Run(MeshShape(ep=2, tp=2), etp=True, activations=Activations("full")),
}
# Each case on layouts of the kinds that it could break on.
TUNING: list[Pair] = [
    (case, TUNING_RUNS[name])
    for case, names in (
        (ALL, [name for name in TUNING_RUNS if name not in ("folded", "features")]),
        (SOME, ("tp", "interleaved", "parameters")),
        (CONV, ("tp", "interleaved", "gradients", "parameters")),
        (ENDS, ("tp", "interleaved", "optimizer", "parameters-full")),
        (ONLY, ("tp", "full", "parameters")),
        (MIXED_LORA, ("folded", "features", "parameters-full")),
        (DOWN, ("features",)),
        (ROUTERS, ("folded",)),
        (MIDDLE, ("full", "gradients", "parameters")),  # a stage of which nothing is trained
    )
    for name in names
]

# Blocks of 64 inputs, which four ranks of tp cut between them.
WIDE = LLAMA | {"hidden_size": 64, "intermediate_size": 256, "head_dim": 32}
WIDE_EXPERTS = WIDE | {"family": "mixtral", "num_local_experts": 4, "intermediate_size": 128}
NF4 = Case("nf4", WIDE, ignored=0.3, tuning=Tuning(Lora(4, 8.0, ("*",), base_dtype="nf4")))
INT8 = Case("int8", WIDE | TIES | {"intermediate_size": 256}, tuning=Tuning(Lora(3, 2.0, ("attn",), base_dtype="int8")))
NF4_EXPERTS = Case("nf4-experts", WIDE_EXPERTS, tuning=Tuning(Lora(3, 2.0, ("attn", "experts.down"), base_dtype="nf4")))
STATES = {"hidden_size": 128, "intermediate_size": 128, "mamba_n_heads": 8, "mamba_expand": 2}
NF4_STATES = Case(
    "nf4-bamba",
    drawn("bamba", 1, vocab=101) | STATES,
    documents=True,
    tuning=Tuning(Lora(3, 2.0, ("*",), base_dtype="nf4")),
)
QUANTISED: list[Pair] = [
    (NF4_STATES, Run(MeshShape(tp=2, pp=2), shard="parameters")),
    (NF4_STATES, Run(MeshShape(cp=2, dp=2), shard="parameters")),
    (NF4, Run(MeshShape(tp=2))),
    (NF4, Run(MeshShape(tp=4), shard="parameters")),  # kv heads shared: pieces of bytes
    (NF4, Run(MeshShape(cp=2, pp=2), schedule="zb-h1")),
    (NF4, interleaved(MeshShape(pp=2, dp=2), shard="parameters", activations=Activations("full"))),
    (NF4, Run(MeshShape(tp=2, dp=2), shard="parameters", offload_parameters=True)),
    (INT8, Run(MeshShape(tp=4))),
    (INT8, Run(MeshShape(dp=2), shard="optimizer", activations=Activations("selective", True, mlp_chunk=5))),
    (INT8, Run(MeshShape(tp=2, pp=2), shard="gradients")),
    (INT8, Run(MeshShape(cp=2, dp=2), shard="parameters", replicas=2)),
    (NF4_EXPERTS, Run(MeshShape(ep=2, tp=2), shard="parameters")),
    (NF4_EXPERTS, Run(MeshShape(ep=2, tp=2), etp=True, activations=Activations("full"))),
]


# -- experts

MIXED = [name for name in FAMILIES if configure(drawn(name)).anatomy.routing is not None]
SIGMOID = {"top_k": 2, "score": "sigmoid", "normalised": True, "epsilon": 1e-20, "factor": 2.5}
GROUPS = SIGMOID | {"top_k": 3, "groups": 4, "kept_groups": 2, "group_score": "top2"}
AFTERWARDS = {"top_k": 2, "weigh": "chosen"}
EXPERTS = LLAMA | {
    "family": "extended",
    "experts": [1, 0, 1],
    "expert_size": 10,
    "shared_expert": True,
    "correction": True,
    "routing": SIGMOID,
}
SEQUENCE = Coefficients(sequence=0.05, z_loss=1e-2, bias_rate=1e-2)
BATCH = Coefficients(batch=0.05, z_loss=1e-2, bias_rate=1e-2)

STARVED = Case("starved-12", EXPERTS, 12, ignored=0.3, padded=True, coefficients=SEQUENCE, starved=True)
GROUPED = Case(
    "grouped",
    EXPERTS | {"routing": GROUPS, "windows": [3, 0, 5], "sinks": True, "norms": True, "tie_word_embeddings": True},
    12,
    documents=True,
    padded=True,
    coefficients=BATCH,
)
FEW_EXPERTS = Case("few", EXPERTS | {"experts": [1, 0, 0]}, 12, ignored=0.3, coefficients=BATCH)  # a stage has none
BIASED_EXPERTS = Case(
    "side-by-side",
    EXPERTS | {"routing": AFTERWARDS, "expert_bias": True, "parallel": True},
    12,
    coefficients=SEQUENCE,
)
EXPERT_MESHES = [
    (MeshShape(ep=2), False),
    (MeshShape(ep=4), False),
    (MeshShape(ep=2, tp=2), False),
    (MeshShape(tp=2), False),
    (MeshShape(tp=2), True),
    (MeshShape(ep=2, tp=2), True),
    (MeshShape(pp=2, ep=2), False),
    (MeshShape(dp=2, ep=2), False),
    (MeshShape(ep=2, tp=2, pp=2), False),
    (MeshShape(ep=2, tp=4), False),
    (MeshShape(tp=4, dp=2), True),  # parts of experts are padded
]
# With three sequences the ranks of tp=2 share one.
THREE_EACH = Run(MeshShape(tp=2, ep=2), micro=3)
OF_EXPERTS: list[Pair] = [
    (STARVED, replace(THREE_EACH, activations=Activations("full"))),
    (FEW_EXPERTS, Run(MeshShape(pp=2, ep=2), schedule="gpipe", micro=3)),
    (STARVED, replace(THREE_EACH, etp=True, activations=Activations("selective"), shard="parameters")),
]


# -- a context over many ranks

FEW_LABELS = Case("few-labels", LLAMA | TIES, ignored=0.85)
ODD_ROWS = Case("odd-rows", LLAMA, 16, ignored=0.3, documents=True, length=11)
BUILT_PARTS = Case("parts", LLAMA | PARTS, ignored=0.3, documents=True)
NOTHING_COUNTS = Case("nothing-counts", LLAMA, ignored=1.0)
OVER_CP = (
    FEW_LABELS,
    ODD_ROWS,
    BUILT_PARTS,
    Case("parts-rows", LLAMA | PARTS, ignored=0.3, label_smoothing=0.1, z_loss=1e-2),
    Case("positions", GPT2 | NO_DROPOUT, documents=True, tuning=Tuning(freeze=("layers.1",))),
    Case("lora", LLAMA, ignored=0.3, documents=True, tuning=EACH),
    Case("padded", LLAMA, ignored=0.3, documents=True, padded=True, tuning=ENDS.tuning),
    NOTHING_COUNTS,
)
# Features whose products are of all magnitudes: only what is tiny beside the largest depends on the scale.
FP8 = Case("fp8", LLAMA | {"intermediate_size": 320}, ignored=0.3, documents=True, fp8=True)
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}
SHORT = Case("dynamic", LLAMA | DYNAMIC | {"max_position_embeddings": 8}, ignored=0.3, length=16)
MIXED_OVER_CP = (
    Case("starved", EXPERTS, ignored=0.3, padded=True, coefficients=SEQUENCE, starved=True),
    Case("groups", EXPERTS | {"routing": GROUPS}, ignored=0.3, documents=True, coefficients=BATCH),
    Case("experts-lora", EXPERTS, documents=True, coefficients=SEQUENCE, tuning=EACH, padded=True),
)
CP_MESHES = [
    (MeshShape(cp=cp, **others), False)
    for cp, others in (
        (2, {}),
        (4, {}),
        (2, {"tp": 2}),
        (4, {"tp": 2}),
        (2, {"pp": 2}),
        (2, {"dp": 2}),
        (2, {"tp": 2, "pp": 2}),
        (2, {"tp": 4}),
        (4, {"dp": 2}),
        (2, {"pp": 2, "dp": 2}),
        (4, {"pp": 2}),
        (2, {"tp": 2, "dp": 2}),
    )
]
CP_EXPERT_MESHES = [
    (MeshShape(cp=2, ep=2), False),
    (MeshShape(cp=4, ep=2), False),
    (MeshShape(cp=2, ep=2, tp=2), False),
    (MeshShape(cp=2, ep=2, tp=2), True),
    (MeshShape(cp=2, tp=2), True),
    (MeshShape(cp=2, ep=2, pp=2), False),
    (MeshShape(cp=2, ep=2, dp=2), False),
]
CONTEXTS: list[Pair] = [
    (FEW_LABELS, Run(MeshShape(cp=4), balance="rows", micro=2, shard="gradients")),
    (ODD_ROWS, Run(MeshShape(cp=4), exchange="gather", micro=4)),
    (BUILT_PARTS, Run(MeshShape(cp=4), micro=2)),
    (BUILT_PARTS, Run(MeshShape(cp=8), balance="auto", micro=4)),
    (BUILT_PARTS, Run(MeshShape(cp=4), exchange="heads", heads=4)),
    (NOTHING_COUNTS, Run(MeshShape(cp=2))),
    (SHORT, Run(MeshShape(cp=2, tp=2), balance="rows")),
    (FP8, Run(MeshShape(cp=4), micro=2)),
    (FP8, Run(MeshShape(cp=2, tp=2), exchange="heads", heads=2, balance="rows", activations=Activations("full"))),
    (MIXED_OVER_CP[0], Run(MeshShape(cp=2, tp=2), micro=2, activations=Activations("full"))),
]
# Experts of their own rows' scales, whose weights have one of each expert.
FP8_EXPERTS = Case(
    "fp8-experts",
    EXPERTS | {"experts": [1, 1, 1], "expert_size": 48, "intermediate_size": 320, "expert_bias": True},
    8,
    ignored=0.3,
    documents=True,
    fp8=True,
)
OF_FP8_EXPERTS: list[Pair] = [
    (FP8_EXPERTS, Run(MeshShape(ep=2, tp=2), etp=True, micro=2, activations=Activations("full"))),
    (FP8_EXPERTS, Run(MeshShape(ep=2, tp=2), micro=2, shard="optimizer")),
    (FP8_EXPERTS, Run(MeshShape(dp=2, ep=2), micro=2, shard="parameters", activations=Activations("selective"))),
    (FP8_EXPERTS, Run(MeshShape(dp=2, tp=2), micro=2, shard="parameters", etp=True)),
    (FP8_EXPERTS, Run(MeshShape(pp=2, ep=2), schedule="zb-h1", micro=2)),
    (FP8_EXPERTS, Run(MeshShape(cp=2, ep=2), schedule="overlapped", micro=2, shard="gradients")),
    (replace(FP8_EXPERTS, name="fp8-experts-lora", tuning=EACH), Run(MeshShape(ep=2, tp=2), etp=True, micro=2)),
]
OVER_EIGHT: list[Pair] = [
    (
        BUILT_PARTS,
        Run(MeshShape(cp=8), exchange="gather", heads=2, micro=4, activations=Activations("full"), loss_chunk=5),
    ),
    (MIXED_OVER_CP[0], Run(MeshShape(cp=8), balance="rows", micro=4, shard="parameters")),
]


def of_family(name: str, seed: int, sequences: int = 4) -> tuple[Case, Case]:
    """A family, with rows and with documents in them that are not all filled; with either balance of experts."""
    section = drawn(name, seed, vocab=101)
    rows = Case(f"{name}-rows", section, sequences, ignored=0.3)
    packed = Case(f"{name}-documents", section, sequences, ignored=0.3, documents=True, padded=True)
    if name not in MIXED:
        return rows, packed
    return replace(rows, coefficients=BATCH), replace(packed, coefficients=SEQUENCE)


def run_of(case: Case, mesh: MeshShape, etp: bool, rng: Random) -> Run:
    """A run on the mesh, drawn."""
    sizes = case.config.sizes
    heads, kv = (max(1, n // mesh.tp) for n in (sizes.get("heads", 1), sizes.get("kv", sizes.get("heads", 1))))
    inner = [n for n in (1, 2, 4) if mesh.cp % n == 0 == heads % n and (kv % n == 0 or n % kv == 0)]
    within = rng.choice(inner)
    of_rank = case.sequences // mesh.data
    sizes_of_micro = (1, 2, 3, 4, 6, 8, 12)
    micro = rng.choice([n for n in sizes_of_micro if of_rank % n == 0 == n * case.length % (mesh.cp * mesh.tp)])
    pipelined = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-interleaved", "zb-v", "dualpipe-v")
    schedule = rng.choice(pipelined if mesh.pp > 1 else ("1f1b", "gpipe"))
    if case.coefficients.batch and micro < of_rank:
        schedule = "gpipe"  # the others begin the backward before all tokens are routed
    shard = rng.choice(RUNGS)
    made = Run(
        mesh,
        2 if schedule.endswith(("interleaved", "-v")) else 1,
        schedule,
        micro=micro,
        activations=Activations(rng.choice(("none", "selective", "full")), rng.random() < 0.2, rng.choice((None, 5))),
        loss_chunk=rng.choice((None, 5)),
        shard=shard,
        replicas=rng.choice((1, mesh.dp)),
        offload=rng.choice((None, None, HOST, FILE)),
        offload_parameters=shard == "parameters" and rng.random() < 0.2,
        etp=etp,
        exchange="heads" if within == mesh.cp > 1 else rng.choice(("ring", "gather")),
        balance=rng.choice(("rows", "documents", "auto")),
        heads=within,
        drawn=None if schedule == "gpipe" or mesh.pp == 1 else rng.choice((None, None, rng.randrange(1000))),
    )
    # Two draws that differ in what is not there would have one name.
    return made if mesh.cp > 1 else replace(made, balance=Run(mesh).balance)


def draw(name: str, cases: Sequence[Case], meshes: Iterable[tuple[MeshShape, bool]], rounds: int = 1) -> Iterator[Pair]:
    """Yield runs on meshes in turn, each of them of one of the cases."""
    turns = [(mesh, each) for each in range(rounds) for mesh in meshes]
    for at, ((mesh, etp), turn) in enumerate(turns):
        case = cases[(at + turn) % len(cases)]
        yield case, run_of(case, mesh, etp, Random(f"{name} {at}"))


# -- global batches that ranks cannot share out evenly


def of(case: Case, sequences: int) -> Case:
    return replace(case, name=f"{case.name.removesuffix('-12')}-{sequences}", sequences=sequences)


FOUR, EIGHT, SEVEN, TWO = (of(UNTIED, sequences) for sequences in (4, 8, 7, 2))
UNEVEN_ENDS, UNEVEN_PACKED = of(TIED, 4), of(replace(DOCUMENTS, padded=True), 5)
BALANCED, TOGETHER = of(STARVED, 8), of(GROUPED, 7)
THREE, STAGES, CONTEXT_OF_THREE = MeshShape(dp=3), MeshShape(pp=2, dp=3), MeshShape(cp=2, dp=3)
UNEVEN: list[Pair] = [
    (FOUR, Run(THREE)),
    (EIGHT, Run(THREE, shard="parameters")),
    (SEVEN, Run(THREE, micro=2, shard="gradients")),  # one row of the second round, and two ranks without any
    (SEVEN, Run(micro=4)),
    (UNEVEN_ENDS, interleaved(STAGES, shard="gradients")),
    (UNEVEN_PACKED, Run(CONTEXT_OF_THREE, shard="optimizer")),
    (BALANCED, Run(MeshShape(ep=2, dp=3), shard="gradients")),
    (BALANCED, Run(micro=3)),
    (TOGETHER, Run(THREE, schedule="gpipe", micro=2)),
]
UNEVEN_RUNGS: list[Pair] = [
    (case, replace(run, shard=rung))
    for rung in RUNGS
    for case, run in (
        *((case, Run(THREE)) for case in (FOUR, EIGHT, TWO)),
        (SEVEN, Run(THREE, micro=2)),
        (UNEVEN_ENDS, interleaved(STAGES)),
        (EIGHT, Run(STAGES, schedule="gpipe")),
        (UNEVEN_PACKED, Run(CONTEXT_OF_THREE, micro=2, balance="auto")),
        (UNEVEN_PACKED, Run(CONTEXT_OF_THREE, exchange="heads", heads=2)),
        (BALANCED, Run(MeshShape(ep=2, dp=3))),
        (TOGETHER, Run(MeshShape(ep=2, dp=3), micro=2)),
        (BALANCED, Run(MeshShape(tp=2, dp=3), micro=2, etp=True)),
        (BALANCED, Run(CONTEXT_OF_THREE)),
        (UNEVEN_ENDS, Run(MeshShape(tp=2, dp=3), loss_chunk=5)),
    )
]
UNEVEN_OTHERS: list[Pair] = [
    (EIGHT, Run(THREE, shard="parameters", replicas=3)),
    (EIGHT, Run(THREE, shard="parameters", offload=HOST, offload_parameters=True)),
    (EIGHT, Run(THREE, shard="gradients", activations=Activations("full", True))),
    (BALANCED, Run(MeshShape(dp=2), micro=3, activations=Activations("selective"))),
    (SEVEN, Run(MeshShape(tp=4, dp=2))),
]


# -- matrices that are updated as wholes


def by_muon(case: Case) -> Case:
    return replace(case, name=f"{case.name}-muon", muon=Muon())


WHOLE, WHOLE_TIED, WHOLE_EXPERTS = by_muon(UNTIED), by_muon(TIED), by_muon(STARVED)
BY_MUON: list[Pair] = [
    (WHOLE, interleaved(MeshShape(pp=2, tp=2))),
    (WHOLE, Run(MeshShape(dp=4), replicas=2, shard="optimizer")),
    (WHOLE, Run(MeshShape(tp=2, pp=2), schedule="zb-h1")),
    (WHOLE, Run(MeshShape(cp=2, tp=2), shard="gradients")),
    (WHOLE, Run(MeshShape(dp=2, ep=2, tp=2), shard="parameters", offload_parameters=True)),
    (WHOLE_TIED, Run(MeshShape(tp=4, dp=2), shard="parameters")),  # shared kv heads, padded features
    (WHOLE_TIED, Run(MeshShape(tp=4))),
    (WHOLE_TIED, interleaved(MeshShape(pp=2, dp=2), shard="gradients")),
    (WHOLE_EXPERTS, Run(MeshShape(ep=2, tp=2), micro=3, shard="gradients")),
    (WHOLE_EXPERTS, Run(MeshShape(ep=2, tp=2), micro=3, etp=True, shard="parameters")),
    (WHOLE_EXPERTS, Run(MeshShape(pp=2, ep=2, dp=2))),
]
OTHERS_BY_MUON: list[Pair] = [
    (by_muon(cases[0]), OF_FAMILIES[at]) for cases in DRAWN for at in range(0, len(OF_FAMILIES), 2)
]


# -- layers that predict further tokens


def ahead(name: str, seed: int, depth: int, **own: Any) -> Case:
    section = drawn(name, seed, vocab=101, num_nextn_predict_layers=depth)
    return Case(f"mtp-{name}", section, ignored=0.3, mtp=0.3, **own)


FURTHER = [
    ahead("deepseek_v3", 1, 2, documents=True, padded=True, coefficients=SEQUENCE),
    ahead("glm4_moe", 2, 1, documents=True),
    ahead("qwen3_next", 0, 1),
    ahead("qwen3_5_moe_text", 2, 1, documents=True),
    ahead("mimo_v2_flash", 1, 2, documents=True),
    ahead("deepseek_v32", 1, 1, documents=True),
]
OF_FURTHER: list[Pair] = [
    (case, run)
    for run in (
        Run(MeshShape(cp=2, pp=2)),
        Run(MeshShape(tp=2, ep=2), etp=True, shard="parameters"),
        interleaved(MeshShape(pp=2, dp=2), shard="parameters", activations=Activations("full")),
        Run(MeshShape(tp=2, cp=2), shard="gradients", activations=Activations("selective", True), loss_chunk=5),
        Run(MeshShape(tp=2, pp=2), schedule="zb-h1"),
        Run(MeshShape(pp=2, dp=2), 2, "zb-interleaved", shard="parameters"),
        Run(MeshShape(pp=2, tp=2), 2, "zb-v"),
        interleaved(MeshShape(dp=2), shard="optimizer"),
        Run(MeshShape(cp=4, ep=2), micro=2, balance="auto"),
    )
    for case in FURTHER
]

# -- layers that look at what the indexer of another one chooses


SHARED = Case(
    "shared-indexers",
    drawn("glm_moe_dsa", 3, vocab=101, index_topk=3, indexer_types=["full", "shared", "shared", "full", "shared"]),
    ignored=0.3,
    documents=True,
    padded=True,
)
OF_SHARED: list[Pair] = [
    (SHARED, Run(MeshShape(tp=2, cp=2), micro=2, activations=Activations("full"))),
    (SHARED, Run(MeshShape(pp=2, dp=2), layers=(3, 2), shard="parameters", activations=Activations("full"))),
    (SHARED, Run(MeshShape(tp=2, pp=2), schedule="zb-h1", layers=(3, 2))),
]

# -- layers that look at the keys and values of one before them, and are told of tokens by themselves

INPUTS = {
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 97,  # padded, and below the vocabulary
    "num_kv_shared_layers": 2,
}
KEYS = Case(
    "shared-keys",
    drawn(
        "gemma4_text",
        3,
        layers=6,
        vocab=101,
        **INPUTS,
        enable_moe_block=False,
        use_double_wide_mlp=True,
        layer_types=["sliding_attention", "full_attention"] * 3,
    ),
    ignored=0.3,
    documents=True,
)
OF_KEYS: list[Pair] = [
    (KEYS, Run(MeshShape(tp=2, cp=2), layers=(6,), micro=2, activations=Activations("full"))),
    (KEYS, Run(MeshShape(pp=2, dp=2), layers=(2, 4), shard="parameters", activations=Activations("full", True))),
    (
        KEYS,
        Run(
            MeshShape(pp=3, tp=2),
            schedule="zb-h1",
            layers=(1, 1, 4),
            activations=Activations("selective"),
            shard="optimizer",
        ),
    ),
    (KEYS, Run(MeshShape(tp=4), layers=(6,), shard="gradients")),
    (KEYS, Run(MeshShape(pp=2, tp=2), 2, "zb-v", (0, 1, 5, 0))),
]

# -- and of which several streams are predicted and corrected, and most gates cut off

STREAMS = replace(
    KEYS,
    name="alt-up",
    model=drawn(
        "gemma3n_text",
        3,
        layers=6,
        vocab=101,
        **INPUTS,
        layer_types=KEYS.model["layer_types"],
        intermediate_size=30,  # padded
        altup_num_inputs=3,
        altup_active_idx=1,
        altup_coef_clip=0.02,
        activation_sparsity_pattern=[0.9, 0.3, 0.0, 0.0, 0.5, 0.9],
    ),
)
OF_STREAMS: list[Pair] = [
    (STREAMS, Run(MeshShape(tp=2, cp=2), layers=(6,), micro=2, activations=Activations("full", mlp_chunk=3))),
    (
        STREAMS,
        Run(MeshShape(pp=2, dp=2), layers=(2, 4), shard="parameters", activations=Activations("selective", True)),
    ),
    (STREAMS, Run(MeshShape(pp=3, tp=2), schedule="zb-h1", layers=(1, 1, 4), shard="optimizer")),
    (STREAMS, Run(MeshShape(tp=4), layers=(6,), activations=Activations("selective"), shard="gradients")),
    (STREAMS, Run(MeshShape(pp=2, tp=2), 2, "zb-v", (0, 1, 5, 0))),
]

# -- and whose blocks several layers share, of one stage or of some

BLOCKS = Case(
    "shared-blocks",
    drawn(
        "zamba2",
        3,
        layers=6,
        vocab=101,
        layers_block_type=["hybrid", "linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
        num_mem_blocks=2,
    ),
    documents=True,
)
OF_BLOCKS: list[Pair] = [
    (BLOCKS, Run(MeshShape(tp=2, cp=2), layers=(6,), micro=2, activations=Activations("full", mlp_chunk=3))),
    (BLOCKS, Run(MeshShape(pp=4, dp=2), layers=(1, 2, 2, 1), shard="parameters", activations=Activations("selective"))),
    (BLOCKS, Run(MeshShape(pp=3, tp=2), schedule="zb-h1", layers=(1, 1, 4), shard="optimizer")),
    (by_muon(BLOCKS), Run(MeshShape(pp=4, dp=2), layers=(2, 1, 1, 2), shard="gradients")),
    (BLOCKS, Run(MeshShape(pp=2, tp=2), 2, "zb-v", (1, 2, 2, 1))),
    (
        replace(BLOCKS, name="lora-shared-blocks", tuning=Tuning(Lora(3, 2.0, ("attn", "mlp", "join")))),
        Run(MeshShape(pp=2, dp=2), layers=(3, 3), shard="parameters"),
    ),
]

# -- forwards and backwards in turns


def overlapped(mesh: MeshShape, chunks: int = 1, recompute: Recompute = "none", **others: Any) -> Run:
    return Run(mesh, chunks, "overlapped", activations=Activations(recompute, recompute == "selective"), **others)


OVERLAPPED: list[Pair] = [
    (STARVED, overlapped(MeshShape(ep=2))),
    (BIASED_EXPERTS, overlapped(MeshShape(ep=2), 2, "full", shard="gradients")),
    (BIASED_EXPERTS, overlapped(MeshShape(pp=2, ep=2), 1, "selective", shard="optimizer")),
    (STARVED, overlapped(MeshShape(pp=2, ep=2), shard="parameters")),
    (STARVED, overlapped(MeshShape(ep=4), 2, "full", shard="parameters")),
    (STARVED, overlapped(MeshShape(pp=2, ep=2, tp=2), 2, "full")),
    (BIASED_EXPERTS, overlapped(MeshShape(ep=2, tp=2), 1, "selective", etp=True, shard="parameters")),
    (MIXED_LORA, overlapped(MeshShape(pp=2, ep=2), shard="parameters")),
    (FURTHER[0], overlapped(MeshShape(pp=2, ep=2), 2, shard="parameters")),
    (FURTHER[1], overlapped(MeshShape(cp=2, ep=2, tp=2), micro=1, balance="auto")),
    (STARVED, DUALPIPE := replace(overlapped(MeshShape(pp=2, ep=2), 2), schedule="dualpipe-v", micro=1)),
    (BIASED_EXPERTS, replace(DUALPIPE, mesh=MeshShape(pp=2, ep=2, tp=2), etp=True, shard="gradients")),
    (STARVED, replace(DUALPIPE, activations=Activations("full"), shard="parameters")),
    (MIXED_LORA, replace(DUALPIPE, activations=Activations("selective", True), shard="parameters")),
    (FURTHER[0], replace(DUALPIPE, shard="parameters")),
    (FURTHER[1], replace(DUALPIPE, mesh=MeshShape(pp=2, cp=2, ep=2), balance="auto", shard="optimizer")),
]

# -- ends of the model that are alone in their virtual stage

ENDS_OF_4, ENDS_OF_8 = (0, 2, 1, 0), (0, *[1] * 6, 0)
BARE_ENDS: list[Pair] = [
    (UNTIED, interleaved(MeshShape(pp=2, tp=2), layers=ENDS_OF_4)),
    (TIED, interleaved(MeshShape(pp=2, dp=2), layers=ENDS_OF_4, shard="parameters", loss_chunk=5)),
    (TIED_ENDS, interleaved(MeshShape(pp=4, dp=2), layers=ENDS_OF_8, shard="optimizer")),
    (TIED, Run(MeshShape(pp=2, tp=2), 2, "zb-interleaved", ENDS_OF_4)),
    (UNTIED, Run(MeshShape(pp=2, dp=2), 2, "zb-interleaved", ENDS_OF_4, shard="parameters")),
    (TIED, Run(MeshShape(pp=4, tp=2), 2, "zb-interleaved", ENDS_OF_8, activations=Activations("full"))),
    (DOCUMENTS, interleaved(MeshShape(), layers=(0, 3), activations=Activations("selective", True))),
    (TIED, Run(MeshShape(pp=2, tp=2), 2, "zb-v", ENDS_OF_4)),
    (UNTIED, Run(MeshShape(pp=4, tp=2), 2, "zb-v", ENDS_OF_8, activations=Activations("full"))),
    (TIED, Run(MeshShape(pp=2, tp=2), layers=(0, 3))),  # a stage without a layer
    (UNTIED, Run(MeshShape(pp=2, dp=2), 1, "zb-h1", (3, 0), shard="gradients")),
    (TIED, Run(MeshShape(pp=2, dp=2), layers=(3, 0), shard="parameters", offload=FILE, offload_parameters=True)),
    (ALL, interleaved(MeshShape(pp=2, tp=2), layers=ENDS_OF_4)),
    (ALL, Run(MeshShape(pp=2, dp=2), layers=(3, 0), shard="parameters")),  # and nothing to train
    (STARVED, Run(MeshShape(pp=2, ep=2), layers=(0, 3), micro=3)),
    (WHOLE_TIED, interleaved(MeshShape(pp=2, dp=2), layers=ENDS_OF_4, shard="gradients")),
    (FURTHER[1], interleaved(MeshShape(pp=2, tp=2), layers=(0, 3, 2, 0))),  # a head behind which more is predicted
]


# -- all of them


def table() -> Iterator[tuple[int, Iterable[Pair]]]:
    """Yield (one in how many has its turn, pairs)."""
    yield 36, [(case, run) for case in CASES for run in RUNS if case in EVERYWHERE or str(run) in ELSEWHERE]
    yield 12, [(case, run) for case in (UNTIED, TIED) for run in (*SPLIT, *ORDERS)]
    yield 160, [(cases[at % 2], run) for cases in DRAWN for at, run in enumerate(OF_FAMILIES)]
    yield 6, [(case, OF_FAMILIES[at]) for case in BUILT for at in (0, 5)]
    yield 24, [(case, replace(run, shard=shard)) for case, run in LADDER for shard in SHARDED]
    yield 8, [(TIED, run) for run in RECOMPUTED]
    yield 6, OFFLOADED
    yield 8, [(case, run) for case in (UNTIED, TIED) for run in LOSS_CHUNKS]
    yield 18, [(case, run) for case in (TIED, SIDE_BY_SIDE, ADAPTED) for run in MLP_CHUNKS]
    yield 24, TUNING
    yield 16, QUANTISED
    yield 84, [(case, TUNING_RUNS["tp"]) for case in TUNED_FAMILIES]
    yield 12, OF_EXPERTS
    yield 96, draw("extended", (STARVED, GROUPED), EXPERT_MESHES, 3)
    yield 96, draw("extended again", (FEW_EXPERTS, BIASED_EXPERTS), EXPERT_MESHES, 3)
    for seed, name in enumerate(MIXED):
        yield 240, draw(f"{name} 12", of_family(name, seed, 12), EXPERT_MESHES, 2)
    yield 12, CONTEXTS
    yield 36, OVER_EIGHT
    yield 7, OF_FP8_EXPERTS
    yield 144, draw("parts", OVER_CP, CP_MESHES, len(OVER_CP))
    yield 60, draw("experts", MIXED_OVER_CP, CP_EXPERT_MESHES, 3)
    for seed, name in enumerate(FAMILIES):
        meshes = CP_EXPERT_MESHES if name in MIXED else CP_MESHES
        yield 480, draw(name, of_family(name, seed), meshes)
    yield 6, OF_SHARED
    yield 5, OF_KEYS
    yield 5, OF_STREAMS
    yield 5, OF_BLOCKS
    yield 24, BARE_ENDS
    yield 8, UNEVEN
    yield 12, BY_MUON
    yield 332, OTHERS_BY_MUON
    yield 48, OF_FURTHER
    yield 5, OVERLAPPED
    yield 72, [*UNEVEN_RUNGS, *UNEVEN_OTHERS]


def parameters() -> list[Any]:
    """Return all pairs, each of them once and under its name. Those that follow each other, such as a family's, have
    their turns far from each other: no family waits for months."""
    made = dict[str, Any]()
    with extended():
        for turns, pairs in table():
            stride = next(n for n in count(round(turns * 0.618)) if gcd(n, turns) == 1)
            for case, run in pairs:
                marks = [pytest.mark.in_turn(turns, stride * len(made))] + [pytest.mark.quick] * (str(run) in QUICK)
                name = f"{case.name}-{run}"
                kept = made.setdefault(name, pytest.param(case, run, id=name, marks=marks))
                assert kept.values == (case, run), f"two runs are called {name}: {kept.values[1]!r} and {run!r}"
    return list(made.values())
