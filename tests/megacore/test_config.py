"""A recipe and its overrides: what loads, and that each thing that is wrong is named with the way out."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest

from megacore import recipe as recipe_module
from megacore.checks.machine import surroundings
from megacore.checks.rules import problems
from megacore.config import RANGES, SECTIONS, Config, CorpusConfig, parts
from megacore.models.anatomy import Anatomy
from megacore.models.registry import configure
from megacore.parallel.weights.schema import Param, Schema
from megacore.recipe import ConfigError, load, processes

RECIPE = """
model: {family: llama, preset: llama-3.2-1b}
mesh: {pp: 2, tp: 2}
data: {train: corpus/text, sequence_length: 512}
batch: {global_size: 8, micro_size: 1}
optimizer: {lr: 3e-4}
train: {steps: 100, precision: bf16, device: cpu}
"""


ONE_B = {"layer": 16, "heads": 32, "kv": 8, "head": 64, "embed": 2048, "mlp": 8192, "vocab": 128256}


@dataclass(frozen=True)
class Sizes:
    """What the rules ask of a model; the numbers are LLaMA 3.2 1B's."""

    sizes: Mapping[str, int] = field(default_factory=lambda: ONE_B)
    max_positions: int | None = 1024
    drops_attention: bool = False
    drops: bool = False
    mtp_layers: int = 0
    labels: int = 0
    schema: Schema = configure({"preset": "llama-3.2-1b"}).schema
    anatomy: Anatomy = configure({"preset": "llama-3.2-1b"}).anatomy


LLAMA: Any = Sizes()
SPARSE = Sizes({**LLAMA.sizes, "experts": 2})
_TINY = configure({"preset": "mixtral-tiny"})
_INDEXED: Any = configure({"preset": "deepseek_v32-tiny"})
_SHARED: Any = configure({"preset": "glm_moe_dsa-tiny", "index_topk_freq": 4})
_KEYS: Any = configure({"preset": "gemma-4-e2b"})
MIXTRAL = Sizes(_TINY.sizes, schema=_TINY.schema)
BIASED = replace(
    MIXTRAL,
    schema=replace(
        _TINY.schema,
        params=(*_TINY.schema.params, Param("layers.{layer}.mlp.router.correction", "routes", "b", buffer=True)),
    ),
)


@dataclass(frozen=True)
class Bad:
    """Overrides of RECIPE (or another recipe) that make exactly one problem, and what its message must say."""

    overrides: tuple[str, ...]
    words: tuple[str, ...]
    recipe: str
    ranks: int
    gpus: int
    sizes: Any


def bad(overrides: str, *words: str, recipe: str = RECIPE, ranks: int = 8, gpus: int = 0, sizes: Sizes = LLAMA) -> Bad:
    return Bad(tuple(overrides.split()), words, recipe, ranks, gpus, sizes)


def corpora(blend: str) -> str:
    """RECIPE with another data.train."""
    return RECIPE.replace("corpus/text", blend)


BOMB = "\n".join(["x0: &x0 1", *(f"x{i}: &x{i} [*x{i - 1}, *x{i - 1}]" for i in range(1, 30))])
CHAIN = "\n".join(["x0: &x0 1", *(f"x{i}: &x{i} [*x{i - 1}]" for i in range(1, 99))])

STREAM = corpora("[{path: x, streams: 2}]")
TWO = corpora("[corpus/text, {path: corpus/text, weight: 2}]")

RANGE = {
    "at least 1": "mesh.pp=0 mesh.cp=0 mesh.ep=0 mesh.tp=0 mesh.dp=-1 mesh.etp=0 pipeline.chunks=0 context.heads=0 "
    "data.sequence_length=0 batch.global_size=0 batch.micro_size=0 loss_scale.growth_interval=0 schedule.decay_steps=0 "
    "train.steps=0 train.threads=0 evaluate.batches=0 log.every=0 memory.loss_chunk=0 memory.offload_buffer=0 "
    "zero.replicas=0",
    "above 0": "optimizer.lr=0.0 optimizer.eps=0.0 optimizer.clip=0.0 log.peak_tflops=0.0",
    "at least 0": "optimizer.weight_decay=-0.1 schedule.warmup_steps=-1 train.seed=-1 evaluate.every=-5 "
    "loss.indexer=-1.0 experts.sequence_balance=-1.0 experts.batch_balance=-0.1 experts.z_loss=-1.0 "
    "experts.bias_rate=-0.001",
    "at least 0 and below 1": "data.validation_fraction=1.0",
    "at least 0 and below 2^63": "data.seed=-1 data.seed=9223372036854775808",
    "between 0 and 1": "schedule.min_ratio=1.5",
    "between 1 and 99": "optimizer.max_skipped=100",
    "a power of two": "loss_scale.minimum=0.0",
    "a power of two up to 2^24": "loss_scale.initial=3.0 loss_scale.initial=33554432.0",
    "minutes above 0, and at most a day (1440)": "train.timeout=0.0",
}

