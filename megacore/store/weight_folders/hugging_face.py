"""A folder in Hugging Face's format as a source: ``config.json`` and safetensors files, one or an index of many.

All that can be known without reading the weights is checked when it is opened. No torch, no transformers.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megacore.models.config import ModelConfig, ModelConfigError
from megacore.models.quantization import QUANTIZATION, Bitsandbytes, BlockFp8, Mxfp4, Quantization, dequantised
from megacore.models.registry import FAMILIES, family
from megacore.models.wrappers import Wrapper, unwrapped
from megacore.parallel.enum_errors import nearest
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.transfer import Stored, by_layer, hugging_face
from megacore.say import err
from megacore.store.io import hub
from megacore.store.io.errors import listed
from megacore.store.io.files import is_inside
from megacore.store.io.hub import HubName
from megacore.store.io.strict_json import StoreError, read_json
from megacore.store.tensor_files import bitsandbytes_files, fp8_files, mxfp4_files
from megacore.store.tensor_files.accounting import Account, account, ignorable_by, printable, summary
from megacore.store.tensor_files.companions import COMPANIONS, Companion, companions, travelling
from megacore.store.tensor_files.tensors import TensorFile
from megacore.store.weight_folders.folder import SafetensorsFolder
from megacore.store.weight_folders.index import Carried, FileRecord, Index

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"

_FIELD = re.compile(r"\w{1,80}", re.ASCII)
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_TO_SAFETENSORS = (
    "import sys; from transformers import AutoModelForCausalLM as Model; "
    'Model.from_pretrained(sys.argv[1], dtype="auto").save_pretrained(sys.argv[2])'
)

_DECODED: Mapping[type[Quantization], Any] = {
    BlockFp8: fp8_files.decoded,
    Bitsandbytes: bitsandbytes_files.decoded,
    Mxfp4: mxfp4_files.decoded,
}
"""{how weights lie: the function that shows files as what they stand for}."""


@dataclass(frozen=True)
class HuggingFace(SafetensorsFolder):
    """An opened folder: every weight of the model is there once, in its shape, and nothing else is. ``weights``: (file,
    name there) of each tensor, by the name that the family's table gives it."""

    format = "hugging_face"
    kind = "a Hugging Face folder"

    weights: Mapping[str, tuple[str, str]]

    @classmethod
    def open(cls, path: Path | str, ignored_fields: Sequence[str] = ()) -> HuggingFace:
        """Open a folder. ``ignored_fields``: unknown fields of its ``config.json`` that are left out, for they change
        nothing of what the model computes. Raises StoreError: everything that is wrong with it."""
        path = Path(path)
        if not path.is_dir():
            raise StoreError(f"{path} is not a folder: give the one that holds {CONFIG} and the weights")
        problems: list[str] = []
        raw, kind, config, wrapper, quantization = read_config(path, ignored_fields, problems)
        files = _files(path, problems)
        found, held, told = Account({}), files[0] if files else (), tuple[str, ...]()
        if files and quantization:
            held, damaged = _DECODED[type(quantization)](held, quantization)
            problems += damaged
        if files and kind:
            problems += _unnamed(*files, kind)
        if files and kind and config:
            tensors = {name: file for file in held for name in file.entries}
            shapes = {name: file.entries[name].shape for name, file in tensors.items()}
            try:
                held_so, remark = kind.as_held(raw, shapes)
            except ModelConfigError as error:
                raise unusable(path, [*problems, *error.problems]) from error
            told = (remark,) if remark else ()
            if held_so != raw:
                raw, config = held_so, kind.from_hugging_face(held_so)
            found = account(config, tensors, wrapper)
        if os.path.lexists(path / ADAPTER):
            problems.append(f"{ADAPTER}: an adapter changes what the weights compute: merge it into them and save that")
        problems += [f"{name} is a link to nothing" for name in travelling(path) if not (path / name).exists()]
        try:
            companions(path, path)
        except StoreError as error:
            problems.append(str(error))
        problems += found.problems
        if problems or config is None or files is None:
            raise unusable(path, problems)
        opened = {str(file.path.relative_to(path)): file for file in held}
        holders = {tensor: name for name, file in opened.items() for tensor in file.entries}
        weights = {name: (holders[held.name], held.name) for name, held in found.weights.items()}
        used = {name: opened[name] for name, _ in weights.values()}
        records = {name: FileRecord(file.size, {of: {} for of in file.entries}) for name, file in used.items()}
        layout, carried = Layout(config.schema, MeshShape(), (config.sizes["layer"],)), None
        if found.naming is not None:
            by_file: dict[str, dict[str, dict[str, int]]] = {}
            for name in found.carried:
                by_file.setdefault(holders[name], {})[name] = {}
            used |= {name: opened[name] for name in by_file}
            rest = {name: FileRecord(opened[name].size, of) for name, of in by_file.items()}
            carried = Carried(_object(path, CONFIG), found.naming, rest)
        index = Index(raw, layout, ("weights",), None, records, carried=carried)
        made = cls(
            path, index, used, weights, ignored=found.ignored, others=found.others, quantization=quantization, told=told
        )
        made.carried  # noqa: B018  # which declares each tensor, or says why it cannot
        return made

    def stored(self, state: str = "weights") -> Iterator[Stored]:
        """Yield the tensors under the names of the family's table; ``where`` is the folder."""
        tensors = hugging_face(self.schema, where=str(self.path)) if state in self.states else ()
        return by_layer(tensors)

    def location(self, state: str, stored: Stored) -> tuple[str, str]:
        return self.weights[stored.name]

    def companions(self) -> Mapping[str, Companion]:
        return companions(self.path, self.path)


