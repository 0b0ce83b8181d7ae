"""Checkpoints of other trainers as sources: ``torch.distributed.checkpoint`` (DCP), as FSDP2, torchtitan and
Megatron-Core save it, and DeepSpeed's universal checkpoints.

Such a folder has weights and AdamW's moments by the trainer's own names, and no config: that of the model lies beside
them as ``config.json``, or is given. All that can be known without reading tensors is checked when it is opened, and
nothing in the files is run. No torch.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from megacore.models.config import ModelConfig
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.transfer import Stored, hugging_face, whole_name
from megacore.store.io import hub
from megacore.store.io.hub import HubName
from megacore.store.io.objects import ObjectPath
from megacore.store.io.strict_json import StoreError, short
from megacore.store.tensor_files.accounting import account, alike, summary
from megacore.store.tensor_files.companions import COMPANIONS, Companion, companions
from megacore.store.tensor_files.distributed import METADATA, DistributedFiles, Origin, PartedFile
from megacore.store.tensor_files.dtypes import FLOATS
from megacore.store.tensor_files.megatron import COMMON, has_states, open_megatron
from megacore.store.tensor_files.universal import is_universal, open_universal
from megacore.store.weight_folders.folder import SafetensorsFolder
from megacore.store.weight_folders.foreign_names import TrainerNaming, anchors, placed
from megacore.store.weight_folders.hugging_face import CONFIG, read_config, unusable
from megacore.store.weight_folders.index import MASTER, MOMENTS, FileRecord, Index

_STEP, _SHOWN = "step", 6
_STATES = MASTER, *MOMENTS


@dataclass(frozen=True)
class ForeignFolder(SafetensorsFolder):
    """An opened checkpoint of another trainer. ``weights``: {Hugging Face's name of a tensor: its name in the files},
    which show it as Hugging Face has it; ``home``: the folder of its config and what else travels with the model."""

    format = "foreign"
    kind = "a checkpoint of another trainer"

    weights: Mapping[str, str]
    home: Path

    @classmethod
    def open(cls, path: Path, config: Path | None = None, ignored_fields: Sequence[str] = ()) -> ForeignFolder:
        """Open a folder. ``path``: the folder, on a disk; ``config``: the model's ``config.json``, the folder that has
        it, or a name of the Hugging Face hub; None: it lies in the folder; ``ignored_fields``: as of
        :meth:`HuggingFace.open`. Raises StoreError: everything that is wrong with it."""
        home, name = _home(path, config)
        source, problems = _source(path), list[str]()
        raw, kind, model, wrapper, quantization = read_config(home, ignored_fields, problems, name)
        if wrapper is not None or quantization is not None:
            what = "are a part of a larger model" if wrapper is not None else "are quantised"
            problems.append(f"{name} says that the weights {what}: these are read from Hugging Face folders alone")
        if problems or kind is None or model is None:
            raise unusable(path, problems)
        made = _Names.of(source, model, problems)
        weights = made.file(made.weights, model, problems)
        if problems:
            raise unusable(path, problems)
        found = account(model, dict.fromkeys(weights.entries, weights))
        held = {hf: tensor.name for hf, tensor in found.weights.items()}
        problems += found.problems
        files, frozen, steps = {"weights": weights}, frozenset[str](), None
        if not problems:
            moments, frozen, steps = _moments(made, model, held, problems)
            files |= moments
        if problems:
            raise unusable(path, problems)
        names = [origin.name for file in files.values() for origin in file.origins.values()]
        records = {
            file: FileRecord(source.sizes[file], {name: {} for name in of})
            for file, of in source.files_of(names).items()
        }
        layout = Layout(model.schema, MeshShape(), (model.sizes["layer"],))
        index = Index(raw, layout, tuple(files), steps, records, frozen=frozen)
        told = tuple(_remarks(made, model, weights, names, frozen, steps))
        # A run that goes on with it takes its data from the beginning.
        begun: dict[str, Any] = {
            "step": steps,
            "consumed_samples": 0,
            "tokens": 0,
            "optimizer_steps": steps,
            "recipe": {},
        }
        trainer = None if steps is None else begun
        return cls(path, index, files, held, home, trainer=trainer, ignored=found.ignored, told=told)

    def stored(self, state: str = "weights") -> Iterator[Stored]:
        tensors = hugging_face(self.schema, where=str(self.path)) if state in self.states else ()
        return (stored for stored in tensors if self.index.has(state, whole_name(self.schema, stored)))

    def location(self, state: str, stored: Stored) -> tuple[str, str]:
        return state, self.weights[stored.name]

    def companions(self) -> Mapping[str, Companion]:
        return companions(self.home, self.home)

    def trainer_json(self) -> bytes | None:
        return None if self.trainer is None else json.dumps(dict(self.trainer), indent=1).encode() + b"\n"


def is_foreign(path: Path) -> bool:
    """Return whether a folder is a checkpoint of another trainer that :class:`ForeignFolder` may open."""
    return not isinstance(path, ObjectPath) and ((path / METADATA).is_file() or is_universal(path))


def _source(path: Path) -> DistributedFiles:
    if not (path / METADATA).is_file():
        return open_universal(path)
    if (path / COMMON).is_file():
        return open_megatron(path)
    source = DistributedFiles.open(path)
    if has_states(source):
        raise StoreError(
            f"{path} has the states of Megatron-Core's optimizer and no {COMMON}, which says how many updates they "
            "have seen: copy all files of the checkpoint"
        )
    return source


def _home(path: Path, config: Path | None) -> tuple[Path, str]:
    """Return the folder of the model's config, and its name there. Raises StoreError: there is none."""
    if config is not None and (of_hub := HubName.of(config)) is not None:
        config = hub.fetch(of_hub, [CONFIG, *COMPANIONS])
    home, name = config or path, CONFIG
    if config is not None and config.is_file():
        home, name = config.parent, config.name
    if not (home / name).is_file():
        way_out = (
            "give it by `megacore convert --config`" if config is None else "give the folder that has it, or the file"
        )
        raise StoreError(
            f"{home} has no {name}, and a checkpoint of another trainer does not say what model it is of: "
            f"{way_out}, or copy the Hugging Face {CONFIG} of the model into {path}"
        )
    return home, name


# -- names


@dataclass(frozen=True)
class _Names:
    """What a checkpoint calls its tensors. ``naming``: the trainer's table; None where the names are Hugging Face's;
    ``weights``: {name of a weight: whole name}, without what all of them begin with; ``moments``: {name: whole name} of
    each state of the optimizers that is there; ``others``: whole names of states of weights that have none of these
    moments."""

    source: DistributedFiles
    naming: TrainerNaming | None
    weights: Mapping[str, str]
    moments: Mapping[str, Mapping[str, str]]
    others: Sequence[str]

    @classmethod
    def of(cls, source: DistributedFiles, config: ModelConfig, problems: list[str]) -> _Names:
        """Find a tensor of the first layer, whoever named it: what stands before it stands before all. Raises
        StoreError: there is none, or there are several."""
        looked_for = []
        for anchor, naming in anchors(config):
            begins = _before(anchor, source.tensors)
            if len(begins) > 1:
                listed = ", ".join(short(begin) for begin in begins)
                told = f"there are {len(begins)} tensors {anchor}, after {listed}: keep one model in it"
                raise unusable(source.path, [told])
            if begins:
                states = list(_states(begins[0], source.tensors))
                roots = dict.fromkeys(state.root for state in states if state.kind in _STATES)
                optimizers = tuple(root.removesuffix("state.") for root in roots if root not in ("", "state."))
                moments = {kind: _after(roots, f".{kind}", source.tensors, problems) for kind in (*_STATES, _STEP)}
                moments[_STEP] |= _after(roots, f".{_STEP}", source.values, problems)
                with_moments = {state.weight for state in states if state.kind in MOMENTS}
                others = [each.name for each in states if each.weight not in with_moments and each.kind != _STEP]
                of_model = {
                    name.removeprefix(begins[0]): name
                    for name in source.tensors
                    if name.startswith(begins[0]) and not name.startswith(optimizers)
                }
                if not begins[0]:  # other things may stand beside the weights
                    firsts = {name.partition(".")[0] for name in _expected(naming, config)}
                    of_model = {name: at for name, at in of_model.items() if name.partition(".")[0] in firsts}
                return cls(source, naming, of_model, moments, others if roots else ())
            looked_for.append(f"{anchor} ({naming.trainer if naming else 'Hugging Face'})")
        there = summary(source.tensors)
        more = f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
        told = (
            f"its tensors are named neither of {', '.join(looked_for)}, of a {config.family} as {CONFIG} has it; there "
            f"are {', '.join(there[:_SHOWN])}{more}"
        )
        raise unusable(source.path, [told])

    def file(self, names: Mapping[str, str], config: ModelConfig, problems: list[str]) -> PartedFile:
        """Return tensors as Hugging Face names and stores them; those that nobody knows keep their names."""
        stored = {name: self.source.tensors[whole].shape for name, whole in names.items()}
        known, shapes = {name: Origin(name) for name in names}, dict[str, tuple[int, ...]]()
        if self.naming is not None:
            there = placed(self.naming, config, stored)
            used = {place.origin.name: place for place in there.values()}
            wrong = {name: place.stored for name, place in used.items() if place.stored != stored[name]}
            problems += alike((f"shape {list(stored[name])} instead of {list(of)}", name) for name, of in wrong.items())
            known = {name: origin for name, origin in known.items() if name not in used}
            known |= {hf: place.origin for hf, place in there.items()}
            shapes = {hf: place.shape for hf, place in there.items()}
        elif self.source.flat:
            expected = {tensor.name: tensor.shape for tensor in hugging_face(config.schema)}
            shapes = {hf: expected[hf] for hf in expected.keys() & stored if (math.prod(expected[hf]),) == stored[hf]}
        for one, other in (config.tied, config.tied[::-1]) if config.tie_word_embeddings else ():
            if one in known and other not in known:  # one tensor, which the optimizer may call by the other name
                known[other] = known[one]
                shapes |= {other: shapes[one]} if one in shapes else {}
        origins = {name: replace(origin, name=names[origin.name]) for name, origin in known.items()}
        return PartedFile.of(self.source, origins, shapes)


def _expected(naming: TrainerNaming | None, config: ModelConfig) -> Iterator[str]:
    yield from (param.hf for param in config.schema.params) if naming is None else (row.name for row in naming.rows)
    if naming is None:
        yield from config.tied


def _before(anchor: str, names: Collection[str]) -> list[str]:
    """Return what stands before a name in those that end with it."""
    return [name.removesuffix(anchor) for name in names if name == anchor or name.endswith(f".{anchor}")]


class _State(NamedTuple):
    """A state of the optimizer: its whole name, ``<root><weight>.<kind>``."""

    name: str
    root: str
    weight: str
    kind: str


def _states(begin: str, names: Collection[str]) -> Iterator[_State]:
    """Yield what the names say of weights of the model, in which ``begin`` stands before these."""
    weights = {name.removeprefix(begin) for name in names if name.startswith(begin)}
    for name in names:
        *parts, kind = name.split(".")
        for at in range(len(parts)):
            if (weight := ".".join(parts[at:])) in weights:
                yield _State(name, name.removesuffix(f"{weight}.{kind}"), weight, kind)
                break


def _after(roots: Collection[str], end: str, names: Collection[str], problems: list[str]) -> dict[str, str]:
    """Return {what stands between: whole name} of those that begin with one of the roots and end so."""
    found = dict[str, str]()
    for root in roots:
        for name in names:
            if name.startswith(root) and name.endswith(end):
                between = name[len(root) : -len(end)]
                if (other := found.setdefault(between, name)) != name:
                    problems.append(f"{short(other)} and {short(name)} are of one tensor: keep one optimizer of it")
                    return found
    return found


# -- the optimizer


def _moments(
    names: _Names, config: ModelConfig, weights: Mapping[str, str], problems: list[str]
) -> tuple[Mapping[str, PartedFile], frozenset[str], int | None]:
    """Return ({state: its tensors}, the tensors of ours that have none, the updates they are of); none, none and None
    where there are no moments."""
    files = {state: names.file(names.moments[state], config, problems) for state in MOMENTS}
    dtypes = {name: names.source.tensors[whole].dtype for name, whole in names.weights.items()}
    if names.moments[MASTER] and {*dtypes.values()} != {"F32"}:
        # What is fp32 itself has no other.
        wide = {name: whole for name, whole in names.weights.items() if dtypes[name] == "F32"}
        files = {MASTER: names.file({**wide, **names.moments[MASTER]}, config, problems), **files}
    if not any(file.entries for file in files.values()) or _unfit(names) is not None:
        return {}, frozenset(), None
    lacking, wrong, parts = dict[str, list[str]](), list[tuple[str, str]](), Counter[str]()
    for stored in hugging_face(config.schema):
        if config.schema[stored.param].buffer:
            continue
        ours, held = whole_name(config.schema, stored), weights[stored.name]
        parts[ours] += len(files)
        for state, file in files.items():
            if (entry := file.entries.get(held)) is None:
                lacking.setdefault(ours, []).append(f"{held} has no {state}")
            elif entry.shape != stored.shape or entry.dtype not in FLOATS:
                wrong.append((f"{state} has {entry.dtype}{list(entry.shape)} instead of {list(stored.shape)}", held))
    frozen = frozenset(ours for ours, said in lacking.items() if len(said) == parts[ours])
    problems += [each for ours, said in lacking.items() if ours not in frozen for each in said] + alike(wrong)
    return files, frozen, _steps(names).pop()


def _unfit(names: _Names) -> str | None:
    """Return why no run can go on with the moments that are there; None where one can."""
    steps = sorted(_steps(names))
    if not steps:
        return "its tensors do not say of how many updates they are"
    if len(steps) > 1:
        return f"its tensors have seen {steps[0]:,} to {steps[-1]:,} updates"
    if names.others:
        return f"{len(names.others)} of its states are none of AdamW, such as {short(names.others[0])}"
    return None


def _steps(names: _Names) -> set[int]:
    """Return the numbers of updates that the tensors have seen."""
    source, found = names.source, set[int]()
    said = source.updates
    for value in (source.number(whole) for whole in names.moments[_STEP].values()) if said is None else said:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 62 or value % 1:
            raise StoreError(f"{source.path}: its optimizer has seen {short(value)}, which is no number of updates")
        found.add(int(value))
    return found


def _remarks(
    names: _Names,
    config: ModelConfig,
    weights: PartedFile,
    read: Collection[str],
    frozen: Collection[str],
    steps: int | None,
) -> Iterator[str]:
    source, trainer = names.source, names.naming.trainer if names.naming else "Hugging Face"
    yield f"{source.kind}, whose tensors have the names of {trainer}"
    held = {hf: weights.origins[hf] for hf in config.tied if hf in weights.origins}
    for name in dict.fromkeys(origin.name for origin in held.values() if origin.views):
        if (rows := source.tensors[name].shape[0]) > config.sizes["vocab"]:
            yield f"{short(name)} is filled up to {rows:,} tokens: those beyond {config.sizes['vocab']:,} are left out"
    if steps is not None:
        yield f"the moments of AdamW after {steps:,} updates go with the weights"
    elif names.moments[MOMENTS[0]] or source.unread:
        yield f"the moments of its optimizer are left out: {source.unread or _unfit(names)}"
    if frozen:
        still = summary(frozen)
        more = f" and {len(still) - _SHOWN} more" if len(still) > _SHOWN else ""
        yield f"without moments, as what is frozen has none, are {', '.join(still[:_SHOWN])}{more}"
    used: dict[str, Any] = dict.fromkeys([*read, *names.moments[_STEP].values()])
    if steps is not None:  # masters of weights that are fp32 themselves are the same
        used |= dict.fromkeys(names.moments[MASTER].values())
    rest: dict[str, int] = {}
    for name in (*source.tensors, *source.values):
        if name not in used:
            rest[name.partition(".")[0]] = rest.get(name.partition(".")[0], 0) + 1
    if rest:
        listed = ", ".join(f"{count} of {short(word)}" for word, count in sorted(rest.items())[:_SHOWN])
        yield f"what is no weight and no moment is left out: {listed}"
