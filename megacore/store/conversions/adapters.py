"""Adapters: read beside their model, as a folder that the peft library loads, and merged into the weights.

Merging computes, so it is no transfer: W + scale B A is taken tensor by tensor, in fp32 (fp64 where the base is), and
rounded once. Every other weight is copied bit for bit. Where the adapters were trained beside weights in fewer bits
(QLoRA), W and all others of these are the numbers that the bits stand for: beside others the adapters are wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from megacore.models.config import ModelConfigError
from megacore.models.lora import WEIGHT, Lora, factors, in_full, peft_problems, quantised, targets
from megacore.models.wrappers import unwrapped
from megacore.parallel.enum_errors import BaseDtype
from megacore.parallel.weights.block_formats import BLOCK
from megacore.parallel.weights.pattern import Piece
from megacore.parallel.weights.schema import Schema
from megacore.parallel.weights.transfer import Stored, hugging_face, plan
from megacore.store.conversions.conversion import FolderPlan, StateFiles, tensors, to_hugging_face
from megacore.store.io.hub import HubName, fetch
from megacore.store.io.strict_json import StoreError, read_json
from megacore.store.tensor_files.companions import Companion
from megacore.store.tensor_files.dtypes import as_floats, rounded
from megacore.store.tensor_files.stream import File, Read, assemble
from megacore.store.tensor_files.tensor_cache import TensorCache
from megacore.store.tensor_files.tensors import DTYPES, TensorFile
from megacore.store.weight_folders.compare import config_differences
from megacore.store.weight_folders.folder import JoinedFolder, SafetensorsFolder, WeightFolder
from megacore.store.weight_folders.hugging_face import ADAPTER, CONFIG
from megacore.store.weight_folders.index import Adapters, Index

WEIGHTS = "adapter_model.safetensors"
_ROWS = 1 << 22
"""Elements of a product at a time."""


def adapters_of(checkpoint: WeightFolder) -> Adapters:
    """Return the adapters of a checkpoint, with the model that they belong to. Raises StoreError: it holds a model."""
    adapters = checkpoint.index.adapters
    if adapters is None:
        raise StoreError(f"{checkpoint.path} holds a model and no adapters: export it by --to hf")
    return adapters


# What a config says of training alone: dropout, and how weights were drawn.
_OF_TRAINING = ("drop", "initializer_range")


def check_model(checkpoint: WeightFolder, base: WeightFolder) -> None:
    """Compare a model, but for its weights, with the one that the adapters were trained on. Raises StoreError: its
    sizes or its config differ, or the checkpoint holds a model."""
    adapters, config = adapters_of(checkpoint), base.config.scoring_as(checkpoint.config)
    ours, theirs = checkpoint.config.schema, config.schema
    if ours.sizes != theirs.sizes or ours.pieces != theirs.pieces:
        raise StoreError(
            f"{base.path} is a model of other sizes or weights than {adapters.base}, whose adapters these are"
        )
    differ = config_differences(config, checkpoint.config)
    if told := {name: both for name, both in differ.items() if not any(each in name for each in _OF_TRAINING)}:
        found = ", ".join(f"{name} is {now!r} and was {trained!r}" for name, (now, trained) in told.items())
        raise StoreError(
            f"the config of {base.path} is not the one that the adapters of {checkpoint.path} were trained with "
            f"({found}): give a base whose config says so"
        )


def _with_head(base: WeightFolder, checkpoint: WeightFolder) -> Index:
    """Return the index of a model, of one with the head of scores that is trained beside its adapters."""
    if base.config.labels == checkpoint.config.labels:
        return base.index
    said = ("architectures", "id2label", "label2id")
    return replace(base.index, raw={**base.raw, **{name: checkpoint.raw[name] for name in said}})


def _left_as_they_are(base: WeightFolder, schema: Schema, state: str) -> Iterator[Stored]:
    """Yield the tensors of a model that are those of one with its adapters, whose schema is given, too: all but a head
    in whose place another is trained."""
    names = schema.by_name.keys() - in_full(schema)
    return (stored for stored in base.stored(state) if stored.param in names)


def check_fingerprint(checkpoint: WeightFolder, base: Path, fingerprint: int) -> None:
    """Compare the fingerprint of a model's weights with that of those that the adapters were trained on. Raises
    StoreError: they are others."""
    adapters = adapters_of(checkpoint)
    if fingerprint != adapters.fingerprint:
        raise StoreError(
            f"the weights of {base} (fingerprint {fingerprint:016x}) are not those that the adapters were trained on, "
            f"{adapters.base} ({adapters.fingerprint:016x}): give that model, in the dtype that it had"
        )


# -- beside the model


@dataclass(frozen=True)
class AdaptedFolder(JoinedFolder):
    """Adapters and the model that they were trained on, two folders that are read as one, in this order. So companions
    are those of the adapters, whose run may have had a chat template of its own; else the base's."""

    base: SafetensorsFolder = field(kw_only=True)

    @classmethod
    def of(cls, own: SafetensorsFolder, base: SafetensorsFolder) -> AdaptedFolder:
        """Open the two, if they belong together as far as can be known without reading the weights. Raises StoreError:
        as :func:`check_model`."""
        check_model(own, base)
        index = replace(_with_head(base, own), states=("weights",), adapters=own.index.adapters)
        return cls(own.path, index, joined=(own, base), base=base)

    @property
    def schema(self) -> Schema:
        return self.index.tuning.schema(self.config.schema)

    def stored(self, state: str = "weights") -> Iterator[Stored]:
        if state in self.states:
            yield from self.joined[0].stored(state)
            yield from _left_as_they_are(self.base, self.schema, state)


