"""Recipe (YAML) + overrides (`optimizer.lr=1e-3`) -> a frozen, typed `Config`.

Here a recipe is read and typed; whether its values fit each other, the model and the machine is asked in
`megacore.problems`. Nothing here imports torch.
"""

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, field, fields
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BeforeValidator, ConfigDict, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from megacore.references import ReferenceProblem, References, dotted, escaped
from megacore.store.strict_json import StoreError, read_file
from models.lora import Lora
from models.tuning import Tuning
from parallel import limits
from parallel.layout import MeshShape

# -- the sections of a recipe

Int = Annotated[int, Strict()]
Float = Annotated[float, Strict()]
Bool = Annotated[bool, Strict()]

TYPED = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, config=TYPED)
class MeshConfig:
    """Sizes of the mesh. Where `dp` is null, it is what the world size leaves."""

    pp: Int = 1
    dp: Int | None = None
    cp: Int = 1
    ep: Int = 1
    tp: Int = 1

    @property
    def model_ranks(self) -> int:
        """Ranks of one data-parallel replica: pp x cp x ep x tp."""
        return self.pp * self.cp * self.ep * self.tp

    def shape(self, world_size: int) -> MeshShape:
        """The mesh on `world_size` ranks; `megacore.problems` has made sure that it fits."""
        dp = world_size // self.model_ranks if self.dp is None else self.dp
        return MeshShape(pp=self.pp, dp=dp, ep=self.ep, cp=self.cp, tp=self.tp)


@dataclass(frozen=True, config=TYPED)
class PipelineConfig:
    """`layers_per_stage` has one number for each of the pp x chunks virtual stages; null balances them."""

    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    chunks: Int = 1
    layers_per_stage: tuple[Int, ...] | None = None


@dataclass(frozen=True, config=TYPED)
class Corpus:
    """A token file (`path` + .bin and .idx) or a file of examples, and its weight in the blend."""

    path: str
    weight: Float = 1.0

    @property
    def has_examples(self) -> bool:
        """Whether it is a file of chats, prompts with completions, or texts, rather than a token file."""
        return self.path.endswith(EXAMPLES)


EXAMPLES = (".jsonl", ".jsonl.gz", ".parquet")
"""How the names of files of examples end."""


def _as_corpora(value: object) -> object:
    """A path prefix, or a list of path prefixes and {path, weight}, as a list of {path, weight}."""
    listed = [value] if isinstance(value, str) else value
    return [{"path": each} if isinstance(each, str) else each for each in listed] if isinstance(listed, list) else value


Corpora = Annotated[tuple[Corpus, ...], BeforeValidator(_as_corpora)]


@dataclass(frozen=True, config=TYPED)
class DataConfig:
    """`validation_fraction` of the training data is held out where `validation` names no corpora.

    `sequence_length` is in tokens. `within_documents` keeps attention from crossing document boundaries; examples are
    always kept apart.

    `shard` is what data parallel ranks (and all others that hold the same) share out instead of holding it each: the
    state of the `optimizer`, the `gradients` too, the `parameters` too (ZeRO 1, 2, 3). They do so in groups of
    dp / `replicas` (HSDP).
    """

    train: Corpora = ()
    validation: Corpora = ()
    validation_fraction: Float = 0.01
    sequence_length: Int = 512
    seed: Int = 0
    within_documents: Bool = False
    shard: Literal["none", "optimizer", "gradients", "parameters"] = "none"
    replicas: Int = 1


@dataclass(frozen=True, config=TYPED)
class ChatConfig:
    """How examples become training data.

    `train_on`: of a chat, the loss counts every turn of the `assistant`, the `last` of them, or `all` tokens.
    `too_long` examples are `cut` to their beginning, or dropped. `bad_lines` stop before training starts, or are
    skipped. `pack` puts several examples into a row. `template` is a file of the chat template to use, where it is not
    the model's own.
    """

    train_on: Literal["assistant", "last", "all"] = "assistant"
    too_long: Literal["cut", "drop"] = "cut"
    bad_lines: Literal["stop", "skip"] = "stop"
    pack: Bool = True
    template: str | None = None


@dataclass(frozen=True, config=TYPED)
class BatchConfig:
    """In sequences: of one optimizer step over all ranks, and of one microbatch."""

    global_size: Int = 8
    micro_size: Int = 1


