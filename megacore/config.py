"""All keys of a recipe: each with its type, its range, its default and what it means, in one place.

docs/config.md is printed from here (`megacore config`). `megacore.recipe` reads a recipe into a `Config`, and whether
its values fit each other, the model and the machine is asked in `megacore.checks.rules`. Nothing here imports
torch.
"""

import math
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, field, fields, is_dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict, Discriminator, Strict, Tag
from pydantic.dataclasses import dataclass

from megacore.batch_sizes import BatchSizes
from megacore.models.lora import Lora
from megacore.models.tuning import Tuning
from megacore.parallel.context_split import ContextParallel
from megacore.parallel.enum_errors import (
    IN_GROUPS,
    OF_SCORES,
    OVERLAPPED,
    SPLIT_BACKWARD,
    BaseDtype,
    Compression,
    ContextBalance,
    ContextExchange,
    MatrixScale,
    Moments,
    OptimizerName,
    OptimizerOffload,
    PipelineSchedule,
    Placement,
    Precision,
    PreferenceLoss,
    Recompute,
    ZeroShard,
)
from megacore.parallel.import_path import is_import_path
from megacore.parallel.virtual_stages import placement_of
from megacore.parallel.weights.layout import MeshShape, read_layers
from megacore.parallel.weights.schema import Schema, Split, split_of
from megacore.recipe_yaml import write_yaml
from megacore.store.io.hub import HubName

# -- ranges


