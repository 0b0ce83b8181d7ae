"""Every family's configuration has these: Hugging Face's field names, read and written with total accounting. No torch.

Each field of a ``config.json`` is carried, or is on the family's list of fields that do not change the maths, or must
have the one value that is supported; anything else is an error that names it.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cached_property, lru_cache
from inspect import formatannotation, get_annotations
from typing import TYPE_CHECKING, Any, ClassVar, Self

from megacore.models import scores
from megacore.models.anatomy import TOLD, Anatomy, LayerAttention
from megacore.models.names import whole_names
from megacore.models.tuning import EVERYTHING, Tuning
from megacore.parallel import limits
from megacore.parallel.enum_errors import nearest
from megacore.parallel.weights.schema import Param, Schema

SCORING = "ForSequenceClassification"
"""The end of the names of transformers' classes whose heads score sequences."""

if TYPE_CHECKING:
    from megacore.models.decoder import Decoder
    from megacore.parallel.parameters import Parameters

HARMLESS = frozenset(
    {
        "_attn_implementation_autoset", "_commit_hash", "_model_name_or_path", "_name_or_path", "_num_labels",
        "architectures", "attn_implementation", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
        "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty",
        "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
        "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
        "id2label", "is_decoder", "label2id", "length_penalty", "max_length", "min_length", "model_type",
        "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
        "output_hidden_states", "output_scores", "prefix", "problem_type", "pruned_heads", "remove_invalid_values",
        "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
        "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k",
        "top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "trust_remote_code",
        "typical_p", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
    }
)  # fmt: skip
"""Fields of any Hugging Face config that do not change what a forward in training computes: bookkeeping, generation."""
# Every config has these; other values would change the maths.
_FIXED = {
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "quantization_config": None,
    "rope_interleaved": False,
}


OTHERWISE = ("labels", "projector")
"""What no field of a ``config.json`` says by its name."""
Shapes = Mapping[str, Sequence[int]]
"""{the name of a tensor of a folder: its shape}."""


