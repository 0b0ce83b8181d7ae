"""Everything that is wrong with a config before anything starts, each with the way out.

`problems` is pure: it asks whether the values fit each other, the model and the ranks. `surroundings` looks at the
machine: files, folders and installed packages. Nothing here imports torch.
"""

import importlib.util
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from megacore import checkpoints
from megacore.checkpoints import AUTO
from megacore.config import EXAMPLES, RANGES, Bound, Config, ContextConfig, CorpusConfig, ExpertsConfig
from megacore.say import brief
from megacore.store.files import leaves
from megacore.store.index import INDEX
from megacore.store.objects import ObjectPath, place
from megacore.store.strict_json import StoreError, read_json
from megacore.training.lock import held, holder
from megacore.training.lr import decay_steps
from models import lora, names
from models.config import ModelConfig
from models.tuning import EVERYTHING
from parallel.weights.layout import MeshShape, heads_problem, mesh_problems

RUN_FILES = ("config.yaml", "metrics.jsonl", "experts.jsonl", checkpoints.FOLDER)
"""The files that a run leaves in its folder; a folder that has one of them is not written to again unless the run goes
on."""
FOLDERS = (checkpoints.FOLDER, "examples", "tensorboard", "wandb")
"""Those that a run makes in its folder."""


def problems(
    config: Config, world_size: int, model: ModelConfig | None, *, gpus: int = 0, local_ranks: int = 1
) -> list[str]:
    """Return every violation: numbers out of range, then broken rules. A rule is left out where a value it needs is
    bad.

    Args:
        config: The config as it was loaded.
        world_size: Ranks in all.
        model: Axis sizes and limits; None if they are not known, which leaves out the rules that need them.
        gpus: GPUs of this node.
        local_ranks: Ranks on this node.
    """
    out_of_range = {key: message for key, bound in RANGES.items() for message in _range_problem(config, key, bound)}
    facts = RuleContext(config, world_size, model, gpus, local_ranks)
    unknown = {*out_of_range, *([MODEL] if model is None else [])}
    askable = [rule for keys, rule in RULES if unknown.isdisjoint(keys)]
    return [*out_of_range.values(), *(message for rule in askable for message in rule(facts))]


# -- the range of each number


def _range_problem(config: Config, key: str, bound: Bound) -> Iterator[str]:
    """Return the problem of a number, or of the numbers or ranges of a list; null is no number."""
    value: object = config
    for name in key.split("."):
        value = None if value is None else getattr(value, name)
    numbers = value if isinstance(value, tuple) else () if value is None else (value,)
    if not all(map(bound.holds, numbers)):
        each = "" if not isinstance(value, tuple) else "each " if isinstance(value[0], tuple) else "each number "
        shown = list(value) if isinstance(value, tuple) else value
        yield f"{key} ({shown}): {each}must be {bound.words}"


# -- rules between values


@dataclass(frozen=True)
class RuleContext:
    """The values that the rules look at."""

    config: Config
    world_size: int
    model: ModelConfig | None
    gpus: int
    local_ranks: int

    @property
    def sizes(self) -> Mapping[str, int]:
        assert self.model is not None  # a rule that asks says that it needs MODEL
        return self.model.sizes


def _world(facts: RuleContext) -> Iterator[str]:
    mesh, world = facts.config.mesh, facts.world_size
    ranks = mesh.model_ranks
    product = f"pp x cp x ep x tp = {mesh.pp} x {mesh.cp} x {mesh.ep} x {mesh.tp} = {ranks}"
    if world % ranks:
        yield f"cannot divide {world} ranks by {product}: start {_multiples(world, ranks)} processes, or change mesh"
    elif mesh.dp is not None and mesh.dp * ranks != world:
        yield (
            f"mesh.dp ({mesh.dp}) times {product} makes {mesh.dp * ranks} ranks, and there are {world}: "
            f"start {mesh.dp * ranks} processes, or set mesh.dp={world // ranks} or null"
        )


