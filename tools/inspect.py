"""`megacore inspect`: what a checkpoint, a Hugging Face folder or a token file holds, what tells two folders apart, and
what is damaged."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megacore.data.corpus import Corpus
from megacore.data.indexed import IndexedDataset
from megacore.models.config import active_parameters
from megacore.parallel.weights.fingerprint import spell
from megacore.parallel.weights.layout import Layout, MeshShape, spelled_layers
from megacore.parallel.weights.transfer import Stored, by_layer, hugging_face, native, whole_name
from megacore.pictures import bars, pyplot, save
from megacore.progress_bar import progress_bar
from megacore.say import brief, say, say_data
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files import accounting
from megacore.store.tensor_files.dtypes import NUMBERS
from megacore.store.tensor_files.tensors import DTYPES
from megacore.store.weight_folders import audit, compare
from megacore.store.weight_folders.audit import Damage
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.compare import Differences
from megacore.store.weight_folders.folder import SafetensorsFolder
from megacore.store.weight_folders.foreign import ForeignFolder
from megacore.store.weight_folders.hugging_face import CONFIG, HuggingFace
from megacore.store.weight_folders.index import EMA, INDEX, MASTER, MOMENTS, Adapters, file_name, kind_of
from megacore.tools import folders
from megacore.tools.options import command_parser
from megacore.tools.tables import table


def main(argv: Sequence[str]) -> int:
    parser = command_parser("inspect", __doc__)
    parser.add_argument("folder", type=Path, help=f"a checkpoint, {folders.HUGGING_FACE}, or a token file")
    parser.add_argument("--tensors", action="store_true", help="list the tensors of the model")
    parser.add_argument(
        "--diff",
        type=Path,
        metavar="OTHER",
        help="compare with another folder, in whatever layout; the exit status is 1 if they differ",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare all tensors of a checkpoint with their fingerprints; the exit status is 1 if they differ",
    )
    folders.add_jobs(parser)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw what each rank of a checkpoint holds: a PNG")
    parser.add_argument("--json", action="store_true", help="print data instead")
    return folders.program(run, parser.parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    if prefixes := token_files(arguments.folder):
        return _show_tokens(prefixes, arguments)
    folder = folders.opened(arguments.folder, adapters=True)
    other = folders.opened(arguments.diff, adapters=True) if arguments.diff else None
    if arguments.check and folder.format != Checkpoint.format:
        raise StoreError(
            f"{folder.path} is {folder.kind}, and those have no fingerprints to check it by: compare it with "
            "another by --diff"
        )
    if arguments.picture and folder.format != Checkpoint.format:
        raise StoreError(f"{folder.path} is {folder.kind}, and --picture draws the ranks of a checkpoint: leave it out")
    facts = summary(folder)
    facts["tensors"] = tensors(folder) if arguments.tensors else None
    damage = differences = None
    if arguments.check:
        with progress_bar(_bytes(folder), folder.path.name) as progress:
            damage = audit.check(folder, folders.jobs(arguments), progress)
            if folder.carried is not None:
                damage += audit.check(folder.carried, folders.jobs(arguments), progress)
        facts["check"] = [vars(found) for found in damage]
    if other is not None:
        differences = _compared(folder, other, folders.jobs(arguments))
        facts["diff"] = _differences(differences, other)
    if arguments.picture:
        draw(folder, arguments.picture)
        folders.drawn(arguments.picture)
    if arguments.json:
        say_data(facts, indent=1)
    else:
        say("\n".join(_text(facts)))
        if damage is not None:
            say(_check_text(damage))
        if other is not None and differences is not None:
            say("\n".join(_diff_text(differences, folder, other)))
    return 1 if damage or differences else 0


# -- token files


def token_files(path: Path) -> list[Path]:
    """Return the token files that a path names, without their endings: a pair, one of its two files, or a folder of
    pairs that holds no model."""
    if path.is_dir():
        model = any((path / name).exists() for name in (INDEX, CONFIG))
        prefixes = [] if model else [each.with_suffix("") for each in sorted(path.glob("*.idx"))]
    else:
        prefixes = [path.with_suffix("") if path.suffix in _PAIR else path]
    return [prefix for prefix in prefixes if all(Path(f"{prefix}{end}").is_file() for end in _PAIR)]


_PAIR = (".bin", ".idx")


def _show_tokens(prefixes: Sequence[Path], arguments: argparse.Namespace) -> int:
    if arguments.tensors or arguments.diff or arguments.check or arguments.picture:
        raise StoreError(f"{arguments.folder} has tokens: --tensors, --diff, --check and --picture are for weights")
    facts = [tokens(prefix) for prefix in prefixes]
    if arguments.json:
        say_data({"format": "tokens", "files": facts}, indent=1)
    else:
        say(_tokens_text(facts))
    return 0


def tokens(prefix: Path) -> dict[str, Any]:
    """Return the facts about a token file; ``corpus`` is what `megacore tokenize` has written beside it, None of
    another origin. Raises StoreError: it is damaged."""
    try:
        dataset, known = IndexedDataset(prefix), Corpus.beside(prefix)
    except ValueError as error:
        raise StoreError(str(error)) from error
    return {
        "path": str(prefix),
        "documents": dataset.documents,
        "tokens": int(dataset.lengths.sum(dtype="int64")),
        "dtype": dataset.dtype.name,
        "bytes": sum(Path(f"{prefix}{end}").stat().st_size for end in _PAIR),
        "corpus": None if known is None else asdict(known),
    }


def _tokens_text(facts: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for each in facts:
        lines += [
            f"{each['path']}: a token file (.bin, .idx), to train on by data.train={each['path']}",
            f"  tokens      {each['tokens']:,} in {each['documents']:,} documents, as {each['dtype']}",
        ]
        if known := each["corpus"]:
            lines += [
                f"  vocabulary  {known['vocabulary']:,}, unigram entropy {known['unigram_entropy']:.4f} nats per token",
                f"  text        {known['text_bytes']:,} bytes, {known['bytes_per_token']:.3f} bytes per token",
            ]
        lines += [f"  size        {each['bytes']:,} bytes in 2 files"]
    return "\n".join(lines)


# -- facts


def summary(folder: SafetensorsFolder) -> dict[str, Any]:
    """Return the facts about a folder; all keys are always there, with None where the kind of folder has no such
    thing."""
    config, index, layout = folder.config, folder.index, folder.layout
    files = [
        {"path": name, "bytes": record.size, "tensors": len(record.fingerprints)}
        for name, record in sorted(index.files.items())
    ]
    ours = folder.format == Checkpoint.format
    return {
        "path": str(folder.path),
        "format": folder.format,
        "version": index.version if ours else None,
        "family": config.family,
        "parameters": folder.schema.parameters,
        "active": active_parameters(config, folder.schema),
        "tied": config.tie_word_embeddings,
        "dtypes": {state: _dtypes(folder, state) for state in folder.states},
        "bytes": sum(file["bytes"] for file in files),
        "adapters": _adapters(index.adapters) if index.adapters else None,
        "frozen": sorted(index.frozen),
        "optimizer": "muon" if index.muon else None,
        "step": index.step,
        "mesh": {dim: layout.mesh[dim] for dim in ("pp", "ep", "tp")} if ours else None,
        "split": {axis: list(dims) for axis, dims in index.split.items()} if ours else None,
        "layers_per_stage": list(layout.layers) if ours else None,
        "placement": layout.placement if ours else None,
        "states": list(folder.states),
        "training": None if folder.trainer is None else dict(folder.trainer),
        "config": config.to_hugging_face(),
        "sizes": dict(folder.schema.sizes),
        "files": files,
        "companions": list(folder.companions()),
        "ignored": list(folder.ignored),
        "carried": None if folder.carried is None else _carried(folder.carried),
        "remarks": folder.remarks,
        "tensors": None,
        "check": None,
        "diff": None,
    }


def _carried(carried: SafetensorsFolder) -> dict[str, Any]:
    return {
        "model_type": carried.raw["model_type"],
        "tensors": [stored.name for stored in carried.stored()],
        "bytes": _bytes(carried),
    }


def _adapters(adapters: Adapters) -> dict[str, Any]:
    return {**asdict(adapters.lora), "base": adapters.base, "base_fingerprint": f"{adapters.fingerprint:016x}"}


def tensors(folder: SafetensorsFolder) -> list[dict[str, Any]]:
    """Return the tensors of the model, whole, and where their shards lie."""
    schema = folder.schema
    names: dict[str, list[str]] = {}
    for stored in by_layer(hugging_face(schema)):
        names.setdefault(whole_name(schema, stored), []).append(stored.name)
    shards: dict[str, list[dict[str, Any]]] = {}
    for state in folder.states:
        for stored in by_layer(folder.stored(state)):
            shards.setdefault(whole_name(schema, stored), []).append(_shard(folder, state, stored))
    values = {state: folder.fingerprints(state) for state in folder.states}
    rows = []
    for whole in native(Layout(schema, MeshShape(), (schema.sizes["layer"],)), [0]):
        param, of = schema[whole.param], shards[whole.name]
        rows.append(
            {
                "name": whole.name,
                "pattern": param.pattern,
                "shape": list(whole.shape),
                "dtypes": {state: sorted({s["dtype"] for s in of if s["state"] == state}) for state in values},
                "hugging_face": names[whole.name],
                "fingerprints": {
                    state: {la: f"{known[whole.name, la]:016x}" for la in whole.labels if (whole.name, la) in known}
                    for state, known in values.items()
                },
                "shards": of,
            }
        )
    return rows


def _dtypes(folder: SafetensorsFolder, state: str) -> dict[str, int]:
    """Return {dtype: number of the model's tensors of it}."""
    schema = folder.schema
    dtypes = {whole_name(schema, stored): NUMBERS[folder.dtype(state, stored)] for stored in folder.stored(state)}
    return {dtype: list(dtypes.values()).count(dtype) for dtype in sorted({*dtypes.values()})}


def _size(folder: SafetensorsFolder, state: str, stored: Stored) -> int:
    return math.prod(stored.shape) * DTYPES[folder.dtype(state, stored)].itemsize


def _shard(folder: SafetensorsFolder, state: str, stored: Stored) -> dict[str, Any]:
    file, name = folder.location(state, stored)
    return {
        "state": state,
        "file": file,
        "tensor": name,
        "shape": list(stored.shape),
        "dtype": NUMBERS[folder.dtype(state, stored)],
        "bytes": _size(folder, state, stored),
    }


def _bytes(folder: SafetensorsFolder) -> int:
    """Return the bytes of all tensors, those that are carried too."""
    own = sum(_size(folder, state, stored) for state in folder.states for stored in folder.stored(state))
    return own + (0 if folder.carried is None else _bytes(folder.carried))


# -- two folders


def _compared(folder: SafetensorsFolder, other: SafetensorsFolder, jobs: int) -> Differences:
    to_read = sum(_bytes(each) for each in (folder, other) if not each.fingerprints("weights"))
    with progress_bar(to_read, "fingerprints") as progress:
        return compare.compare((folder, other), jobs, progress)


def _differences(differences: Differences, other: SafetensorsFolder) -> dict[str, Any]:
    return {
        "other": str(other.path),
        "equal": not differences,
        "config": {name: list(both) for name, both in differences.config.items()},
        "step": differences.step and list(differences.step),
        "states": dict(differences.states),
        "pieces": [vars(piece) | {"both": list(piece.both)} for piece in differences.pieces],
    }


def _diff_text(differences: Differences, folder: SafetensorsFolder, other: SafetensorsFolder) -> Iterator[str]:
    yield ""
    if not differences:
        yield f"Equal to {other.path}: every piece of every state that both can hold, and what the config means."
        return
    yield f"Differences: {folder.path} | {other.path}"
    for name, (one, two) in differences.config.items():
        yield f"  config: {name} is {one!r} | {two!r}"
    if differences.step:
        yield f"  step: {differences.step[0]} | {differences.step[1]}"
    for state, which in differences.states.items():
        yield f"  state: only {(folder, other)[which].path} has {state}"
    for piece in differences.pieces:
        one, two = ("absent" if side is None else "there" for side in piece.both)
        if piece.what != "presence":
            one, two = (_sizes(side) for side in piece.both)
        yield f"  {piece.state}: {spell((piece.name, piece.label))}: {piece.what}: {one} | {two}"


def _sizes(side: Any) -> str:
    return " ".join(f"{axis}={n}" for axis, n in side.items()) if isinstance(side, Mapping) else str(side)


# -- for people


_DRAWN = {"weights": "weights", MASTER: "masters", **dict.fromkeys(MOMENTS, "moments"), EMA: "averages"}
"""{kind of states: what its bytes are drawn as}, of those that are not drawn by their own names."""


def draw(folder: SafetensorsFolder, picture: Path) -> None:
    """Draw the bytes that a checkpoint has of each rank, and the layers that the rank holds."""
    index, layout = folder.index, folder.layout
    mesh, rows = layout.mesh, range(layout.mesh.world)
    places, split = [mesh.place(rank) for rank in rows], [dim for dim in ("pp", "ep", "tp") if mesh[dim] > 1]
    names = [" ".join(f"{dim}={getattr(at, dim)}" for dim in split) or "the one rank" for at in places]
    sizes = {name: [0.0] * len(rows) for name in _DRAWN.values()}
    for (state, at), parts in index.parts.items():
        kind = kind_of(state)[0]
        row = sizes.setdefault(_DRAWN.get(kind, kind), [0.0] * len(rows))
        row[places.index(at)] += sum(index.files[file_name(state, at, part)].size for part in parts)
    held = [[math.nan] * folder.schema.sizes["layer"] for _ in rows]
    for rank, at in enumerate(places):
        for chunk in range(layout.chunks):
            for layer in layout.chunk_layers(at.pp, chunk):
                held[rank][layer] = chunk
    height = 1.6 + 0.32 * len(rows)
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(11, height), layout="constrained", sharey=True)
    unit, word = (1e9, "GB") if max(map(sum, zip(*sizes.values(), strict=True))) >= 1e9 else (1e6, "MB")
    bars(left, names, sizes, unit)
    left.set(xlabel=f"{word} on disk")
    across, down = ([at - 0.5 for at in range(size + 1)] for size in (len(held[0]), len(rows)))
    right.pcolormesh(across, down, held, cmap="Set3", vmin=0, vmax=11, edgecolors="white")
    axes_of = {dim: [axis for axis in folder.schema.sizes if dim in layout.split.get(axis, ())] for dim in split}
    told = [f"{dim} splits {', '.join(axes)}" for dim, axes in axes_of.items() if axes and dim != "pp"]
    right.set(xlabel="layers, of each chunk in a colour", title="; ".join(told))
    figure.legend(loc="outside upper left", ncols=4, fontsize=8)
    save(figure, picture)


