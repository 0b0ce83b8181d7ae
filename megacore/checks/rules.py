"""Everything that is wrong with a config before anything starts, each with the way out.

`problems` is pure: it asks whether the values fit each other, the model and the ranks. `megacore.checks.machine` looks
at files, folders and packages. Nothing here imports torch.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import Any, NoReturn

from megacore.checkpoints import AUTO
from megacore.config import EXAMPLE_KEYS, RANGES, Bound, Config, ContextConfig, CorpusConfig, PreferenceConfig
from megacore.models import lora, names
from megacore.models.config import ModelConfig
from megacore.models.stages import source_apart, together
from megacore.models.tuning import EVERYTHING
from megacore.parallel.weights.layout import MeshShape, heads_problem, layers_problems, mesh_problems

GROUPS, MULTIPLE = 1024, 16
"""Experts of a rank that torch's products of all of them on a GPU refuse, one thread being that of each; and what the
features of those in fp8 must be multiples of."""


class _OutOfRange(Exception):
    """A rule has read a value that it cannot judge by: a number that is out of range, or of a model that is unknown."""


def problems(
    config: Config, world_size: int, model: ModelConfig | None, *, gpus: int = 0, local_ranks: int = 1
) -> list[str]:
    """Return every violation: numbers out of range, then broken rules. A rule ends where it reads a value that is out
    of range, or the model where that is not known; ``gpus`` and ``local_ranks`` are those of this node."""
    out_of_range = {key: message for key, bound in RANGES.items() for message in range_problems(config, key, bound)}
    facts = RuleContext(_without(config, out_of_range), world_size, model, gpus, local_ranks)
    found = list(out_of_range.values())
    for rule in RULES:
        with suppress(_OutOfRange):
            for message in rule(facts):  # those before it ends count
                found.append(message)
    return found


# -- the range of each number


def range_problems(config: Config, key: str, bound: Bound) -> Iterator[str]:
    """Yield the problem of a number, or of the numbers or ranges of a list; null is no number."""
    section, name = key.split(".")
    value = getattr(getattr(config, section), name, None)
    numbers = value if isinstance(value, tuple) else () if value is None else (value,)
    if not all(map(bound.holds, numbers)):
        each = "" if not isinstance(value, tuple) else "each " if isinstance(value[0], tuple) else "each number "
        shown = list(value) if isinstance(value, tuple) else value
        yield f"{key} ({shown}): {each}must be {bound.words}"


def _without(config: Config, keys: Iterable[str]) -> Config:
    """Return the config with sections in which to read one of these keys raises `_OutOfRange`, by their own properties
    and methods too."""

    def refuse(section: object) -> NoReturn:
        raise _OutOfRange

    refused = defaultdict[str, dict[str, property]](dict)
    for section, name in (key.split(".") for key in keys):
        refused[section][name] = property(refuse)
    sections = dict[str, Any]()
    for name, properties in refused.items():
        there = getattr(config, name)
        sections[name] = object.__new__(type(type(there).__name__, (type(there),), properties))
        vars(sections[name]).update(vars(there))
    return replace(config, **sections)


# -- rules between values


@dataclass(frozen=True)
class RuleContext:
    """The values that the rules look at."""

    config: Config
    world_size: int
    known_model: ModelConfig | None
    gpus: int
    local_ranks: int

    @property
    def model(self) -> ModelConfig:
        if self.known_model is None:
            raise _OutOfRange
        return self.known_model

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.model.sizes

    @property
    def dp(self) -> int:
        """Data parallel ranks; 0 where the world is too small for the mesh, which a rule of its own says."""
        mesh = self.config.mesh
        return self.world_size // mesh.model_ranks if mesh.dp is None else mesh.dp


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
    config, counts = facts.config, facts.config.pipeline.layers_per_stage
    keys = {"pp": "mesh.pp", "chunks": "pipeline.chunks", "layers_per_stage": "pipeline.layers_per_stage"}
    for problem in layers_problems(facts.sizes["layer"], config.mesh.pp, config.pipeline.chunks, counts):
        yield re.sub("`(.*?)`", lambda name: keys[name[1]], problem)


def _chunks(facts: RuleContext) -> Iterator[str]:
    pipeline = facts.config.pipeline
    other = {"1f1b": "interleaved (or gpipe)", "zb-h1": "zb-interleaved"}.get(pipeline.schedule)
    if other is not None and pipeline.chunks > 1:
        yield (
            f"pipeline.schedule {pipeline.schedule} runs one chunk per stage, not pipeline.chunks={pipeline.chunks}: "
            f"set pipeline.schedule={other}, or pipeline.chunks=1"
        )
    if pipeline.placement == "v" and pipeline.chunks != 2:
        yield (
            f"pipeline.schedule {pipeline.schedule} runs two chunks per stage, there and back, not pipeline.chunks="
            f"{pipeline.chunks}: set pipeline.chunks=2, or pipeline.schedule=zb-interleaved"
        )


def _group(facts: RuleContext) -> Iterator[str]:
    pipeline, pp = facts.config.pipeline, facts.config.mesh.pp
    if pipeline.group is None:
        return
    if not pipeline.in_groups:
        yield (
            f"pipeline.group ({pipeline.group}) is of microbatches that go through several chunks in turn, and "
            f"pipeline.schedule {pipeline.schedule} with pipeline.chunks={pipeline.chunks} has no such groups: set "
            f"pipeline.group=null, or more chunks with pipeline.schedule=interleaved, overlapped or zb-interleaved"
        )
    elif pipeline.group < pp:
        yield (
            f"pipeline.group ({pipeline.group}) microbatches come round before mesh.pp ({pp}) stages have had them: "
            f"set pipeline.group={pp} or more, or null"
        )


def _split_backward(facts: RuleContext) -> Iterator[str]:
    config, schedule = facts.config, facts.config.pipeline.schedule
    if not config.pipeline.splits_backward:
        return
    whole = {"zb-h1": "1f1b"}.get(schedule, "interleaved")
    if config.train.compile:
        yield (
            f"pipeline.schedule {schedule} computes weight gradients by themselves, and compiled blocks compute them "
            f"with the input gradients: set train.compile=false or pipeline.schedule={whole}"
        )
    for key, chunk in (("loss_chunk", config.memory.loss_chunk), ("mlp_chunk", config.memory.mlp_chunk)):
        if chunk is not None and config.zero.shard in ("gradients", "parameters"):
            yield (
                f"memory.{key} ({chunk}) makes whole gradients before pipeline.schedule {schedule} asks for them, "
                f"which zero.shard={config.zero.shard} would hold for each microbatch that waits: set "
                f"memory.{key}=null, zero.shard=optimizer or pipeline.schedule={whole}"
            )


def _order(facts: RuleContext) -> Iterator[str]:
    pipeline, ramp = facts.config.pipeline, facts.config.batch.ramp
    if pipeline.order is not None and ramp is not None:
        yield (
            f"batch.ramp {list(ramp)} changes the number of microbatches, and pipeline.order ({pipeline.order}) is for "
            "one number of them: set one of both to null"
        )
    if pipeline.order is not None and pipeline.schedule == "gpipe":
        yield (
            f"pipeline.schedule gpipe runs all forwards before all backwards, and pipeline.order ({pipeline.order}) "
            "has an order of its own: set pipeline.schedule=1f1b or interleaved, or pipeline.order=null"
        )


def _overlapped(facts: RuleContext) -> Iterator[str]:
    config = facts.config
    if not config.pipeline.overlaps:
        return
    mesh, schedule, splits = config.mesh, config.pipeline.schedule, config.pipeline.splits_backward
    what = f"pipeline.schedule {schedule} computes where others wait for messages of experts"
    alone = "zb-v" if splits else "1f1b" if config.pipeline.chunks == 1 else "interleaved"
    other = f"pipeline.schedule={alone}"
    if "experts" not in facts.sizes:
        if not splits:  # which leaves less of a bubble without experts, too
            yield f"{what}, and this model has no experts: set {other}"
    elif not splits and MeshShape(ep=mesh.ep, tp=mesh.tp).size(mesh.split["experts"]) == 1:
        yield f"{what}, and with mesh.ep={mesh.ep} each rank has all of them: set mesh.ep, or {other}"
    if config.pipeline.order is not None:
        yield (
            f"pipeline.schedule {schedule} runs actions two by two, and those of pipeline.order "
            f"({config.pipeline.order}) are run one by one: set {other}, or pipeline.order=null"
        )
    lora_drops = config.lora is not None and config.lora.dropout > 0
    if (facts.model.drops or lora_drops) and "full" in config.memory.recompute:
        yield (
            f"memory.recompute=full draws the masks of dropout again, which pipeline.schedule {schedule} would have "
            f"others draw in between: set memory.recompute=selective, no dropout, or {other}"
        )


def _loss_chunk(facts: RuleContext) -> Iterator[str]:
    chunk, schedule = facts.config.memory.loss_chunk, facts.config.pipeline.schedule
    if chunk is not None and schedule == "gpipe":
        yield (
            f"memory.loss_chunk ({chunk}) keeps a gradient of the whole head from a microbatch's forward to its "
            "backward, and pipeline.schedule gpipe runs all forwards first: set pipeline.schedule=1f1b or interleaved, "
            "or memory.loss_chunk=null"
        )


def _own_loss(facts: RuleContext) -> Iterator[str]:
    loss, chunk = facts.config.loss, facts.config.memory.loss_chunk
    terms = {"loss.label_smoothing": loss.label_smoothing, "loss.z_loss": loss.z_loss, "memory.loss_chunk": chunk}
    given = [f"{key} ({value})" for key, value in terms.items() if value]
    if loss.function is not None and given:
        yield f"loss.function ({loss.function}) takes the place of {', '.join(given)} too: leave them out"


def _preference(facts: RuleContext) -> Iterator[str]:
    config, section = facts.config, facts.config.preference
    if section is None:
        return
    loss = config.loss
    asked: dict[str, object] = {"loss.function": loss.function, "loss.label_smoothing": loss.label_smoothing}
    asked |= {"loss.z_loss": loss.z_loss}
    if given := [f"{key} ({value})" for key, value in asked.items() if value]:
        yield f"preference.loss ({section.loss}) takes the place of {', '.join(given)} too: leave them out"
    if config.chat.train_on != "assistant":
        yield (
            f"chat.train_on ({config.chat.train_on}): preferences are of all that stands behind the prompt of a pair: "
            "leave it out"
        )
    others = [corpus.path for corpus in (*config.data.train, *config.data.validation) if not corpus.has_examples]
    if others:
        yield (
            f"preference.loss ({section.loss}) learns from files of pairs, 'chosen' and 'rejected', and "
            f"{', '.join(others)} is none: name files of pairs, or leave preference out"
        )
    if section.gamma != PreferenceConfig().gamma and section.loss != "simpo":
        yield f"preference.gamma ({section.gamma:g}) is for preference.loss=simpo, not {section.loss}: leave it out"
    if section.scores and section.beta is not None:
        yield f"preference.beta ({section.beta:g}) is no part of preference.loss={section.loss}: leave it out"
    if section.label_smoothing and section.loss not in ("dpo", "simpo"):
        yield (
            f"preference.label_smoothing ({section.label_smoothing:g}) is for preference.loss=dpo or simpo, not "
            f"{section.loss}: leave it out"
        )


def _labels(facts: RuleContext) -> Iterator[str]:
    labels, section = facts.model.labels, facts.config.preference
    if section is not None and section.scores and labels > 1:
        yield (
            f"preference.loss={section.loss} is of one score, and the model's head gives {labels} "
            "(id2label): start from a model with one, or from a language model"
        )
    if labels and not facts.config.scores:
        yield (
            "the model's head scores sequences, and predicts no tokens: set preference.loss=bradley_terry, or start "
            "from a language model"
        )


def _mtp(facts: RuleContext) -> Iterator[str]:
    config, layers = facts.config, facts.model.mtp_layers
    factor = config.loss.mtp_loss_scaling_factor
    if layers == 0 or not config.tuning.predicts(facts.model.schema) or (factor and config.has_cross_entropy):
        return
    reason = f"is {factor:g}"
    if not config.has_cross_entropy:
        other = config.loss.function if config.preference is None else config.preference.loss
        reason = f"is a weight of cross entropy, and the loss is {other}"
    yield (
        f"loss.mtp_loss_scaling_factor {reason}: the model's layers that predict further tokens ({layers}) would learn "
        "nothing, and weights decay: leave them as they are with train.freeze=[mtp]"
    )


def _indexers(facts: RuleContext) -> Iterator[str]:
    schema = facts.model.schema
    indexers = {name for p in schema.params if ".attn.index." in p.name for name in names.whole_names(schema, p)}
    if not facts.config.loss.indexer and (trained := indexers - facts.config.tuning.frozen(schema)):
        yield (
            f"loss.indexer is 0: the weights of indexers ({len(trained)} tensors) would learn nothing, and weights "
            "decay: leave them as they are with train.freeze=[attn.index]"
        )


def _choices(facts: RuleContext) -> Iterator[str]:
    pipeline, pp = facts.config.pipeline, facts.config.mesh.pp
    given, virtual = pipeline.layers_per_stage, pp * pipeline.chunks
    if given is None and virtual > facts.sizes["layer"]:
        return  # it is said already
    if (apart := source_apart(facts.model, virtual, pipeline.chunks > 1, given)) is not None:
        (layer, source), keys = apart, facts.model.anatomy.layers[apart[0]].keys is not None
        what = f"the keys and values of layer {source}" if keys else f"what the indexer of layer {source} chooses"
        which, layers = "both", facts.sizes["layer"]
        if keys:
            firsts = together(facts.model)
            last = min((first for first in firsts if first > layer), default=layers) - 1
            which = f"layers {max(first for first in firsts if first <= source)} to {last}"
        yield (
            f"mesh.pp ({pp}), pipeline.chunks ({pipeline.chunks}): layer {layer} looks at {what}, which is in another "
            f"part of the pipeline: keep {which} in one part with pipeline.layers_per_stage, or set mesh.pp=1 and "
            "pipeline.chunks=1"
        )


def _mlp_chunk(facts: RuleContext) -> Iterator[str]:
    chunk, precision = facts.config.memory.mlp_chunk, facts.config.train.precision
    if chunk is not None and precision == "fp8":
        yield (
            f"memory.mlp_chunk ({chunk}) would scale each chunk of tokens by itself with train.precision fp8, and the "
            "numbers would depend on the layout: set memory.mlp_chunk=null, or train.precision=bf16"
        )


def _each_stage(facts: RuleContext) -> Iterator[str]:
    memory, pp = facts.config.memory, facts.config.mesh.pp
    for key in ("recompute", "offload_activations"):
        value = getattr(memory, key)
        if isinstance(value, tuple) and len(value) != pp:
            yield (
                f"memory.{key} has a list of {len(value)}, and mesh.pp is {pp}: give one value for each stage, or one "
                "for all"
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


def _compressed_activations(facts: RuleContext) -> Iterator[str]:
    memory = facts.config.memory
    if not memory.compress_activations:
        return
    if "full" in (memory.recompute if isinstance(memory.recompute, tuple) else [memory.recompute]):
        yield (
            "memory.compress_activations with memory.recompute=full would compute blocks again from rounded inputs, "
            "of which experts may be chosen otherwise: set memory.recompute=selective, or leave one of both out"
        )
    if memory.offload_activations not in (False, (False,) * facts.config.mesh.pp):
        yield (
            "memory.compress_activations is for what is kept on the device, and memory.offload_activations has it wait "
            "on the host: set one of both to false"
        )
    if facts.config.train.compile:
        yield (
            "memory.compress_activations rounds what each module keeps, and the compiler decides itself what compiled "
            "blocks keep: set train.compile=false, or memory.compress_activations=false"
        )


def _positions(facts: RuleContext) -> Iterator[str]:
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
    asked = sorted(asdict(section).items() - asdict(ContextConfig()).items())
    if asked and cp == 1:
        keys = ", ".join(f"context.{name} ({value})" for name, value in asked)
        yield f"{keys}: mesh.cp is 1, and no sequence is split: leave it out, or set mesh.cp"
    elif cp % section.heads:
        yield f"cannot divide mesh.cp ({cp}) by context.heads ({section.heads}): choose from {_divisors(cp)}"
    elif section.exchange == "heads" and section.heads not in (1, cp):
        yield (
            f"context.exchange=heads is over all of mesh.cp ({cp}), not over context.heads ({section.heads}): leave "
            "that out, or set context.exchange=ring (or gather), which is then between such groups"
        )


def _context_of_model(facts: RuleContext) -> Iterator[str]:
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
        yield "data.train names no corpus: give the path prefix of a token file, or a list of {path, weight, ...}"
    for key, corpora in (("data.train", data.train), ("data.validation", data.validation)):
        for index, corpus in enumerate(corpora):
            if corpus.weight <= 0:
                yield f"{key}[{index}].weight ({corpus.weight}) of {corpus.path}: must be above 0, or leave it out"
            if corpus.least < 0:
                yield f"{key}[{index}].least ({corpus.least}) of {corpus.path}: must be 0 or more, or leave it out"
            if corpus.streams is not None:
                yield from _streams(
                    f"{key}[{index}].streams ({corpus.streams}) of {corpus.path}", corpus, corpora[:index]
                )
    named = (*data.train, *data.validation)
    examples, tokens = ([c.path for c in named if c.has_examples == kind] for kind in (True, False))
    if examples and tokens:
        yield (
            f"data.train and data.validation name examples ({', '.join(examples)}) and token files "
            f"({', '.join(tokens)}): a run takes one kind"
        )
    ordered = [c.path for c in named if c.has_examples or c.is_imported]
    if not data.shuffle and ordered:
        yield (
            f"data.shuffle=false is for token files and streams, and {', '.join(ordered)} is neither: leave it out, or "
            "give files of texts streams"
        )
    if data.tokenizer is not None and facts.config.checkpoint.init is not None:
        yield (
            f"data.tokenizer ({data.tokenizer}) is for runs that begin with random weights, and checkpoint.init "
            f"({facts.config.checkpoint.init}) has its own: leave it out"
        )


def _streams(what: str, corpus: CorpusConfig, before: Sequence[CorpusConfig]) -> Iterator[str]:
    if corpus.streams is not None and corpus.streams < 1:
        yield f"{what}: must be 1 or more, or leave it out"
    elif corpus.is_imported:
        yield f"{what}: a data set of your own has rows, and streams are of files of texts: leave it out"
    elif any(other.streams and (other.path, other.split) == (corpus.path, corpus.split) for other in before):
        yield f"{what}: its files are named twice: give them once, with the sum of the weights"


def _keys(facts: RuleContext) -> Iterator[str]:
    for key, theirs in facts.config.data.map.items():
        if key not in EXAMPLE_KEYS:
            near = get_close_matches(key, EXAMPLE_KEYS, 1)
            meant = f"did you mean {near[0]}?" if near else f"choose from {', '.join(EXAMPLE_KEYS)}"
            yield f"data.map names {key} ({theirs}), which is no key that is read: {meant}"


def _compression(facts: RuleContext) -> Iterator[str]:
    width, precision = facts.config.zero.compress, facts.config.train.precision
    wide = precision == "fp32" or (facts.config.optimizer.master_weights and precision != "fp64")
    if width != "none" and not wide:
        way_out = "train.precision=bf16" if precision == "fp64" else "optimizer.master_weights=true"
        yield (
            f"zero.compress={width} is for gradients that are summed in fp32, and these are summed in {precision}: set "
            f"zero.compress=none, or {way_out}"
        )
    if width != "int8":
        return
    if facts.config.zero.shard not in ("none", "optimizer"):
        yield (
            f"zero.compress=int8 keeps what rounding leaves of whole gradients, and zero.shard="
            f"{facts.config.zero.shard} has none: choose zero.shard=optimizer or none, or zero.compress=bf16"
        )
    if precision == "fp16":
        yield (
            "zero.compress=int8 sends later what rounding leaves, and the loss scale of train.precision=fp16 changes "
            "meanwhile: choose train.precision=bf16, or zero.compress=bf16"
        )
    if facts.config.sync.every is not None:
        yield (
            f"zero.compress=int8 and sync.every={facts.config.sync.every} each keep a state of their own for each "
            "replica: choose zero.compress=bf16, or leave sync out"
        )


def _shards(facts: RuleContext) -> Iterator[str]:
    sync, shard, replicas = facts.config.sync, facts.config.zero.shard, facts.config.zero.replicas
    alone = sync.replicas_of(facts.dp)
    dp = 0 if not alone or facts.dp % alone else facts.dp // alone
    if replicas > 1 and shard == "none":
        yield (
            f"zero.replicas ({replicas}) groups share nothing out where zero.shard is none: set zero.shard=optimizer, "
            "gradients or parameters, or zero.replicas=1"
        )
    elif dp and dp % replicas:
        yield (
            f"cannot divide dp={dp} data parallel ranks{' of a replica of sync' * (alone > 1)} into "
            f"zero.replicas={replicas} groups: choose from {_divisors(dp)}"
        )


def _sync(facts: RuleContext) -> Iterator[str]:
    config, sync, dp = facts.config, facts.config.sync, facts.dp
    if sync.every is None:
        if sync.replicas is not None:
            yield f"sync.replicas ({sync.replicas}) take steps alone, and sync.every is null: set it, or leave them out"
        return
    replicas = sync.replicas_of(dp)
    if dp and dp % replicas:
        yield f"cannot divide dp={dp} into sync.replicas={replicas}: choose from {_divisors(dp)}"
    together, batch = config.batch.micro_size * dp * config.mesh.ep, config.batch
    for key, size in [("batch.global_size", batch.global_size), *(("batch.ramp", n) for n in (batch.ramp or ())[:2])]:
        if together and size % together:
            yield (
                f"{key} ({size}): replicas of sync are to have as many sequences each, and micro_size x dp x ep is "
                f"{together}: choose {_multiples(size, together)}"
            )
    for key, value, off in (
        ("ema.decay", config.ema.decay, "null"),
        ("experts.bias_rate", config.experts.bias_rate, "0"),
        ("recovery.recompute_every", config.recovery.recompute_every, "0"),
    ):
        if value:
            yield f"{key} ({value:g}) is of weights that all replicas have alike, unlike those of sync.every: set {off}"
    if (where := config.memory.offload_optimizer) != "none":
        yield f"sync.every keeps states on the device, and memory.offload_optimizer is {where}: set that to none"


def _lengths(facts: RuleContext) -> Iterator[str]:
    if facts.config.train.epochs is None:  # else steps are known once the data is
        yield from too_few_steps(facts.config)
    if facts.config.schedule.name == "constant" and facts.config.schedule.decay_steps is not None:
        yield "schedule.decay_steps is for cosine, linear and wsd: leave it null for constant"


def too_few_steps(config: Config) -> Iterator[str]:
    """Yield what of the learning rate's schedule, or of rounds, does not fit into the steps of a run."""
    schedule, steps, every = config.schedule, config.train.steps, config.sync.every
    warmup = schedule.warmup_steps
    if every is not None and every > steps:
        yield (
            f"sync.every ({every}) is above train.steps ({steps}): no round would end, and what is saved stay the "
            f"weights of the start: choose at most {steps}"
        )
    if warmup >= steps:
        yield f"schedule.warmup_steps ({warmup}) must be below train.steps ({steps}): choose at most {steps - 1}"
    elif schedule.name == "wsd" and warmup + schedule.length_of_decay(steps) > steps:
        yield (
            f"schedule.decay_steps ({schedule.decay_steps}) and warmup_steps ({warmup}) are more than train.steps "
            f"({steps}): choose a decay of at most {steps - warmup}"
        )


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
    if train.precision == "fp8" and (layers := facts.sizes["layer"]) < 3:
        yield (
            f"train.precision fp8 leaves the first and the last layer in bf16, and the model has {layers}: "
            "set train.precision=bf16"
        )


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


