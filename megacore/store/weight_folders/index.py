"""``index.json``: what a checkpoint says about itself. ``docs/checkpoints.md`` describes it."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast, get_args

from megacore.models import names
from megacore.models.config import ModelConfig, ModelConfigError
from megacore.models.lora import Lora
from megacore.models.registry import family
from megacore.models.tuning import Tuning
from megacore.models.wrappers import Naming, unwrapped
from megacore.parallel import limits
from megacore.parallel.enum_errors import Placement
from megacore.parallel.rank_sets import runs
from megacore.parallel.weights.block_formats import BLOCK_BYTES
from megacore.parallel.weights.fingerprint import spell
from megacore.parallel.weights.layout import Coordinates, Layout, MeshShape, Shard, least_layers
from megacore.parallel.weights.schema import SPLIT, Param, Schema, Split
from megacore.parallel.weights.transfer import Cut, Stored, native
from megacore.store.io.strict_json import StoreError, read_json, short

INDEX = "index.json"
FORMAT, VERSIONS = "megacore", (1, 2, 3, 4, 5, 6, 7)
"""Since version 2 the tensors of a place may be spread over several files, a parameter may belong to some layers, and
there may be experts; since version 3 tensors may be carried, since version 4 virtual stages be placed in a V, since
version 5 replicas have states of their own, since version 6 a projector be among the weights, and since version 7
layers use the tensors of others. Where nothing of this is so, it is version 1."""
MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
EMA = "ema"
STATES = ("weights", MASTER, *MOMENTS, EMA)
"""Weights, their fp32 masters, AdamW's two moments, and averages of weights: each stored by the weights' own sentences
and names."""
OUTER, LOCAL = ROUND_STATES = "outer_momentum", "local"
"""The states that replicas which take steps alone have beside them, stored alike: the momentum of the outer step, and
each replica's own weights."""
RESIDUAL = "residual"
"""What rounding has left of the gradients that a rank has sent in 8 bits: each of dp x cp has its own, stored alike."""
KINDS = *STATES, *ROUND_STATES, RESIDUAL
CARRIED = "carried/tensors.safetensors"
"""The file of a checkpoint that has the tensors of other parts of the model."""

_LONGEST_SENTENCE, _MOST_SUMS, _MOST_PLACES = 200, 8, 1 << 16
_LONGEST_NAME, _MOST_TARGETS, _MOST_NUMBERS = 200, 1000, 16 * limits.LAYERS
_RUNS = r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*"
# What is in braces is an axis, or a word for each piece: no attribute, index or width of Python's format strings.
_HUGGING_FACE = re.compile(r"(?:[\w.-]|\{\w+(?:,\w+)*\})*", re.ASCII)


_OF_REPLICA = re.compile(r"(\w+)_of_(\d{1,6})", re.ASCII)


def of_replica(state: str, replica: int) -> str:
    """Return the name of a state that a replica has for itself: ``exp_avg_of_1``."""
    return f"{state}_of_{replica}"


def kind_of(state: str) -> tuple[str, int | None]:
    """Return the one of :data:`KINDS` that a state is, and the replica that has it for itself; None: all have it."""
    found = _OF_REPLICA.fullmatch(state)
    return (state, None) if found is None else (found[1], int(found[2]))


def replicas_of(states: Iterable[str]) -> int:
    """Return the number of replicas that take steps alone and have states for themselves; 0: none have."""
    return len({replica for kind, replica in map(kind_of, states) if replica is not None and kind != RESIDUAL})


def residuals_of(states: Iterable[str]) -> list[str]:
    """Return those of some states that are residuals, in the order of their ranks."""
    return sorted(
        (state for state in states if kind_of(state)[0] == RESIDUAL), key=lambda state: kind_of(state)[1] or 0
    )


def kept_as(state: str, states: Sequence[str]) -> str | None:
    """Return the one of some states that a run goes on from for one of its own, where it has the same, more or fewer
    replicas: what was a replica's goes to those that are as many places further on, and what all had to all."""
    kind, replica = kind_of(state)
    replicas = replicas_of(states)
    others = [state, *([of_replica(kind, (replica or 0) % replicas)] if replicas else []), kind]
    return next((each for each in others if each in states), None)