def fetched(name: HubName, ignored_fields: Sequence[str] = ()) -> Path:
    """Bring a model of the hub onto this machine -> its folder in the hub's cache, whose name is the commit. These are
    the files that a folder is read from, and no others: the config first, which may say that the model cannot be used,
    and the weights in one format. Raises StoreError: it cannot be fetched, or is no model that can be read here."""
    folder = hub.fetch(name, [CONFIG, INDEX, ADAPTER, *COMPANIONS])
    pinned = name.at(folder)
    if not (folder / CONFIG).exists():
        adapters = "; it holds adapters: let peft merge them into their model" if (folder / ADAPTER).exists() else ""
        raise StoreError(f"{pinned} has no {CONFIG}, and is no model in Hugging Face's format{adapters}")
    problems: list[str] = []
    read_config(folder, ignored_fields, problems)
    if problems:
        raise unusable(pinned, problems)
    weights = [WEIGHTS] if (folder / WEIGHTS).exists() else []
    if not weights and (folder / INDEX).exists():
        weights = sorted({*_weight_map(folder).values()})
    if weights and all((folder / file).exists() for file in weights):
        return folder
    sizes = hub.files_of(pinned)
    weights = [WEIGHTS] if WEIGHTS in sizes else weights
    if not weights:
        raise unusable(pinned, [_no_weights(name.repository, list(sizes))])
    if absent := [file for file in weights if file not in sizes]:
        raise unusable(pinned, [_not_there(absent)])
    size = sum(sizes[file] for file in weights)
    err(f"{pinned}: fetching {size:,} bytes of weights, {len(weights)} file{'s' * (len(weights) > 1)}")
    return hub.fetch(pinned, [glob.escape(file) for file in weights], shown=True)


def _not_there(files: Sequence[str]) -> str:
    return f"{INDEX} names files that are not there: {', '.join(map(printable, files))}"


def unusable(source: Path | HubName, problems: Sequence[str]) -> StoreError:
    """Return the error of a folder that has problems, of which it says the first."""
    return StoreError("\n- ".join([f"{source} cannot be used:", *listed(problems, 18)]))


def read_config(
    folder: Path, ignored_fields: Sequence[str], problems: list[str], name: str = CONFIG
) -> tuple[dict[str, Any], type[ModelConfig] | None, ModelConfig | None, Wrapper | None, Quantization | None]:
    """Return what can be made out of ``config.json``. These are its fields, its family's kind of config, what they
    mean, what they are wrapped in, and how weights lie. What is wrong with it joins the problems. ``name``: that of the
    file."""
    raw: dict[str, Any] = {}
    kind, wrapper, quantization = None, None, None
    try:
        raw, wrapper = unwrapped(_object(folder, name))
        try:
            raw, quantization = dequantised(raw)
        except ModelConfigError as error:  # told with whatever else there is
            problems += [f"{CONFIG}: {problem}" for problem in error.problems]
            raw = {name: value for name, value in raw.items() if name != QUANTIZATION}
        of = raw.get("model_type")
        if not isinstance(of, str):
            problems.append(f"{CONFIG} has model_type={of!r}: the families are {', '.join(FAMILIES)}")
            return raw, None, None, None, quantization
        kind = family(of).config
        raw = _without(raw, kind, ignored_fields, problems)
        return raw, kind, kind.from_hugging_face(raw), wrapper, quantization
    except ModelConfigError as error:
        problems += [f"{CONFIG}: {problem}" for problem in error.problems]
        if kind and (unknown := [name for name in kind.unknown(raw) if _FIELD.fullmatch(name)]):
            options = " ".join(f"--ignore-field {name}" for name in unknown)
            problems.append(f"{CONFIG}: `megacore convert` leaves out fields that change nothing by {options}")
    except StoreError as error:
        problems.append(str(error))
    return raw, kind, None, wrapper, quantization


def _without(
    raw: dict[str, Any], kind: type[ModelConfig], ignored_fields: Sequence[str], problems: list[str]
) -> dict[str, Any]:
    """Return the fields of a ``config.json`` without those that somebody says change nothing."""
    unknown = kind.unknown(raw)
    for name in ignored_fields:
        if name not in raw:
            problems.append(f"{CONFIG} has no field {name!r}{nearest(name, unknown)}: leave out --ignore-field {name}")
        elif name not in unknown:
            problems.append(f"{CONFIG}: {name} is a field that is known, and is not ignored: leave out --ignore-field")
    return {name: value for name, value in raw.items() if name not in ignored_fields or name not in unknown}