def _text(facts: Mapping[str, Any]) -> Iterator[str]:
    (what,) = (each.kind for each in (Checkpoint, HuggingFace, ForeignFolder) if each.format == facts["format"])
    what += "" if facts["version"] is None else f" (format version {facts['version']})"
    yield f"{facts['path']}: {what}"
    yield from (f"  {name:<11} {value}" for name, value in _lines(facts))
    yield ""
    rows = [(file["path"], f"{file['bytes']:,}", f"{file['tensors']:,}") for file in facts["files"]]
    yield table(("file", "bytes", "tensors"), rows)
    if facts["tensors"] is not None:
        yield ""
        yield _tensor_table(facts["tensors"])


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    tied = ", embedding and head tied" if facts["tied"] else ""
    active = f" ({facts['active']:,} active)" if facts["active"] < facts["parameters"] else ""
    yield "model", f"{facts['family']}, {facts['parameters']:,} parameters{active}{tied}"
    if adapters := facts["adapters"]:
        scale = "alpha / sqrt(rank)" if adapters["rslora"] else "alpha / rank"
        held = f", beside {adapters['base_dtype']}" if adapters["base_dtype"] else ""
        yield "adapters", f"LoRA, rank {adapters['rank']}, alpha {adapters['alpha']:g} (scaled by {scale}){held}"
        targets = ", ".join(map(brief, adapters["targets"]))
        yield "of", f"{brief(adapters['base'])} (fingerprint {adapters['base_fingerprint']}): {targets}"
    if facts["optimizer"]:
        yield "optimizer", "muon: the matrices of blocks have one moment"
    if facts["frozen"]:
        yield "frozen", f"{len(facts['frozen'])} tensors, without optimizer state"
    for state, dtypes in facts["dtypes"].items():
        yield state, ", ".join(dtypes) if len(dtypes) == 1 else ", ".join(f"{d} ({n})" for d, n in dtypes.items())
    if facts["mesh"] is not None:
        mesh, layers = facts["mesh"], facts["layers_per_stage"]
        chunks = len(layers) // mesh["pp"]
        sizes = " x ".join(f"{dim}={size}" for dim, size in mesh.items())
        placed = ", in a V" if facts["placement"] == "v" else ""
        interleaved = f", {chunks} chunks each{placed}" if chunks > 1 else ""
        split = "".join(f"{axis} over {' x '.join(dims)}; " for axis, dims in facts["split"].items())
        yield "layout", f"{sizes}{interleaved}; {split}layers of each stage: {spelled_layers(layers)}"
    if facts["step"] is not None:
        yield "step", f"{facts['step']:,}"
    for name, value in (facts["training"] or {}).items():
        if isinstance(value, int | float | str) and name != "step":
            yield brief(name.replace("_", " ")), f"{value:,}" if isinstance(value, int) else brief(value)
    yield "size", f"{facts['bytes']:,} bytes in {len(facts['files'])} files"
    if facts["companions"]:
        yield "beside", ", ".join(map(brief, facts["companions"]))
    if carried := facts["carried"]:
        names = accounting.summary(carried["tensors"])
        yield "carried", f"of a {carried['model_type']}: {len(carried['tensors'])} tensors, {carried['bytes']:,} bytes"
        yield "", ", ".join(names)
    if facts["ignored"]:
        yield "ignored", f"{', '.join(accounting.summary(facts['ignored']))} (no weights)"
    yield from (("remark", remark) for remark in facts["remarks"])