class Bound(NamedTuple):
    """The range of a number, or of a pair of them: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]


AT_LEAST_0 = Bound("at least 0", lambda value: value >= 0)
AT_LEAST_1 = Bound("at least 1", lambda value: value >= 1)
COUNTED = Bound("at least 1 and at most 2^20", lambda value: 1 <= value <= 2**20)
SEED = Bound("at least 0 and below 2^63", lambda value: 0 <= value < 2**63)
ABOVE_0 = Bound("above 0", lambda value: value > 0)
BELOW_HALF = Bound("at least 0 and below 0.5", lambda value: 0 <= value < 0.5)
BELOW_1 = Bound("at least 0 and below 1", lambda value: 0 <= value < 1)
UP_TO_1 = Bound("between 0 and 1", lambda value: 0 <= value <= 1)
TIMEOUT = Bound("minutes above 0, and at most a day (1440)", lambda value: 0 < value <= 1440)
UP_TO_99 = Bound("between 1 and 99", lambda value: 1 <= value <= 99)
POWER_OF_2 = Bound("a power of two up to 2^24", lambda value: 0 < value <= 2**24 and math.frexp(value)[0] == 0.5)
SAMPLES = Bound("a-b with 0 <= a < b", lambda pair: 0 <= pair[0] < pair[1])

Int = Annotated[int, Strict()]
Float = Annotated[float, Strict()]
Bool = Annotated[bool, Strict()]
T = TypeVar("T")
PerStage = Annotated[
    Annotated[T, Tag("{all}")] | Annotated[tuple[T, ...], Tag("{each}")],
    Discriminator(lambda value: "{each}" if isinstance(value, list | tuple) else "{all}"),
]
"""A value of all stages of a pipeline, or a list of one for each."""

# -- the sections of a recipe

TYPED = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, config=TYPED)
class MeshConfig:
    """Sizes of the mesh of ranks; their product is the number of processes."""

    pp: Annotated[Int, COUNTED] = 1
    """Pipeline parallel: stages, each with some of the layers."""
    dp: Annotated[Int, COUNTED] | None = None
    """Data parallel: replicas, each with some of the batch; null: as many as the world size leaves."""
    cp: Annotated[Int, COUNTED] = 1
    """Context parallel: parts of each sequence."""
    ep: Annotated[Int, COUNTED] = 1
    """Expert parallel: parts of the experts, each with some of the batch."""
    tp: Annotated[Int, COUNTED] = 1
    """Tensor parallel: parts of each layer."""
    etp: Annotated[Int, COUNTED] = 1
    """Expert tensor parallel: parts of each expert; 1: experts are whole, and spread over ep x tp; or as many as `tp`.
    """

    @property
    def split(self) -> Split:
        """The dimensions that split each axis."""
        return split_of(self.etp)

    @property
    def model_ranks(self) -> int:
        """Ranks of one data-parallel replica: pp x cp x ep x tp."""
        return self.pp * self.cp * self.ep * self.tp

    def shape(self, world_size: int) -> MeshShape:
        """Return the mesh on `world_size` ranks; `megacore.checks.rules` has made sure that it fits."""
        dp = world_size // self.model_ranks if self.dp is None else self.dp
        return MeshShape(pp=self.pp, dp=dp, ep=self.ep, cp=self.cp, tp=self.tp)


@dataclass(frozen=True, config=TYPED)
class ContextConfig:
    """The attention of sequences that are split over `mesh.cp`."""

    exchange: ContextExchange = "auto"
    """The way in which queries meet the keys of other ranks: hop by hop (`ring`), all at once (`gather`), or each rank
    with all tokens of some heads (`heads`); `auto`: `heads` where the model drops attention weights, which no other one
    can, else `ring`."""
    balance: ContextBalance = "auto"
    """The pieces that are cut so that each rank has early and late tokens of them: `rows`, `documents`, or as few
    documents as leave the ranks equal work (`auto`)."""
    heads: Annotated[Int, AT_LEAST_1] = 1
    """Successive ranks of cp, those of a node, that exchange heads, with `ring` or `gather` between them; with `heads`
    it is all of cp, and is left at 1."""

    def over(self, cp: int, drops_attention: bool) -> ContextParallel:
        """Return what a mesh makes of it, and a model that drops attention weights in training or does not."""
        return ContextParallel.of(cp, self.exchange, self.balance, self.heads, drops_attention)


def _as_layers(value: object) -> object:
    """Return the list that a text of layers stands for."""
    return read_layers(value) if isinstance(value, str) else value


Layers = Annotated[tuple[Annotated[Int, AT_LEAST_0], ...], BeforeValidator(_as_layers)]


@dataclass(frozen=True, config=TYPED)
class PipelineConfig:
    """The way of microbatches through the stages of a pipeline."""

    schedule: PipelineSchedule = "1f1b"
    """The order of forwards and backwards on each stage; `zb-` ones compute weight gradients where it would wait, and
    in `overlapped` a forward or a backward computes while the other one's experts exchange rows, and `dualpipe-v` does
    both."""
    chunks: Annotated[Int, COUNTED] = 1
    """Virtual stages of each rank, for `interleaved`, `overlapped` and `zb-interleaved` (and `gpipe`); `zb-v` and
    `dualpipe-v` have 2."""
    group: Annotated[Int, COUNTED] | None = None
    """The most microbatches that go through all chunks of a stage before the next ones do, pp or more, for
    `interleaved`, `overlapped` and `zb-interleaved`: groups of more are held longer, and their messages have longer to
    arrive. null takes pp, or as few more as leave none over; an `order` has its own."""
    order: str | None = None
    """The file of another order in which the actions of the schedule are run, for this recipe's sizes: `megacore
    schedule --search` makes it of times and memory (docs/pipelines.md)."""
    layers_per_stage: Layers | None = None
    """A number of layers for each of the pp x chunks virtual stages, or a text with repetitions, as `0,1x126,0`; the
    first and the last one may have none, but the embedding or the head. null balances them."""

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed by themselves, not with input gradients."""
        return self.schedule in SPLIT_BACKWARD

    @property
    def in_groups(self) -> bool:
        """Whether microbatches go through several chunks group by group."""
        return self.schedule in IN_GROUPS and self.chunks > 1

    @property
    def overlaps(self) -> bool:
        """Whether forwards and backwards run in turns, so that one computes where the other waits for experts."""
        return self.schedule in OVERLAPPED

    @property
    def placement(self) -> Placement:
        """The way in which chunks go through the stages."""
        return placement_of(self.schedule)


@dataclass(frozen=True, config=TYPED)
class ZeroConfig:
    """The states that ranks split instead of each holding all of them (ZeRO)."""

    shard: ZeroShard = "none"
    """The state of the `optimizer`, the `gradients` too, the `parameters` too (ZeRO 1, 2, 3), or `none` of it."""
    replicas: Annotated[Int, COUNTED] = 1
    """Copies of what is shared out: it is split over groups of dp / replicas ranks (HSDP), of the dp of each replica
    that takes steps alone, where some do (`sync`)."""
    compress: Compression = "none"
    """The numbers that gradients are rounded to where they are sent: `bf16` are half as many bytes, `int8` a quarter,
    and what rounding leaves is then kept and sent later; layouts agree to the rounding (see docs/precision.md)."""


@dataclass(frozen=True, config=TYPED)
class SyncConfig:
    """Replicas that take steps alone and are brought together by an outer step (DiLoCo, Douillard et al. 2023, arXiv
    2311.08105; docs/meshes.md)."""

    every: Annotated[Int, AT_LEAST_1] | None = None
    """Steps that each replica takes alone before all are brought together; null: gradients are summed over all of them
    in every step."""
    replicas: Annotated[Int, COUNTED] | None = None
    """The replicas that do so, successive parts of dp, in each of which `zero` shares out; null: each rank of dp is
    one."""
    lr: Annotated[Float, ABOVE_0] = 0.7
    """The learning rate of the outer step, SGD with Nesterov's momentum on the mean of the ways that replicas have
    come; with 1, and no momentum, weights are averaged."""
    momentum: Annotated[Float, BELOW_1] = 0.9
    """The momentum of the outer step."""

    def replicas_of(self, dp: int) -> int:
        """Return the number of replicas that take steps alone on so many ranks of dp: 1 where none do."""
        return 1 if self.every is None else self.replicas or dp


@dataclass(frozen=True, config=TYPED)
class CorpusConfig:
    """A token file, a file of examples or files of texts, and its weight in the blend."""

    path: str
    """NAME of the pair NAME.bin, NAME.idx, or examples: a file (.jsonl, .json, both with .gz or .zst, .parquet,
    .arrow), a folder of such files, or a data set of the hub (`OWNER/NAME@REVISION`); or a data set of your own by
    its import path, `package.module:name` (see docs/extending.md)."""
    weight: Float = 1.0
    """Its share of the blend, relative to the others'; above 0."""
    least: Int = 0
    """Tokens of a document, or an example, below which it is left out, on both sides of what is held out."""
    split: str | None = None
    """The split of a folder or a data set; null: `data.split` to train on, and to validate on the first of
    `validation`, `valid`, `dev` and `test` that is there."""
    streams: Int | None = None
    """The number of streams that files of texts are dealt to, which are tokenized beside training (docs/data.md): each
    rank tokenizes those that it takes samples of; null: nothing is."""

    @property
    def has_examples(self) -> bool:
        """Whether it is chats, prompts with completions, or texts, which are prepared, rather than a token file."""
        return self.streams is None and (self.path.endswith(EXAMPLES) or self.is_set)

    @property
    def is_set(self) -> bool:
        """Whether it is several files of examples: a folder, or a data set of the hub."""
        return self.hub_name is not None or (os.path.isdir(self.path) and not os.path.lexists(f"{self.path}.idx"))

    @property
    def hub_name(self) -> HubName | None:
        """The name of a data set of the hub, which has a revision; None where a path is meant."""
        found = HubName.of(self.path, "dataset")
        return None if found is None or found.revision is None else found

    @property
    def is_imported(self) -> bool:
        """Whether it is a data set of the user's own, by its import path."""
        return is_import_path(self.path)


EXAMPLE_KEYS = (
    *("chosen", "rejected", "completion", "label", "messages", "tools", "conversations", "system"),
    *("instruction", "output", "input", "prompt", "text", "role", "content", "from", "value"),
)
"""The keys of examples that are read, which `data.map` gives others for."""
EXAMPLES = (
    *(f"{name}{packed}" for name in (".jsonl", ".json") for packed in ("", ".gz", ".zst")),
    ".parquet",
    ".arrow",
)
"""The endings of the names of files of examples."""
ABOUT_DATA = (
    *("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"),
    *("corpus.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
)
"""The names of files that have such an ending, and tell of data that are beside them."""


def has_examples(name: str) -> bool:
    """Return whether a file in a folder, by its name, is one of examples."""
    return name.endswith(EXAMPLES) and os.path.basename(name) not in ABOUT_DATA


def _as_corpora(value: object) -> object:
    """Return a path prefix, or a list of path prefixes and {path, weight, ...}, as a list of the latter."""
    listed = [value] if isinstance(value, str) else value
    return [{"path": each} if isinstance(each, str) else each for each in listed] if isinstance(listed, list) else value


Corpora = Annotated[tuple[CorpusConfig, ...], BeforeValidator(_as_corpora)]


@dataclass(frozen=True, config=TYPED)
class DataConfig:
    """The data that the model is trained and evaluated on."""

    train: Corpora = ()
    """A corpus, or a list of corpora, each a path or {path, weight, least, split, streams}."""
    validation: Corpora = ()
    """The same for evaluation; where there is none, a part of the training data is held out."""
    validation_fraction: Annotated[Float, BELOW_1] = 0.01
    """The share of the training data that is held out where `validation` names no corpora."""
    sequence_length: Annotated[Int, AT_LEAST_1] = 512
    """Tokens of a sequence."""
    seed: Annotated[Int, SEED] = 0
    """The seed of the order of the samples."""
    shuffle: Bool = True
    """Whether samples of token files are shuffled, and files and documents of streams; false: in their order."""
    temperature: Annotated[Float, ABOVE_0] = 1.0
    """The temperature of a blend: a corpus has a share as weight^(1/temperature). With the corpora's sizes as weights,
    1 takes each as often as the others, and more favours the small ones."""
    tokenizer: str | None = None
    """The tokenizer of streams and examples, a Hugging Face folder or a name on its hub, where a run begins with random
    weights; null: the one that lies beside the first corpus."""
    workers: Annotated[Int, COUNTED] = 1
    """Processes of each rank that tokenize streams; a stream is tokenized by one of them."""
    within_documents: Bool = False
    """Whether attention stays within documents; examples are always kept apart."""
    allow_changed: Bool = False
    """Whether a run goes on where a corpus holds other tokens than it was trained on, under the same name."""
    split: str = "train"
    """The split to train on of folders and data sets, where they name none of their own: `train`, `main/train` where it
    is in several folders, or `*` for all of their files."""
    map: dict[str, str] = field(default_factory=dict)
    """The keys of examples, where they are others than those that are read: {prompt: question, completion: answer}."""


@dataclass(frozen=True, config=TYPED)
class ChatConfig:
    """The way from examples to training data."""

    train_on: Literal["assistant", "last", "all"] = "assistant"
    """The part of a chat that the loss counts: every turn of the `assistant`, the `last` of them, or `all` tokens."""
    too_long: Literal["cut", "drop"] = "cut"
    """Whether an example that is too long is cut to its beginning or dropped."""
    bad_lines: Literal["stop", "skip"] = "stop"
    """Whether a bad line stops before training starts, or is skipped."""
    pack: Bool = True
    """Whether several examples are put into a row."""
    template: str | None = None
    """A file of the chat template to use; null: the model's own."""


@dataclass(frozen=True, config=TYPED)
class BatchConfig:
    """Sizes of batches, in sequences."""

    global_size: Annotated[Int, COUNTED] = 8
    """Sequences of one optimizer step over all ranks, which need not divide by them."""
    micro_size: Annotated[Int, COUNTED] = 1
    """Sequences of one microbatch."""
    ramp: tuple[Annotated[Int, AT_LEAST_1], Annotated[Int, AT_LEAST_1], Annotated[Int, AT_LEAST_1]] | None = None
    """[first size, increment, samples]: the way to `global_size`, which is reached after so many samples, each size
    between for the same share of them (Megatron's `--rampup-batch-size`); null: all steps are alike. `schedule` and
    `train.steps` count steps of any size."""

    @property
    def sizes(self) -> BatchSizes:
        """The sizes of the global batches of a run."""
        return BatchSizes(self.global_size, self.ramp)


@dataclass(frozen=True, config=TYPED)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), or beside it Muon for matrices (docs/optimizer.md)."""

    name: OptimizerName = "adamw"
    """The rule of the matrices of blocks: that of all else, or `muon`."""
    lr: Annotated[Float, ABOVE_0] = 3e-4
    """The highest learning rate; `schedule` moves it."""
    betas: tuple[Annotated[Float, BELOW_1], Annotated[Float, BELOW_1]] = (0.9, 0.95)
    """The share of each moment that a step keeps."""
    eps: Annotated[Float, ABOVE_0] = 1e-8
    """The number that is added to the root of the second moment."""
    weight_decay: Annotated[Float, AT_LEAST_0] = 0.1
    """Decay of the matrices, times the learning rate."""
    clip: Annotated[Float, ABOVE_0] | None = 1.0
    """Bound of the global gradient norm; null: none."""
    master_weights: Bool = True
    """Whether the update is made on fp32 copies of the weights."""
    moments: Moments = "fp32"
    """`fp32`: as wide as what is updated; `bf16`: rounded after each step."""
    non_finite: Literal["stop", "skip", "repeat"] = "repeat"
    """Whether a NaN or infinity in loss or gradient stops the run, or skips the step, which then changes nothing, or
    the step is repeated: where it is bad again, its samples are left out (`recovery.skip_samples`), and it is done with
    those after them."""
    max_skipped: Annotated[Int, UP_TO_99] | None = 10
    """Skipped steps among 100, or steps whose samples are left out, that end the run all the same; null: no number
    does. What overflows in fp16 and only lowers the loss scale does not count."""


@dataclass(frozen=True, config=TYPED)
class MuonConfig:
    """Muon (Jordan et al. 2024, Liu et al. 2025, arXiv 2502.16982), with `optimizer.name=muon`; weight decay is that of
    `optimizer`."""

    lr: Annotated[Float, ABOVE_0] | None = None
    """The highest learning rate of matrices; null: optimizer.lr."""
    scale: MatrixScale = "match_rms_adamw"
    """The factor of the learning rate for a matrix of so many rows and columns: 0.2 sqrt(max(rows, columns)), with
    which updates are as large as AdamW's, or sqrt(max(1, rows / columns)) (`original`)."""
    momentum: Annotated[Float, BELOW_1] = 0.95
    """The share of the mean of gradients that a step keeps."""
    nesterov: Bool = True
    """Whether the gradient of a step counts once more in its update."""
    steps: Annotated[Int, UP_TO_99] = 5
    """Steps of Newton and Schulz, of five products of matrices each."""


@dataclass(frozen=True, config=TYPED)
class EmaConfig:
    """Exponential averages of the weights, kept beside them (docs/optimizer.md)."""

    decay: Annotated[Float, BELOW_1] | None = None
    """The share of an average that each update of the weights keeps; null: there are no averages."""
    evaluate: Bool = False
    """Whether evaluations tell the loss of the averages too, as `ema_validation_loss`."""
    export: Bool = False
    """Whether `checkpoint.export` takes the averages."""


@dataclass(frozen=True, config=TYPED)
class LoraConfig:
    """Low-rank adapters of the linears of the blocks, which are trained alone, or with a head of scores (see
    docs/lora.md); null: none."""

    rank: Annotated[Int, AT_LEAST_1] = 16
    """Their inner size."""
    alpha: Annotated[Float, ABOVE_0] = 32.0
    """Their outputs count alpha / rank times."""
    targets: tuple[str, ...] = ("*",)
    """Patterns of the linears' names, ours (`attn.qkv`, `attn.qkv.q`, `mlp`) or Hugging Face's (`q_proj`)."""
    dropout: Annotated[Float, BELOW_1] = 0.0
    """The dropout of their inputs."""
    rslora: Bool = False
    """Whether their outputs count alpha / sqrt(rank) times instead."""
    base_dtype: BaseDtype | None = None
    """The numbers that the frozen linears and experts are held in, `nf4` (4.5 bits each) or `int8` (8.5); null: those
    of `train.precision`."""


@dataclass(frozen=True, config=TYPED)
class PreferenceConfig:
    """Learning from pairs, what was chosen and what was rejected (see docs/finetune.md); null: none."""

    loss: PreferenceLoss = "dpo"
    """The loss of a pair; `dpo` and `ipo` compare with the weights that the run starts from, and `bradley_terry` trains
    a reward model, whose head scores the last token of each."""
    beta: Annotated[Float, ABOVE_0] | None = None
    """The factor of the log-probabilities in the rewards (`dpo`, `simpo`), of the regularisation (`ipo`), or of the
    odds ratio beside the cross entropy of what was chosen (`orpo`); null: 2 for `simpo`, 0.1 for the others."""
    gamma: Annotated[Float, AT_LEAST_0] = 1.0
    """The margin between the rewards (`simpo`)."""
    label_smoothing: Annotated[Float, BELOW_HALF] = 0.0
    """The probability that the two of a pair were mixed up (`dpo`, `simpo`)."""

    @property
    def scores(self) -> bool:
        """Whether it is of a head that scores sequences."""
        return self.loss in OF_SCORES

    @property
    def factor(self) -> float:
        """Beta, or what stands for null."""
        usual = 2.0 if self.loss == "simpo" else 0.1
        return usual if self.beta is None else self.beta


@dataclass(frozen=True, config=TYPED)
class LossConfig:
    """The terms of the loss beyond cross entropy, or another loss."""

    function: str | None = None
    """The import path `package.module:name` of a function of your own that takes the place of cross entropy (see
    docs/extending.md)."""
    label_smoothing: Annotated[Float, BELOW_1] = 0.0
    """Probability that is spread over the vocabulary."""
    z_loss: Annotated[Float, AT_LEAST_0] = 0.0
    """Weight of the squared log-partition."""
    mtp_loss_scaling_factor: Annotated[Float, AT_LEAST_0] = 0.1
    """Weight of the mean loss of the layers that predict further tokens (MTP), where the model has some."""
    indexer: Annotated[Float, AT_LEAST_0] = 1.0
    """Weight of what indexers learn from, where the model has some: the mean divergence of the softmax of their scores
    from the attention's weights. It is not part of the loss, and has no gradient for other weights."""


@dataclass(frozen=True, config=TYPED)
class ExpertsConfig:
    """The balance of a model's experts over the global batch (docs/moe.md); none of it is part of the loss."""

    sequence_balance: Annotated[Float, AT_LEAST_0] = 0.0
    """Weight of the balance of each sequence, the mean over all; 1 is perfect."""
    batch_balance: Annotated[Float, AT_LEAST_0] = 0.0
    """Weight of the balance of the whole batch instead."""
    z_loss: Annotated[Float, AT_LEAST_0] = 0.0
    """Weight of the squared log-partition of the routers."""
    bias_rate: Annotated[Float, AT_LEAST_0] = 0.0
    """The step by which a correction bias, where the model has one, moves towards an even load after each update."""


@dataclass(frozen=True, config=TYPED)
class LossScaleConfig:
    """The dynamic loss scale of fp16."""

    initial: Annotated[Float, POWER_OF_2] = 2.0**16
    """The scale of the first step."""
    growth_interval: Annotated[Int, AT_LEAST_1] = 2000
    """Steps without an overflow that double it; an overflow halves it."""
    minimum: Annotated[Float, POWER_OF_2] = 1.0
    """The smallest scale."""


@dataclass(frozen=True, config=TYPED)
class MemoryConfig:
    """The memory of what is kept for the backward and for the update."""

    recompute: PerStage[Recompute] = "none"
    """The part of a block that is computed again in the backward: `none` of it, `selective`: the outputs of its norms
    and activation functions, or `full`: all of it. A list has one for each stage of the pipeline, of which the first
    ones hold the most microbatches."""
    offload_activations: PerStage[Bool] = False
    """Whether the activations of the blocks wait in host memory for the backward. A list has one for each stage."""
    compress_activations: Bool = False
    """Whether the activations of the blocks wait for the backward in 8 bits: losses stay as they are, and gradients
    agree with those without it to a few per cent (see docs/precision.md)."""
    loss_chunk: Annotated[Int, AT_LEAST_1] | None = None
    """Tokens whose logits are there at a time; null: those of a microbatch."""
    mlp_chunk: Annotated[Int, AT_LEAST_1] | None = None
    """Tokens whose activations of a dense feed-forward network are there at a time, forward and backward, of which only
    the input is kept; null: those of a microbatch."""
    offload_optimizer: OptimizerOffload = "none"
    """Whether masters and moments live in `host` memory, or in a `file`, and the CPU updates."""
    offload_folder: str | None = None
    """The folder of the file, on a fast disk of each node."""
    offload_buffer: Annotated[Int, AT_LEAST_1] = 512
    """MiB on each rank of the buffer that they pass through."""
    offload_parameters: Bool = False
    """Whether a rank's slice of the parameters is in host memory too (with zero.shard=parameters)."""


@dataclass(frozen=True, config=TYPED)
class ScheduleConfig:
    """The course of the learning rate, in optimizer steps."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """The shape of its fall after the warm-up; `wsd` stays and falls at the end."""
    warmup_steps: Annotated[Int, AT_LEAST_0] = 0
    """Steps in which it rises from 0."""
    decay_steps: Annotated[Int, AT_LEAST_1] | None = None
    """Steps of the fall; null: all that are left, or for `wsd` a tenth of all."""
    min_ratio: Annotated[Float, UP_TO_1] = 0.1
    """The share of optimizer.lr that is left at the end."""

    def length_of_decay(self, total_steps: int) -> int:
        """Return the number of steps of the fall, in a run of so many."""
        if self.name == "constant":
            return 0
        if self.decay_steps is not None:
            return self.decay_steps
        rest = total_steps - self.warmup_steps
        return min(math.ceil(total_steps / 10), rest) if self.name == "wsd" else rest


@dataclass(frozen=True, config=TYPED)
class TrainConfig:
    """The run: how long, in which precision, on what, and which of the weights."""

    steps: Annotated[Int, AT_LEAST_1] = 100
    """Optimizer steps in all."""
    epochs: Annotated[Float, ABOVE_0] | None = None
    """Passes over the training data, of a blend until each corpus has been passed so often; they go before `steps`,
    which is set to what they come to; null: `steps` counts."""
    seed: Annotated[Int, AT_LEAST_0] = 0
    """The seed of the initial weights and of dropout."""
    precision: Precision = "bf16"
    """The precision of weights and activations; `fp8` is bf16 with the products of linears and experts in
    fp8."""
    compile: Bool = False
    """Whether torch.compile compiles the blocks."""
    async_tp: Bool = False
    """Whether linears of tensor parallel GPUs send some tokens while they multiply others (docs/meshes.md)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The devices to train on; `auto`: GPUs where there are some."""
    only: tuple[str, ...] | None = None
    """Patterns of names of the tensors that are trained (`embed`, `layers.0`, `attn.qkv`, `*norm`); null: all."""
    freeze: tuple[str, ...] = ()
    """Patterns of the names of tensors that are not trained."""
    projector: Bool = False
    """Whether the projector of a model that also sees is trained on chats with images (`projector` to `only` and
    `freeze`); false: it stays as it is."""
    threads: Annotated[Int, AT_LEAST_1] | None = None
    """Torch threads of each process; null leaves them to the environment (OMP_NUM_THREADS)."""
    timeout: Annotated[Float, TIMEOUT] = 10.0
    """Minutes that one rank waits for another before the run ends and says where each of them stands. What all of them
    do takes as long as it takes."""

    def device_type(self, gpus: int) -> Literal["cpu", "cuda"]:
        """Return the kind of device that a machine with `gpus` GPUs trains on."""
        if self.device == "auto":
            return "cuda" if gpus else "cpu"
        return self.device


@dataclass(frozen=True, config=TYPED)
class EvaluateConfig:
    """The loss on validation data."""

    every: Annotated[Int, AT_LEAST_0] = 0
    """Steps from one evaluation to the next; 0: never."""
    batches: Annotated[Int, AT_LEAST_1] = 8
    """Global batches of one evaluation."""
    patience: Annotated[Int, AT_LEAST_1] | None = None
    """Evaluations in a row without a lower loss that end the run, as if all its steps were done; null: none do."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness (the extra `lm-eval`) that each evaluation asks too."""


@dataclass(frozen=True, config=TYPED)
class CheckpointConfig:
    """The checkpoints that a run saves, and the weights that it starts from."""

    every: Annotated[Int, AT_LEAST_0] = 1000
    """Steps from one checkpoint to the next; 0: at no interval."""
    at_end: Bool = True
    """Whether the end is saved, also where a signal ends the run."""
    keep: Annotated[Int, AT_LEAST_1] | None = 3
    """The number of the newest that stay; null: all."""
    keep_every: Annotated[Int, AT_LEAST_0] = 0
    """Those of every so many steps stay too; 0: no others."""
    best: Bool = False
    """Whether an evaluation with a lower loss than all before is saved at once, and the checkpoint with the lowest
    stays too; it is what `export` takes."""
    background: Bool = True
    """Whether training goes on while a checkpoint is written."""
    patience: Annotated[Float, AT_LEAST_0] = 4.0
    """Hours of failing saves that end the run: one that fails is tried again when the next is due, and at the end until
    it succeeds."""
    folder: str | None = None
    """The URL of the folder of the checkpoints in an object store, `s3://bucket/prefix`, `gs://`, `file://`; null:
    `checkpoints` in out. Credentials come from the environment."""
    init: str | None = None
    """A Hugging Face folder, a model of its hub (`OWNER/NAME` or `OWNER/NAME@REVISION`) or a checkpoint to take the
    weights of."""
    resume: str | None = None
    """A checkpoint whose run goes on, or `auto`: the newest in the run's own folder that is whole, if there is one."""
    export: str | None = None
    """A folder to make of the last checkpoint when all steps are done, in Hugging Face's format, or peft's if adapters
    were trained."""
    push: str | None = None
    """A repository of the hub, `OWNER/NAME`, to upload the export to, with a model card; one that is made for it is
    private."""

    @property
    def on(self) -> bool:
        return self.at_end or self.every > 0 or self.best