def _parts(facts: RuleContext) -> Iterator[str]:
    mesh = facts.config.mesh
    yield from mesh_problems(facts.sizes, MeshShape(pp=mesh.pp, cp=mesh.cp, ep=mesh.ep, tp=mesh.tp), mesh.etp)


def _stages(facts: RuleContext) -> Iterator[str]:
    pp, pipeline, layers = facts.config.mesh.pp, facts.config.pipeline, facts.sizes["layer"]
    stages = pp * pipeline.chunks
    product = f"mesh.pp x pipeline.chunks = {pp} x {pipeline.chunks} = {stages}"
    counts = pipeline.layers_per_stage
    if stages > layers:
        yield f"cannot give each of {product} virtual stages one of the {layers} layers: choose at most {layers}"
    if counts is not None and len(counts) != stages:
        yield f"pipeline.layers_per_stage has {len(counts)} numbers: give {product}, one for each virtual stage"
    if counts is not None and sum(counts) != layers:
        yield f"pipeline.layers_per_stage {list(counts)} adds up to {sum(counts)}: the model has {layers} layers"


def _chunks(facts: RuleContext) -> Iterator[str]:
    pipeline = facts.config.pipeline
    if pipeline.schedule == "1f1b" and pipeline.chunks > 1:
        yield (
            f"pipeline.schedule 1f1b runs one chunk per stage, not pipeline.chunks={pipeline.chunks}: "
            "set pipeline.schedule=interleaved (or gpipe), or pipeline.chunks=1"
        )


def _loss_chunk(facts: RuleContext) -> Iterator[str]:
    chunk, schedule = facts.config.memory.loss_chunk, facts.config.pipeline.schedule
    if chunk is not None and schedule == "gpipe":
        yield (
            f"memory.loss_chunk ({chunk}) keeps a gradient of the whole head from a microbatch's forward to its "
            "backward, and pipeline.schedule gpipe runs all forwards first: set pipeline.schedule=1f1b or interleaved, "
            "or memory.loss_chunk=null"
        )


def _mlp_chunk(facts: RuleContext) -> Iterator[str]:
    chunk, precision = facts.config.memory.mlp_chunk, facts.config.train.precision
    if chunk is not None and precision == "fp8":
        yield (
            f"memory.mlp_chunk ({chunk}) would scale each chunk of tokens by itself with train.precision fp8, and the "
            "numbers would depend on the layout: set memory.mlp_chunk=null, or train.precision=bf16"
        )


def _offload(facts: RuleContext) -> Iterator[str]:
    memory, shard = facts.config.memory, facts.config.zero.shard
    if memory.offload_optimizer == "file" and memory.offload_folder is None:
        yield (
            "memory.offload_optimizer=file needs memory.offload_folder: name a folder on a fast disk of each node, or "
            "set memory.offload_optimizer=host"
        )
    if memory.offload_folder is not None and memory.offload_optimizer != "file":
        yield (
            f"memory.offload_folder ({memory.offload_folder}) is for memory.offload_optimizer=file, not "
            f"{memory.offload_optimizer}: set that, or leave memory.offload_folder null"
        )
    if memory.offload_parameters and shard != "parameters":
        yield (
            f"memory.offload_parameters needs zero.shard=parameters, not {shard}: only there are parameters gathered "
            "for their use and let go after it; set zero.shard=parameters, or memory.offload_parameters=false"
        )
    if memory.offload_parameters and memory.offload_optimizer == "none":
        yield (
            "memory.offload_parameters needs memory.offload_optimizer=host or file: the CPU updates what lies in host "
            "memory, and masters and moments are several times as large"
        )


def _positions(facts: RuleContext) -> Iterator[str]:
    assert facts.model is not None
    length, limit = facts.config.data.sequence_length, facts.model.max_positions
    if limit is not None and length > limit:
        yield (
            f"data.sequence_length ({length}) is above the model's {limit} positions: choose at most {limit}, or raise "
            "the model's own limit (model.n_positions, model.max_position_embeddings, or its rope scaling)"
        )