def holder(place: Coordinates, part: int | None = None) -> str:
    """Return the name of a file in the folder of each state; ``part`` is its number, where a place has several."""
    return f"pp{place.pp}-ep{place.ep}-tp{place.tp}" + ("" if part is None else f"-part{part}")


def file_name(state: str, place: Coordinates, part: int | None = None) -> str:
    return path_of(state, holder(place, part))


def path_of(state: str, where: Hashable) -> str:
    """Return the path of the file that holds a tensor of a state: ``where`` is the tensor's."""
    return f"{state}/{where}.safetensors"


_FILE = re.compile(r"(\w+)/pp(\d{1,9})-ep(\d{1,9})-tp(\d{1,9})(?:-part(\d{1,9}))?\.safetensors", re.ASCII)


@dataclass(frozen=True)
class FileLayout(Layout):
    """A layout on the coordinates that there are files for: what is not spread over ep lies with the first of them
    alone, as ranks of ep are data parallel for it."""

    def shards(self, place: Coordinates) -> Iterator[Shard]:
        spread = {axis for axis, dims in self.split.items() if "ep" in dims}
        return (s for s in super().shards(place) if place.ep == 0 or not spread.isdisjoint(s.box))


def on_disk(layout: Layout) -> FileLayout:
    """Return the layout without what does not show on disk: its ranks are the model-parallel coordinates."""
    mesh = layout.mesh
    shape = MeshShape(pp=mesh.pp, ep=mesh.ep, tp=mesh.tp)
    return FileLayout(layout.schema, shape, layout.layers, layout.split, layout.placement)


@dataclass(frozen=True)
class Adapters:
    """The adapters that a checkpoint holds, and their model. ``fingerprint``: the fingerprint of that model's weights,
    see :func:`~parallel.weights.fingerprint.combined`."""

    lora: Lora
    base: str
    fingerprint: int


@dataclass(frozen=True)
class FileRecord:
    """Bytes of a file, {tensor: {label: fingerprint}} of what it holds, and {tensor: (axis, start, stop)} of those of
    which it is only a range."""

    size: int
    fingerprints: Mapping[str, Mapping[str, int]]
    ranges: Mapping[str, Cut] = field(default_factory=dict)


@dataclass(frozen=True)
class Carried:
    """The larger model that the weights are a part of, one that also sees, and its other tensors, which are carried
    byte by byte. ``config``: all fields of its ``config.json``; ``naming``: how the tensors of the part are named in
    it; ``files``: the files that have the others, as in :class:`Index`."""

    config: Mapping[str, Any]
    naming: Naming
    files: Mapping[str, FileRecord]