def _muon(facts: RuleContext) -> Iterator[str]:
    config = facts.config
    if config.optimizer.name != "muon":
        return
    if config.memory.offload_optimizer != "none":
        yield (
            f"optimizer.name muon multiplies matrices on the device, and memory.offload_optimizer "
            f"({config.memory.offload_optimizer}) has the CPU update: set it to none, or optimizer.name=adamw"
        )
    if config.lora is not None:
        yield "optimizer.name muon is for the matrices of a model, and lora trains none of them: set it to adamw"
    if config.optimizer.moments == "bf16" and config.muon.momentum >= 1 - 2**-8:
        yield (
            f"muon.momentum ({config.muon.momentum:g}) moves its mean by less than bf16 can hold: choose it below "
            "0.996, or optimizer.moments=fp32"
        )


def _ema(facts: RuleContext) -> Iterator[str]:
    config, section = facts.config, facts.config.ema
    if section.decay is None:
        for key in (key for key in ("evaluate", "export") if getattr(section, key)):
            yield f"ema.{key} is about averages, and ema.decay is null: set it, 0.999 say, or ema.{key}=false"
    elif not config.optimizer.master_weights and config.train.precision not in ("fp32", "fp64"):
        yield (
            "ema.decay moves averages by less than 16 bits can hold: set optimizer.master_weights=true, which has "
            "averages as wide as masters"
        )
    if section.evaluate and not config.evaluate.every:
        yield "ema.evaluate is about evaluations, and evaluate.every is 0: set it, or ema.evaluate=false"
    if section.export and (config.checkpoint.export is None or config.lora is not None):
        yield (
            "ema.export is about checkpoint.export of a whole model, which this run has not: name a folder there, or "
            "set ema.export=false"
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
    if not every:
        asked = {"evaluate.patience": facts.config.evaluate.patience, "checkpoint.best": facts.config.checkpoint.best}
        for key in (key for key, value in asked.items() if value):
            yield f"{key} looks at the losses of evaluations, and evaluate.every is 0: set it, or leave {key} out"
        if facts.config.evaluate.tasks:
            yield "evaluate.tasks are asked at evaluations, and evaluate.every is 0: set it, or leave the tasks out"
    if facts.config.evaluate.tasks and facts.model.labels:
        yield "evaluate.tasks are of models of text, and this one scores sequences: leave them out"
    if every and not data.validation and not data.validation_fraction:
        yield (
            f"evaluate.every ({every}) has nothing to evaluate: name data.validation, set data.validation_fraction "
            "above 0, or evaluate.every=0"
        )


def _tuning(facts: RuleContext) -> Iterator[str]:
    tuning = facts.config.tuning
    if tuning.projector and facts.config.checkpoint.init is None and facts.config.checkpoint.resume is None:
        yield "train.projector is of a model that also sees: name its folder or checkpoint in checkpoint.init"
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
    section, schema = facts.config.experts, facts.model.schema
    asked = {f"experts.{name}": value for name, value in asdict(section).items() if value}
    if asked and "experts" not in facts.sizes:
        yield f"{_said(asked)}: the model has no experts to balance, set {_off(asked)}"
        return
    if section.bias_rate and not any(names.buffers(schema)):
        yield (
            f"experts.bias_rate ({section.bias_rate:g}): the routers of this model have no biases to move, set it to 0 "
            "and balance by experts.sequence_balance or experts.batch_balance"
        )
    if section.bias_rate and facts.config.lora is not None:
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
    tuning = facts.config.tuning
    still, adapted = tuning.frozen(schema), tuning.schema(schema).by_name
    if asked and (frozen := [name for name, adapter in routers if name in still and adapter not in adapted]):
        yield (
            f"{_said(asked)}: {len(frozen)} of the {len(routers)} routers are not trained ({frozen[0]}), and have no "
            f"balance to learn: train them (train.only, train.freeze, lora.targets), or set {_off(asked)}"
        )


def _grouped(facts: RuleContext) -> Iterator[str]:
    """What torch's products of all experts of a rank take on a GPU."""
    config, sizes, precision = facts.config, facts.sizes, facts.config.train.precision
    mesh, shape = config.mesh, MeshShape(pp=config.mesh.pp, cp=config.mesh.cp, ep=config.mesh.ep, tp=config.mesh.tp)
    on_gpus = config.train.device_type(facts.gpus) == "cuda" and precision in ("bf16", "fp8")
    if not on_gpus or "experts" not in sizes or mesh_problems(sizes, shape, mesh.etp):
        return
    held = {axis: size // shape.size(mesh.split.get(axis, ())) for axis, size in sizes.items()}
    if held["experts"] >= GROUPS:
        yield (
            f"mesh.ep ({mesh.ep}): a rank has {held['experts']} of the {sizes['experts']} experts, and a GPU "
            f"multiplies by fewer than {GROUPS} at once: choose a larger ep"
        )
    for param in facts.model.schema.params if precision == "fp8" else ():
        _, *sides = param.sentence.shape(held) if "experts" in param.leading else (0,)
        if odd := [side for side in sides if side % MULTIPLE]:
            yield (
                f"train.precision fp8: {param.name} has {' and '.join(map(str, odd))} features on a rank, and a GPU "
                f"multiplies experts in fp8 by multiples of {MULTIPLE}: choose another mesh.etp (it is {mesh.etp}), or "
                "train.precision=bf16"
            )


def _said(asked: Mapping[str, float]) -> str:
    return ", ".join(f"{key} ({value:g})" for key, value in asked.items())


def _off(asked: Iterable[str]) -> str:
    return ", ".join(f"{key}=0" for key in asked)


def _ramp(facts: RuleContext) -> Iterator[str]:
    batch = facts.config.batch
    if batch.ramp is None:
        return
    first, increment, samples = batch.ramp
    if first >= batch.global_size or (batch.global_size - first) % increment:
        yield (
            f"batch.ramp {list(batch.ramp)} does not come from {first} to batch.global_size ({batch.global_size}) in "
            f"increments of {increment}: choose a first size below it, and an increment that divides what is between"
        )
    elif samples < (batch.global_size - first) // increment:
        yield (
            f"batch.ramp {list(batch.ramp)} has more sizes than samples: give it {batch.global_size} samples or more"
        )


def _batch_balance(facts: RuleContext) -> Iterator[str]:
    """Yield the problem of a balance whose counts come from forwards that are run after the first backward."""
    batch, schedule, groups = facts.config.batch, facts.config.pipeline.schedule, facts.dp * facts.config.mesh.ep
    own = -(-batch.global_size // groups) if groups else 0
    microbatches = -(-own // batch.micro_size)
    if facts.config.experts.batch_balance and schedule != "gpipe" and microbatches > 1:
        yield (
            f"experts.batch_balance needs the counts of all {microbatches} microbatches of a step before the first "
            f"backward, and pipeline.schedule {schedule} runs backwards before: set pipeline.schedule=gpipe or "
            f"batch.micro_size={own}, or balance by experts.sequence_balance"
        )


def _base_dtype(facts: RuleContext) -> Iterator[str]:
    config, mesh = facts.config, facts.config.mesh
    if config.lora is None or (dtype := config.lora.base_dtype) is None:
        return
    for key, given, other in (("train.precision", "fp8", "bf16"), ("train.async_tp", True, "false")):
        section, name = key.split(".")
        if getattr(getattr(config, section), name) == given:
            yield (
                f"{key} multiplies by weights as they are, and lora.base_dtype {dtype} holds them in blocks: set "
                f"{key}={other}, or lora.base_dtype=null"
            )
    schema, shape = facts.model.schema, MeshShape(pp=mesh.pp, cp=mesh.cp, ep=mesh.ep, tp=mesh.tp)
    if mesh_problems(facts.sizes, shape, mesh.etp):
        return  # said already
    on_any = config.tuning.block_problems(schema, MeshShape(), mesh.split)
    for problem in config.tuning.block_problems(schema, shape, mesh.split):
        other = "" if problem in on_any else "choose other sizes of the mesh, or "
        yield f"{problem}: {other}set lora.base_dtype=null"


def _checkpoint(facts: RuleContext) -> Iterator[str]:
    section, lora = facts.config.checkpoint, facts.config.lora
    if lora is not None and section.init is None:
        yield "lora trains adapters of a model that is there: name its folder or checkpoint in checkpoint.init"
    # Adapters are resumed beside the model that they were begun on.
    if lora is None and section.init is not None and section.resume not in (None, AUTO):
        yield (
            f"checkpoint.init ({section.init}) and checkpoint.resume ({section.resume}) both say where to start: "
            "leave out one of them"
        )
    if section.export is not None and not section.at_end:
        yield (
            f"checkpoint.export ({section.export}) is made of the checkpoint at the end, and checkpoint.at_end is "
            "false: set it to true, or leave out the export"
        )
    if section.push is not None and section.export is None:
        yield (
            f"checkpoint.push ({section.push}) uploads the export: name a folder for it by checkpoint.export, or leave "
            "out the push"
        )


def _repetition(facts: RuleContext) -> Iterator[str]:
    section, choice = facts.config.recovery, facts.config.optimizer.non_finite
    for key in ("spikes", "go_back"):
        if getattr(section, key) and choice != "repeat":
            yield (
                f"recovery.{key} is about steps that are repeated, and optimizer.non_finite is {choice}: set that to "
                f"repeat, or recovery.{key}=false"
            )


RULES: tuple[Callable[[RuleContext], Iterator[str]], ...] = (
    _world, _parts, _stages, _chunks, _group, _split_backward, _order, _overlapped, _loss_chunk, _own_loss, _preference,
    _labels, _mtp, _indexers, _choices, _mlp_chunk, _each_stage, _offload, _compressed_activations, _positions, _tokens,
    _context, _context_of_model, _corpora, _keys, _shards, _sync, _compression, _lengths, _device, _fp16, _moments,
    _muon, _ema, _async_tp, _held_out, _tuning, _balances, _experts, _grouped, _ramp, _batch_balance, _base_dtype,
    _checkpoint, _repetition,
)  # fmt: skip


def _multiples(value: int, step: int) -> str:
    """Return the multiples of `step` on both sides of a value that is none."""
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)


def _divisors(value: int) -> str:
    return ", ".join(str(n) for n in range(1, value + 1) if value % n == 0)