def _as_ranges(value: object) -> object:
    """Return texts 'a-b', one or a list of them, as pairs."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple):
        return value
    texts = [re.fullmatch(r"(\d{1,18})-(\d{1,18})", each) if isinstance(each, str) else None for each in listed]
    return [each if text is None else (int(text[1]), int(text[2])) for each, text in zip(listed, texts, strict=True)]


SampleRanges = Annotated[tuple[Annotated[tuple[Int, Int], SAMPLES], ...], BeforeValidator(_as_ranges)]


@dataclass(frozen=True, config=TYPED)
class RecoveryConfig:
    """The faults that a run gets over by itself, and the data that it leaves out."""

    compare_every: Annotated[Int, AT_LEAST_0] = 100
    """Steps after which ranks that hold the same weights and states compare them bit for bit, as before each save; 0:
    never."""
    recompute_every: Annotated[Int, AT_LEAST_0] = 0
    """Steps after which replicas compute the same microbatch, of each in its turn, and compare its loss and gradients
    bit for bit, without a replica each rank with itself: it finds what computes wrong; 0: never."""
    checksums: Annotated[Float, BELOW_1] = 0.0025
    """The share of a step's time in which what one rank alone holds, in turns, is compared with what its last update
    has left there; 0: none."""
    max_restarts: Annotated[Int, AT_LEAST_0] = 3
    """Restarts of all ranks in a row with no new step between them, before the run ends with status 75; 0: none."""
    memory: Bool = True
    """Whether checkpoints are kept in host memory too, where there is room, for all ranks to start again from."""
    overhead: Annotated[Float, ABOVE_0] = 0.005
    """The share of the time that checkpoints in memory may take: so often are they made."""
    skip_samples: SampleRanges = ()
    """Ranges of the numbers of training samples that are left out, `a-b` or [a, b] for a to b - 1; the samples after
    them take their place. A run keeps its ranges wherever it goes on."""
    spikes: Bool = False
    """Whether a step whose loss or gradient norm is far above those before it is repeated too, as
    `optimizer.non_finite=repeat` does; where not, that is only told."""
    go_back: Bool = False
    """Whether the samples that are left out are all from the newest checkpoint to the bad step, and the run goes back
    there (PaLM's remedy, arXiv 2204.02311)."""


@dataclass(frozen=True, config=TYPED)
class LogConfig:
    """The places that metrics go to, besides metrics.jsonl."""

    every: Annotated[Int, AT_LEAST_1] = 1
    """Steps from one line to the next."""
    tensorboard: Bool = False
    """Whether TensorBoard's files are written."""
    report: Bool = True
    """Whether `report.html` is written at the end, a page with curves, layout and incidents (`megacore report`); it
    takes the extra `report`."""
    wandb: str | None = None
    """A project of Weights & Biases."""
    peak_tflops: Annotated[Float, ABOVE_0] | None = None
    """The peak of one device, where its own table or measurement is not wanted."""
    profile: Annotated[Int, AT_LEAST_0] = 0
    """The step that torch's profiler records, with the one after it, into `profiles/` of the run's folder; 0: none."""
    trace: Annotated[Int, AT_LEAST_0] = 0
    """Steps from one to the next of which all ranks record what they do when, and for what they wait, into one file in
    `traces/` of the run's folder, for Perfetto, `megacore diagnose`, `schedule --trace` and the report; 0: none."""


# A recipe's `model=null` is no key: the model is the checkpoint's that the run starts from.
Model = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]