def _tokens(facts: RuleContext) -> Iterator[str]:
    mesh, length, micro = facts.config.mesh, facts.config.data.sequence_length, facts.config.batch.micro_size
    ranks = mesh.tp * mesh.cp
    # The smallest step of the length that keeps the tokens divisible.
    step = ranks // math.gcd(micro, ranks)
    if length < mesh.cp:
        least = -(-mesh.cp // step) * step
        yield (
            f"data.sequence_length ({length}) is less than mesh.cp ({mesh.cp}), which splits each sequence: choose "
            f"data.sequence_length={least} or more, or mesh.cp=1"
        )
    elif length % step:
        yield (
            f"cannot split the tokens of a microbatch, batch.micro_size x data.sequence_length = {micro} x {length}, "
            f"over tp x cp = {mesh.tp} x {mesh.cp}: choose data.sequence_length={_multiples(length, step)}"
        )


def _context(facts: RuleContext) -> Iterator[str]:
    cp, section = facts.config.mesh.cp, facts.config.context
    asked = sorted(vars(section).items() - vars(ContextConfig()).items())
    if asked and cp == 1:
        keys = ", ".join(f"context.{name} ({value})" for name, value in asked)
        yield f"{keys}: mesh.cp is 1, and no sequence is split: leave it out, or set mesh.cp"
    elif cp % section.heads:
        choices = ", ".join(str(n) for n in range(1, cp + 1) if cp % n == 0)
        yield f"cannot divide mesh.cp ({cp}) by context.heads ({section.heads}): choose from {choices}"
    elif section.exchange == "heads" and section.heads not in (1, cp):
        yield (
            f"context.exchange=heads is over all of mesh.cp ({cp}), not over context.heads ({section.heads}): leave "
            "that out, or set context.exchange=ring (or gather), which is then between such groups"
        )


def _context_of_model(facts: RuleContext) -> Iterator[str]:
    assert facts.model is not None
    mesh, section, drops = facts.config.mesh, facts.config.context, facts.model.drops_attention
    if mesh.cp == 1 or mesh.cp % section.heads:
        return
    context = section.over(mesh.cp, drops)
    no_dropout = "set the model's attention dropout to 0 (model.attn_pdrop=0, model.attention_dropout=0)"
    if drops and context.parts > 1:
        yield (
            f"context.exchange ({section.exchange}), context.heads ({section.heads}): the model drops attention "
            f"weights, which only a rank that has all keys of a query can: {no_dropout}, or "
            "context.exchange=heads and context.heads=1"
        )
    elif problem := heads_problem(facts.sizes, mesh.tp, context.heads):
        key = "context.heads" if context.parts > 1 else "mesh.cp"
        yield f"{key} ({context.heads}): {problem}, or {no_dropout if drops else 'context.exchange=ring'}"


def _corpora(facts: RuleContext) -> Iterator[str]:
    data = facts.config.data
    if not data.train:
        yield "data.train names no corpus: give the path prefix of a token file, or a list of {path, weight, least}"
    for key, corpora in (("data.train", data.train), ("data.validation", data.validation)):
        for index, corpus in enumerate(corpora):
            if corpus.weight <= 0:
                yield f"{key}[{index}].weight ({corpus.weight}) of {corpus.path}: must be above 0, or leave it out"
            if corpus.least < 0:
                yield f"{key}[{index}].least ({corpus.least}) of {corpus.path}: must be 0 or more, or leave it out"
    named = (*data.train, *data.validation)
    examples, tokens = ([c.path for c in named if c.has_examples == kind] for kind in (True, False))
    if examples and tokens:
        yield (
            f"data.train and data.validation name files of examples ({', '.join(examples)}) and token files "
            f"({', '.join(tokens)}): a run takes one kind"
        )


def _shards(facts: RuleContext) -> Iterator[str]:
    mesh, shard, replicas = facts.config.mesh, facts.config.zero.shard, facts.config.zero.replicas
    dp = facts.world_size // mesh.model_ranks if mesh.dp is None else mesh.dp
    if replicas > 1 and shard == "none":
        yield (
            f"zero.replicas ({replicas}) groups share nothing out where zero.shard is none: set zero.shard=optimizer, "
            "gradients or parameters, or zero.replicas=1"
        )
    elif dp and dp % replicas:
        choices = ", ".join(str(n) for n in range(1, dp + 1) if dp % n == 0)
        yield f"cannot divide dp={dp} data parallel ranks into zero.replicas={replicas} groups: choose from {choices}"


def _lengths(facts: RuleContext) -> Iterator[str]:
    schedule, steps = facts.config.schedule, facts.config.train.steps
    warmup = schedule.warmup_steps
    if warmup >= steps:
        yield f"schedule.warmup_steps ({warmup}) must be below train.steps ({steps}): choose at most {steps - 1}"
    elif schedule.name == "wsd" and warmup + decay_steps(schedule, steps) > steps:
        yield (
            f"schedule.decay_steps ({schedule.decay_steps}) and warmup_steps ({warmup}) are more than train.steps "
            f"({steps}): choose a decay of at most {steps - warmup}"
        )
    if schedule.name == "constant" and schedule.decay_steps is not None:
        yield "schedule.decay_steps is for cosine, linear and wsd: leave it null for constant"


def _device(facts: RuleContext) -> Iterator[str]:
    train = facts.config.train
    if train.device == "cuda" and not facts.gpus:
        yield "train.device is cuda, and there is no GPU: set train.device=cpu (or auto)"
    elif train.device_type(facts.gpus) == "cuda" and facts.local_ranks > facts.gpus:
        yield (
            f"{facts.local_ranks} processes on this node need a GPU each, and there are {facts.gpus}: "
            f"start {facts.gpus} (NPROC_PER_NODE={facts.gpus}), or set train.device=cpu"
        )
    if train.precision == "fp64" and train.device_type(facts.gpus) == "cuda":
        yield "train.precision fp64 is for the CPU: set train.device=cpu, or train.precision=fp32 or bf16"


def _fp16(facts: RuleContext) -> Iterator[str]:
    scale = facts.config.loss_scale
    if facts.config.train.precision != "fp16":
        return
    if not facts.config.optimizer.master_weights:
        yield (
            "train.precision fp16 has too little range for updates without optimizer.master_weights: set it to true, "
            "or train.precision=bf16"
        )
    if not scale.minimum <= scale.initial:
        yield f"loss_scale.initial ({scale.initial:g}) is below loss_scale.minimum ({scale.minimum:g}): raise it"


def _moments(facts: RuleContext) -> Iterator[str]:
    optimizer = facts.config.optimizer
    if optimizer.moments == "bf16" and max(optimizer.betas) >= 1 - 2**-8:
        yield (
            f"optimizer.betas {list(optimizer.betas)} move moments by less than bf16 can hold, so that they would "
            "stand still: choose betas below 0.996, or optimizer.moments=fp32"
        )


def _fp8(facts: RuleContext) -> Iterator[str]:
    layers = facts.sizes["layer"]
    if facts.config.train.precision == "fp8" and layers < 3:
        yield (
            f"train.precision fp8 leaves the first and the last layer in bf16, and the model has {layers}: "
            "set train.precision=bf16"
        )


def _async_tp(facts: RuleContext) -> Iterator[str]:
    train, tp = facts.config.train, facts.config.mesh.tp
    if not train.async_tp:
        return
    if train.device_type(facts.gpus) == "cpu":
        yield "train.async_tp needs GPUs that reach each other's memory, and this is a run on CPUs: set it to false"
    elif tp == 1:
        yield "train.async_tp overlaps what tensor parallel ranks send, and mesh.tp is 1: set it to false"
    elif facts.local_ranks % tp:
        yield (
            f"train.async_tp needs the ranks of mesh.tp ({tp}) on one node, and each has {facts.local_ranks}: "
            "choose a tp that divides them, or set it to false"
        )
    if train.precision == "fp8":
        yield "train.async_tp has no products in fp8: set it to false, or train.precision=bf16"


def _held_out(facts: RuleContext) -> Iterator[str]:
    data, every = facts.config.data, facts.config.evaluate.every
    if every and not data.validation and not data.validation_fraction:
        yield (
            f"evaluate.every ({every}) has nothing to evaluate: name data.validation, set data.validation_fraction "
            "above 0, or evaluate.every=0"
        )


def _tuning(facts: RuleContext) -> Iterator[str]:
    assert facts.model is not None
    tuning = facts.config.tuning
    if tuning != EVERYTHING:
        yield from tuning.problems(facts.model.schema)


def _balances(facts: RuleContext) -> Iterator[str]:
    section = facts.config.experts
    if section.sequence_balance and section.batch_balance:
        yield (
            f"experts.sequence_balance ({section.sequence_balance:g}) and experts.batch_balance "
            f"({section.batch_balance:g}) would balance the same experts in two ways: set one of them to 0"
        )


def _experts(facts: RuleContext) -> Iterator[str]:
    assert facts.model is not None
    section, schema, tuning = facts.config.experts, facts.model.schema, facts.config.tuning
    asked = {f"experts.{name}": value for name, value in vars(section).items() if value}
    if asked and "experts" not in facts.sizes:
        yield f"{_said(asked)}: the model has no experts to balance, set {_off(asked)}"
        return
    if section.bias_rate and not any(names.buffers(schema)):
        yield (
            f"experts.bias_rate ({section.bias_rate:g}): the routers of this model have no biases to move, set it to 0 "
            "and balance by experts.sequence_balance or experts.batch_balance"
        )
    if section.bias_rate and tuning.lora is not None:
        del asked["experts.bias_rate"]
        yield (
            f"experts.bias_rate ({section.bias_rate:g}) moves biases of the model, and lora saves its adapters alone: "
            "set it to 0"
        )
    routers = [
        (name, f"{param.name.removesuffix('.weight')}.{lora.A}")
        for param in schema.params
        if param.name.endswith(".router.weight")
        for name in names.whole_names(schema, param)
    ]
    still, adapted = tuning.frozen(schema), tuning.schema(schema).by_name
    if asked and (frozen := [name for name, adapter in routers if name in still and adapter not in adapted]):
        yield (
            f"{_said(asked)}: {len(frozen)} of the {len(routers)} routers are not trained ({frozen[0]}), and have no "
            f"balance to learn: train them (train.only, train.freeze, lora.targets), or set {_off(asked)}"
        )


def _said(asked: Mapping[str, float]) -> str:
    return ", ".join(f"{key} ({value:g})" for key, value in asked.items())


def _off(asked: Iterable[str]) -> str:
    return ", ".join(f"{key}=0" for key in asked)


def _batch_balance(facts: RuleContext) -> Iterator[str]:
    """Yield the problem of a balance whose counts come from forwards that are run after the first backward."""
    mesh, batch, schedule = facts.config.mesh, facts.config.batch, facts.config.pipeline.schedule
    dp = facts.world_size // mesh.model_ranks if mesh.dp is None else mesh.dp
    # Where dp comes to 0, the world is too small for the mesh, and that is said already.
    own = -(-batch.global_size // (dp * mesh.ep)) if dp else 0
    microbatches = -(-own // batch.micro_size)
    if facts.config.experts.batch_balance and schedule != "gpipe" and microbatches > 1:
        yield (
            f"experts.batch_balance needs the counts of all {microbatches} microbatches of a step before the first "
            f"backward, and pipeline.schedule {schedule} runs backwards before: set pipeline.schedule=gpipe or "
            f"batch.micro_size={own}, or balance by experts.sequence_balance"
        )


def _adapters(facts: RuleContext) -> Iterator[str]:
    section = facts.config.checkpoint
    if facts.config.lora is not None and section.init is None:
        yield "lora trains adapters of a model that is there: name its folder or checkpoint in checkpoint.init"


def _one_start(facts: RuleContext) -> Iterator[str]:
    section = facts.config.checkpoint
    # Adapters are resumed beside the model that they were begun on.
    if facts.config.lora is None and section.init is not None and section.resume not in (None, AUTO):
        yield (
            f"checkpoint.init ({section.init}) and checkpoint.resume ({section.resume}) both say where to start: "
            "leave out one of them"
        )


def _repetition(facts: RuleContext) -> Iterator[str]:
    section, choice = facts.config.recovery, facts.config.optimizer.non_finite
    for key in ("spikes", "go_back"):
        if getattr(section, key) and choice != "repeat":
            yield (
                f"recovery.{key} is about steps that are repeated, and optimizer.non_finite is {choice}: set that to "
                f"repeat, or recovery.{key}=false"
            )


def _export(facts: RuleContext) -> Iterator[str]:
    section = facts.config.checkpoint
    if section.export is not None and not section.at_end:
        yield (
            f"checkpoint.export ({section.export}) is made of the checkpoint at the end, and checkpoint.at_end is "
            "false: set it to true, or leave out the export"
        )


Rule = Callable[[RuleContext], Iterator[str]]

MODEL = "model"
MODEL_RANKS = ("mesh.pp", "mesh.cp", "mesh.ep", "mesh.tp")

RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    ((*MODEL_RANKS, "mesh.dp"), _world),
    ((MODEL, *MODEL_RANKS, "mesh.etp"), _parts),
    ((MODEL, "mesh.pp", "pipeline.chunks", "pipeline.layers_per_stage"), _stages),
    (("pipeline.chunks",), _chunks),
    (("memory.loss_chunk",), _loss_chunk),
    ((), _mlp_chunk),
    ((), _offload),
    ((MODEL, "data.sequence_length"), _positions),
    (("data.sequence_length", "batch.micro_size", "mesh.tp", "mesh.cp"), _tokens),
    (("mesh.cp", "context.heads"), _context),
    ((MODEL, "mesh.cp", "mesh.tp", "context.heads"), _context_of_model),
    ((), _corpora),
    ((*MODEL_RANKS, "mesh.dp", "zero.replicas"), _shards),
    (("schedule.warmup_steps", "schedule.decay_steps", "train.steps"), _lengths),
    ((), _device),
    (("loss_scale.initial", "loss_scale.minimum"), _fp16),
    (("optimizer.betas",), _moments),
    ((MODEL,), _fp8),
    (("mesh.tp",), _async_tp),
    (("evaluate.every", "data.validation_fraction"), _held_out),
    ((MODEL,), _tuning),
    (("experts.sequence_balance", "experts.batch_balance"), _balances),
    ((MODEL, "lora.rank", *(f"experts.{each.name}" for each in fields(ExpertsConfig))), _experts),
    ((*MODEL_RANKS, "mesh.dp", "batch.global_size", "batch.micro_size", "experts.batch_balance"), _batch_balance),
    ((), _adapters),
    ((), _one_start),
    ((), _repetition),
    ((), _export),
)
"""The keys that each rule needs in range, and the rule."""


def _multiples(value: int, step: int) -> str:
    """Return the multiples of `step` on both sides of a value that is none."""
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)


# -- the machine


def surroundings(config: Config, led: bool = False) -> list[str]:
    """Return missing token files, folders that cannot be used, and packages that a setting needs.

    Args:
        config: The config.
        led: Whether another process looks at what all of them share over a network.
    """
    looks = (
        _missing_files,
        _unusable_out,
        *(() if led else (_unusable_folder,)),
        _unusable_export,
        _unusable_offload_folder,
        _missing_packages,
    )
    missing = list[str]()
    for look in looks:
        try:
            missing += look(config)
        except (OSError, ValueError) as error:  # a name that no file can have
            missing.append(f"a path of the recipe cannot be used: {brief(str(error))}")
    return missing


def _missing_files(config: Config) -> Iterator[str]:
    for key, corpora in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        for corpus in corpora:
            yield from (f"{key}: {problem}" for problem in _missing(corpus))
    template = config.chat.template
    if template is not None and not Path(template).is_file():
        yield f"chat.template: there is no {template}: name a file, or leave it null for the model's own"


def _missing(corpus: CorpusConfig) -> Iterator[str]:
    """Yield the problem of a missing token file or file of examples, and what another path may have meant."""
    path = Path(corpus.path)
    ends = ("",) if corpus.has_examples else (".bin", ".idx")
    missing = [f"{path}{end}" for end in ends if not Path(f"{path}{end}").is_file()]
    if not missing:
        return
    if corpus.path.endswith((".bin", ".idx")):
        yield f"{path} is a file: name the prefix, {path.with_suffix('')}"
    elif path.is_dir():
        names = [str(each.with_suffix("")) for each in sorted(path.glob("*.idx"))]
        names += [str(each) for each in sorted(path.iterdir()) if each.name.endswith(EXAMPLES)]
        yield f"{path} is a folder: name one of {', '.join(names)}" if names else f"{path} is a folder: {_KINDS}"
    elif path.exists():
        yield f"{path} is neither a token file nor a file of examples: {_KINDS}"
    elif corpus.has_examples:
        yield f"there is no {path}"
    else:
        yield f"there is no {' and no '.join(missing)}: make them with `megacore tokenize`"


_KINDS = (
    "token files are a pair NAME.bin, NAME.idx, named without the ending, which `megacore tokenize` makes of text, and "
    f"files of examples end in {', '.join(EXAMPLES[:-1])} or {EXAMPLES[-1]}"
)


def readable(config: Config) -> bool:
    """Return whether the data can be looked at, whatever else is wrong with a config."""
    numbers = (key for key in RANGES if key.startswith("data."))
    wrong = (message for key in numbers for message in _range_problem(config, key, RANGES[key]))
    return bool(config.data.train) and not any(wrong) and not any(_missing_files(config))


def _unusable_out(config: Config) -> Iterator[str]:
    out, resume = Path(config.out), config.checkpoint.resume
    there = [name for name in RUN_FILES if (out / name).exists()]
    if elsewhere := [name for name in FOLDERS if leaves(out / name, out)]:
        links = ", ".join(f"{name} leads to {os.path.realpath(out / name)}" for name in elsewhere)
        yield f"out ({out}): {links}, and a run writes to its own folder alone: put all of it there, by out="
    elif who := holder(out):
        yield held(out, who)
    elif there and resume is None:
        yield (
            f"out ({out}) already holds a run ({', '.join(there)}): choose another out=, move it away, or go on with "
            f"it by checkpoint.resume={AUTO}"
        )
    elif there and resume != AUTO and config.checkpoint.folder is None:
        yield from _not_its_own("out", out, checkpoints.folder_of(out), str(resume))
    else:
        yield from _cannot_be_made("out", out)


def _cannot_be_made(key: str, folder: Path) -> Iterator[str]:
    """Yield why a folder cannot be made. Only making it tells: permissions say nothing of a full disk."""
    parent = next(each for each in (folder, *folder.absolute().parents) if os.path.exists(each))
    if not parent.is_dir():
        yield f"{key} ({folder}) cannot be made, {parent} is not a folder: choose another {key}="
        return
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".megacore-", dir=parent))
    except OSError as error:
        yield (
            f"{key} ({folder}) cannot be written to, no folder can be made in {parent} ({error.strerror}): make that "
            f"possible, or choose another {key}="
        )