@dataclass(frozen=True, config=TYPED)
class OptimizerConfig:
    """AdamW. `clip` bounds the global gradient norm (null does not).

    `non_finite`: a NaN or infinity in loss or gradient makes the run `stop`, or `skip` the step, which then changes
    nothing; more than `max_skipped` such steps among 100 end it all the same (null: no number does). What overflows in
    fp16 and only lowers the loss scale does not count.

    `moments`: `fp32` are as wide as what is updated, `bf16` rounded after each step.
    """

    lr: Float = 3e-4
    betas: tuple[Float, Float] = (0.9, 0.95)
    eps: Float = 1e-8
    weight_decay: Float = 0.1
    clip: Float | None = 1.0
    master_weights: Bool = True
    moments: Literal["fp32", "bf16"] = "fp32"
    non_finite: Literal["stop", "skip"] = "stop"
    max_skipped: Int | None = 10


@dataclass(frozen=True, config=TYPED)
class LoraConfig:
    """Trains low-rank adapters of the linears of the blocks, and nothing else: see `models.lora`.

    `targets` are patterns of the linears' names, ours (`attn.qkv`, `attn.qkv.q`, `mlp`) or Hugging Face's (`q_proj`).
    """

    rank: Int = 16
    alpha: Float = 32.0
    targets: tuple[str, ...] = ("*",)
    dropout: Float = 0.0
    rslora: Bool = False


@dataclass(frozen=True, config=TYPED)
class LossConfig:
    """Beyond cross entropy: probability spread over the vocabulary, and weight of the squared log-partition."""

    label_smoothing: Float = 0.0
    z_loss: Float = 0.0


@dataclass(frozen=True, config=TYPED)
class LossScaleConfig:
    """Of fp16. A gradient that overflows halves the scale; `growth_interval` steps without one double it."""

    initial: Float = 2.0**16
    growth_interval: Int = 2000
    minimum: Float = 1.0


@dataclass(frozen=True, config=TYPED)
class MemoryConfig:
    """What is kept for the backward and for the update, and where.

    `recompute`: of a block, `none` is computed again, `selective` the outputs of its norms and activation functions, or
    `full` all of it. `offload_activations` keeps what the backward needs of the blocks in host memory. `loss_chunk` is
    the number of tokens whose logits are there at a time (null: those of a microbatch).

    `offload_optimizer`: masters and moments live in `host` memory, or in a `file` in `offload_folder` (on a fast disk
    of each node), and the CPU updates; they pass through a buffer of `offload_buffer` MiB on each rank.
    `offload_parameters` keeps a rank's slice of the parameters in host memory too (with data.shard=parameters).
    """

    recompute: Literal["none", "selective", "full"] = "none"
    offload_activations: Bool = False
    loss_chunk: Int | None = None
    offload_optimizer: Literal["none", "host", "file"] = "none"
    offload_folder: str | None = None
    offload_buffer: Int = 512
    offload_parameters: Bool = False


@dataclass(frozen=True, config=TYPED)
class ScheduleConfig:
    """How the learning rate moves, in optimizer steps: see `megacore.lr`."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: Int = 0
    decay_steps: Int | None = None
    min_ratio: Float = 0.1


@dataclass(frozen=True, config=TYPED)
class TrainConfig:
    """`precision` of the weights and activations; `fp8` is bf16 with the products of linears in fp8.

    `async_tp`: whether linears of tensor parallel GPUs send parts of their tokens while they multiply others
    (docs/meshes.md).

    `only` and `freeze` are patterns of names of tensors (`embed`, `layers.0`, `attn.qkv`, `*norm`): those that are
    trained (null: all), and those that are not.

    `threads`: torch threads of each process; null leaves them to the environment (OMP_NUM_THREADS).

    `timeout`: minutes that one rank waits for another before the run ends and says where each of them stands. What all
    of them do takes as long as it takes.
    """

    steps: Int = 100
    seed: Int = 0
    precision: Literal["bf16", "fp16", "fp8", "fp32", "fp64"] = "bf16"
    compile: Bool = False
    async_tp: Bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    only: tuple[str, ...] | None = None
    freeze: tuple[str, ...] = ()
    threads: Int | None = None
    timeout: Float = 10.0

    def device_type(self, gpus: int) -> Literal["cpu", "cuda"]:
        """Where a machine with `gpus` GPUs trains."""
        if self.device == "auto":
            return "cuda" if gpus else "cpu"
        return self.device


@dataclass(frozen=True, config=TYPED)
class EvaluateConfig:
    """Evaluates `batches` global batches after each `every` steps; 0 never does."""

    every: Int = 0
    batches: Int = 8


@dataclass(frozen=True, config=TYPED)
class CheckpointConfig:
    """Saves after each `every` steps (0: at no interval) and at the end, also where a signal ends the run.

    The `keep` newest stay (null: all), and those of every `keep_every` steps (0: no others). `background` writes while
    training goes on. A save that fails is tried again when the next one is due, and at the end until it succeeds; the
    run ends where all have failed for `patience` hours. `init` is a Hugging Face folder or a checkpoint to take the
    weights of; `resume` is a checkpoint whose run goes on, or `auto`: the newest in the run's own folder that is whole,
    if there is one. `export` is a folder to make of the last checkpoint when all steps are done, in Hugging Face's
    format, or peft's if adapters were trained.
    """

    every: Int = 1000
    at_end: Bool = True
    keep: Int | None = 3
    keep_every: Int = 0
    background: Bool = True
    patience: Float = 4.0
    init: str | None = None
    resume: str | None = None
    export: str | None = None

    @property
    def on(self) -> bool:
        return self.at_end or self.every > 0


@dataclass(frozen=True, config=TYPED)
class LogConfig:
    """`wandb` is a project's name; `peak_tflops` of one device, where its own table or measurement is not wanted."""

    every: Int = 1
    tensorboard: Bool = False
    wandb: str | None = None
    peak_tflops: Float | None = None