def _object(folder: Path, name: str) -> dict[str, Any]:
    file = folder / name
    if not os.path.isfile(file):
        raise StoreError(f"{file} is not there, or is no file")
    value = read_json(file, folder)
    if not isinstance(value, dict):
        raise StoreError(f"{file} does not hold a JSON object")
    return value


def _files(folder: Path, problems: list[str]) -> tuple[tuple[TensorFile, ...], Mapping[str, TensorFile] | None] | None:
    """Open the weight files -> they, and which of them the index names for each tensor (None: there is no index). None
    if some cannot be opened. Where there are both a single file and an index, the single file counts, as for
    transformers."""
    if os.path.lexists(folder / WEIGHTS):
        opened = _open(folder, [WEIGHTS], problems)
        return (opened, None) if opened else None
    if not os.path.lexists(folder / INDEX):
        problems.append(_no_weights(str(folder), [file.name for file in folder.iterdir()]))
        return None
    try:
        named = _weight_map(folder)
    except StoreError as error:
        problems.append(str(error))
        return None
    names = sorted({*named.values()})
    absent = [name for name in names if not os.path.isfile(folder / name)]  # False for any name
    if absent:
        problems.append(_not_there(absent))
    opened = _open(folder, sorted({*names}.difference(absent)), problems)
    if len(opened) < len(names):
        return None
    by_name = dict(zip(names, opened, strict=True))
    return opened, {tensor: by_name[name] for tensor, name in named.items()}


def _open(folder: Path, files: list[str], problems: list[str]) -> tuple[TensorFile, ...]:
    opened = []
    for name in files:
        try:
            opened.append(TensorFile.open(folder / name, folder))
        except StoreError as error:
            problems.append(str(error))
    return tuple(opened)


def _weight_map(folder: Path) -> dict[str, str]:
    """Return {tensor: file} of the index."""
    names = _object(folder, INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise StoreError(f"{INDEX} has no weight_map, the object that names the file of each tensor")
    outside = sorted({printable(str(name)) for name in names.values() if not _is_weights(name)})
    if outside:
        raise StoreError(f"{INDEX} names what is no .safetensors file of this folder: {', '.join(outside)}")
    return names


def _is_weights(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and is_inside(name)


def _unnamed(files: Sequence[TensorFile], named: Mapping[str, TensorFile] | None, kind: type[ModelConfig]) -> list[str]:
    """Return the problems of an index that disagrees with its files."""
    if named is None:
        return []
    problems = []
    holders: dict[str, list[str]] = {}
    for file in files:
        for name in file.entries:
            holders.setdefault(name, []).append(file.path.name)
    ignorable = ignorable_by(kind)
    absent: dict[str, list[str]] = {}
    for name, file in named.items():
        if name not in file.entries:
            absent.setdefault(file.path.name, []).append(name)
    for path, names in absent.items():
        where = sorted({other for name in names for other in holders.get(name, ())})
        elsewhere = f" ({', '.join(where)} does)" if where else ""
        problems.append(f"{path} does not hold what {INDEX} says{elsewhere}: {', '.join(summary(names))}")
    twice = [name for name, paths in holders.items() if len(paths) > 1 and not ignorable(name)]
    if twice:
        paths = sorted({path for name in twice for path in holders[name]})
        problems.append(f"tensors lie in several files ({', '.join(paths)}): {', '.join(summary(twice))}")
    unnamed = [name for name in holders if name not in named and not ignorable(name)]
    if unnamed:
        paths = sorted({path for name in unnamed for path in holders[name]})
        problems.append(f"{INDEX} does not name tensors of {', '.join(paths)}: {', '.join(summary(unnamed))}")
    return problems


def _no_weights(source: str, names: Sequence[str]) -> str:
    """Return why there are no weights among the files of a folder, or of a repository of the hub."""
    looked_for = f"there is neither {WEIGHTS} nor {INDEX}"
    pickled, gguf, others = (
        sorted(printable(name) for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
        for patterns in (_PICKLED, ("*.gguf",), ("*.safetensors",))
    )
    tokens = sorted(name.removesuffix(".idx") for name in names if name.endswith(".idx"))
    pickled = [name for name in pickled if name.removesuffix(".bin") not in tokens]
    if others:
        return f"{looked_for}, but {', '.join(others)}: if these are the model's, the index that names them is missing"
    if pickled:
        command = shlex.join(["python", "-c", _TO_SAFETENSORS, source, f"{source.rstrip('/')}-safetensors"])
        return (
            f"{looked_for}, but {', '.join(pickled)}: a pickle can run code when it is read, so none is read here. "
            f"If you trust it, make it safetensors, and copy the tokenizer's files: {command}"
        )
    if tokens:
        pairs = ", ".join(printable(f"{source}/{name}.bin, .idx") for name in tokens)
        prefix = f"{source}/{tokens[0]}"
        return f"{looked_for}, but {pairs}: a token file has tokens to train on (data.train={prefix}), no weights"
    if gguf:
        return f"{looked_for}, but {', '.join(gguf)}: GGUF is not read here; take the model that it was made from"
    return looked_for
