"""A checkpoint beside a Hugging Face folder: every tensor bit for bit, and the logits of both models.

The checkpoint is loaded through the parallel model, on a mesh of one process or in its own layout, and the folder
through transformers. Both compute in float32 on the CPU, where every stored weight of 32 bits or fewer is exact. In the
stored dtype they would differ by how their kernels round between operations, and a bound that allows for that would
hide mistakes.

How much rounding does, hangs on the model: one that scales its embeddings or has deep sums loses digits that another
keeps. So transformers computes in float64 too, with the same weights, and what its own float32 is off there is the
measure for ours.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.control import Control
from megacore.data import pretrained
from megacore.data.batches import Batch
from megacore.inference.model_loader import microbatch_of, model_from
from megacore.models.assemble import Model
from megacore.models.decoder import Microbatch
from megacore.models.wrappers import NAMINGS
from megacore.parallel.enum_errors import ContextExchange
from megacore.parallel.labels import IGNORE
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.fingerprint import Logical, spell
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.transfer import Stored, strided, whole_name
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.accounting import summary
from megacore.store.tensor_files.dtypes import NUMBERS
from megacore.store.weight_folders.audit import padding
from megacore.store.weight_folders.compare import PieceComparison, carried_differences, compare_bits, config_differences
from megacore.store.weight_folders.folder import SafetensorsFolder, WeightFolder
from megacore.store.weight_folders.index import CARRIED

TIMES = 8
"""The rounding of logits that may be ours, as a multiple of that of transformers, both relative to the largest logit of
a prompt. The largest of thousands of errors varies little: the two are within a factor of two, and of three or four
where softmaxes are sharp. Weights in wrong places change logits by their own size."""
LEAST = 1e-5
"""The rounding that may be ours in any case. Float32 rounds to 6e-8, and where transformers happens to sum exactly,
another order of the same sums does not."""


@dataclass(frozen=True)
class Pair:
    """A checkpoint and a folder of the same model. Raises StoreError: they cannot be of the same model."""

    checkpoint: SafetensorsFolder
    folder: WeightFolder

    def __post_init__(self) -> None:
        one, other = self.checkpoint.config.schema, self.folder.config.schema
        if dict(one.sizes) != dict(other.sizes) or one.by_name.keys() != other.by_name.keys():
            found = ", ".join(f"{name} is {a!r} and {b!r}" for name, (a, b) in self.config.items())
            raise StoreError(f"{self.checkpoint.path} and {self.folder.path} are different models: {found}")

    @property
    def config(self) -> dict[str, tuple[Any, Any]]:
        """{field: the checkpoint's and the folder's}, where they mean something else."""
        return config_differences(self.checkpoint.config, self.folder.config)

    def dtypes(self) -> dict[Logical, tuple[str, str]]:
        """Return the folder's dtype and the checkpoint's of each piece."""
        schema = self.checkpoint.config.schema
        theirs, ours = (
            {(whole_name(schema, s), label): folder.dtype("weights", s) for s in folder.stored() for label in s.labels}
            for folder in (self.folder, self.checkpoint)
        )
        return {piece: (theirs[piece], ours[piece]) for piece in ours}


def mesh_shape(checkpoint: SafetensorsFolder, world: int, cp: int = 1) -> MeshShape:
    """Return the mesh for so many processes: of one, or the checkpoint's own layout, once or several times. Raises
    StoreError: it takes another number of processes."""
    if world == cp == 1:
        return MeshShape()
    mesh = replace(checkpoint.layout.mesh, cp=cp)
    if world % mesh.world:
        sizes = " x ".join(f"{dim}={mesh[dim]}" for dim in ("pp", "ep", *(["cp"] if cp > 1 else []), "tp"))
        raise StoreError(
            f"{checkpoint.path} lies on {sizes}, and {world} processes cannot form that: start {mesh.world} or a "
            f"multiple of it{'' if cp > 1 else ', or one'}"
        )
    return replace(mesh, dp=world // mesh.world)


# -- what comes out


@dataclass
class ComparedParameter:
    """A parameter over all layers, shards and replicas, compared bit for bit: its pieces (a fused tensor has several),
    their elements and those that differ, and the two dtypes, in words."""

    name: str
    pieces: int = 0
    elements: int = 0
    differ: int = 0
    dtypes: tuple[str, ...] = ()

    def add(self, elements: int, differ: int, dtype: str) -> None:
        """Add a piece."""
        self.pieces += 1
        self.elements += elements
        self.differ += differ
        self.dtypes = tuple(sorted({*self.dtypes, dtype}))


@dataclass(frozen=True)
class Logits:
    """The logits of a prompt, at every position; the scores, of a model that gives those.

    Args:
        largest: The largest magnitude, None if some are not finite.
        difference: The largest difference to transformers in float64, None if it is not finite.
        theirs: That of transformers in float32, likewise.
        bound: The largest difference that is rounding.
        agreement: The part of the positions at which both find the same token most likely.
    """

    tokens: int
    largest: float | None
    difference: float | None
    theirs: float | None
    bound: float
    agreement: float

    @property
    def passes(self) -> bool:
        return self.largest is not None and self.difference is not None and self.difference <= self.bound


@dataclass(frozen=True)
class Report:
    """The result of a verification, on the mesh that the checkpoint was loaded on; config: the differences of
    :attr:`Pair.config`; differing: each piece that differs, with its file, in words."""

    mesh: Mapping[str, int]
    config: Mapping[str, tuple[Any, Any]]
    groups: Sequence[ComparedParameter]
    differing: Sequence[str]
    prompts: Sequence[Logits]

    @property
    def passes(self) -> bool:
        return not self.config and not self.differing and all(prompt.passes for prompt in self.prompts)


# -- comparing


def verify(
    pair: Pair, prompts: Sequence[Sequence[int]], mesh: Mesh, jobs: int = 1, exchange: ContextExchange = "auto"
) -> Report:
    """Compare both; every rank of the mesh calls this, and all get the same report.

    The ranks share out the tensors, with so many threads each, and one of the last stage computes what transformers
    does. The mesh is that of :func:`mesh_shape`, and the length of each prompt is a multiple of tp x cp. Raises
    StoreError: transformers cannot load the folder (on one rank).
    """
    control = Control.create(mesh)
    groups = {param.name: ComparedParameter(param.name) for param in pair.checkpoint.config.schema.params}
    differing = list[str]()
    for found, wrong in control.exchange(_tensors(pair, mesh.rank, mesh.shape.world, jobs)):
        for name, *piece in found:
            groups[name].add(*piece)
        differing += wrong
    measured = _logits(pair, prompts, mesh, exchange)
    (result,) = (each for each in control.exchange(measured) if each is not None)
    sizes = {dim: mesh.shape[dim] for dim in mesh.shape.DIMS}
    return Report(sizes, pair.config, list(groups.values()), differing, [Logits(**each) for each in result])


def _carried(pair: Pair, jobs: int) -> Iterator[str]:
    """Yield each tensor that is carried and differs; of those that only one of the two has, their names in one."""
    found = list(carried_differences((pair.checkpoint, pair.folder), jobs))
    for which, holder in enumerate((pair.checkpoint, pair.folder)):
        if only := [each.name for each in found if each.what == "presence" and each.both[which] is not None]:
            yield f"only {holder.path} carries {', '.join(summary(only))}"
    for each in found:
        if each.what != "presence":
            yield f"{CARRIED}: {each.name}: {each.what}: {each.both[0]} in the checkpoint, {each.both[1]} in the folder"


def _tensors(pair: Pair, part: int, parts: int, jobs: int) -> tuple[list[tuple[str, int, int, str]], list[str]]:
    """Return (the parameter, elements, those that differ, and dtypes of each piece; each that differs, in words) of one
    of so many parts of the checkpoint's tensors."""
    checkpoint, schema = pair.checkpoint, pair.checkpoint.config.schema
    own, read = list(checkpoint.stored())[part::parts], checkpoint.read()
    pieces, differing = list[tuple[str, int, int, str]](), list(_carried(pair, jobs)) if part == 0 else []

    def where(tensor: Stored, label: str) -> str:
        return f"{checkpoint.location('weights', tensor)[0]}: {spell((tensor.name, label))}"

    for each in compare_bits(checkpoint, own, pair.folder, jobs):
        pieces.append((each.tensor.param, each.elements, each.differ, _dtype(each)))
        if each.differ:
            told = f"{each.differ:,} of {each.elements:,} elements differ"
            differing.append(f"{where(each.tensor, each.label)}: {told}")
    for tensor in own:
        for label, piece in padding(schema, tensor):
            if strided(read(tensor)[1], piece).any():
                differing.append(f"{where(tensor, label)}: its padding is not zero")
    return pieces, differing


