"""A reader written from docs/checkpoints.md alone, with the safetensors library and none of our code."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import random_model
from safetensors.torch import load_file
from tiny import spread
from transformers import GPT2Config, LlamaConfig, PretrainedConfig
from wrapped import saved

from megacore.tools.convert import main as convert

Sizes = dict[str, int]
Pieces = dict[str, np.ndarray]
Box = dict[str, tuple[int, int]]


def dims(pattern: str) -> list[list[tuple[str, list[str]]]]:
    """Of the sentences that our families have: each dimension's terms, (label, axes)."""
    found = []
    for text in re.findall(r"\([^)]*\)|\w+", pattern):
        terms = [term.strip() for term in text.strip("()").split("+")]
        found.append([(t.split(":")[0] if ":" in t else "", t.split(":")[-1].split()) for t in terms])
    return found


def pieces_of(pattern: str) -> dict[str, list[str]]:
    """{label: axes} of a sentence."""
    leaves = list(itertools.product(*dims(pattern)))
    return {"".join(label for label, _ in leaf): [a for _, axes in leaf for a in axes] for leaf in leaves}


def box_of(axis: str, size: int, parts: int, part: int) -> tuple[int, int]:
    if axis == "kv" and size < parts:
        return part * size // parts, part * size // parts + 1
    step = -(-size // parts)
    return part * step, (part + 1) * step


def pieces(tensor: np.ndarray, pattern: str, sizes: Sizes) -> dict[str, tuple[list[str], np.ndarray]]:
    """{label: (axes, array with one dimension per axis)}."""
    found = {}
    for leaf in itertools.product(*dims(pattern)):
        part = tensor
        for d, (terms, (label, _)) in enumerate(zip(dims(pattern), leaf, strict=True)):
            lengths = [math.prod(sizes[a] for a in term_axes) for _, term_axes in terms]
            at = [name for name, _ in terms].index(label)
            part = np.take(part, range(sum(lengths[:at]), sum(lengths[: at + 1])), axis=d)
        axes = [a for _, term in leaf for a in term]
        found["".join(label for label, _ in leaf)] = (axes, part.reshape([sizes[a] for a in axes]))
    return found


def weight(axis: str, n: int) -> int:
    x = int.from_bytes(hashlib.blake2b(axis.encode(), digest_size=8).digest(), "little")
    x = (x + (n + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return (x ^ x >> 31) | 1


def fingerprint(bits: np.ndarray, axes: list[str], box: Box, sizes: Sizes) -> int:
    total, k = 0, 8 // bits.itemsize
    for index in np.ndindex(*bits.shape):
        at = [box[a][0] + i for a, i in zip(axes, index, strict=True)]
        if any(i >= sizes[a] for a, i in zip(axes, at, strict=True)):
            continue
        term = int(bits[index]) * weight(axes[-1], at[-1] // k) << 8 * bits.itemsize * (at[-1] % k)
        for axis, i in zip(axes[:-1], at[:-1], strict=True):
            term *= weight(axis, i)
        total += term
    return total % 2**64


def files_of(files: Iterable[str], place: str) -> list[str]:
    return [path for path in files if re.fullmatch(rf"{place}(-part\d+)?\.safetensors", path)]


def read(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """{tensor: {label: the whole piece's bits}} of the weights; fingerprints are checked on the way."""
    index = json.loads((folder / "index.json").read_text())
    sizes, mesh = index["sizes"], index["mesh"]
    assert index["format"] == "megacore" and index["version"] in (1, 2)
    stage_of = [v % mesh["pp"] for v, n in enumerate(index["layers_per_stage"]) for _ in range(n)]
    whole: dict[str, dict[str, np.ndarray]] = {}
    places = itertools.product(range(mesh["pp"]), range(mesh["tp"]))
    files = ((pp, tp, path) for pp, tp in places for path in files_of(index["files"], f"weights/pp{pp}-ep0-tp{tp}"))
    for pp, tp, path in files:
        file, record = load_file(folder / path), index["files"][path]
        assert (folder / path).stat().st_size == record["bytes"]
        for param in index["parameters"]:
            ends = {"first": 0, "last": mesh["pp"] - 1}
            layers = range(sizes["layer"]) if "{layer}" in param["name"] else [None]
            for layer in layers:
                held = [stage_of[layer]] if layer is not None else [ends[end] for end in param["at"].split()]
                name = param["name"].format(layer=layer)
                assert (name in file) == (pp in held) or "-part" in path
                if name not in file:
                    continue
                bits = file.pop(name).view(torch.int16).numpy().view(np.uint16)
                axes = set(re.findall(r"\b\w+\b(?!:)", param["pattern"]))
                split = {"heads", "kv", "mlp", "vocab"}
                box = {a: box_of(a, sizes[a], mesh["tp"], tp) if a in split else (0, sizes[a]) for a in axes}
                if cut := record.get("ranges", {}).get(name):
                    box[cut[0]] = (cut[1], cut[2])
                local = {a: stop - start for a, (start, stop) in box.items()}
                for label, (order, part) in pieces(bits, param["pattern"], local).items():
                    assert int(record["fingerprints"][name][label], 16) == fingerprint(part, order, box, sizes)
                    into = whole.setdefault(name, {}).setdefault(label, np.zeros([sizes[a] for a in order], np.uint16))
                    real = [min(box[a][1], sizes[a]) - box[a][0] for a in order]
                    cut = tuple(slice(box[a][0], box[a][1]) for a in order)
                    into[cut] = part[tuple(slice(max(0, n)) for n in real)]
        assert not file
    return whole


CONFIGS: dict[str, tuple[PretrainedConfig, list[str]]] = {
    "llama": (
        LlamaConfig(
            vocab_size=13,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        ),
        ["--tp", "4", "--pp", "2", "--layers-per-stage", "2,1"],
    ),
    "gpt2": (GPT2Config(vocab_size=13, n_positions=6, n_embd=8, n_layer=3, n_head=4), ["--tp", "2", "--pp", "3"]),
}


def of_hugging_face(theirs: Pieces, param: dict[str, str], layer: int, sizes: Sizes) -> dict[str, np.ndarray]:
    """{label: piece, its axes as our sentence has them} of a parameter. Names in braces are those of its pieces."""
    ours, name = pieces_of(param["pattern"]), param["hf"].replace("{layer}", str(layer))
    if words := re.search(r"\{(.*)\}", name):
        listed = zip(ours.items(), words[1].split(","), strict=True)
        return {
            label: theirs[name.replace(words[0], word)].reshape([sizes[axis] for axis in axes])
            for (label, axes), word in listed
        }
    found = pieces(theirs[name], param["hf_pattern"], sizes)
    return {label: piece.transpose([axes.index(x) for x in ours[label]]) for label, (axes, piece) in found.items()}


@pytest.mark.parametrize(("family", "replicas"), [("llama", 1), ("llama", 3), ("gpt2", 1)])
def test_every_piece_is_where_the_page_says(family: str, replicas: int, tmp_path: Path) -> None:
    config, layout = CONFIGS[family]
    model: Any = random_model(config).bfloat16()
    model.save_pretrained(tmp_path / "hf")
    assert convert([str(tmp_path / "hf"), str(tmp_path / "ckpt"), *layout]) == 0
    if replicas > 1:
        assert spread(tmp_path / "ckpt", tmp_path / "spread", replicas).index.version == 2
    ours = read(tmp_path / ("spread" if replicas > 1 else "ckpt"))
    theirs = {n: t.detach().view(torch.int16).numpy().view(np.uint16) for n, t in model.state_dict().items()}
    index = json.loads((tmp_path / "ckpt/index.json").read_text())
    for param in index["parameters"]:
        for layer in range(3) if "{layer}" in param["name"] else [0]:
            found = ours.pop(param["name"].format(layer=layer))
            wanted = of_hugging_face(theirs, param, layer, index["sizes"])
            assert found.keys() == wanted.keys()
            assert all(np.array_equal(found[label], wanted[label]) for label in wanted), param
    assert not ours


def test_what_is_carried_is_where_the_page_says(tmp_path: Path) -> None:
    saved("qwen2_vl", tmp_path / "hf")
    assert convert([str(tmp_path / "hf"), str(tmp_path / "ckpt")]) == 0
    index = json.loads((tmp_path / "ckpt/index.json").read_text())
    carried, theirs = index["carried"], load_file(tmp_path / "hf/model.safetensors")
    assert index["version"] == 3 and carried["config"] == json.loads((tmp_path / "hf/config.json").read_text())
    ((path, record),) = carried["files"].items()
    held = load_file(tmp_path / "ckpt" / path)
    assert held.keys() == record["fingerprints"].keys() == {name for name in theirs if name.startswith("visual.")}
    for name in sorted(held, key=lambda name: held[name].numel())[:20]:
        bits = held[name].view(torch.int32).numpy().view(np.uint32)
        sizes = {f"d{n}_{size}": size for n, size in enumerate(bits.shape)}
        value = fingerprint(bits, [*sizes], {axis: (0, size) for axis, size in sizes.items()}, sizes)
        assert record["fingerprints"][name] == {"": f"{value:016x}"} and torch.equal(held[name], theirs[name])
    (body, head), others = carried["naming"], theirs.keys() - held.keys()
    assert {"model.layers.0.mlp.up_proj.weight", "lm_head.weight"} <= others and (body, head) == ("model.", "")