@dataclass(frozen=True)
class Index:
    """The index of a folder: a checkpoint's ``index.json``, or what a Hugging Face folder's files come to.

    ``raw``: all fields of the Hugging Face ``config.json`` that the model came from or would have; ``states``: those of
    :data:`STATES` that are there; ``step``: the training step, None for converted weights; ``files``: those by path
    within the folder, Hugging Face's have no fingerprints; ``adapters``: of what, if it holds adapters and not the
    model that ``raw`` describes; ``frozen``: tensors that were not trained: they have weights alone, as buffers do,
    which are not listed; ``muon``: whether the matrices of blocks have been updated as wholes: of them there is the
    first moment alone; ``carried``: what the weights are a part of, where they are one.
    """

    raw: Mapping[str, Any]
    layout: Layout
    states: tuple[str, ...]
    step: int | None
    files: Mapping[str, FileRecord]
    adapters: Adapters | None = None
    frozen: frozenset[str] = frozenset()
    muon: bool = False
    carried: Carried | None = None

    @cached_property
    def config(self) -> ModelConfig:
        made = family(self.raw["model_type"]).config.from_hugging_face(self.raw)
        rows = () if self.carried is None else self.layout.schema.params
        return replace(made, projector=tuple(param for param in rows if param.name.startswith(names.PROJECTOR)))

    @cached_property
    def schema(self) -> Schema:
        """The schema, in this release's sentences, of what the checkpoint holds; those of its own are in the layout."""
        return self.tuning.kept(self.config.schema)

    @property
    def tuning(self) -> Tuning:
        """The part of the model that the adapters train, if it holds adapters."""
        return Tuning(self.adapters.lora if self.adapters else None)

    def has(self, state: str, tensor: str) -> bool:
        """Return whether a tensor has a state."""
        if kind_of(state)[0] == MOMENTS[1] and self.muon and tensor in self._matrices:
            return False
        return state == STATES[0] or (tensor not in self.frozen and tensor not in self._buffers)

    @cached_property
    def _matrices(self) -> frozenset[str]:
        return frozenset(names.matrices(self.schema))

    @cached_property
    def _buffers(self) -> frozenset[str]:
        return frozenset(names.buffers(self.schema))

    @property
    def version(self) -> int:
        """The version of the format: the first that has what there is."""
        sizes, params = self.layout.schema.sizes, self.layout.schema.params
        some = "experts" in sizes or any(param.layers is not None for param in params)
        spread = any(parts != [None] for parts in self.parts.values())
        since = {
            2: some or spread or self.split,
            3: self.carried,
            4: self.layout.placement != "loop",
            5: any(kind_of(state)[1] is not None for state in self.states),
            6: self.carried and any(param.name.startswith(names.PROJECTOR) for param in params),
            7: any(param.also for param in params),
        }
        return max((version for version, there in since.items() if there), default=1)

    @property
    def split(self) -> Split:
        """The dimensions of the mesh over which axes are split, of those that are not split as in
        :data:`~parallel.weights.schema.SPLIT`."""
        there = {axis: self.layout.split.get(axis, ()) for axis in SPLIT}
        return {axis: dims for axis, dims in there.items() if dims != SPLIT[axis]}

    @cached_property
    def parts(self) -> Mapping[tuple[str, Coordinates], list[int | None]]:
        """{(state, place): the numbers of its files}; a file that holds all of them has none."""
        found: dict[tuple[str, Coordinates], list[int | None]] = {}
        for state, pp, ep, tp, part in (match.groups() for match in map(_FILE.fullmatch, self.files) if match):
            place = Coordinates(pp=int(pp), ep=int(ep), tp=int(tp))
            found.setdefault((state, place), []).append(None if part is None else int(part))
        return found

    def stored(self, state: str) -> Iterator[Stored]:
        """Yield the tensors of a state and the slices of them; ``where`` is the name of their file, see
        :func:`path_of`."""
        for rank in range(self.layout.mesh.world):
            place = self.layout.mesh.place(rank)
            shards = {s.name: s for s in native(self.layout, [rank]) if self.has(state, s.name)}
            for part in self.parts.get((state, place), [None]):
                where, record = holder(place, part), self.files.get(file_name(state, place, part))
                for name in shards if part is None or record is None else record.fingerprints:
                    cut = record and record.ranges.get(name)
                    whole = replace(shards[name], where=where)
                    yield whole.along(*cut) if cut else whole

    def to_json(self) -> bytes:
        schema, mesh = self.layout.schema, self.layout.mesh
        tree = {
            "format": FORMAT,
            "version": self.version,
            "step": self.step,
            "config": dict(self.raw),
            "parameters": [
                {
                    "name": p.name,
                    "pattern": p.pattern,
                    "at": p.at,
                    "hf": p.hf,
                    "hf_pattern": p.hf_pattern or p.pattern,
                    **({"layers": _spelled_layers(p.layers)} if p.layers is not None else {}),
                    **({"also": [_spelled_layers(others) for others in p.also]} if p.also else {}),
                }
                for p in schema.params
            ],
            "sizes": dict(schema.sizes),
            "mesh": {"pp": mesh.pp, "ep": mesh.ep, "tp": mesh.tp},
            "layers_per_stage": list(self.layout.layers),
            **({"placement": self.layout.placement} if self.layout.placement != "loop" else {}),
            **({"split": {axis: list(dims) for axis, dims in self.split.items()}} if self.split else {}),
            "states": list(self.states),
            **({"frozen": sorted(still)} if (still := self.frozen - self._buffers) else {}),
            **({"optimizer": "muon"} if self.muon else {}),
            **({"adapters": _spelled(self.adapters)} if self.adapters else {}),
            **({"carried": _of_carried(self.carried)} if self.carried else {}),
            "files": _of_files(self.files),
        }
        return json.dumps(tree, indent=1, allow_nan=False).encode() + b"\n"