BAD = [
    # the recipe itself
    bad("", "cannot divide 8 ranks", recipe=RECIPE.replace("pp: 2", "pp: 3"), ranks=8),
    bad("", "recipe.yaml:2:1", recipe="model: [1, 2\n"),
    bad("", "recipe.yaml", "duplicate key tp", recipe="mesh: {tp: 1, tp: 2}"),
    bad("", "mapping of sections", "mesh", recipe="- mesh"),
    bad("", "mesh: expected a mapping", recipe="mesh:\n"),
    # overrides
    bad("mesh.tp", "override 'mesh.tp'", "section.key=value"),
    bad("=4", "override '=4'", "section.key=value"),
    bad("out={", "override 'out={'"),
    bad("data.train=[a] data.train[3].weight=2", "override 'data.train[3].weight=2'", "out of range"),
    bad("", r"'x\n  2. \x1b[2J': unknown key", recipe='"x\\n  2. \\e[2J": 1'),
    bad("batch.global_size=4611686018427387904", "batch.global_size", "at most 2^20"),
    bad("data.train=[a] data.train[0].weight=2", "override 'data.train[0].weight=2': a has no key weight"),
    # nothing is resolved, and nothing is deep enough to overflow the stack, or doubles with each line
    bad("out=${oc.env:MEGACORE_CANARY}", "${oc.env:MEGACORE_CANARY} is not resolved", "write the value itself"),
    bad("", "data.train[0].path: x-${mesh.pp} is", "(&name)", recipe=corpora("[{path: 'x-${mesh.pp}'}]")),
    bad("", "recipe.yaml: line 2 is nested more than 32 levels deep", recipe="model:\n  " + "[" * 10**5),
    bad("", "aliases stand for more than 100,000 values", recipe=BOMB),
    bad("", "aliases are nested more than 32 levels deep", recipe=CHAIN),
    bad("", "model: its aliases are nested more than 32", recipe="model: &a {a: *a}"),
    bad("", "mesh: << takes one mapping", recipe="a: &a {pp: 1}\nmesh: {<<: [*a, *a]}"),
    bad("", "mesh: the key 1 is no text: put it in quotes", recipe="mesh: {1: 2}"),
    bad("", "could not determine a constructor", recipe="mesh: !!python/tuple [1]"),
    bad("", "recipe.yaml has more than 1,048,576 bytes", recipe="a: 1\n" * 2**18),
    bad("", "recipe.yaml: line 1 is nested more than 32 levels", recipe="model: " + "{a: " * 99 + "1" + "}" * 99),
    # unknown keys, with the nearest spelling
    bad("optimzer.lr=1", "optimzer: unknown key", "did you mean optimizer?"),
    bad("optimizer.beta=[0.9,0.95]", "optimizer.beta: unknown key", "did you mean optimizer.betas or preference.beta?"),
    bad("data.shard=optimizer", "data.shard: unknown key; did you mean zero.shard?"),
    bad("data.replicas=2", "data.replicas: unknown key; did you mean zero.replicas or sync.replicas?"),
    bad("lr=1", "lr: unknown key", "did you mean optimizer.lr?"),
    bad("train.warmup_steps=3", "train.warmup_steps", "schedule.warmup_steps?"),
    bad("optimizer.learning_rate=1", "optimizer.learning_rate: unknown key", "did you mean optimizer.lr?"),
    bad("batch_size=8", "batch_size: unknown key", "did you mean batch.global_size?"),
    bad("optimizer.name=adam", "optimizer.name", "adam", "adamw", "muon"),
    bad("optimizer=adamw", "optimizer: expected a mapping of name, lr, betas", "got 'adamw'"),
    bad("mesh.vocabulary=1", "mesh.vocabulary: unknown key", "mesh has pp, dp, cp, ep, tp"),
    bad("", "data.train[0].wieght", "did you mean data.train[0].weight?", recipe=corpora("[{path: a, wieght: 1}]")),
    bad("", "data.train[0].path", "missing", recipe=corpora("[{weight: 1}]")),
    # types
    bad("train.steps=1.5", "train.steps: expected a whole number, got 1.5"),
    bad("train.steps='100'", "train.steps: expected a whole number, got '100'"),
    bad("optimizer.lr=fast", "optimizer.lr: expected a number, got 'fast'"),
    bad("optimizer.lr=.nan", "optimizer.lr: expected a finite number"),
    bad("train.compile=1", "train.compile: expected true or false, got 1"),
    bad("optimizer.betas=[0.9]", "optimizer.betas[1]", "missing"),
    bad("optimizer.betas=[0.9,0.95,0.99]", "optimizer.betas", "at most 2"),
    bad("log.wandb=true", "log.wandb: expected text, got True"),
    bad("data.train=3", "data.train: expected a list, got 3"),
    bad("pipeline.layers_per_stage=[8,half]", "pipeline.layers_per_stage[1]: expected a whole number, got 'half'"),
    bad("model=llama", "model: expected a mapping, got 'llama'"),
    bad(
        "pipeline.schedule=1F1B",
        *(
            "got '1F1B'",
            "'gpipe', '1f1b', 'interleaved', 'overlapped', 'zb-h1', 'zb-interleaved', 'zb-v' or 'dualpipe-v'",
        ),
    ),
    bad("schedule.name=cosin", "schedule.name: got 'cosin'", "'cosine', 'linear', 'wsd' or 'constant'"),
    bad("train.precision=fp4", "train.precision: got 'fp4'", "'bf16', 'fp16', 'fp8', 'fp32' or 'fp64'"),
    bad("train.device=gpu", "train.device: got 'gpu'", "'auto', 'cpu' or 'cuda'"),
    bad("optimizer.non_finite=ignore", "optimizer.non_finite: got 'ignore'", "'stop', 'skip' or 'repeat'"),
    # the range of each number
    *(
        bad(case, "{} ({}): must be ".format(*case.split("=")) + bound, sizes=BIASED)
        for bound, cases in RANGE.items()
        for case in cases.split()
    ),
    bad("pipeline.layers_per_stage=[17,-1]", "pipeline.layers_per_stage ([17, -1]): each number must be at least 0"),
    bad("optimizer.betas=[0.9,1.0]", "optimizer.betas ([0.9, 1.0]): each number must be at least 0 and below 1"),
    bad("recovery.skip_samples=[3]", "recovery.skip_samples[0]: expected a list, got 3"),
    bad("recovery.skip_samples=[3..5]", "recovery.skip_samples[0]: expected a list, got '3..5'"),
    bad("recovery.skip_samples=[[3,5,7]]", "recovery.skip_samples[0]", "at most 2"),
    bad("recovery.skip_samples=[1-3,5-3]", "recovery.skip_samples ([(1, 3), (5, 3)]): each must be a-b with 0 <="),
    bad("recovery.skip_samples=[[-1,3]]", "recovery.skip_samples ([(-1, 3)]): each must be a-b with 0"),
    bad("recovery.spikes=true optimizer.non_finite=stop", "recovery.spikes is about steps that are repeated, and opt"),
    bad("recovery.go_back=true optimizer.non_finite=skip", "recovery.go_back is about", "is skip: set that to repeat"),
    # ranks and the mesh
    bad("", "cannot divide 6 ranks", "2 x 1 x 1 x 2 = 4", "start 4 or 8 processes", ranks=6),
    bad("", "cannot divide 2 ranks", "start 4 processes", ranks=2),
    bad("mesh.dp=4", "mesh.dp (4)", "16 ranks", "there are 8", "start 16 processes", "mesh.dp=2"),
    bad("mesh.ep=2", "ep=2: the model has no experts to split, set ep=1"),
    bad("mesh.etp=2", "etp=2: the model has no experts to split, set etp=1"),
    bad("mesh.ep=2 mesh.etp=4", "etp=4 is neither 1", "nor tp=2", sizes=SPARSE),
    bad("mesh.ep=2", "experts (2) over ep x tp=4", "choose ep x tp from 1, 2, or etp=2", sizes=SPARSE),
    # indexers
    bad(
        "loss.indexer=0.0",
        *("loss.indexer is 0: the weights of indexers (20 tensors) would learn nothing", "train.freeze=[attn.index]"),
        sizes=_INDEXED,
    ),
    bad(
        "mesh.pp=2 mesh.tp=1",
        *("mesh.pp (2), pipeline.chunks (1): layer 2 looks at what the indexer of layer 1 chooses", "layers_per_stage"),
        sizes=_SHARED,
    ),
    bad(
        "mesh.pp=2 mesh.tp=1 pipeline.layers_per_stage=20,15",
        "mesh.pp (2), pipeline.chunks (1): layer 20 looks at the keys and values of layer 13, which is in another part",
        "keep layers 13 to 34 in one part with pipeline.layers_per_stage",
        sizes=_KEYS,
    ),
    # the balance of experts
    bad("experts.sequence_balances=1", "unknown key", "did you mean experts.sequence_balance"),
    bad(
        "experts.sequence_balance=0.1 experts.batch_balance=0.2 pipeline.schedule=gpipe",
        *("experts.sequence_balance (0.1) and experts.batch_balance (0.2)", "set one of them to 0"),
        sizes=MIXTRAL,
    ),
    bad(
        "experts.z_loss=0.001 experts.bias_rate=0.01",
        *("experts.z_loss (0.001), experts.bias_rate (0.01): the model has no experts", "set experts.z_loss=0, exp"),
    ),
    bad("experts.bias_rate=0.001", "experts.bias_rate (0.001)", "have no biases", "sequence_balance", sizes=MIXTRAL),
    bad(
        "experts.sequence_balance=0.1 train.freeze=[layers.0]",
        *("experts.sequence_balance (0.1): 1 of the 4 routers", "layers.0.mlp.router.weight", "train.freeze"),
        sizes=MIXTRAL,
    ),
    bad("experts.z_loss=1 train.only=[attn]", "4 of the 4 routers are not trained", "train.only", "=0", sizes=MIXTRAL),
    bad("experts.bias_rate=1 train.freeze=[mlp]", "experts.bias_rate (1): 4 of the 4 routers", "=0", sizes=BIASED),
    bad(
        "experts.z_loss=1 lora.targets=[q_proj] checkpoint.init=hf",
        *("experts.z_loss (1): 4 of the 4 routers are not trained", "lora.targets", "set experts.z_loss=0"),
        sizes=MIXTRAL,
    ),
    bad(
        "experts.bias_rate=1 lora.targets=[q_proj] checkpoint.init=hf",
        *("experts.bias_rate (1) moves biases of the model, and lora saves its adapters alone", "set it to 0"),
        sizes=BIASED,
    ),
    bad(
        "experts.batch_balance=1",
        *("experts.batch_balance", "all 4 microbatches", "1f1b", "pipeline.schedule=gpipe", "batch.micro_size=4"),
        sizes=MIXTRAL,
    ),
    bad(
        "experts.batch_balance=1 pipeline.schedule=interleaved pipeline.chunks=2 batch.micro_size=2",
        *("all 2 microbatches", "interleaved", "batch.micro_size=4", "or balance by experts.sequence_balance"),
        sizes=MIXTRAL,
    ),
    bad("experts.batch_balance=1 batch.global_size=7 batch.micro_size=3", "all 2 microbatches", "=4", sizes=MIXTRAL),
    # the model over the mesh
    bad("mesh.pp=1", "heads (9) over tp=2: choose tp from 1, 3, 9", sizes=Sizes({**LLAMA.sizes, "heads": 9, "kv": 1})),
    bad("pipeline.schedule=gpipe pipeline.chunks=12", "2 x 12 = 24 virtual stages", "16 layers", "pipeline.chunks=9"),
    bad("mesh.pp=20", "mesh.pp x pipeline.chunks = 20 x 1", "16 layers: the nearest possible is mesh.pp=16", ranks=40),
    bad("pipeline.layers_per_stage=[4,4,8]", "pipeline.layers_per_stage (4x2,8) has 3 numbers", "2 x 1 = 2", "is 8x2"),
    bad("pipeline.layers_per_stage=[8,9]", "(8,9) adds up to 17", "16 layers: the nearest possible is 8x2"),
    bad("pipeline.layers_per_stage=14,1", "(14,1) adds up to 15", "16 layers: the nearest possible is 14,2"),
    bad("pipeline.layers_per_stage=0,2x2,0 pipeline.chunks=2 pipeline.schedule=gpipe", "the nearest possible is 4x4"),
    bad("pipeline.layers_per_stage=8,0,4x2 pipeline.chunks=2 pipeline.schedule=gpipe", "more than the ends", "7,1,4x2"),
    bad("pipeline.layers_per_stage=8x,8", "pipeline.layers_per_stage: Value error, '8x' is no number of layers"),
    bad("pipeline.chunks=2", "1f1b", "pipeline.chunks=2", "pipeline.schedule=interleaved"),
    bad("pipeline.chunks=2 pipeline.schedule=zb-h1", "pipeline.chunks=2", "pipeline.schedule=zb-interleaved"),
    bad("pipeline.group=4", "pipeline.group (4) is of microbatches that go through several", "pipeline.chunks=1 has"),
    bad("pipeline.group=4 pipeline.schedule=zb-v pipeline.chunks=2", "zb-v with pipeline.chunks=2", "group=null"),
    bad(
        "pipeline.group=1 pipeline.schedule=interleaved pipeline.chunks=2",
        *("pipeline.group (1) microbatches come round before mesh.pp (2) stages", "set pipeline.group=2 or more"),
    ),
    bad("pipeline.order=x.json pipeline.schedule=gpipe", "pipeline.order (x.json) has an order of its own", "=1f1b or"),
    bad(
        "pipeline.order=x.json batch.ramp=[8,8,64] batch.global_size=64",
        *("batch.ramp [8, 8, 64] changes the number of microbatches", "pipeline.order (x.json)", "one of both to null"),
    ),
    bad(
        "pipeline.schedule=overlapped memory.recompute=full",
        "draws the masks of dropout again",
        sizes=replace(MIXTRAL, drops=True),
    ),
    bad(
        "pipeline.schedule=overlapped memory.recompute=[none,full]",
        "draws the masks of dropout again",
        sizes=replace(MIXTRAL, drops=True),
    ),
    bad("pipeline.schedule=overlapped", "messages of experts, and this model has no", "pipeline.schedule=1f1b"),
    bad(
        "pipeline.schedule=overlapped pipeline.chunks=2 mesh.tp=1",
        *("with mesh.ep=1 each rank has all of them: set mesh.ep", "pipeline.schedule=interleaved"),
        sizes=MIXTRAL,
    ),
    bad(
        "pipeline.schedule=dualpipe-v pipeline.chunks=2 pipeline.order=x.json",
        *("dualpipe-v runs actions two by two", "set pipeline.schedule=zb-v, or pipeline.order=null"),
    ),
    bad(
        "pipeline.schedule=overlapped pipeline.order=x.json",
        *("runs actions two by two", "pipeline.order (x.json)", "pipeline.order=null"),
        sizes=MIXTRAL,
    ),
    bad(
        "pipeline.schedule=overlapped memory.recompute=full lora.rank=4 lora.dropout=0.1 lora.targets=[attn] "
        "checkpoint.init=x",
        *("draws the masks of dropout again", "memory.recompute=selective, no dropout, or pipeline.schedule=1f1b"),
        sizes=MIXTRAL,
    ),
    bad("pipeline.schedule=zb-v", "two chunks per stage, there and back, not pipeline.chunks=1", "pipeline.chunks=2"),
    bad("pipeline.schedule=zb-h1 train.compile=true", "compiled blocks", "=false or pipeline.schedule=1f1b"),
    bad(
        "pipeline.schedule=zb-interleaved memory.loss_chunk=512 zero.shard=gradients",
        *("memory.loss_chunk (512)", "zero.shard=gradients would", "pipeline.schedule=interleaved"),
    ),
    bad("pipeline.schedule=zb-h1 memory.mlp_chunk=512 zero.shard=parameters", "memory.mlp_chunk=null, zero.shard="),
    bad("memory.loss_chunk=512 pipeline.schedule=gpipe", "memory.loss_chunk (512)", "gpipe", "pipeline.schedule=1f1b"),
    bad("memory.recompute=all", "memory.recompute: got 'all'", "'none', 'selective' or 'full'"),
    bad("memory.recompute=[full,all]", "memory.recompute[1]: got 'all'", "'none', 'selective' or 'full'"),
    bad("memory.recompute=[full,none,none]", "memory.recompute has a list of 3, and mesh.pp is 2: give one value for"),
    bad("memory.offload_activations=[1,no]", "memory.offload_activations[0]: expected true or false, got 1"),
    bad("memory.offload_activations=[true]", "memory.offload_activations has a list of 1, and mesh.pp is 2: give"),
    bad("memory.offload_optimizer=file", "memory.offload_optimizer=file needs memory.offload_folder: name"),
    bad("memory.offload_optimizer=host memory.offload_folder=x", "(x) is for memory.offload_optimizer=file, not host"),
    bad("memory.offload_optimizer=host memory.offload_parameters=true", "needs zero.shard=parameters, not none: only"),
    bad("memory.offload_parameters=true zero.shard=parameters", "needs memory.offload_optimizer=host or file: the CPU"),
    bad("mesh.pp=1 zero.shard=optimizer zero.replicas=3", "dp=4 data", "zero.replicas=3 groups: choose from 1, 2, 4"),
    bad("zero.replicas=2", "zero.replicas (2) groups share nothing out where zero.shard is none"),
    bad("sync.replicas=2", "sync.replicas (2) take steps alone, and sync.every is null: set it"),
    bad("sync.every=200 train.steps=150 mesh.pp=1", "sync.every (200) is above train.steps (150): no round would end"),
    bad("sync.every=8 sync.replicas=3 mesh.pp=1", "cannot divide dp=4 into sync.replicas=3: choose from 1, 2, 4"),
    bad(
        "sync.every=8 batch.global_size=6 mesh.pp=1",
        "batch.global_size (6)",
        "micro_size x dp x ep is 4: choose 4 or 8",
    ),
    bad("sync.every=8 batch.ramp=[4,2,16] mesh.pp=1", "batch.ramp (2)", "is 4: choose 4"),
    bad(
        "sync.every=8 ema.decay=0.9",
        "ema.decay (0.9) is of weights that all replicas have alike",
        "sync.every: set null",
    ),
    bad("sync.every=8 recovery.recompute_every=5", "recovery.recompute_every (5)", "sync.every: set 0"),
    bad("sync.every=8 experts.bias_rate=1", "experts.bias_rate (1) is of weights", "set 0", sizes=BIASED),
    bad("sync.every=8 memory.offload_optimizer=host", "memory.offload_optimizer is host: set that to none"),
    bad(
        "sync.every=8 sync.replicas=2 zero.shard=optimizer zero.replicas=4 mesh.pp=1",
        "dp=2 data parallel ranks of a replica of sync into zero.replicas=4 groups: choose from 1, 2",
    ),
    bad("memory.compress_activations=true memory.recompute=full", "from rounded inputs", "memory.recompute=selective"),
    bad("memory.compress_activations=true memory.offload_activations=true", "has it wait on the host: set one of both"),
    bad("memory.compress_activations=true train.compile=true", "the compiler decides", "set train.compile=false, or"),
    bad("zero.compress=bf16 train.precision=fp64", "these are summed in fp64: set zero.compress=none"),
    bad("zero.compress=bf16 train.precision=bf16 optimizer.master_weights=false", "or optimizer.master_weights=true"),
    bad(
        "zero.compress=int8 zero.shard=gradients",
        "has none: choose zero.shard=optimizer or none, or zero.compress=bf16",
    ),
    bad("zero.compress=int8 train.precision=fp16", "changes meanwhile: choose train.precision=bf16"),
    bad("zero.compress=int8 sync.every=4", "sync.every=4 each keep a state of their own for each replica"),
    # sequences and batches
    bad("data.sequence_length=2048", "data.sequence_length (2048)", "1024 positions", "at most 1024", "n_positions"),
    bad("data.sequence_length=511", "1 x 511", "2 x 1", "data.sequence_length=510 or 512"),
    bad("batch.micro_size=2 batch.global_size=12 data.sequence_length=3 mesh.pp=1 mesh.tp=4", "2 x 3", "=2 or 4"),
    # a context over cp
    bad("context.exchange=rings mesh.cp=2", "context.exchange: got 'rings'", "'ring', 'gather' or 'heads'"),
    bad("context.exchange=ring", "context.exchange (ring): mesh.cp is 1", "leave it out, or set mesh.cp"),
    bad("context.heads=2 context.balance=rows", "context.balance (rows), context.heads (2): mesh.cp is 1"),
    bad("mesh.cp=4 mesh.tp=1 context.heads=3", "mesh.cp (4) by context.heads (3)", "choose from 1, 2, 4"),
    bad(
        "mesh.cp=4 mesh.tp=1 context.exchange=heads context.heads=2",
        *("context.exchange=heads is over all of mesh.cp (4)", "context.heads (2)", "exchange=ring (or gather)"),
    ),
    bad(
        "mesh.cp=4 mesh.tp=1 context.exchange=heads",
        *("mesh.cp (4): cannot share out 6 heads (3 of keys) over 4", "choose from 1, 3, 6, or context.exchange=ring"),
        sizes=Sizes({**LLAMA.sizes, "heads": 6, "kv": 3}),
    ),
    bad(
        "mesh.cp=4 mesh.pp=1 context.heads=2",
        *("context.heads (2): cannot share out 3 heads (1 of keys) of each rank of tp=2 over 2 ranks", "from 1, 3, or"),
        sizes=Sizes({**LLAMA.sizes, "heads": 6, "kv": 2}),
    ),
    bad(
        "mesh.cp=2 context.exchange=gather",
        *("context.exchange (gather)", "drops attention weights", "model.attn_pdrop=0", "or context.exchange=heads"),
        sizes=Sizes(drops_attention=True),
    ),
    bad(
        "mesh.cp=4 mesh.tp=1 context.heads=2",
        *("context.exchange (auto), context.heads (2)", "attn_pdrop=0", "context.exchange=heads and context.heads=1"),
        sizes=Sizes(drops_attention=True),
    ),
    bad(
        "mesh.cp=4 mesh.tp=1",
        *("mesh.cp (4): cannot share out 6 heads", "choose from 1, 2, 3, 6", "model.attn_pdrop=0"),
        sizes=Sizes({**LLAMA.sizes, "heads": 6, "kv": 6}, drops_attention=True),
    ),
    bad("mesh.cp=2 data.sequence_length=255", "1 x 255", "tp x cp = 2 x 2", "data.sequence_length=252 or 256"),
    bad(
        "mesh.cp=4 mesh.tp=1 data.sequence_length=3 batch.micro_size=4",
        *("data.sequence_length (3) is less than mesh.cp (4)", "data.sequence_length=4 or more", "mesh.cp=1"),
    ),
    # data
    bad("data.train=[]", "data.train names no corpus", "path prefix"),
    bad("data.train[1].weight=0", "data.train[1].weight (0.0) of corpus/text", "above 0", recipe=TWO),
    bad("data.train[1].least=-1", "data.train[1].least (-1) of corpus/text", "0 or more", recipe=TWO),
    bad("data.train[0].streams=0", "data.train[0].streams (0) of notes: must be 1", recipe=corpora("[{path: notes}]")),
    bad("", "data.train: there is no x: name a file or folder of texts", recipe=STREAM),
    bad("data.train[0].path=a.b:c", "of a.b:c: a data set of your own has rows", "leave it out", recipe=STREAM),
    bad(
        "",
        *("data.train[1].streams (3) of notes: its files are named twice", "give them once, with the sum"),
        recipe=corpora("[{path: notes, streams: 2}, {path: notes, streams: 3}]"),
    ),
    bad("data.train=a.b:c data.shuffle=false", "data.shuffle=false is for token files and streams, and a.b:c is"),
    bad("data.tokenizer=t checkpoint.init=hf", "data.tokenizer (t) is for runs that begin with random weights"),
    bad("data.train=corpus/txet", "no corpus/txet.bin and no corpus/txet.idx", "megacore tokenize"),
    bad("data.train=corpus/half", "no corpus/half.idx", "megacore tokenize"),
    bad("data.train=corpus/text.bin", "name the prefix, corpus/text"),
    bad("data.train=notes/facts.csv", "notes/facts.csv is neither a token file", ".json.zst, .parquet or .arrow"),
    bad("data.train=corpus", "corpus is a folder: name one of corpus/text"),
    bad("data.train=notes", "notes is a folder: token files are a pair", "megacore tokenize"),
    *(bad(f"data.train={name}", f"data.train: there is no {name}") for name in ("x.jsonl", "x.parquet", "x.jsonl.gz")),
    bad("chat.template=x.jinja", "chat.template: there is no x.jinja"),
    bad("chat.train_on=user", "chat.train_on: got 'user', choose 'assistant', 'last' or 'all'"),
    bad("data.validation=corpus/held", "data.validation", "no corpus/held.bin"),
    bad("evaluate.every=10 data.validation_fraction=0", "evaluate.every (10)", "data.validation_fraction"),
    # the length of the run
    bad("schedule.warmup_steps=100", "schedule.warmup_steps (100)", "train.steps (100)", "at most 99"),
    bad("schedule.name=wsd schedule.warmup_steps=50 schedule.decay_steps=51", "(51)", "(50)", "at most 50"),
    bad("schedule.name=constant schedule.decay_steps=5", "schedule.decay_steps", "constant"),
    # the machine
    bad("train.device=cuda", "train.device is cuda", "no GPU", "train.device=cpu"),
    bad("train.device=auto", "8 processes on this node", "there are 4", "NPROC_PER_NODE=4", gpus=4),
    bad("train.device=auto train.precision=fp64", "fp64", "train.device=cpu", gpus=8),
    # precision
    bad("optimizer.moments=bf16 optimizer.betas=[0.9,0.999]", "optimizer.betas [0.9, 0.999]", "below 0.996", "fp32"),
    bad(
        "optimizer.name=muon memory.offload_optimizer=host",
        "memory.offload_optimizer (host) has the CPU",
        "set it to none",
    ),
    bad("optimizer.name=muon lora.rank=2 checkpoint.init=x", "lora trains none of them", "set it to adamw"),
    bad(
        "optimizer.name=muon optimizer.moments=bf16 muon.momentum=0.999",
        *("muon.momentum (0.999)", "below 0.996", "optimizer.moments=fp32"),
    ),
    bad(
        "batch.global_size=64 batch.ramp=[8,10,1000]",
        "does not come from 8 to batch.global_size (64)",
        "increments of 10",
    ),
    bad("batch.global_size=64 batch.ramp=[8,8,6]", "more sizes than samples", "give it 64"),
    bad("batch.ramp=[0,8,100]", "batch.ramp ([0, 8, 100]): each number must be at least 1"),
    bad("ema.evaluate=true evaluate.every=10", "ema.evaluate is about averages", "ema.decay is null"),
    bad("ema.decay=0.9 ema.evaluate=true", "evaluate.every is 0"),
    bad("ema.decay=0.9 ema.export=true", "ema.export is about checkpoint.export of a whole model"),
    bad("ema.decay=0.9 optimizer.master_weights=false", "16 bits", "optimizer.master_weights=true"),
    bad("train.precision=fp16 optimizer.master_weights=false", "fp16", "optimizer.master_weights", "bf16"),
    bad("train.precision=fp16 loss_scale.initial=2 loss_scale.minimum=4", "loss_scale.initial (2)", "minimum (4)"),
    bad(
        "train.precision=fp8 mesh.pp=1",
        *("fp8", "first and the last layer", "the model has 2", "train.precision=bf16"),
        sizes=Sizes({**LLAMA.sizes, "layer": 2}),
    ),
    bad(
        "train.precision=fp8 train.device=auto mesh.ep=1",
        *("layers.{layer}.mlp.experts.down.weight has 88 features on a rank", "by multiples of 16", "=bf16"),
        gpus=8,
        sizes=MIXTRAL,
    ),
    bad(
        "train.precision=bf16 train.device=auto mesh.ep=2",
        *("mesh.ep (2): a rank has 1024 of the 4096 experts", "fewer than 1024 at once", "a larger ep"),
        gpus=8,
        sizes=replace(MIXTRAL, sizes={**_TINY.sizes, "experts": 4096}),
    ),
    bad("train.async_tp=true train.device=cpu", "train.async_tp", "a run on CPUs", "set it to false"),
    bad("train.device=auto train.async_tp=true mesh.tp=1", "train.async_tp", "mesh.tp is 1", "set it to false", gpus=8),
    bad("train.device=auto train.async_tp=true train.precision=fp8", "async_tp", "fp8", "=bf16", gpus=8),
    bad("out=done", "out (done) already holds a run (metrics.jsonl)", "another out"),
    bad("out=/proc/x", "out (/proc/x)", "no folder can be made in /proc", "another out"),
    bad("out=corpus/text.bin/run", "corpus/text.bin is not a folder", "another out"),
    # what is exported at the end
    bad("checkpoint.export=hf checkpoint.at_end=false", "checkpoint.export (hf)", "checkpoint.at_end"),
    bad("checkpoint.push=own/it", "checkpoint.push (own/it) uploads the export", "checkpoint.export"),
    bad("checkpoint.export=done", "checkpoint.export (done) exists and is not empty", "another folder"),
    bad("checkpoint.export=corpus/text.bin/hf", "checkpoint.export", "corpus/text.bin is not a folder"),
    bad("checkpoint.export=fresh out=fresh/run", "checkpoint.export (fresh) holds out (fresh/run)", "beside it"),
    bad("log.wandb=megacore", "log.wandb", "pip install 'megacore[wandb]'"),
    bad(
        "evaluate.every=1 data.validation_fraction=0.1 evaluate.tasks=[piqa]",
        "evaluate.tasks",
        "pip install 'megacore[lm-eval]'",
    ),
]