def _as_section(value: object) -> object:
    """A recipe's `model=null` leaves the model to the checkpoint that the run starts from."""
    return {} if value is None else value


Model = Annotated[dict[str, Any], BeforeValidator(_as_section)]


@dataclass(frozen=True, config=TYPED)
class Config:
    """A run, as its recipe and overrides describe it.

    `model` is resolved by `models.registry`; where it names none, it is that of the checkpoint that the run starts
    from.
    """

    model: Model = field(default_factory=dict)
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    data: DataConfig = DataConfig()
    chat: ChatConfig = ChatConfig()
    batch: BatchConfig = BatchConfig()
    loss: LossConfig = LossConfig()
    loss_scale: LossScaleConfig = LossScaleConfig()
    memory: MemoryConfig = MemoryConfig()
    lora: LoraConfig | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    out: str = "runs/pretrain"

    @property
    def tuning(self) -> Tuning:
        """What of the model is trained."""
        lora = None if self.lora is None else Lora(**vars(self.lora))
        return Tuning(lora, self.train.only, self.train.freeze)

    def to_yaml(self) -> str:
        """A recipe that loads back as this very config."""
        return OmegaConf.to_yaml(OmegaConf.create(escaped(asdict(self))))


SECTIONS = {
    "mesh": MeshConfig,
    "pipeline": PipelineConfig,
    "data": DataConfig,
    "chat": ChatConfig,
    "batch": BatchConfig,
    "loss": LossConfig,
    "loss_scale": LossScaleConfig,
    "memory": MemoryConfig,
    "lora": LoraConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "checkpoint": CheckpointConfig,
    "log": LogConfig,
}


class ConfigError(ValueError):
    """Everything that is wrong with a config, at once."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(map(limits.cut, problems))
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{count} in the config:", *_numbered(self.problems)]))


def _numbered(problems: Sequence[str]) -> Iterator[str]:
    return (f"{number:3}. {problem}" for number, problem in enumerate(problems, start=1))


# -- reading


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a recipe and applies dotted overrides in order: `optimizer.lr=1e-3`, `data.train[0].weight=2`.

    Values are YAML, and `${section.key}` stands for another key's value. `out` is runs/<name of the recipe> by default.

    Raises:
        ConfigError: all malformed overrides, unknown keys (with the nearest spelling) and mistyped values.
    """
    tree = _read(Path(recipe))
    problems = [problem for override in overrides for problem in _override(tree, override)]
    try:
        plain = References(OmegaConf.to_container(tree, throw_on_missing=True)).resolved()
    except OmegaConfBaseException as error:
        raise ConfigError([*problems, f"{error.full_key}: {_first_line(error)}"]) from error
    except ReferenceProblem as error:
        raise ConfigError([*problems, str(error)]) from error
    assert isinstance(plain, dict)
    try:
        config = TypeAdapter(Config).validate_python({"out": f"runs/{Path(recipe).stem}", **plain})
    except ValidationError as error:
        raise ConfigError([*problems, *map(_explain, error.errors())]) from error
    if problems:
        raise ConfigError(problems)
    return config


def _read(recipe: Path) -> DictConfig:
    try:
        text = read_file(recipe, limits.RECIPE).decode()
        _check_depth(text)
        tree = OmegaConf.load(StringIO(text))
    except StoreError as error:
        raise ConfigError([str(error) if recipe.exists() else f"there is no recipe {recipe}"]) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{recipe}:{mark.line + 1}:{mark.column + 1}" if mark else str(recipe)
        raise ConfigError([f"{where}: {error.problem}"]) from error
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError([f"cannot read {recipe}: {_first_line(error)}"]) from error
    if not isinstance(tree, DictConfig):
        raise ConfigError([f"{recipe}: a recipe is a mapping of sections ({', '.join(SECTIONS)}), not a list"])
    return tree