def _of_files(files: Mapping[str, FileRecord]) -> dict[str, Any]:
    return {
        name: {
            "bytes": record.size,
            **({"ranges": dict(record.ranges)} if record.ranges else {}),
            "fingerprints": {
                tensor: {label: f"{value:016x}" for label, value in of.items()}
                for tensor, of in record.fingerprints.items()
            },
        }
        for name, record in sorted(files.items())
    }


def _of_carried(carried: Carried) -> dict[str, Any]:
    naming = list(astuple(carried.naming))
    return {"config": dict(carried.config), "naming": naming, "files": _of_files(carried.files)}


def _spelled(adapters: Adapters) -> dict[str, Any]:
    base = {"path": adapters.base, "fingerprint": f"{adapters.fingerprint:016x}"}
    said = {name: value for name, value in asdict(adapters.lora).items() if value is not None}
    return {**said, "base": base}


class VersionError(StoreError):
    """A checkpoint of another version of the format: it may be sound, and another release reads it."""


class _Tree:
    """A JSON object of a file, whose fields are asked for with their types."""

    def __init__(self, path: Path, where: str, tree: object) -> None:
        self.path, self.where = path, where
        if not isinstance(tree, dict):
            raise self.error("is not an object")
        self.tree = tree

    def error(self, reason: str) -> StoreError:
        return StoreError(f"{self.path}: {self.where} {reason}: this is not a checkpoint of ours, or it is damaged")

    def get(self, key: str, *kinds: type, default: object = None) -> Any:
        """Return the value of a field. Without a default, it must be there."""
        if key not in self.tree and default is not None:
            return default
        if key not in self.tree:
            raise self.error(f"has no {key!r}")
        value = self.tree[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise self.error(f"has {key}={short(value)}, which is not of type {wanted}")
        return value

    def child(self, key: str, default: object = None) -> _Tree:
        return _Tree(self.path, key, self.get(key, dict, default=default))

    def numbers(self) -> dict[str, int]:
        """Return the fields, all of which must be positive whole numbers."""
        if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in self.tree.values()):
            raise self.error(f"{short(self.tree)} holds something else than positive whole numbers")
        return dict(self.tree)


def read_index(path: Path) -> Index:
    """Read and check an ``index.json``. Raises StoreError: it is missing, damaged, of a later version, or describes a
    model that cannot be."""
    tree = _Tree(path, "the index", read_json(path, path.parent))
    if tree.get("format", str) != FORMAT:
        raise tree.error(f"has format {short(tree.tree['format'])} instead of {FORMAT!r}")
    if (version := tree.get("version", int)) not in VERSIONS:
        read = f"{', '.join(map(str, VERSIONS[:-1]))} and {VERSIONS[-1]}"
        raise VersionError(
            f"{path}: format version {version}, and this release reads {read}: use the one that wrote it"
        )
    raw, files, step = tree.get("config", dict), tree.child("files"), tree.get("step", int, type(None))
    tree.child("config").get("model_type", str)
    if step is not None and step < 0:
        raise tree.error(f"has step={step}")
    records = {name: _record(files.child(name)) for name in files.tree}
    mesh = tree.child("mesh").numbers()
    states = tuple(tree.get("states", list))
    layers = tree.get("layers_per_stage", list)
    strange = any(not isinstance(state, str) or kind_of(state)[0] not in KINDS for state in states)
    if strange or "weights" not in states or len(set(states)) != len(states):
        raise tree.error(f"has states={short(list(states))}, of which only {', '.join(KINDS)} are known")
    if not all(type(n) is int and n >= least for n, least in zip(layers, least_layers(len(layers)), strict=True)):
        raise tree.error(f"has layers_per_stage={short(layers)}")
    ranks = math.prod(mesh.values())
    # Those of ep but the first have files where they have experts, and those of a stage where it has adapters.
    least, most = mesh.get("tp", 1), len(states) * ranks if version == 1 else len(records)
    if set(mesh) != {"pp", "ep", "tp"} or ranks > _MOST_PLACES or not least <= len(records) <= most:
        raise tree.error(f"has mesh={short(mesh)} and {len(states)} states, but {len(records)} files")
    try:
        schema = Schema(tuple(_params(tree, version)), tree.child("sizes").numbers())
        split = _split(tree, version)
        spread = (schema.sizes[axis] for axis, dims in split.items() if "ep" in dims and axis in schema.sizes)
        if mesh["ep"] > max(spread, default=1):
            raise tree.error(f"has mesh={short(mesh)}, and no experts to spread over so many")
        _check_count(tree, schema, records)
        if "adapters" not in tree.tree:  # earlier releases left out layers that predict further tokens
            raw, _ = family(raw["model_type"]).config.as_held(raw, {param.hf: () for param in schema.params})
        placement, optimizer = tree.get("placement", str, default="loop"), tree.get("optimizer", str, default="muon")
        if placement not in (placements := get_args(Placement)):
            allowed = " or ".join(placements)
            raise tree.error(f"has placement={short(placement)}, and virtual stages are placed as {allowed}")
        if optimizer != "muon":  # where none is named, it was AdamW, or there was none
            raise tree.error(f"has optimizer={short(optimizer)}, of which only muon is known")
        layout = FileLayout(schema, MeshShape(**mesh), tuple(layers), split, cast(Placement, placement))
        index = Index(raw, layout, states, step, records, _adapters(tree), carried=_carried(tree, raw["model_type"]))
        _check_model(tree, index)
        index = replace(index, frozen=_frozen(tree, index.schema), muon="optimizer" in tree.tree)
    except StoreError:
        raise
    except (ModelConfigError, ValueError, KeyError) as error:
        raise StoreError(f"{path}: {error}") from error
    _check_files(tree, index, version)
    return index