def _unusable_export(config: Config) -> Iterator[str]:
    """Yield why an export would fail. It gets its name when training is over: there must be nothing, or an empty
    folder."""
    key = "checkpoint.export"
    if config.checkpoint.export is None:
        return
    folder = Path(config.checkpoint.export)
    if Path(config.out).resolve().is_relative_to(folder.resolve()):
        yield f"{key} ({folder}) holds out ({config.out}): choose a folder in it, or beside it"
    elif folder.is_dir() and any(folder.iterdir()):
        if _is_done(config):  # and was ended when it had made it, or while it told so
            return
        yield f"{key} ({folder}) exists and is not empty: choose another folder, or remove it"
    else:
        # Where it is an empty folder, it is replaced: what must be writable is the folder around it.
        yield from _cannot_be_made(key, folder.parent if folder.is_dir() else folder)


def _is_done(config: Config) -> bool:
    """Return whether a run goes on by itself from the checkpoint of its last step."""
    try:
        steps = checkpoints.complete(checkpoints.folder_of(config.out, config.checkpoint.folder))
    except StoreError:  # which is said elsewhere
        return False
    return config.checkpoint.resume == AUTO and max(steps, default=0) >= config.train.steps


def _unusable_folder(config: Config) -> Iterator[str]:
    """Yield why a run cannot keep its checkpoints in an object store."""
    key, folder, resume = "checkpoint.folder", config.checkpoint.folder, config.checkpoint.resume
    if folder is None:
        return
    try:
        path = place(folder)
        if not isinstance(path, ObjectPath):
            yield f"{key} ({folder}) is no URL of an object store such as s3://bucket/prefix: leave it out for a disk's"
        elif resume is None and checkpoints.complete(path):
            yield f"{key} ({path}) already holds a run: choose another, or go on with it by checkpoint.resume={AUTO}"
        elif resume not in (None, AUTO) and checkpoints.complete(path):
            yield from _not_its_own(key, path, path, str(resume))
    except StoreError as error:
        yield f"{key}: {error}"