class ModelConfigError(ValueError):
    """A model configuration that cannot be built; ``problems`` names all reasons."""

    def __init__(self, family: str, problems: Sequence[str]) -> None:
        self.problems = [limits.cut(problem) for problem in problems]
        super().__init__(limits.cut(f"{family}: " + "; ".join(self.problems)))


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """The part of a ``config.json`` that changes the maths."""

    family: ClassVar[str]
    architecture: ClassVar[str]
    # Whether it is the part of a model that also sees, whose class without its head has the plain name.
    of_text: ClassVar[bool] = False
    harmless: ClassVar[frozenset[str]] = frozenset()
    fixed: ClassVar[Mapping[str, Any]] = {}
    # What is said of all that is written, whatever was read.
    written: ClassVar[Mapping[str, Any]] = {}
    # {a field: the name that transformers saves it by, where that is another}
    saved: ClassVar[Mapping[str, str]] = {}
    # {another name that a file may have for a field: the field}
    spellings: ClassVar[Mapping[str, str]] = {}
    # Hugging Face's tensors: what their names start with (and a dot), unless the base model was saved by itself; the
    # embedding and the head, which are one tensor where they are tied; what older versions left that is no weight.
    base_model_prefix: ClassVar[str]
    tied: ClassVar[tuple[str, str]]
    ignored: ClassVar[tuple[str, ...]] = ()
    # {a tensor: its name there, if it is not the same without the prefix}
    base_names: ClassVar[Mapping[str, str]] = {}
    # What _read reads beside the fields of the class; fields that a folder's tensors tell, and no file says; and the
    # beginnings of the names of tensors of layers that predict further tokens, which are told and not read.
    reads: ClassVar[frozenset[str]] = frozenset()
    by_tensors: ClassVar[frozenset[str]] = frozenset()
    further: ClassVar[tuple[str, ...]] = ()
    # What is told where some are left out.
    without: ClassVar[str] = "only the model without layers that predict further tokens is read"
    # {axis of the weights' sentences: the field that holds its size}
    axes: ClassVar[Mapping[str, str]]

    vocab_size: int
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    # The numbers that the head gives of a sequence; 0: it gives logits of the next token. Files say it otherwise.
    labels: int = 0
    # What connects the tower of a model that also sees to it, where that is trained: files say it otherwise too.
    projector: tuple[Param, ...] = field(default=(), compare=False)

    def __init_subclass__(cls) -> None:
        """Raise TypeError where a class says a field of its bases without a type: every instance would have theirs."""
        known = {each.name for base in cls.__mro__[1:] if is_dataclass(base) for each in fields(base)}
        for name in sorted(known & vars(cls).keys() - get_annotations(cls).keys()):
            raise TypeError(f"{cls.__qualname__}.{name} is a field of its bases: say it with its type, as they do")

    @classmethod
    def base_architecture(cls) -> str:
        """Return the name of transformers' class of the model without its head."""
        base = re.sub("(ForCausalLM|LMHeadModel)$", "Model", cls.architecture)
        return base.replace("Model", "TextModel") if cls.of_text else base

    @classmethod
    def scoring_architecture(cls) -> str:
        """Return the name of transformers' class of the model with a head of scores.

        Raises:
            ModelConfigError: it has none.
        """
        if cls.family not in scores.FAMILIES:
            raise ModelConfigError(
                cls.family, [f"transformers has no {SCORING} of this family: a head of scores would load nowhere"]
            )
        return cls.base_architecture().removesuffix("Model") + SCORING

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of the axes of the weights' sentences."""
        return {axis: getattr(self, field) for axis, field in self.axes.items()}

    @abstractmethod
    def params(self) -> tuple[Param, ...]:
        """Return the weights table."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """The beginnings of the names of tensors that are told and not read."""
        return self.further

    @property
    def mtp_layers(self) -> int:
        """The number of layers behind the model that predict further tokens (:mod:`models.mtp`)."""
        return 0

    @classmethod
    def as_held(cls, raw: Mapping[str, Any], shapes: Shapes) -> tuple[dict[str, Any], str | None]:
        """Return a ``config.json`` that says how many layers predict further tokens, and how experts lie, in a folder
        with such tensors, and what is to be told of it."""
        return {**raw}, None

    @property
    @abstractmethod
    def anatomy(self) -> Anatomy:
        """All that the weights table does not say."""

    def build(self, parameters: Parameters, chunk: int) -> Decoder:
        """Return the modules of one pipeline chunk of this rank, over parameters that the layout has cut."""
        from megacore.models.builder import build

        return build(self.anatomy, self.sizes, parameters, chunk)

    @property
    def drops_attention(self) -> bool:
        """Whether attention weights are dropped in training."""
        return self.anatomy.attention_dropout > 0

    @property
    def drops(self) -> bool:
        """Whether blocks drop anything in training."""
        return self.drops_attention or self.anatomy.branch_dropout > 0

    @property
    def width(self) -> int:
        """The numbers of a token that blocks hand on: those of all residual streams."""
        streams = self.anatomy.streams
        return self.sizes["embed"] * (1 if streams is None else streams.count)

    @cached_property
    def boundary_width(self) -> int:
        """The numbers of a token that travel between the stages of a pipeline: its embedding too, where blocks are told
        it."""
        return self.width + self.sizes["embed"] * any(not TOLD.isdisjoint(p.sentence.axes) for p in self.params())

    @property
    @abstractmethod
    def max_positions(self) -> int | None:
        """The longest sequence that the positions allow; None if there is no limit."""

    @abstractmethod
    def problems(self) -> list[str]:
        """Return what is wrong with the values; empty if nothing is."""

    @property
    def schema(self) -> Schema:
        rows = self.params()
        beside = {axis: int(axis.partition("_")[2]) for param in self.projector for axis in param.sentence.axes}
        if self.labels:
            rows, beside = scores.scored(rows, self.initializer_range), {**beside, scores.AXIS: self.labels}
        return Schema((*rows, *self.projector), {**self.sizes, **beside})

    def scoring(self, labels: int) -> Self:
        """Return the model with a head of scores in place of its own.

        Raises:
            ModelConfigError: transformers has no such class of the family.
        """
        self.scoring_architecture()
        return replace(self, labels=labels)

    def scoring_as(self, other: ModelConfig) -> Self:
        """Return the model with a head of scores as another's, where that has one and this has none, whether or not
        transformers has such a class of the family."""
        return replace(self, labels=other.labels) if other.labels and not self.labels else self

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> Self:
        """Read a ``config.json``.

        Raises:
            ModelConfigError: unknown, missing or unsupported fields, all of them.
        """
        problems = cls._unsupported(config)
        values, wrong = cls._read(config)
        problems += wrong
        try:
            values["labels"] = cls._labels(config)
        except ModelConfigError as error:
            problems += error.problems
        readable = cls.readable()
        for name in cls.unknown(config):
            problems.append(f"unknown field {name!r}{nearest(name, readable) or ', which may change the maths'}")
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
        problems += [f"field {name!r} is missing" for name in missing if name not in values]
        problems += [
            f"{field.name} is {values[field.name]!r}, which is not of type {_type(field)}"
            for field in fields(cls)
            if field.name in values and not _is_of(values[field.name], _type(field))
        ]
        made = None if problems else cls(**values)
        if made and not (problems := made.problems()):
            return made
        # Fields are told by the names that files have for them, where this one has no other.
        others = {**cls.saved, **{name: other for other, name in cls.spellings.items() if other in config}}
        names = {name: other for name, other in others.items() if name not in config}
        if (chosen := "num_experts_per_tok") in readable:  # as the table of the router has it
            names["top_k"] = names.get(chosen, chosen)
        told = (re.sub(r"\w+", lambda word: names.get(word[0], word[0]), problem) for problem in problems)
        raise ModelConfigError(cls.family, [*told])

    @classmethod
    def as_written(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a ``config.json`` with those spellings that transformers takes for something else
        replaced, and what is said whatever was read."""
        return {name: value for name, value in raw.items() if name not in cls.by_tensors} | dict(cls.written)

    @classmethod
    def override(cls, base: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a ``config.json`` with some fields replaced."""
        return {**base, **fields}

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the ``config.json`` that means the same."""
        # Where nothing is said of these, the defaults of transformers' class would come back: tokens of its tokenizer.
        tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        head = {"architectures": [self.architecture], "model_type": self.family, **tokens}
        if self.labels:
            names = {str(number): f"LABEL_{number}" for number in range(self.labels)}
            numbers = {name: int(number) for number, name in names.items()}
            head |= {"architectures": [self.scoring_architecture()], "id2label": names, "label2id": numbers}
        written = {name: value for name, value in self._write().items() if name not in OTHERWISE}
        return head | written | dict(self.fixed) | dict(self.written)

    @classmethod
    def _labels(cls, config: Mapping[str, Any]) -> int:
        """Return the labels of a ``config.json``; 0 where it names no class of models with scores."""
        named, labels = config.get("architectures"), config.get("id2label")
        if not isinstance(named, list) or not any(isinstance(each, str) and each.endswith(SCORING) for each in named):
            return 0
        cls.scoring_architecture()
        if labels is None:
            return 2  # as transformers takes it
        if not isinstance(labels, Mapping) or not labels:
            raise ModelConfigError(cls.family, [f"id2label is {labels!r}: it must be {{number: label}}"])
        return len(labels)

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the values of the dataclass fields, and what is wrong with them."""
        given = {f.name: config[f.name] for f in fields(cls) if f.name in config and f.name not in OTHERWISE}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}, []

    def _write(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def unknown(cls, config: Mapping[str, Any]) -> list[str]:
        """Return the fields of a ``config.json`` of which nobody knows whether they change the maths."""
        given = {name for name, value in config.items() if value is not None}
        return sorted(given - cls.readable() - HARMLESS - cls.harmless - set(cls.fixed) - set(_FIXED))

    @classmethod
    def readable(cls) -> set[str]:
        """Return the fields of a ``config.json`` that say something of the model."""
        return {field.name for field in fields(cls) if field.name not in OTHERWISE} | cls.reads

    @classmethod
    def _unsupported(cls, config: Mapping[str, Any]) -> list[str]:
        return [
            f"{name}={config[name]!r} would change the maths and is not supported: only {value!r} is"
            for name, value in {**_FIXED, **cls.fixed}.items()
            # What is off may be null or false.
            if name in config and config[name] != value and (config[name] or value)
        ]


_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "bool | str": (bool, str),
    "int | None": (int, type(None)),
    "float | None": (int, float, type(None)),
    "tuple[str, ...]": (tuple,),
    "tuple[str, ...] | None": (tuple, type(None)),
    "tuple[int, ...]": (tuple,),
    "tuple[int, ...] | None": (tuple, type(None)),
    "tuple[float, ...]": (tuple,),
    "tuple[float, ...] | None": (tuple, type(None)),
}


def _type(of: Field[Any]) -> str:
    """Return the type of a field as its annotation spells it, whether or not its file keeps annotations as text."""
    return of.type if isinstance(of.type, str) else formatannotation(of.type)


def _is_of(value: object, type_name: str) -> bool:
    """Return whether a value is of a field's type, as its annotation spells it; any is of one that is not listed."""
    if type_name not in _TYPES:
        return True
    if isinstance(value, tuple):
        inner = type_name.removeprefix("tuple[").partition(",")[0]
        # A limit may be infinite.
        open_end = (math.inf,) if inner == "float" else ()
        return tuple in _TYPES[type_name] and all(each in open_end or _is_of(each, inner) for each in value)
    if isinstance(value, float) and not math.isfinite(value):
        return False
    # True is an int to Python.
    return isinstance(value, _TYPES[type_name]) and (not isinstance(value, bool) or bool in _TYPES[type_name])


def positive(config: ModelConfig, *names: str) -> list[str]:
    """Return a problem for each named field that is below 1."""
    return [f"{name} is {getattr(config, name)}: it must be at least 1" for name in names if getattr(config, name) < 1]


def above_zero(config: ModelConfig, *names: str) -> list[str]:
    """Return a problem for each named field that is 0 or below, and not null."""
    given = {each.name: (getattr(config, each.name), "None" in str(each.type)) for each in fields(config)}
    held = [(name, *given[name]) for name in names]
    return [
        f"{name} is {n}: it must be above 0{', or null' * null}" for name, n, null in held if n is not None and n <= 0
    ]


def probabilities(config: ModelConfig, *names: str) -> list[str]:
    """Return a problem for each named field outside of [0, 1)."""
    return [
        f"{name} is {getattr(config, name)}: it must lie in [0, 1)"
        for name in names
        if not 0 <= getattr(config, name) < 1
    ]


def looks(tokens: int, window: int | None, chunk: int | None = None, block: int = 1) -> int:
    """Return how many pairs of a token and one that it looks at there are in a causal sequence, or in its chunks; or of
    a token and a block of so many, a window being some of these."""
    if chunk is not None and tokens > chunk:
        return tokens // chunk * looks(chunk, window) + looks(tokens % chunk, window)
    seen = min(tokens // block, window or tokens)
    return block * seen * (seen - 1) // 2 + (tokens - block * seen + 1) * seen


def _looked_at(tokens: int, layer: LayerAttention) -> int:
    """Return how many pairs of a token and one that it looks at, or a block of them, there are in a layer."""
    if layer.block is None:
        return looks(tokens, layer.top or layer.window, layer.chunk)
    return looks(tokens, layer.window) + looks(tokens, layer.top, block=layer.block)


def active_elements(config: ModelConfig, schema: Schema, param: Param) -> int:
    """Return the elements of a parameter that a token meets: of the experts of a layer those that it is sent to, of
    which as many do nothing as of all, else all.

    Args:
        schema: Its weights, or those of a run of it, with adapters.
        param: One of them.
    """
    numel, routing = schema.numel(param), config.anatomy.routing
    if routing is None or "experts" not in {*param.sentence.axes, *param.named_axes}:
        return numel
    return numel * routing.top_k // routing.experts


def active_parameters(config: ModelConfig, schema: Schema | None = None) -> int:
    """Return the number of parameters that a token meets: all but those of experts that it is not sent to. Buffers
    don't count.

    The embedding and the head count whole, as in published numbers ("30B-A3B").

    Args:
        schema: The weights of a run of it, if not the model's own.
    """
    schema = schema or config.schema
    return sum(active_elements(config, schema, param) for param in schema.params if not param.buffer)


def parameters_in_words(config: ModelConfig, tuning: Tuning = EVERYTHING) -> str:
    """Return the number of parameters and, where they are not all of them, how many a token meets and how many are
    trained."""
    total, active = config.schema.parameters, active_parameters(config)
    some = [f"{active:,} active"] if active < total else []
    some += [] if tuning == EVERYTHING else [f"{tuning.trained(config.schema):,} trained"]
    return f"{total:,} parameters" + (f" ({', '.join(some)})" if some else "")


def matmul_parameters(config: ModelConfig, schema: Schema | None = None) -> int:
    """Return the number of parameters that multiply a token's activations: all matrices that it meets but tables that
    are only looked up at the first stage. What several layers share counts for each of them.

    Args:
        schema: The weights of a run of it, if not the model's own.
    """
    schema = schema or config.schema
    counted = ((active_elements(config, schema, param), _uses(schema, param)) for param in _matmuls(schema))
    return sum(active // len(uses) * sum(uses) for active, uses in counted)


def _uses(schema: Schema, param: Param) -> list[int]:
    """Return how many layers use each tensor of a parameter."""
    return [1 + len(others) for others in param.also] or [1] * schema.count(param, param.name)


def _matmuls(schema: Schema) -> list[Param]:
    # Layers that predict further tokens look up the embedding at the last stage, and it is no head of theirs.
    return [
        p for p in schema.params if p.decays and not p.is_table and ("layer" in p.named_axes or _at_ends(p, schema))
    ]


def _at_ends(param: Param, schema: Schema) -> bool:
    looked_up = param.name == "embed.weight" and "head.weight" in schema.by_name
    return ("last" in param.at and not looked_up) or "turned" in param.sentence.axes


_STATES: Mapping[str, int] = {
    "layers.{layer}.delta.conv.weight": 18,
    "layers.{layer}.lightning.norm.weight": 12,
    "layers.{layer}.ssm.conv.weight": 12,
    "layers.{layer}.lru.conv.weight": 6,
    "layers.{layer}.then.ssm.conv.weight": 12,
    "layers.{layer}.short.conv.weight": 0,
}
"""{a weight that layers with a state have: the operations of an element of a head's state for each token}: those of the
gated delta rule, of lightning attention, of state space layers, of recurrent units, and of short convolutions alone."""
_ATTENDS = tuple(f"layers.{{layer}}.{each}.out.weight" for each in ("attn", "local_attn", "then.attn"))


@lru_cache(maxsize=64)
def flops_per_token(config: ModelConfig, sequence_length: int, tuning: Tuning = EVERYTHING) -> int:
    """Floating point operations of forward and backward for one token of a causal sequence.

    6 for each parameter of a matrix product, of experts those alone that it is sent to; and for the attention scores
    and their use in each layer 6 * heads * (head + value) * (the tokens that a token looks at, on average): 2 products
    of 2 operations, times 3 for the backward, of heads of keys and of values, which mostly have one size. A token looks
    at (sequence + 1) / 2 on average, and at no more than its layer's window or chunk. (Chowdhery et al. 2022, arXiv
    2204.02311, appendix B, with the causal half left out.) What is frozen has no gradient of its own, and 4 instead of
    6; adapters count as any parameters do.

    An indexer scores all tokens before a token, with one product, and sends a gradient to the ones that it chooses.
    Where blocks of tokens are one key each, both count these.

    A layer with a state has no scores. Each of its heads multiplies the state three times, to know what it says of a
    key, to write and to read: 18 * key * value, or without the first one 12, and where a state is one number 6; and a
    short convolution counts 6 for each of its weights.

    A layer that predicts further tokens counts as any other does, with another head, where it is trained.
    """
    sizes, whole = config.sizes, config.schema
    predicts = tuning.predicts(whole)
    mixed = {param.name: param for param in whole.params if param.name in _STATES}
    attends = [whole.by_name.get(name) for name in _ATTENDS]
    others = (
        () if mixed or any(attends) else range(sizes["layer"])
    )  # a user's own blocks give their weights other names
    further = range(sizes["layer"], len(config.anatomy.layers)) if predicts else ()
    full, local, then = (() if param is None else param.used_in(range(sizes["layer"])) for param in attends)
    looked_at = 0  # numbers of all heads
    count, of_heads = sizes.get("heads", 0), sizes.get("head", 0)
    local_kind = tuple(local), sizes.get("local_heads", count), sizes.get("local_head", of_heads)
    for layers, heads, head in (((*full, *then, *others, *further), count, of_heads), local_kind):
        attending = (config.anatomy.layers[layer] for layer in layers)
        tokens = sum(_looked_at(sequence_length, layer) for layer in attending)
        looked_at += heads * (head + sizes.get("value", head)) * tokens
    attention = 6 * looked_at // sequence_length + sum(
        6 * whole.numel(param) for param in mixed.values() if "taps" in param.sentence.axes
    )
    if index := whole.by_name.get("layers.{layer}.attn.index.q.weight"):
        own = whole.numel(index) // sizes["q_latent"] // len(index.values("layer", sizes))
        indexed = [config.anatomy.layers[layer] for layer in (*index.values("layer", sizes), *further)]
        every = sum(looks(sequence_length, None, block=layer.block or 1) for layer in indexed)
        chosen = sum(looks(sequence_length, layer.top, block=layer.block or 1) for layer in indexed)
        attention += own * (2 * every + 4 * chosen) // sequence_length
    state = math.prod(sizes.get(axis, 1) for axis in ("channels", "state_heads", "each", "state_key", "state_value"))
    attention += sum(_STATES[name] * len(param.values("layer", sizes)) * state for name, param in mixed.items())
    schema, frozen = tuning.schema(whole), tuning.frozen(whole)
    products, head_weight = 0, "head.weight" if "head.weight" in whole.by_name else "embed.weight"
    for param in _matmuls(schema):
        if predicts or not param.predicts:
            names, uses = list(whole_names(schema, param)), _uses(schema, param)
            each = active_elements(config, schema, param) // len(names)
            times = 1 + config.mtp_layers if predicts and param.name == head_weight else 1
            products += times * each * sum((6 - 2 * (name in frozen)) * n for name, n in zip(names, uses, strict=True))
    return products + attention