def _tensor_table(tensors: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for tensor in tensors:
        shards = [shard for shard in tensor["shards"] if shard["state"] == "weights"]
        alike = Counter(f"{_shape(shard['shape'])} {shard['bytes']:,} B" for shard in shards)
        values = tensor["fingerprints"]["weights"]
        rows.append(
            (
                tensor["name"],
                tensor["pattern"],
                _shape(tensor["shape"]),
                ", ".join(tensor["dtypes"]["weights"]),
                ", ".join(f"{count} x {shard}" for shard, count in alike.items()),
                _together(tensor["hugging_face"]),
                ", ".join(f"{label} {value}".strip() for label, value in values.items()),
            )
        )
    return table(("tensor", "sentence", "shape", "dtype", "shards", "Hugging Face", "fingerprint"), rows)


def _together(names: Sequence[str]) -> str:
    """Return several names in one: ``layers.0.{q_proj,k_proj,v_proj}.weight``, ``experts.{0..7}.{w1,w3}.weight``."""
    words = (dict.fromkeys(of) for of in zip(*(name.split(".") for name in names), strict=True))
    return ".".join(accounting.ranges([*map(int, of)]) if all(map(str.isdecimal, of)) else _one_of(of) for of in words)


def _one_of(words: Collection[str]) -> str:
    return ",".join(words) if len(words) == 1 else f"{{{','.join(words)}}}"


def _shape(sizes: Sequence[int]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _check_text(damage: Sequence[Damage]) -> str:
    if not damage:
        return "\nSound: every tensor is what it was when it was written, and replicas agree."
    return "\n".join(["", "Damaged:", *(f"  {found}" for found in damage)])