def _not_its_own(key: str, holds: Path, folder: Path, named: str) -> Iterator[str]:
    """Yield why a checkpoint is not the one that the run of a folder resumes from: its own newest. A run that began
    from another's, and has none of its own yet, begins so again."""
    steps, resume = checkpoints.complete(folder), checkpoints.newest_of(place(named))
    here = [step for step, path in steps.items() if path.resolve() == resume.resolve()]
    newer = [path.name for step, path in steps.items() if here and step > here[0]]
    if not here and (steps or not _follow(holds, resume)):
        yield f"{key} ({holds}) already holds a run, and {resume} is not a checkpoint of it: choose another {key}="
    elif newer:
        yield (
            f"checkpoint.resume ({resume}) is older than {', '.join(newer)} in the same folder: choose another {key}=, "
            "or move those away"
        )


def _follow(out: Path, resume: Path) -> bool:
    """Return whether the records in a run's folder, if there are any, come after a checkpoint, as those of a run that
    began from it do."""
    try:
        with (out / "metrics.jsonl").open("rb") as file:
            first = json.loads(file.readline() or "null")
        return first is None or first["step"] > read_json(resume / INDEX, resume)["step"]
    except FileNotFoundError:
        return True
    except (OSError, ValueError, LookupError, TypeError, StoreError):
        return False


def _unusable_offload_folder(config: Config) -> Iterator[str]:
    if config.memory.offload_folder is not None:
        yield from _cannot_be_made("memory.offload_folder", Path(config.memory.offload_folder))


def _missing_packages(config: Config) -> Iterator[str]:
    wanted = {"tensorboard": config.log.tensorboard, "wandb": config.log.wandb is not None}
    for name, is_wanted in wanted.items():
        if is_wanted and importlib.util.find_spec(name) is None:
            yield f"log.{name} needs the package {name}: pip install 'megacore[{name}]', or leave log.{name} out"
    rows = [corpus.path for corpus in (*config.data.train, *config.data.validation) if corpus.path.endswith(".parquet")]
    if rows and importlib.util.find_spec("pyarrow") is None:
        yield f"data: {', '.join(rows)}: .parquet files need the package pyarrow: pip install 'megacore[parquet]'"