# -- by themselves


def to_peft(checkpoint: WeightFolder, dtype: str | None = None) -> FolderPlan:
    """Return a folder of adapters as the peft library saves them. Raises StoreError: the checkpoint holds none, no
    single config describes them, or peft would load them wrongly."""
    adapters, schema = adapters_of(checkpoint), checkpoint.schema
    made = tensors(schema, checkpoint, "weights", hugging_face(schema), dtype)
    files = (File(WEIGHTS, tuple(made), checkpoint.read()),)
    texts = {ADAPTER: json.dumps(_config(checkpoint, adapters), indent=2, allow_nan=False).encode() + b"\n"}
    part = StateFiles.of(schema, checkpoint, "weights", files)
    kind = "adapters for the peft library"
    return FolderPlan(kind, schema, {"weights": part}, lambda found: texts, checkpoint.companions(), _read_peft)


def _read_peft(folder: Path) -> None:
    TensorFile.open(folder / WEIGHTS, folder)
    read_json(folder / ADAPTER, folder)


def _config(checkpoint: WeightFolder, adapters: Adapters) -> dict[str, object]:
    """Return a config with the field names and meaning of the peft library's."""
    chosen = targets(checkpoint.config.schema, adapters.lora.targets)
    linears = [linear for linear in chosen if not linear.is_parameter]
    whole = adapters.base if is_part_of(adapters.base) else None
    for problem in peft_problems(checkpoint.config.family, chosen, whole):
        raise StoreError(f"{checkpoint.path}: {problem}: merge the adapters by --to hf --base {adapters.base}")
    parameters = sorted(linear.hf_name for linear in chosen if linear.is_parameter)
    beside = sorted(name.removesuffix(WEIGHT) for name in in_full(checkpoint.config.schema))
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if checkpoint.config.labels else "CAUSAL_LM",
        **_base(adapters.base),
        "r": adapters.lora.rank,
        "lora_alpha": adapters.lora.alpha,
        "lora_dropout": adapters.lora.dropout,
        "use_rslora": adapters.lora.rslora,
        "target_modules": sorted({linear.hf_name for linear in linears}),
        **({"target_parameters": parameters} if parameters else {}),
        **({"modules_to_save": beside} if beside else {}),
        "fan_in_fan_out": any(linear.transposed for linear in linears),
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _base(base: str) -> dict[str, str]:
    """Return the fields that name the model: of the hub, where it was named by a commit."""
    name = HubName.parse(base)
    if name is None or name.revision is None or not name.is_pinned:
        return {"base_model_name_or_path": base}
    return {"base_model_name_or_path": name.repository, "revision": name.revision}


def is_part_of(base: str) -> bool:
    """Return whether the model of a folder is a part of what the folder holds, as far as it is there to be asked."""
    try:
        name = HubName.of(base)
        folder = Path(base) if name is None else fetch(name, [CONFIG], cached=True)
        return unwrapped(read_json(folder / CONFIG, folder))[1] is not None
    except (StoreError, ModelConfigError, AttributeError):
        return False


# -- merged


def merged(
    checkpoint: WeightFolder, base: SafetensorsFolder, max_shard_bytes: int, dtype: str | None = None
) -> FolderPlan:
    """Return a Hugging Face folder of the base with the adapters merged into it, which is made when it is written.
    Raises StoreError: the checkpoint holds no adapters, or those of a model of another shape or config."""
    check_model(checkpoint, base)
    return to_hugging_face(
        MergedFolder(base.path, _with_head(base, checkpoint), checkpoint, dtype, base=base), max_shard_bytes, dtype
    )


