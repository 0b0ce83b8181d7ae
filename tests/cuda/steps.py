"""Training steps of whole runs on fake CUDA tensors: the cases, and what each launches.

    .venv/bin/python tests/cuda/steps.py            # the table, beside what launches.txt says
    .venv/bin/python tests/cuda/steps.py --write    # and into launches.txt

A case has two microbatches, and a pipeline two for each stage.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from host_waits import HostWaits, WatchedGpu

from megacore.config import Config
from megacore.data.batches import Batch, BatchPairs
from megacore.models.registry import configure
from megacore.parallel.labels import IGNORE
from megacore.planning.trace import fake_cuda
from megacore.planning.trace.rank_steps import run_steps
from megacore.recipe import load
from megacore.training.trainer import Trainer

READS = frozenset({"megacore/training/states/offload.py:OffloadedStore.update"})
"""Where a step may ask the device for a number: the CPU is to update, and must know whether to and what to divide by,
and have the gradients."""
DOWNLOADS = frozenset(
    {
        "megacore/training/states/offload.py:OffloadedStore._send",
        "parallel/memory/offload.py:HostMemory.send",
        "parallel/kernels/grouped.py:start_counts",
        "megacore/training/callbacks/shard_checksums.py:ShardChecksums.on_gradients",
        *(f"parallel/gradients/reduce.py:Gradients.{name}" for name in ("read", "read_weight")),
    }
)
"""Where a step may copy to the host: gradients that the CPU updates by, activations that are kept there, how many
rows go where, whether a shard has changed, what is saved."""
ONCE = frozenset({"models/rope.py:tables"})
"""Where the first step may wait for a copy to the device: of tables that are made once."""

GPT2 = "model.family=gpt2 model.vocab_size=512 model.n_positions=32 model.n_embd=64 model.n_head=4"


@dataclass(frozen=True)
class Case:
    """A run.

    Args:
        overrides: Of a recipe that has nothing else.
        rank: Which one is traced.
        layers: Of each chunk.
        labels: The share of the tokens that have a label.
        documents: Lengths of the documents of a sequence; of preferences they are pairs.
    """

    overrides: str = ""
    rank: int = 0
    layers: int = 1
    labels: float = 1.0
    documents: tuple[int, ...] | None = None


MISTRAL = "model.preset=mistral-tiny model.sliding_window=8"
GEMMA2 = "model.preset=gemma2-tiny model.sliding_window=8"
GEMMA3 = "model.preset=gemma3_text-tiny model.sliding_window=8"
DROPS = GPT2 + " model.embd_pdrop=0.1 model.attn_pdrop=0.1 model.resid_pdrop=0.1"
LORA = "lora.rank=4"
EXPERTS = "model.preset=mixtral-tiny"
DELTA = "model.preset=qwen3_5_text-tiny"
FURTHER = "model.preset=glm4_moe-tiny model.num_nextn_predict_layers=1"
IN_FP8 = f"{EXPERTS} model.intermediate_size=96 train.precision=fp8"  # of which there is a grouped product: by 16
BALANCED = f"{EXPERTS} experts.sequence_balance=0.01 experts.z_loss=0.001"
FEW = 0.1
TEXTS = (20, 5, 7)
PAIR = (20, 12)

CASES: Mapping[str, Case] = {
    "bf16": Case(),
    "bf16, no masters": Case("optimizer.master_weights=false"),
    "bf16 moments": Case("optimizer.moments=bf16"),
    "muon": Case("optimizer.name=muon"),
    "muon, bf16 moments, fp16": Case("optimizer.name=muon optimizer.moments=bf16 train.precision=fp16"),
    "averages": Case("ema.decay=0.999"),
    "fp16": Case("train.precision=fp16"),
    "fp32": Case("train.precision=fp32"),
    "fp64": Case("train.precision=fp64"),
    "fp8": Case("train.precision=fp8", layers=2),
    "no clipping": Case("optimizer.clip=null"),
    "smoothing, z-loss": Case("loss.label_smoothing=0.1 loss.z_loss=1e-4"),
    "tied": Case("model.tie_word_embeddings=true"),
    "gpt2": Case(GPT2),
    "gpt2, dropout": Case(DROPS),
    "gpt2, dropout, full": Case(f"{DROPS} memory.recompute=full"),
    "window": Case(MISTRAL),
    "window, fp32": Case(f"{MISTRAL} train.precision=fp32"),
    "window, documents": Case(MISTRAL, documents=TEXTS),
    "window, compiled": Case(f"{MISTRAL} train.compile=true"),
    "softcap": Case(GEMMA2),
    "softcap, documents": Case(GEMMA2, documents=TEXTS),
    "softcap, compiled": Case(f"{GEMMA2} train.compile=true"),
    "norms of heads": Case(GEMMA3),
    "norms of heads, compiled": Case(f"{GEMMA3} train.compile=true"),
    "norms over heads, tp": Case("mesh.tp=2 model.preset=olmo2-tiny"),
    "delta rule": Case(DELTA),
    "delta rule, documents, full": Case(f"{DELTA} memory.recompute=full", documents=TEXTS),
    "delta rule, compiled": Case(f"{DELTA} train.compile=true"),
    "delta rule, tp, cp": Case(f"{DELTA} mesh.tp=2 mesh.cp=2", rank=2),
    "delta rule, channels, tp": Case("model.preset=kimi_linear-tiny mesh.tp=2"),
    "state space, tp": Case("model.preset=bamba-tiny mesh.tp=2"),
    "selective scan, tp": Case("model.preset=mamba-tiny mesh.tp=2"),
    "linear recurrence, tp": Case("model.preset=recurrent_gemma-tiny mesh.tp=2"),
    "linear recurrence, documents, cp": Case("model.preset=recurrent_gemma-tiny mesh.cp=2", rank=1, documents=TEXTS),
    "blocks, tp": Case("model.preset=deepseek_v4-tiny mesh.tp=2", layers=4),
    "blocks, documents, full": Case("model.preset=deepseek_v4-tiny memory.recompute=full", layers=4, documents=TEXTS),
    "short convolution": Case("model.preset=lfm2-tiny"),
    "selective": Case("memory.recompute=selective"),
    "full": Case("memory.recompute=full"),
    "activations on host": Case("memory.offload_activations=true"),
    "selective, activations on host": Case("memory.recompute=selective memory.offload_activations=true"),
    "full, activations on host": Case("memory.recompute=full memory.offload_activations=true"),
    "activations in 8 bits": Case("memory.compress_activations=true"),
    "loss chunks": Case("memory.loss_chunk=16"),
    "few labels": Case("data.sequence_length=256", labels=FEW),
    "documents": Case(documents=TEXTS),
    "documents, fp32": Case("train.precision=fp32", documents=TEXTS),
    "documents, selective": Case("memory.recompute=selective", documents=TEXTS),
    "preferences": Case("preference.loss=dpo", documents=PAIR),
    "preferences, lora, tp": Case(f"preference.loss=orpo mesh.tp=2 {LORA}", documents=PAIR),
    "lora": Case(LORA),
    "lora, dropout, full": Case(f"{LORA} lora.dropout=0.1 memory.recompute=full"),
    "lora, fp8": Case(f"{LORA} train.precision=fp8", layers=2),
    "lora, nf4": Case(f"{GPT2} {LORA} lora.base_dtype=nf4"),
    "frozen embedding": Case("train.freeze=[embed]"),
    "states on host": Case("memory.offload_optimizer=host"),
    "states on host, no masters": Case("memory.offload_optimizer=host optimizer.master_weights=false"),
    "states in a file": Case("memory.offload_optimizer=file memory.offload_folder=FOLDER"),
    "compiled": Case("train.compile=true"),
    "compiled, selective": Case("train.compile=true memory.recompute=selective"),
    "compiled, full": Case("train.compile=true memory.recompute=full"),
    "compiled, documents": Case("train.compile=true", documents=TEXTS),
    "compiled, lora": Case(f"train.compile=true {LORA}"),
    "compiled, fp8": Case("train.compile=true train.precision=fp8", layers=2),
    "dp": Case("mesh.dp=2"),
    "dp, optimizer": Case("mesh.dp=2 zero.shard=optimizer"),
    "dp, optimizer, checksums": Case("mesh.dp=2 zero.shard=optimizer recovery.checksums=0.005"),
    "dp, gradients": Case("mesh.dp=2 zero.shard=gradients"),
    "dp, parameters": Case("mesh.dp=2 zero.shard=parameters"),
    "dp, parameters, fp16": Case("mesh.dp=2 zero.shard=parameters train.precision=fp16"),
    "dp, parameters, full": Case("mesh.dp=2 zero.shard=parameters memory.recompute=full"),
    "dp, parameters, lora": Case(f"mesh.dp=2 zero.shard=parameters {LORA}"),
    "dp, parameters, compiled": Case("mesh.dp=2 zero.shard=parameters train.compile=true"),
    "dp, parameters and states on host": Case(
        "mesh.dp=2 zero.shard=parameters memory.offload_parameters=true memory.offload_optimizer=host"
    ),
    "dp, everything on host": Case(
        "mesh.dp=2 zero.shard=parameters memory.offload_parameters=true memory.offload_optimizer=host "
        "memory.offload_activations=true"
    ),
    "hsdp, optimizer": Case("mesh.dp=4 zero.replicas=2 zero.shard=optimizer"),
    "hsdp, gradients": Case("mesh.dp=4 zero.replicas=2 zero.shard=gradients"),
    "hsdp, parameters": Case("mesh.dp=4 zero.replicas=2 zero.shard=parameters"),
    "hsdp, gradients, rounded": Case("mesh.dp=4 zero.replicas=2 zero.shard=gradients zero.compress=bf16"),
    "hsdp, optimizer, 8 bits": Case("mesh.dp=4 zero.replicas=2 zero.shard=optimizer zero.compress=int8"),
    "replicas alone, gradients": Case("mesh.dp=4 sync.every=2 sync.replicas=2 zero.shard=gradients"),
    "tp": Case("mesh.tp=2"),
    "tp, shared kv heads": Case("mesh.tp=4"),
    "tp, fp8": Case("mesh.tp=2 train.precision=fp8", layers=2),
    "tp, lora": Case(f"mesh.tp=2 {LORA}"),
    "tp, full": Case("mesh.tp=2 memory.recompute=full"),
    "tp, selective": Case("mesh.tp=2 memory.recompute=selective"),
    "tp, loss chunks": Case("mesh.tp=2 memory.loss_chunk=16"),
    "tp, documents": Case("mesh.tp=2", documents=TEXTS),
    "tp, few labels": Case("mesh.tp=2 data.sequence_length=512", labels=FEW),
    "tp, compiled": Case("mesh.tp=2 train.compile=true"),
    "tp, compiled, fp8": Case("mesh.tp=2 train.compile=true train.precision=fp8", layers=2),
    "tp, async": Case("mesh.tp=2 train.async_tp=true"),
    "tp, async, gpt2": Case(f"mesh.tp=2 train.async_tp=true {GPT2}"),
    "tp, compiled, async": Case("mesh.tp=2 train.compile=true train.async_tp=true"),
    "tp, gpt2": Case(f"mesh.tp=2 {GPT2}"),
    "tp, dp, parameters": Case("mesh.tp=2 mesh.dp=2 zero.shard=parameters"),
    "tp, ep, optimizer": Case("mesh.tp=2 mesh.ep=2 zero.shard=optimizer"),
    "experts": Case(EXPERTS),
    "experts, full": Case(f"{EXPERTS} memory.recompute=full"),
    "experts, fp32": Case(f"{EXPERTS} train.precision=fp32"),
    "experts, compiled": Case(f"{EXPERTS} train.compile=true"),
    "experts, fp8": Case(IN_FP8, layers=2),
    "experts, balanced": Case(BALANCED),
    "experts, ep": Case(f"{EXPERTS} mesh.ep=2"),
    "experts, ep, full": Case(f"{EXPERTS} mesh.ep=2 memory.recompute=full"),
    "experts, ep, parameters": Case(f"{EXPERTS} mesh.ep=2 mesh.dp=2 zero.shard=parameters"),
    "experts, ep, tp, balanced": Case(f"{BALANCED} mesh.ep=2 mesh.tp=2"),
    "experts, ep, etp": Case(f"{EXPERTS} mesh.ep=2 mesh.tp=2 mesh.etp=2"),
    "experts, ep, etp, fp8, full": Case(f"{IN_FP8} mesh.ep=2 mesh.tp=2 mesh.etp=2 memory.recompute=full", layers=2),
    "experts, ep, parameters, fp8": Case(f"{IN_FP8} mesh.ep=2 mesh.dp=2 zero.shard=parameters", layers=2),
    "experts, ep, gpipe, batch": Case(
        f"{EXPERTS} mesh.ep=2 mesh.pp=2 pipeline.schedule=gpipe experts.batch_balance=0.01"
    ),
    "further tokens": Case(FURTHER, documents=TEXTS),
    "further tokens, parameters, full": Case(f"{FURTHER} mesh.dp=2 zero.shard=parameters memory.recompute=full"),
    "cp, ring": Case("mesh.cp=2 context.exchange=ring"),
    "cp, ring, documents": Case("mesh.cp=2 context.exchange=ring context.balance=documents", documents=TEXTS),
    "cp, gather, documents": Case("mesh.cp=4 context.exchange=gather context.balance=documents", documents=TEXTS),
    "cp, gather, window": Case(f"{MISTRAL} mesh.cp=4 context.exchange=gather", rank=2),
    "cp, heads": Case("mesh.cp=2 context.exchange=heads"),
    "cp, ring, compiled": Case("mesh.cp=2 context.exchange=ring train.compile=true"),
    "1f1b, first": Case("mesh.pp=2"),
    "1f1b, last": Case("mesh.pp=2", rank=1),
    "1f1b, middle": Case("mesh.pp=4", rank=1),
    "1f1b, tied, first": Case("mesh.pp=2 model.tie_word_embeddings=true"),
    "1f1b, tied, last": Case("mesh.pp=2 model.tie_word_embeddings=true", rank=1),
    "1f1b, full": Case("mesh.pp=2 memory.recompute=full"),
    "1f1b, gradients": Case("mesh.pp=2 mesh.dp=2 zero.shard=gradients"),
    "1f1b, compiled": Case("mesh.pp=2 train.compile=true"),
    "gpipe, first": Case("mesh.pp=2 pipeline.schedule=gpipe"),
    "gpipe, last": Case("mesh.pp=2 pipeline.schedule=gpipe", rank=1),
    "interleaved, first": Case("mesh.pp=2 pipeline.schedule=interleaved pipeline.chunks=2"),
    "interleaved, last": Case("mesh.pp=2 pipeline.schedule=interleaved pipeline.chunks=2", rank=1),
    "zb-h1, first": Case("mesh.pp=2 pipeline.schedule=zb-h1"),
    "zb-h1, tp, last": Case("mesh.pp=2 mesh.tp=2 pipeline.schedule=zb-h1", rank=2),
    "zb-h1, fp8, full": Case("mesh.pp=2 pipeline.schedule=zb-h1 train.precision=fp8 memory.recompute=full"),
    "zb-interleaved, parameters": Case(
        "mesh.pp=2 mesh.dp=2 pipeline.schedule=zb-interleaved pipeline.chunks=2 zero.shard=parameters", rank=2
    ),
    "zb-h1, experts, ep": Case(f"{EXPERTS} mesh.ep=2 mesh.pp=2 pipeline.schedule=zb-h1"),
    "overlapped, experts, ep": Case(f"{EXPERTS} mesh.ep=2 pipeline.schedule=overlapped"),
    "overlapped, compiled, gradients": Case(
        f"{EXPERTS} mesh.ep=2 mesh.pp=2 pipeline.schedule=overlapped pipeline.chunks=2 zero.shard=gradients "
        "train.compile=true",
        rank=1,
    ),
    "tp, pp, dp, optimizer": Case("mesh.tp=2 mesh.pp=2 mesh.dp=2 zero.shard=optimizer"),
}
"""Runs of which one rank is traced; the recipe has nothing but what is said."""


@dataclass(frozen=True, order=True)
class Launches:
    """What a step launches on a rank.

    Args:
        step: Operators on the device; compiled code is one for each graph, forward and backward.
        block: Those of one block more.
        messages: Those that communicate.
        uploads, downloads: Copies from and to the host.
    """

    step: int
    block: int
    messages: int
    uploads: int
    downloads: int


def launches(case: Case) -> Launches:
    """Trace two steps of a run, of which the second counts, and one of a run with a block more in each chunk. Raises
    TraceFault: a step waits for the device; also errors of torch, where tensors are on different ones."""
    (first, second), chunks = trace(case, 2)
    (deeper,), _ = trace(replace(case, layers=case.layers + 1), 1)
    block, rest = divmod(deeper.launches.total() - first.launches.total(), chunks)
    assert not rest, "the chunks' blocks launch different numbers"
    counts = (second.messages, second.uploads, second.downloaded)
    return Launches(second.launches.total(), block, *(count.total() for count in counts))


def trace(
    case: Case, steps: int, fault: Callable[[Trainer], None] = lambda trainer: None, gpu: Any = None
) -> tuple[list[HostWaits], int]:
    """(what each of some steps did, chunks on the rank).

    Args:
        case: The run.
        steps: How many.
        fault: Does something to the run before.
        gpu: What plays the streams; by default what counts launches and refuses waits.
    """
    config, watched = _config(case), WatchedGpu(READS, DOWNLOADS, ONCE)
    torch._dynamo.reset()  # it compiles the same code for a few cases alone
    batches = [list(_batches(case, config))] * steps
    played: Any = gpu or watched
    run_steps(config, ranks(case), case.rank, batches, played, fault)
    return watched.watches, config.pipeline.chunks


def ranks(case: Case) -> int:
    """How many ranks a run has."""
    mesh = _config(case).mesh
    return mesh.model_ranks * (mesh.dp or 1)


def _config(case: Case) -> Config:
    overrides = case.overrides.split()
    model = (
        []
        if any("model.family" in each or "model.preset" in each for each in overrides)
        else ["model.preset=llama-tiny"]
    )
    with tempfile.NamedTemporaryFile(suffix=".yaml") as recipe:
        always = ["data.sequence_length=32", "data.train=none", "log.every=1000", "recovery.checksums=0"]
        config = load(recipe.name, [*model, *always, *overrides])
    layers = case.layers * config.pipeline.chunks * config.mesh.pp
    key = "n_layer" if config.model.get("family") == "gpt2" else "num_hidden_layers"
    return replace(config, model=config.model | {key: layers})


def _batches(case: Case, config: Config) -> Iterator[Batch]:
    length, rng = config.data.sequence_length, np.random.default_rng(0)
    for _ in range(2 * config.mesh.pp):
        labels = np.where(np.arange(length) < case.labels * length, 1, IGNORE)[None]
        pairs = None
        if config.preference is not None and case.documents is not None:
            places = np.arange(len(case.documents)).repeat(case.documents)
            pairs = BatchPairs(
                places[None], np.bincount(places).reshape(-1, 2), np.zeros((len(case.documents) // 2, 2))
            )
        tokens, positions = rng.integers(0, 512, (1, length)), np.arange(length)[None]
        yield Batch(tokens, labels, positions, case.documents, pairs=pairs).looking(configure(config.model).mtp_layers)


# -- the table

TABLE = Path(__file__).with_name("launches.txt")
HOW = "python tests/cuda/steps.py --write"


def read() -> tuple[str, dict[str, Launches]]:
    """(the torch that it was counted with, {case: what it may launch})."""
    version, _, *lines = TABLE.read_text().splitlines()
    rows = (line.rsplit(maxsplit=len(_COLUMNS)) for line in lines)
    return version.removeprefix("torch "), {name: Launches(*map(int, numbers)) for name, *numbers in rows}


def table(rows: Mapping[str, Launches]) -> str:
    """The rows under each other."""
    width = max(map(len, rows))
    lines = [" " * width + "".join(f"{column:>11}" for column in _COLUMNS)]
    lines += [f"{name:{width}}" + "".join(f"{n:11}" for n in astuple(row)) for name, row in rows.items()]
    return "\n".join(lines) + "\n"


def excess(name: str, row: Launches, allowed: Launches) -> list[str]:
    """What a case launches more than it may."""
    return [
        f"{name}: {column} {now}, {before} in {TABLE.name}"
        for column, now, before in zip(_COLUMNS, astuple(row), astuple(allowed), strict=True)
        if now > before
    ]


_COLUMNS = tuple(field.name for field in fields(Launches))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="some of them; all without")
    parser.add_argument("--write", action="store_true", help="all of them into launches.txt")
    arguments = parser.parse_args()
    fake_cuda.pretend()
    found = {name: launches(CASES[name]) for name in (not arguments.write and arguments.cases) or CASES}
    print(table(found), end="")
    if arguments.write:
        TABLE.write_text(f"torch {torch.__version__.partition('+')[0]}\n{table(found)}")
    else:
        allowed = read()[1]
        for name, row in found.items():
            print(*excess(name, row, allowed[name]), sep="\n", end="")
    sys.stdout.flush()
    os._exit(0)  # what C++ takes down at an end is not made for this


if __name__ == "__main__":
    main()