def _check_files(tree: _Tree, index: Index, version: int) -> None:
    """Check that the files are those that there must be, and together hold each element of each place once."""
    layout, wanted = index.layout, set[str]()
    places = [layout.mesh.place(rank) for rank in range(layout.mesh.world)]
    for place, state in itertools.product(places, index.states):
        if any(index.has(state, shard.name) for shard in layout.shards(place)):
            count = len(index.parts.get((state, place), ())) if version > 1 else 1
            wanted |= {file_name(state, place, part if count > 1 else None) for part in range(max(1, count))}
    if wanted != set(index.files):
        raise tree.error(f"names the files {short(sorted(index.files))} instead of {short(sorted(wanted))}")
    cut, alike = {tensor for record in index.files.values() for tensor in record.ranges}, dict[object, list[Cut]]()
    if cut and version == 1:
        raise tree.error(f"has ranges of {short(sorted(cut))}, which version 1 does not know")
    for (state, place), parts in index.parts.items() if version > 1 else ():
        shards = (each for each in native(layout, [layout.mesh.rank(place)]) if index.has(state, each.name))
        records = [index.files[file_name(state, place, part)] for part in parts]
        for stored, ranges in _tiled(tree, path_of(state, holder(place)), shards, records):
            for label in stored.labels if stored.name in cut else ():
                box = tuple(stored.box[axis] for axis in stored.pattern.piece_axes(label))
                if alike.setdefault((state, stored.name, label, box), ranges) != ranges:
                    raise tree.error(f"cuts replicas of {stored.name} in {state} at different places")


def _tiled(
    tree: _Tree, place: str, shards: Iterable[Stored], records: Sequence[FileRecord]
) -> Iterator[tuple[Stored, list[Cut]]]:
    """Yield each tensor of a place, and in which ranges its files hold it: none where one has all of it."""
    listed: dict[str, list[Cut | None]] = {}
    for record in records:
        for name in record.fingerprints:
            listed.setdefault(name, []).append(record.ranges.get(name))
    for stored in shards:
        if stored.name not in listed:
            raise tree.error(f"lists no {stored.name} in the files of {place}")
        found = listed.pop(stored.name)
        ranges = sorted((each for each in found if each is not None), key=lambda each: each[1])
        if found != [None] and (len(ranges) < len(found) or not _tile(stored, ranges)):
            said = ", ".join("all" if each is None else "{} {}:{}".format(*each) for each in found[:9])
            raise tree.error(f"lists {said} of {stored.name} in the files of {place}, which are not all of it once")
        yield stored, ranges
    if listed:
        raise tree.error(f"lists {short(sorted(listed))} in the files of {place}, which do not belong there")


