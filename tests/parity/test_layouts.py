"""Any layout, the same numbers: loss, gradients, norm and updated weights against one process, in float64."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from extended_family import extended
from families import ROTATION, drawn
from oracle import Case, Measured, Run, check, deep, measure, measured, relative
from pool import LARGEST, Pool

from models.registry import FAMILIES
from parallel.memory.recompute import Activations
from parallel.weights.layout import MeshShape

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
BIASES = {"attention_bias": True, "mlp_bias": True}

CASES = [
    Case("llama", LLAMA, ignored=0.3),
    Case(
        "llama-tied-biases",
        LLAMA | BIASES | {"tie_word_embeddings": True, "intermediate_size": 27, "pad_token_id": 82},  # padded
        ignored=0.3,
        label_smoothing=0.1,
        z_loss=1e-2,
    ),
    Case("gpt2", GPT2 | NO_DROPOUT),
    Case("llama-documents", LLAMA | {"pad_token_id": -3}, ignored=0.3, documents=True),
    Case("gpt2-untied-documents", GPT2 | NO_DROPOUT | {"tie_word_embeddings": False, "n_inner": 51}, documents=True),
]
# What each family draws; with another seed for each family, so that those of one kind differ in more than their kind.
DRAWN = [
    tuple(
        Case(f"{name}-drawn{'-documents' * documents}", drawn(name, seed, vocab=101), ignored=0.3, documents=documents)
        for documents in (False, True)
    )
    for seed, name in enumerate(FAMILIES)
]
MESHES = [
    MeshShape(tp=tp, pp=pp, dp=dp)
    for tp in (1, 2, 4)
    for pp in (1, 2, 4)
    for dp in (1, 2)
    if 1 < tp * pp * dp <= LARGEST
]
RUNS = [
    *(Run(mesh, chunks, "interleaved" if chunks > 1 else "1f1b") for mesh in MESHES for chunks in (1, 2)),
    Run(MeshShape(), chunks=2, schedule="interleaved"),
    Run(MeshShape(), micro=4),
    Run(MeshShape(tp=2, pp=2), schedule="gpipe", micro=2),
    Run(MeshShape(pp=2, dp=2), chunks=2, schedule="gpipe"),
    Run(MeshShape(tp=2, pp=2), layers=(3, 1)),
    Run(MeshShape(pp=2, dp=2), chunks=2, schedule="interleaved", layers=(1, 3, 1, 2)),
    Run(MeshShape(pp=4, tp=2), layers=(1, 1, 2, 1)),
    Run(MeshShape(dp=2, ep=2, tp=2)),
]
# Layouts of each kind; each family meets every second one with packed documents.
OF_FAMILIES = [
    Run(MeshShape(tp=4)),  # kv heads shared
    Run(MeshShape(tp=2, pp=2, dp=2)),
    Run(MeshShape(tp=4, pp=2), 2, "interleaved"),
    Run(MeshShape(pp=2, dp=2), 2, "interleaved", layers=(1, 3, 1, 2)),
    Run(MeshShape(tp=2, dp=2), shard="parameters"),
    Run(MeshShape(tp=2, pp=2, dp=2), shard="parameters", activations=Activations("selective"), loss_chunk=5),
    Run(MeshShape(tp=2, pp=4)),
    Run(MeshShape(dp=2, ep=2, tp=2), shard="gradients", activations=Activations("full")),
]
# A case of each family everywhere; the other cases on layouts of each kind.
EVERYWHERE = ("llama", "gpt2")
ELSEWHERE = ("tp2-pp2-dp2", "tp4-pp2-v2", "tp4", "tp2-pp4", "pp4-dp2-v2", "tp4-dp2")
QUICK = ("tp2-pp2-dp2", "tp4-pp2-v2")


@cache
def _one(pool: Pool, case: Case) -> Measured:
    return pool.run(1, measure, case, Run())[0]


PAIRS = [
    pytest.param(case, run, id=f"{case.name}-{run}", marks=[pytest.mark.quick] * (str(run) in QUICK))
    for case in CASES
    for run in RUNS
    if case.name in EVERYWHERE or str(run) in ELSEWHERE
] + [
    pytest.param(
        case := cases[at % 2],
        run,
        id=f"{case.name}-{run}",
        marks=[] if (3 * seed + ROTATION) % len(OF_FAMILIES) == at else [pytest.mark.grid],
    )
    for seed, cases in enumerate(DRAWN)
    for at, run in enumerate(OF_FAMILIES)
]


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(("case", "run"), PAIRS)
def test_layout_computes_what_one_process_computes(pool: Pool, case: Case, run: Run) -> None:
    case = deep(case, sum(run.layers) if run.layers else max(3, run.mesh.pp * run.chunks + 1))
    one = _one(pool, case)
    check(case, run, one, pool.run(run.mesh.world, measure, case, run))


PARTS = {
    "windows": [3, 0, 5],
    "local_rope": True,
    "softcap": 2.0,
    "sinks": True,
    "norms": True,
    "offset": 1.0,
    "head_bias": True,
    "intermediate_size": 27,  # padded
}


@pytest.mark.parametrize("parallel", [False, True], ids=["in-turn", "side-by-side"])
@pytest.mark.parametrize("run", [OF_FAMILIES[0], OF_FAMILIES[5]], ids=str)
def test_every_part_of_the_builder_computes_what_one_process_computes(pool: Pool, run: Run, parallel: bool) -> None:
    """All at once, sinks among them; kv heads are shared by ranks."""
    case = Case("parts", LLAMA | PARTS | {"family": "extended", "parallel": parallel}, ignored=0.3, documents=True)
    with extended():
        one = pool.run(1, measured, case, Run())[0]
        assert any("sinks" in name for name in one.gradients)
        check(case, run, one, pool.run(run.mesh.world, measured, case, run))


def test_three_steps_learn_something(pool: Pool) -> None:
    """Else equal weights would prove nothing."""
    for case in [*CASES, *(plain for plain, _ in DRAWN)]:
        one = _one(pool, case)
        assert all(relative(one.final[name], one.initial[name]) > 1e-3 for name in one.initial)
        assert all(np.linalg.norm(gradient) > 0 for gradient in one.gradients.values())
