"""Random damage to sound files: bytes, and values of JSON trees."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

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

NUMBERS = (0, 1, 2, -1, 3, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 53, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30)
VALUES: tuple[Any, ...] = (
    *NUMBERS,
    None,
    True,
    0.5,
    1e308,
    -0.0,
    "",
    "x",
    "\x1b[31m",
    "\u202e",
    "../../outside/secret.txt",
    "/etc/passwd",
    "${oc.env:MEGACORE_CANARY}",
    "{0.__class__}",
    "x" * 5000,
    [],
    {},
    [[]],
    {"": {}},
)


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of all values of a JSON tree."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(pairs):
        yield tree, key
        yield from places(value)


def damage_tree(tree: Any, rng: random.Random) -> Any:
    """A JSON value with something else in one to three of its places."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        found = list(places(tree))
        if not found:
            return rng.choice(VALUES)
        container, key = rng.choice(found)
        how = rng.randrange(5)
        if how == 0:
            del container[key]
        elif how == 1 and isinstance(container, dict):
            container[rng.choice(("", "\x1b[1m", "x" * 3000, str(key).upper(), "..", "__class__"))] = container[key]
        elif how == 2:
            other, at = rng.choice(found)
            if other is not container:
                container[key] = json.loads(json.dumps(other[at]))
        else:
            container[key] = rng.choice(VALUES)
    return tree


def damage_bytes(content: bytes, rng: random.Random) -> bytes:
    """Bytes that are flipped, cut out, put in, doubled, or numbers of eight bytes."""
    made = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at, size = rng.randrange(len(made) + 1), rng.choice((1, 1, 2, 8, 64))
        how: Callable[[], object] = rng.choice(
            (
                lambda at=at, size=size: made.__delitem__(slice(at, at + size)),
                lambda at=at, size=size: made.__setitem__(slice(at, at + size), rng.randbytes(size)),
                lambda at=at, size=size: made.__setitem__(slice(at, at), made[at : at + size] * 3),
                lambda at=at: made.__setitem__(slice(at, at + 8), struct.pack("<Q", rng.choice(NUMBERS) % 2**64)),
                lambda at=at: made.__setitem__(slice(at, at + 1), bytes([rng.choice(b'"{}[],:\\\x00\xff\n')])),
                lambda at=at: made.__delitem__(slice(at, None)),
            )
        )
        how()
    return bytes(made)


def damage(name: str, content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return damage_bytes(content, rng)
    if name.endswith(".json"):
        return json.dumps(damage_tree(json.loads(content), rng)).encode()
    if name.endswith(".safetensors"):
        (length,) = struct.unpack("<Q", content[:8])
        made = json.dumps(damage_tree(json.loads(content[8 : 8 + length]), rng)).encode()
        return struct.pack("<Q", len(made)) + made + content[8 + length :]
    if name.endswith(".jsonl"):
        rows = [json.loads(line) for line in content.splitlines()]
        at = rng.randrange(len(rows))
        rows[at] = damage_tree(rows[at], rng)
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    return damage_bytes(content, rng)