def _dtype(compared: PieceComparison) -> str:
    there, here = (NUMBERS[dtype] for dtype in compared.dtypes)
    return here if here == there else f"{here} (folder: {there}, compared rounded)"


def _logits(
    pair: Pair, prompts: Sequence[Sequence[int]], mesh: Mesh, exchange: ContextExchange
) -> list[dict[str, Any]] | None:
    """Return the fields of each prompt's :class:`Logits`, on one rank; None on the others."""
    ours, place = parallel_model(pair, mesh, exchange), mesh.place
    own = [ours.logits(_microbatch(ids, ours)) for ids in prompts]
    if place.pp < mesh.shape.pp - 1 or place.tp or place.cp or place.ep or place.dp:
        return None
    del ours  # float64 takes the room of two models of float32
    gc.collect()
    model, rows = transformers_model(pair), []
    single = [_their_logits(model, ids) for ids in prompts]
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    for ids, logits, theirs in zip(prompts, own, single, strict=True):
        with _Float64():
            wanted = _their_logits(model, ids)
        assert logits is not None  # this is the last stage
        largest, difference, rounding = (_largest(each) for each in (wanted, logits - wanted, theirs - wanted))
        same = float((logits.argmax(-1) == wanted.argmax(-1)).double().mean())
        rows.append(Logits(len(ids), largest, difference, rounding, 0.0, same))
    # Of all prompts, for one where transformers rounds little says nothing of the model.
    most = max((row.theirs or 0.0) / (row.largest or 1.0) for row in rows)
    return [asdict(replace(row, bound=max(LEAST, TIMES * most) * (row.largest or 0.0))) for row in rows]