def _override(tree: DictConfig, override: str) -> Iterator[str]:
    """Applies one override to the tree in place; yields what is wrong with it."""
    if not re.match(r"[A-Za-z_]\w*(\.\w+|\[\d+\])*=", override):
        yield f"override {override!r} is not of the form section.key=value"
        return
    try:
        key, _, value = override.partition("=")
        _check_depth(value, key.count(".") + key.count("["))
        tree.merge_with_dotlist([override])
    except (OmegaConfBaseException, yaml.YAMLError, IndexError, TypeError, ValueError) as error:
        yield f"override {override!r}: {_first_line(error)}"


def _check_depth(text: str, depth: int = 0) -> None:
    """ValueError for YAML that goes, from a depth, deeper than the limit: what composes it can overflow the stack."""
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > limits.DEEPEST:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise ValueError(f"line {line} is nested more than {limits.DEEPEST} levels deep, and no recipe needs to be")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


# -- what is wrong, in words

EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "dataclass_type": "a mapping",
}

OTHER_NAMES = {
    "optimizer.lr": ("learning_rate", "max_lr"),
    "optimizer.betas": ("beta1", "beta2", "adam_beta1", "adam_beta2"),
    "optimizer.clip": ("max_grad_norm", "grad_clip", "clip_grad"),
    "schedule.name": ("lr_scheduler", "lr_scheduler_type"),
    "schedule.warmup_steps": ("warmup",),
    "schedule.min_ratio": ("min_lr",),
    "train.steps": ("max_steps", "num_steps", "train_iters"),
    "train.precision": ("dtype",),
    "batch.global_size": ("batch_size", "global_batch_size", "gradient_accumulation_steps"),
    "batch.micro_size": ("micro_batch_size", "per_device_train_batch_size"),
    "data.sequence_length": ("seq_len", "seq_length", "max_length", "max_seq_length"),
    "mesh.tp": ("tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size"),
    "mesh.pp": ("pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size"),
    "memory.recompute": ("gradient_checkpointing", "activation_checkpointing"),
    "evaluate.every": ("eval_steps", "eval_interval"),
    "checkpoint.every": ("save_steps", "save_interval"),
    "log.every": ("logging_steps", "log_interval"),
    "model.vocab_size": ("vocab_size",),
    "out": ("output_dir", "out_dir"),
}
"""{a key: what other trainers call it}."""
NO_CHOICE = {
    f"optimizer.{key}": "the optimizer is AdamW, and there is no other: leave it out" for key in ("name", "type")
}
"""{what is no key because there is nothing to choose: how it is}."""


def _explain(error: ErrorDetails) -> str:
    where, kind, value = error["loc"], error["type"], error["input"]
    if kind == "unexpected_keyword_argument":
        return f"{dotted(where)}: unknown key; {_nearest(where)}"
    if kind == "missing":
        return f"{dotted(where)}: is missing"
    if kind == "literal_error":
        return f"{dotted(where)}: got {value!r}, choose {error['ctx']['expected']}"
    if kind in EXPECTED:
        keys = f" of {', '.join(_keys(where))}" if kind == "dataclass_type" else ""
        return f"{dotted(where)}: expected {EXPECTED[kind]}{keys}, got {value!r}"
    return f"{dotted(where)}: {error['msg']}, got {value!r}"


def _nearest(where: Sequence[str | int]) -> str:
    """The keys that an unknown one may have meant: what other trainers call so, its name in another section, else one
    spelled alike beside it."""
    *parents, key = where
    if (how := NO_CHOICE.get(dotted(where))) is not None:
        return how
    beside = _keys(parents)
    alike = difflib.get_close_matches(str(key)[:100], beside, n=1)
    elsewhere = [f"{name}.{key}" for name in SECTIONS if key in _keys([name])]
    named = [ours for ours, theirs in OTHER_NAMES.items() if key in theirs]
    meant = named or elsewhere or [dotted([*parents, name]) for name in alike]
    if meant:
        return f"did you mean {' or '.join(meant)}?"
    return f"{dotted(parents) or 'a recipe'} has {', '.join(beside)}"


def _keys(parents: Sequence[str | int]) -> list[str]:
    """Names that may stand at a place of a recipe."""
    if not parents:
        section: type = Config
    else:
        section = SECTIONS[str(parents[0])] if len(parents) == 1 else Corpus
    return [each.name for each in fields(section)]


# -- for the launcher


def processes(config: Config, nodes: int, gpus: int) -> int:
    """Processes to start on each node: what the mesh needs, or where `mesh.dp` is free, one for each of its GPUs."""
    if config.mesh.dp is None and config.train.device_type(gpus) == "cuda" and gpus:
        return gpus
    return max(1, math.ceil(config.mesh.model_ranks * (config.mesh.dp or 1) / nodes))