def _tile(stored: Stored, ranges: Sequence[Cut]) -> bool:
    axes, starts, stops = zip(*ranges, strict=True)
    if {*axes} != {axes[0]} or any(axes[0] not in stored.pattern.piece_axes(label) for label in stored.labels):
        return False
    first, last = stored.box[axes[0]]
    return (*starts, last) == (first, *stops)


def _adapters(tree: _Tree) -> Adapters | None:
    if "adapters" not in tree.tree:
        return None
    said = tree.child("adapters")
    base, targets = said.child("base"), said.get("targets", list)
    fingerprint, numbers = base.get("fingerprint", str), [said.get(key, int, float) for key in ("alpha", "dropout")]
    if not re.fullmatch("[0-9a-f]{16}", fingerprint):
        raise base.error(f"has fingerprint={short(fingerprint)}, which is not 16 hexadecimal digits")
    if said.get("rank", int) < 1 or not all(map(math.isfinite, numbers)) or not 0 <= numbers[1] < 1:
        raise said.error(f"has rank={said.tree['rank']}, alpha={numbers[0]} and dropout={numbers[1]}")
    if len(targets) > _MOST_TARGETS or not all(isinstance(each, str) and len(each) < _LONGEST_NAME for each in targets):
        raise said.error(f"has targets={short(targets)}, which are no patterns of names")
    held = said.get("base_dtype", str) if "base_dtype" in said.tree else None
    if held not in (None, *BLOCK_BYTES):
        raise said.error(f"has base_dtype={short(held)}, which is none of {', '.join(BLOCK_BYTES)}")
    lora = Lora(said.get("rank", int), numbers[0], tuple(targets), numbers[1], said.get("rslora", bool), held)
    return Adapters(lora, base.get("path", str), int(fingerprint, 16))


def _carried(tree: _Tree, family: str) -> Carried | None:
    if "carried" not in tree.tree:
        return None
    said = tree.child("carried")
    config, naming, files = said.get("config", dict), said.get("naming", list), said.child("files")
    if len(naming) != 2 or not all(isinstance(each, str) and _HUGGING_FACE.fullmatch(each) for each in naming):
        raise said.error(f"has naming={short(naming)}, which are no two beginnings of names")
    if [*files.tree] != [CARRIED]:
        raise said.error(f"names the files {short(sorted(files.tree))} instead of {CARRIED}")
    part, wrapper = unwrapped(config)
    if wrapper is None or part["model_type"] != family:
        raise said.error(f"has the config of a {short(config.get('model_type'))}, of which no part is a {family}")
    return Carried(config, Naming(*naming), {name: _record(files.child(name)) for name in files.tree})


def _frozen(tree: _Tree, schema: Schema) -> frozenset[str]:
    named = tree.get("frozen", list, default=[])
    known = {name for name, _ in names.tensors(schema)}
    if strange := [name for name in named if not isinstance(name, str) or name not in known]:
        raise tree.error(f"has frozen={short(strange)}, which are no tensors of it")
    return frozenset(named)


def _record(tree: _Tree) -> FileRecord:
    found = tree.child("fingerprints")
    for tensor, of in found.tree.items():
        values = list(of.values()) if isinstance(of, dict) else [None]
        if not all(isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value) for value in values):
            raise found.error(f"of {tensor!r} are {short(of)}, not 16 hexadecimal digits for each piece")
    made = {tensor: {label: int(v, 16) for label, v in of.items()} for tensor, of in found.tree.items()}
    cut, ranges = tree.child("ranges", default={}), dict[str, Cut]()
    for tensor, value in cut.tree.items():
        match value:
            case [str(axis), int(start), int(stop)] if 0 <= start < stop and bool not in map(type, (start, stop)):
                ranges[tensor] = axis, start, stop
            case _:
                raise cut.error(f"has {short(value)} for {tensor!r}, which is not [axis, start, stop]")
    if strange := sorted(ranges.keys() - made.keys()):
        raise cut.error(f"are of {short(strange)}, which have no fingerprints")
    return FileRecord(tree.get("bytes", int), made, ranges)