@dataclass(frozen=True, config=TYPED)
class Config:
    """A run, as its recipe and overrides describe it."""

    model: Model = field(default_factory=dict)
    """A family or a preset and the keys of its config (see docs/adding_a_family.md); where it names none, it is the
    model of the checkpoint that the run starts from. The family may be one of your own (see docs/extending.md)."""
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    zero: ZeroConfig = ZeroConfig()
    sync: SyncConfig = SyncConfig()
    data: DataConfig = DataConfig()
    chat: ChatConfig = ChatConfig()
    batch: BatchConfig = BatchConfig()
    loss: LossConfig = LossConfig()
    preference: PreferenceConfig | None = None
    experts: ExpertsConfig = ExpertsConfig()
    context: ContextConfig = ContextConfig()
    loss_scale: LossScaleConfig = LossScaleConfig()
    memory: MemoryConfig = MemoryConfig()
    lora: LoraConfig | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    muon: MuonConfig = MuonConfig()
    ema: EmaConfig = EmaConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    log: LogConfig = LogConfig()
    callbacks: tuple[str, ...] = ()
    """Import paths `package.module:name` of callbacks of your own (see docs/extending.md), in their order."""
    out: str = "runs/pretrain"
    """The run's own folder; runs/NAME for a recipe NAME.yaml."""

    @property
    def has_cross_entropy(self) -> bool:
        """Whether the loss is the cross entropy of tokens, in nats."""
        return self.loss.function is None and self.preference is None

    @property
    def tuning(self) -> Tuning:
        """The part of the model that is trained."""
        lora = None if self.lora is None else Lora(**asdict(self.lora))
        return Tuning(lora, self.train.only, self.train.freeze, self.train.projector)

    @property
    def scores(self) -> bool:
        """Whether a head is trained that scores whole sequences."""
        return self.preference is not None and self.preference.scores

    @property
    def example_tokens(self) -> int:
        """The most tokens of a row of examples. The last one is predicted alone, unless nothing is predicted."""
        return self.data.sequence_length + (not self.scores)

    def mtp_factor(self, model: Schema) -> float:
        """Return the weight of the loss of further tokens: 0 where nothing that predicts them is trained."""
        return self.loss.mtp_loss_scaling_factor if self.tuning.predicts(model) else 0.0

    def to_yaml(self) -> str:
        """Return a recipe that loads back as this very config."""
        return write_yaml(asdict(self))


# -- what the sections say of themselves


def parts(annotation: Any) -> Iterator[Any]:
    """Yield a type and all that it is made of: `tuple[Annotated[int, BOUND], ...] | None` has int, BOUND and None in
    it."""
    yield annotation
    if get_origin(annotation) in (Annotated, Union, types.UnionType, tuple):
        for each in get_args(annotation):
            yield from parts(each)


SECTIONS: Mapping[str, type] = {
    each.name: kind
    for each in fields(Config)
    for kind in parts(each.type)
    if isinstance(kind, type) and is_dataclass(kind)
}
"""{a section of a recipe: its class}."""
RANGES: Mapping[str, Bound] = {
    f"{section}.{each.name}": bound
    for section, kind in SECTIONS.items()
    for each in fields(kind)
    for bound in parts(each.type)
    if isinstance(bound, Bound)
}
"""{a key that is a number, or numbers: its range}."""