ABSENT = "wandb", "lm_eval"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with one corpus, half of another, a run, and what is none of them."""
    corpus = (f"corpus/{name}" for name in ("text.bin", "text.idx", "half.bin", "corpus.json"))
    for name in (*corpus, "done/metrics.jsonl", "notes/facts.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megacore.checks.machine.importlib.util.find_spec", lambda name: None if name in ABSENT else 1)
    return tmp_path


def write(folder: Path, text: str) -> Path:
    recipe = folder / "recipe.yaml"
    recipe.write_text(text)
    return recipe


def found(folder: Path, case: Bad) -> list[str]:
    """Every problem of a case, as a launch sees them."""
    try:
        config = load(write(folder, case.recipe), case.overrides)
    except ConfigError as error:
        return list(error.problems)
    return problems(config, case.ranks, case.sizes, gpus=case.gpus, local_ranks=case.ranks) + surroundings(config)


@pytest.mark.parametrize("case", BAD, ids=[" ".join(case.overrides) or case.words[0] for case in BAD])
def test_bad_configs_are_named(folder: Path, case: Bad) -> None:
    messages = found(folder, case)
    assert len(messages) == 1, messages
    assert [word for word in case.words if word not in messages[0]] == [], messages[0]


GOOD = [
    bad(""),
    bad("", ranks=4),
    bad("mesh.dp=2 pipeline.schedule=interleaved pipeline.chunks=4"),
    bad("pipeline.schedule=gpipe pipeline.chunks=8"),
    bad("pipeline.schedule=zb-interleaved pipeline.chunks=2 pipeline.group=3"),
    bad("pipeline.schedule=zb-h1 memory.loss_chunk=512 memory.mlp_chunk=512 zero.shard=optimizer"),
    bad("pipeline.schedule=overlapped memory.recompute=full train.compile=true", sizes=MIXTRAL),
    bad("pipeline.schedule=zb-interleaved pipeline.chunks=2 zero.shard=parameters"),
    bad("pipeline.layers_per_stage=[7,9]"),
    bad("pipeline.layers_per_stage=0,1x16,0 pipeline.chunks=9 pipeline.schedule=interleaved"),
    bad("pipeline.schedule=gpipe pipeline.chunks=9"),
    bad("memory.recompute=full memory.offload_activations=true memory.loss_chunk=512"),
    bad("memory.recompute=[full,none] memory.offload_activations=[true,false]"),
    bad("memory.recompute=selective memory.compress_activations=true memory.loss_chunk=512"),
    bad("mesh.cp=2"),
    bad("memory.offload_optimizer=host"),
    bad("memory.offload_optimizer=host memory.offload_parameters=true zero.shard=parameters"),
    bad("mesh.pp=1 zero.shard=parameters zero.replicas=2"),
    bad("mesh.cp=2", sizes=Sizes(drops_attention=True)),
    bad("mesh.cp=4 mesh.tp=1 context.heads=2 context.exchange=gather context.balance=documents"),
    bad("mesh.cp=4 mesh.tp=1", sizes=Sizes({"layer": 16, "heads": 9, "kv": 1, "mlp": 8192, "vocab": 101})),
    bad("mesh.pp=1 mesh.tp=8", sizes=Sizes({"layer": 16, "heads": 8, "kv": 2, "mlp": 64, "vocab": 101})),
    bad("data.sequence_length=4096", sizes=Sizes(max_positions=None)),
    bad("data.train[1].weight=3", recipe=TWO),
    bad("train.device=auto", gpus=8),
    bad("evaluate.every=10 data.validation=corpus/text data.validation_fraction=0"),
    bad("mesh.ep=2", sizes=Sizes({**LLAMA.sizes, "experts": 4})),
    bad("optimizer.clip=null optimizer.max_skipped=null evaluate.every=10 schedule.name=wsd schedule.warmup_steps=90"),
    bad("optimizer.lr=1 log.tensorboard=true train.precision=fp64 train.threads=1"),
    bad("train.precision=fp16 loss_scale.initial=4 loss_scale.minimum=4 loss_scale.growth_interval=10"),
    bad("train.precision=fp8 train.compile=true"),
    bad("train.precision=fp8 mesh.ep=1", sizes=MIXTRAL),
    bad(
        "train.precision=bf16 train.device=auto mesh.ep=2",
        gpus=8,
        sizes=replace(MIXTRAL, sizes={**_TINY.sizes, "experts": 4092}),
    ),
    bad("train.device=auto train.async_tp=true train.compile=true", gpus=8),
    bad("optimizer.moments=bf16 optimizer.betas=[0.9,0.99]"),
    bad("optimizer.name=muon optimizer.moments=bf16 muon.lr=0.02 muon.scale=original muon.steps=3"),
    bad("batch.global_size=12 batch.micro_size=3 data.sequence_length=6 out=fresh/one"),
    bad("batch.global_size=7"),
    bad("batch.micro_size=8"),
    bad("experts.batch_balance=0.01 batch.micro_size=4 batch.global_size=7", sizes=MIXTRAL),
    bad("out=fresh/one checkpoint.export=fresh/one/hf"),
    bad("experts.sequence_balance=0.01 experts.z_loss=0.001 experts.bias_rate=0.001", sizes=BIASED),
    bad("experts.batch_balance=0.01 pipeline.schedule=gpipe", sizes=MIXTRAL),
    bad("experts.batch_balance=0.01 batch.micro_size=4", sizes=MIXTRAL),
    bad("experts.sequence_balance=0.01 train.freeze=[embed] train.only=[mlp]", sizes=MIXTRAL),
]


@pytest.mark.parametrize("case", GOOD, ids=[" ".join(case.overrides) or f"{case.ranks} ranks" for case in GOOD])
def test_good_configs_pass_and_load_back_equal(folder: Path, case: Bad) -> None:
    assert found(folder, case) == []
    config = load(write(folder, case.recipe), case.overrides)
    assert load(write(folder, config.to_yaml())) == config


def test_all_spelling_and_type_problems_come_together(folder: Path) -> None:
    case = bad("optimzer.lr=1 train.steps=many nonsense schedule.name=flat data.trian=x")
    messages = "\n".join(found(folder, case))
    for words in ("optimizer?", "train.steps", "'nonsense'", "schedule.name", "data.train?"):
        assert words in messages
    assert len(found(folder, case)) == 5


def test_every_number_has_a_range() -> None:
    """Stated where its key is; a rule between values looks only at those that are within it."""
    numbers = {
        f"{section}.{each.name}"
        for section, kind in SECTIONS.items()
        for each in fields(kind)
        if not {int, float}.isdisjoint(parts(each.type))
    }
    assert numbers == set(RANGES) and len(RANGES) > 40


def test_what_other_trainers_call_a_key_leads_to_one_of_ours() -> None:
    for key in recipe_module.OTHER_NAMES:
        section, _, name = key.rpartition(".")
        assert section == "model" or name in recipe_module._keys([section] if section else []), key


def test_a_rule_ends_where_it_reads_a_value_that_is_out_of_range(folder: Path) -> None:
    """By a property of the config too; what needs no such value is told."""
    assert [text.split()[0] for text in found(folder, bad("mesh.tp=0 optimizer.lr=-1"))] == ["mesh.tp", "optimizer.lr"]
    words = "\n".join(found(folder, bad("mesh.tp=0 pipeline.chunks=2 zero.replicas=2")))
    assert "mesh.tp (0)" in words and "runs one chunk per stage" in words and "zero.replicas" not in words
    messages = found(folder, bad("lora.rank=0 lora.targets=[none] train.only=[none] checkpoint.init=x"))
    assert [text.split()[0] for text in messages] == ["lora.rank"]


def test_products_overlap_with_what_is_sent_within_a_node(folder: Path) -> None:
    config = load(write(folder, RECIPE), ["mesh.tp=8", "train.async_tp=true", "train.device=auto"])
    assert problems(config, 16, LLAMA, gpus=8, local_ranks=8) == []
    (message,) = problems(config, 16, LLAMA, gpus=8, local_ranks=4)
    assert "the ranks of mesh.tp (8) on one node, and each has 4" in message


@pytest.mark.parametrize("override", ["=" + "[" * 10**5, ".a" * 100 + "=1", ".a" * 2000 + "=1"], ids=len)
def test_overrides_that_are_nested_too_deeply(folder: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"nested more than 32 levels deep"):
        load(write(folder, RECIPE), [f"model{override}"])


def test_overrides_that_are_one_text() -> None:
    with pytest.raises(ConfigError, match=r"the overrides are one text, 'out=x': give a list of them, \['out=x'\]"):
        load({}, "out=x")


def test_the_error_numbers_its_problems() -> None:
    error = ConfigError(["one thing", "another"])
    assert str(error) == "2 problems in the config:\n  1. one thing\n  2. another"
    assert error.problems == ("one thing", "another")


def test_recipe_then_overrides_then_defaults(folder: Path) -> None:
    config = load(
        write(folder, RECIPE),
        ["optimizer.lr=1e-3", "mesh.tp=4", "model.n_layer=3", "mesh.tp=1", "batch={micro_size: 2}"],
    )
    assert config.optimizer.lr == 1e-3
    assert (config.mesh.pp, config.mesh.dp, config.mesh.tp) == (2, None, 1)
    assert config.model == {"family": "llama", "preset": "llama-3.2-1b", "n_layer": 3}
    assert config.data.train == (CorpusConfig("corpus/text", 1.0),)
    assert (config.batch.global_size, config.batch.micro_size) == (8, 2)
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.out == "runs/recipe"
    assert replace(load(write(folder, "")), out=Config().out) == Config()


def test_a_recipe_that_comes_along_is_found_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"there is no recipe nowhere\.yaml: .*one that comes along \(.*quickstart\)"):
        load("nowhere.yaml")
    assert load("quickstart", ["train.steps=3"]) == load(recipe_module.RECIPES / "quickstart.yaml", ["train.steps=3"])
    (folder / "quickstart").write_text("out: mine")
    assert load("quickstart").out == "mine"


def test_aliases_and_merges_of_yaml(folder: Path) -> None:
    """Each is a copy: what is set in one place stays in it."""
    text = "model: &m {a: 1, b: &b {c: 1}}\nmesh: {<<: &two {tp: 2, pp: 2}, pp: 4}\ndata: {seed: 3, <<: {seed: 5}}"
    config = load(write(folder, f"{text}\nlora: {{<<: {{rank: 4}}, alpha: 1e1}}"), ["model.d=[{}]", "model.d[0].e=x"])
    assert config.model == {"a": 1, "b": {"c": 1}, "d": [{"e": "x"}]}
    assert (config.mesh.tp, config.mesh.pp, config.data.seed) == (2, 4, 3)
    assert config.lora is not None and (config.lora.rank, config.lora.alpha) == (4, 10.0)


@pytest.mark.parametrize("text", ["1e3", "1.5e3", "true", "null", "010", "a: b", "2020-01-01", "naïve", "- x", "#"])
def test_texts_that_look_like_something_else_load_back(folder: Path, text: str) -> None:
    config = replace(Config(), out=text, model={"name": text, "list": [1, 2.5e-7, None, {"deep": text}]})
    assert load(write(folder, config.to_yaml())) == config


@pytest.mark.parametrize(
    ("overrides", "nodes", "gpus", "expected"),
    [
        ("train.device=cpu", 1, 8, 4),  # pp x tp
        ("train.device=auto", 1, 0, 4),
        ("train.device=auto", 1, 8, 8),  # dp takes the rest
        ("train.device=auto mesh.dp=1", 1, 8, 4),
        ("train.device=cpu mesh.dp=3", 2, 0, 6),
        ("train.device=cpu mesh.pp=1 mesh.tp=1", 2, 0, 1),
    ],
)
def test_processes_to_start(folder: Path, overrides: str, nodes: int, gpus: int, expected: int) -> None:
    assert processes(load(write(folder, RECIPE), overrides.split()), nodes, gpus) == expected