def _spelled_layers(layers: Sequence[int]) -> str:
    """Return numbers as the index says them: ``0-2,5``."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs(layers))


def _layers(tree: _Tree, key: str, texts: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of each text; none in an empty one of ``also``."""
    found = []
    for text in texts:
        if not isinstance(text, str) or not re.fullmatch(_RUNS if key == "layers" else f"({_RUNS})?", text, re.ASCII):
            raise tree.error(f"has {key}={short(text)}, which are no numbers of layers such as 0-2,5")
        ends = [(int(run.partition("-")[0]), int(run.rpartition("-")[2])) for run in text.split(",") if run]
        if any(a > b for a, b in ends) or any(b >= a for (_, b), (a, _) in itertools.pairwise(ends)):
            raise tree.error(f"has {key}={short(text)}, which do not ascend")
        found.append(ends)
    # Before they are counted out, which could be any number of times as long as the texts.
    if (count := sum(b - a + 1 for ends in found for a, b in ends)) > limits.LAYERS:
        raise tree.error(f"has {key}={short([*texts])}, which are {count} numbers: there may be {limits.LAYERS}")
    return tuple(tuple(n for a, b in ends for n in range(a, b + 1)) for ends in found)


def _split(tree: _Tree, version: int) -> Split:
    if "split" not in tree.tree or version == 1:
        return SPLIT
    said = tree.child("split")
    for axis, dims in said.tree.items():
        if axis not in SPLIT or dims not in ([], ["ep"], ["tp"], ["ep", "tp"], ["tp", "ep"]):
            raise said.error(f"has {short(dims)} for {axis!r}, which is no list of ep and tp")
    return {**SPLIT, **{axis: tuple(dims) for axis, dims in said.tree.items()}}


def _params(tree: _Tree, version: int) -> Iterator[Param]:
    room = _MOST_NUMBERS
    for value in tree.get("parameters", list):
        yield (param := _param(tree, value, version))
        room -= len(param.layers or ()) + sum(map(len, param.also))
        if room < 0:
            raise tree.error(f"has parameters of more than {_MOST_NUMBERS} numbers of layers")


def _param(tree: _Tree, value: object, version: int) -> Param:
    declared = _Tree(tree.path, "a parameter", value)
    for sentence in (declared.get("pattern", str), declared.get("hf_pattern", str)):
        # Fused groups multiply, and parentheses nest: a damaged sentence must not take for ever.
        if len(sentence) > _LONGEST_SENTENCE or sentence.count("+") > _MOST_SUMS:
            raise declared.error(f"has the sentence {short(sentence)}")
    if not _HUGGING_FACE.fullmatch(declared.get("hf", str)):
        raise declared.error(f"has hf={short(declared.tree['hf'])}, which names no tensors")
    texts = {key: declared.get(key, str) for key in ("name", "pattern", "hf", "hf_pattern", "at")}
    some = {key for key, since in (("layers", 2), ("also", 7)) if key in declared.tree and version >= since}
    layers = _layers(declared, "layers", [declared.get("layers", str)])[0] if "layers" in some else None
    also = _layers(declared, "also", declared.get("also", list)) if "also" in some else ()
    return Param(**texts, layers=layers, also=also)


def _check_count(tree: _Tree, schema: Schema, records: Mapping[str, FileRecord]) -> None:
    """Check the number of layers before anything counts through them: a damaged one must not take for ever."""
    tensors = sum(schema.count(param, param.name) for param in schema.params)
    listed = sum(len(record.fingerprints) for record in records.values())
    if tensors > listed:
        raise tree.error(f"describes {tensors} tensors and lists {listed}")


def _check_model(tree: _Tree, index: Index) -> None:
    """Check that the sentences, which may be those of another release, are about the same pieces."""
    there, here = index.layout.schema, index.schema
    if sizes := {axis for axis, _ in there.sizes.items() ^ here.sizes.items()}:
        said, meant = ({axis: of[axis] for axis in sorted(sizes) if axis in of} for of in (there.sizes, here.sizes))
        raise tree.error(f"has sizes {short(said)}, and its config means {short(meant)}")

    if differ := {piece for piece, _ in there.pieces.items() ^ here.pieces.items()}:
        names = ", ".join(sorted(map(spell, differ)))
        raise tree.error(f"declares other pieces than this release does for its config: {names}")