@dataclass(frozen=True)
class MergedFolder(WeightFolder):
    """The weights of a model as they are with adapters. ``wanted``: the dtype of merged weights; None for that of the
    base."""

    adapters: WeightFolder
    wanted: str | None
    base: SafetensorsFolder = field(kw_only=True)
    _computed: TensorCache = field(default_factory=TensorCache)

    @cached_property
    def _factors(self) -> Mapping[str, Sequence[Callable[[str], np.ndarray]]]:
        """{tensor of the base: what reads, in a dtype, the two whose product is added to it}."""
        schema, read = self.adapters.schema, self.adapters.read()
        parts = [part for stored in self.base.stored() for part in factors(schema, stored)]
        found: dict[str, list[Callable[[str], np.ndarray]]] = {}
        for part, copies in plan(schema, self.adapters.stored(), parts):
            found.setdefault(part.name, []).append(partial(assemble, part, copies, read))
        return found

    @property
    def carried(self) -> SafetensorsFolder | None:
        return self.base.carried

    def companions(self) -> Mapping[str, Companion]:
        return self.adapters.companions()

    def stored(self, state: str = "weights") -> Iterator[Stored]:
        """Yield the model's tensors, of which the adapters' folder has some in its place: what is trained in full."""
        yield from _left_as_they_are(self.base, self.schema, state)
        yield from (stored for stored in self.adapters.stored(state) if self._is_own(stored))

    @cached_property
    def _quantised(self) -> Mapping[str, BaseDtype]:
        return quantised(self.base.schema, adapters_of(self.adapters).lora)

    def dtype(self, state: str, stored: Stored) -> str:
        held = (self.adapters if self._is_own(stored) else self.base).dtype(state, stored)
        return self.wanted or held if self._is_changed(stored) else held

    def read(self, state: str = "weights") -> Read:
        """Return a function that reads tensors; merged ones are kept a while, as blocks are asked for one by one."""
        plain, own = self.base.read(state), self.adapters.read(state)

        def read(stored: Stored, view: Piece | None = None) -> tuple[str, np.ndarray]:
            if self._is_changed(stored):
                return self.dtype(state, stored), self._computed.get(stored.name, partial(self._merge, stored))
            return own(stored, view) if self._is_own(stored) else plain(stored, view)

        return read

    def _is_own(self, stored: Stored) -> bool:
        return stored.param in in_full(self.config.schema)

    def _is_changed(self, stored: Stored) -> bool:
        return stored.name in self._factors or stored.param in self._quantised

    def _merge(self, stored: Stored) -> np.ndarray:
        dtype, bits = self.base.read()(stored)
        wide = computed_in(dtype)
        both = [as_floats(read(wide), wide, wide) for read in self._factors.get(stored.name, ())]
        lora, wanted = adapters_of(self.adapters).lora, self.dtype("weights", stored)
        return merge(bits, dtype, both, lora, wanted, partial(self._held, stored))

    def _held(self, stored: Stored, weight: np.ndarray) -> np.ndarray:
        """weight: [rows, columns] of a tensor, cut between blocks -> the numbers that were trained beside."""
        if stored.param not in self._quantised:
            return weight
        import torch  # only to compute with

        from megacore.parallel.quantised import Blocks

        blocks = Blocks.on("cpu", self._quantised[stored.param])
        inputs_last = stored.pattern.dims[-1] == self.base.schema[stored.param].sentence.dims[-1]
        matrix = torch.tensor(weight if inputs_last else weight.T)
        held = blocks.dequantise(blocks.quantise(matrix), matrix.dtype).numpy()
        return held if inputs_last else held.T


def computed_in(dtype: str) -> str:
    """Return the dtype that adapters are merged in, by that of the weights."""
    return "F64" if dtype == "F64" else "F32"


def merge(
    bits: np.ndarray,
    dtype: str,
    factors: Sequence[np.ndarray],
    lora: Lora,
    wanted: str,
    held: Callable[[np.ndarray], np.ndarray] = lambda weight: weight,
) -> np.ndarray:
    """Return the bits of weights with their adapters added, rounded once. ``bits``: those of the weights, of ``dtype``:
    [out, in], or [experts, out, in]; ``factors``: the two whose product is added, numbers of the dtype that
    :func:`computed_in` says: [..., out, rank], [..., rank, in]; none where there is no adapter; ``wanted``: the dtype
    of what is made; ``held``: returns the numbers that rows of weights, cut between blocks, were trained as."""
    wide, made = computed_in(dtype), np.empty(bits.shape, DTYPES[wanted])
    whole_blocks = _ROWS // bits.shape[-1] // BLOCK * BLOCK
    matrices = (x.reshape(-1, *x.shape[-2:]) for x in (bits, made, *factors))
    # One, or one of each expert.
    for weight, total, *both in zip(*matrices, strict=True):
        for start in range(0, len(weight), step := max(BLOCK, whole_blocks)):
            rows = slice(start, start + step)
            sums = held(as_floats(weight[rows], dtype, wide))
            if both:
                sums = sums + lora.scale * (both[0][rows] @ both[1])
            total[rows] = rounded(sums, wide, wanted)
    return made