def _their_logits(model: Any, ids: Sequence[int]) -> Tensor:
    given = {"input_ids": torch.tensor([ids]), "use_cache": False}
    with torch.no_grad():
        if hasattr(model, "score"):  # which gives those of the last token alone
            return model.score(model.base_model(**given)[0])[0]
        return model(**given).logits[0]


def _largest(values: Tensor) -> float | None:
    """Return the largest magnitude, None where one is not finite."""
    value = float(values.abs().max())
    return value if math.isfinite(value) else None


_MOST = torch.finfo(torch.float32).max


class _Float64(TorchDispatchMode):
    """Within this, what is float64 stays so: norms, softmaxes and routers of transformers are cast to float32 whatever
    the dtype of the model. Rotary frequencies and angles are float32 from the start, and stay that: they are what the
    model is."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        narrows = function is torch.ops.aten._to_copy.default and named.get("dtype") is torch.float32
        if narrows and arguments[0].dtype is torch.float64:
            named = named | {"dtype": torch.float64}
        if function is torch.ops.aten.full.default and abs(arguments[1]) > _MOST:  # the least number, in XGLM
            named = named | {"dtype": torch.float64}
        return function(*arguments, **named)


def _microbatch(ids: Sequence[int], model: Model) -> Microbatch:
    tokens = np.array([ids])
    return microbatch_of(model, Batch(tokens, np.full_like(tokens, IGNORE), np.arange(len(ids))[None], None))


def parallel_model(pair: Pair, mesh: Mesh, exchange: ContextExchange = "auto") -> Model:
    """Return this rank's part of the checkpoint's model, in float32."""
    model, dtypes = model_from(pair.checkpoint, mesh, torch.float32, False, exchange=exchange), pair.dtypes()
    with torch.no_grad():
        for name, label, view in model.parameters.pieces():
            _round(view, *dtypes[name, label])
    return model


def transformers_model(pair: Pair) -> nn.Module:
    """Return the folder's model, in float32. Raises StoreError: transformers cannot load it."""
    schema, dtypes = pair.folder.config.schema, pair.dtypes()
    # Of a quantised folder only what lies so is loaded in the dtype that is asked for.
    loaded = torch.float32 if pair.folder.quantization is None else getattr(torch, pair.folder.quantization.dtype)
    scores = pair.folder.config.labels > 0
    model: nn.Module = pretrained.model(pair.folder.path, scores, dtype=loaded).float().eval()
    of_tensor = {s.name: dtypes[whole_name(schema, s), s.labels[0]] for s in pair.folder.stored()}
    with torch.no_grad():
        for tensor, names in pretrained.parameters(model):
            by_itself = {inner for name in names for inner in (name, *(of.inside(name) for of in NAMINGS))}
            for found in sorted({of_tensor[inner] for inner in by_itself if inner in of_tensor}):
                _round(tensor, *found)
    return model


def _round(weights: Tensor, *dtypes: str) -> None:
    """Round weights whose two sides have different dtypes to one, then to the other.

    Whichever side was converted into the other, by rounding or by widening, both are the same numbers afterwards.
    """
    if len({*dtypes}) > 1:
        for dtype in dtypes:
            weights.copy_(weights.to(getattr(torch, NUMBERS[dtype])))
