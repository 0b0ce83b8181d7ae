"""Random damage to sound files: bytes, and values of JSON trees. It is what every fuzzer here draws."""

import copy
import json
import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from changes import headed

TARGETS: dict[str, tuple[str, ...]] = {
    "hf/config.json": ("convert hf made", "inspect hf", "pretrain tuning.yaml"),
    "hf/model.safetensors": ("convert hf made", "inspect hf --tensors"),
    "hf/tokenizer.json": ("tokenize data/texts.jsonl --out made --tokenizer hf --workers 1",),
    "hf/tokenizer_config.json": ("generate hf --chat --prompt few --max-new-tokens 2",),
    "ckpt/index.json": ("reshard ckpt made", "convert ckpt made --to hf", "inspect ckpt --tensors", "verify ckpt hf"),
    "ckpt/weights/pp0-ep0-tp0.safetensors": ("reshard ckpt made", "inspect ckpt --check"),
    "state/index.json": ("pretrain recipe.yaml train.steps=8 checkpoint.resume=state", "reshard state made"),
    "state/trainer.json": ("pretrain recipe.yaml train.steps=8 checkpoint.resume=state", "inspect state"),
    "data/tokens.idx": ("inspect data", "evaluate hf --data data/tokens", "pretrain recipe.yaml"),
    "parts/corpus.part-1-of-1/part.json": ("merge_tokens parts",),
    "parts/corpus.part-1-of-1/corpus.idx": ("merge_tokens parts",),
    "data/texts.jsonl": ("tokenize data/texts.jsonl --out made --tokenizer hf --workers 1",),
    "data/chats.jsonl": ("pretrain tuning.yaml", "evaluate hf --data data/chats.jsonl"),
    "recipe.yaml": ("pretrain recipe.yaml", "plan recipe.yaml"),
}
"""{file that is damaged: commands that read it}."""

NUMBERS = (0, 1, 2, -1, 3, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 53, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64)
VALUES: tuple[Any, ...] = (
    *NUMBERS, 10**30, None, True, False, 0.5, 1.5, -0.0, 1e300, 1e308,
    "", "x", "x" * 5000, "\x1b[31m", "\u202e", "\x00", "\ud800", "٣", "0" * 16,
    "..", "../../outside/secret.txt", "/etc/passwd", "${oc.env:MEGACORE_CANARY}", "{0.__class__}", "{0}",
    "{layer.__class__}", "layers.{layer}.x", "weights", "embed", "vocab embed", "(q: embed + k: mlp)", "first last",
    "(a: + b:)" * 9, [], {}, [[]], [1], ["weights"], {"": {}}, {"": "0" * 16}, {"a": {"b": []}}, [[[[[[]]]]]],
)  # fmt: skip
KEYS = ("", "x", "\x1b[1m", "x" * 3000, "..", "{layer}", "__class__")

Way = tuple[Any, ...]
"""The keys that lead to a place in a JSON tree."""


def places(tree: Any, way: Way = ()) -> Iterator[Way]:
    """All places in a JSON tree but its root."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in pairs:
        yield (*way, key)
        yield from places(value, (*way, key))


def damage_tree(tree: Any, rng: random.Random, among: Sequence[Way] = ()) -> Any:
    """A copy of a JSON tree, in one to three of whose places something is replaced, lost, doubled or renamed."""
    tree, among = copy.deepcopy(tree), among or list(places(tree))
    if not among:
        return rng.choice(VALUES)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        *way, last = rng.choice(among)
        here = tree
        try:
            for key in way:
                here = here[key]
            value = here[last]
        except (KeyError, IndexError, TypeError):  # gone already
            continue
        if not isinstance(here, dict | list):
            continue
        match rng.randrange(7):
            case 0 | 1 | 2:
                here[last] = copy.deepcopy(rng.choice(VALUES))
            case 3:
                del here[last]
            case 4 if isinstance(here, list):
                here.insert(last, copy.deepcopy(value))
            case 4 | 5 if isinstance(here, dict):
                here[rng.choice((*here, *KEYS, str(last).upper(), f"{last}s"))] = here.pop(last)
            case _ if type(value) is int:
                here[last] = value + rng.choice((-1, 1, 1000))
            case _:
                here[last] = copy.deepcopy(rng.choice([*here.values()] if isinstance(here, dict) else here))
    return tree


def damage_bytes(content: bytes, rng: random.Random) -> bytes:
    """Bytes that are flipped, cut out, put in, repeated, exchanged for others of JSON, or numbers of eight bytes."""
    made = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at, size = rng.randrange(len(made) + 1), rng.choice((1, 1, 2, 8, 64, 300))
        part = slice(at, at + size)
        match rng.randrange(8):
            case 0:
                del made[part]
            case 1:
                made[part] = rng.randbytes(size)
            case 2:
                made[at:at] = made[part] * rng.choice((1, 3))
            case 3:
                made[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS) % 2**64)
            case 4:
                made[at : at + 1] = bytes([rng.choice(b'"{}[],:\\\x00\xff\n0123456789-.e')])
            case 5:
                made[at:at] = rng.choice((b"9", b'"', b"{", b"[", b"\xff", b"\\u", b"e9", b"-", b"NaN"))
            case 6 if at < len(made):
                made[at] ^= 1 << rng.randrange(8)
            case _:
                del made[at:]
    return bytes(made)


def damage(name: str, content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return damage_bytes(content, rng)
    if name.endswith(".json"):
        return json.dumps(damage_tree(json.loads(content), rng)).encode()
    if name.endswith(".safetensors"):
        (length,) = struct.unpack("<Q", content[:8])
        tree = damage_tree(json.loads(content[8 : 8 + length]), rng)
        return headed(json.dumps(tree).encode()) + content[8 + length :]
    if name.endswith(".jsonl"):
        rows = [json.loads(line) for line in content.splitlines()]
        at = rng.randrange(len(rows))
        rows[at] = damage_tree(rows[at], rng)
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    return damage_bytes(content, rng)
