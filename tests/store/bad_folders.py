"""The one table of bad folders: changes of sound ones (`build`), the command that meets them, and what it must say.

What is hostile, in that it would run, leak, or take all memory, stands in `hostile/cases`.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from changes import (
    Change,
    both,
    drop,
    edit,
    exchange,
    gone,
    headed,
    header,
    instead,
    led_out,
    link,
    nothing,
    put,
    raw,
    swap,
    tensors,
    write,
)
from tiny import GPT2, LLAMA, MIXTRAL, OF_ADAMW, hugging_face_folder, layout_of, run_checkpoint, spread

from megacore.models.registry import FAMILIES
from megacore.parallel import limits
from megacore.store.conversions.conversion import to_hugging_face
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.store.weight_folders.index import STATES
from megacore.tools import convert


def build(folder: Path) -> None:
    """Make ``hf`` and ``shards``, the same in several files; ``ckpt``, a run's on pp=2 x tp=2; ``spread``, of another
    whose places have several files; ``gpt2``, weights only, of ``gpt2-hf``; and ``experts``."""
    hugging_face_folder(folder / "hf", LLAMA)
    to_hugging_face(HuggingFace.open(folder / "hf"), 160).write(folder / "shards", jobs=1)
    run_checkpoint(folder / "ckpt", LLAMA, layout_of(LLAMA, (2, 3), pp=2, tp=2))
    run_checkpoint(folder / "plain", LLAMA, layout_of(LLAMA, tp=2), states=OF_ADAMW)
    spread(folder / "plain", folder / "spread")
    shutil.rmtree(folder / "plain")
    hugging_face_folder(folder / "gpt2-hf", GPT2)
    assert convert.main([str(folder / "gpt2-hf"), str(folder / "gpt2"), "--tp", "2"]) == 0
    hugging_face_folder(folder / "experts", MIXTRAL)


@dataclass(frozen=True)
class Case:
    """What is done to the folders, the command line within them, and what the message must name."""

    command: str
    change: Change
    words: tuple[str, ...]


CASES: dict[str, Case] = {}
Rows = Mapping[str, tuple[Any, ...]]
"""{name: (change, what the message names ...)}"""

EXPORT, RESHARD, CONVERT = "convert ckpt target --to hf", "reshard ckpt target --tp 4", "convert hf target"


def refused(group: str, rows: Rows, *commands: str) -> None:
    """Add rows; they take turns with the commands, all of which open the folder in the same way."""
    for number, (name, (change, *words)) in enumerate(rows.items()):
        assert f"{group}-{name}" not in CASES
        CASES[f"{group}-{name}"] = Case(commands[number % len(commands)], change, tuple(words))


def asked(group: str, command: str, rows: Mapping[str, Sequence[str]]) -> None:
    """Add rows (arguments, what the message names ...), of sound folders."""
    for name, (arguments, *words) in rows.items():
        assert f"{group}-{name}" not in CASES
        CASES[f"{group}-{name}"] = Case(f"{command} {arguments}".strip(), nothing, tuple(words))


# -- the index of a checkpoint

INDEX, RECORD, OUT = "ckpt/index.json", "weights/pp0-ep0-tp0.safetensors", "layers.0.attn.out.weight"
SUMS = "files", RECORD, "fingerprints"


def index(value: object, *keys: str | int) -> Change:
    return put(INDEX, value, *keys)


def updated(**fields: object) -> Change:
    return edit(INDEX, lambda tree: tree.update(fields))


def step(text: str) -> Change:
    return swap(INDEX, '"step": 7', f'"step": {text}')


def parameter(field: str, value: str) -> Change:
    return index(value, "parameters", 0, field)


def sentence(name: str, pattern: str) -> Change:
    """Another sentence of the parameter whose name ends so."""
    return edit(INDEX, lambda t: next(p for p in t["parameters"] if p["name"].endswith(name)).update(pattern=pattern))


def sized(axis: str, field: str, size: int) -> Change:
    return edit(INDEX, lambda tree: (tree["config"].update({field: size}), tree["sizes"].update({axis: size})))


def layers(count: int, *stages: int) -> Change:
    return both(sized("layer", "num_hidden_layers", count), index(list(stages), "layers_per_stage"))


def renamed(name: str) -> Change:
    return edit(INDEX, lambda tree: tree["files"].update({name: tree["files"].pop(RECORD)}))


def other_config(folder: Path) -> None:
    index(json.loads((folder / "gpt2/index.json").read_text())["config"], "config")(folder)


QKV = "attn.qkv.weight"
FIELDS = ("config", "parameters", "sizes", "mesh", "layers_per_stage", "states", "files")
NESTED = json.loads("[" * 900 + "]" * 900)

refused(
    "index",
    {
        "empty": (write(INDEX, b""), "index.json", "not JSON"),
        "half": (raw(INDEX, lambda text: text[: len(text) // 2]), "index.json", "not JSON"),
        "not-utf-8": (raw(INDEX, lambda text: b"\xff" + text), "index.json", "not JSON"),
        "list": (write(INDEX, b"[]"), "index.json", "not an object"),
        "null": (write(INDEX, b"null"), "index.json", "not an object"),
        "nested": (write(INDEX, b'{"a":' * 100_000), "index.json", "not JSON"),
        "nested-value": (index(NESTED, "step"), "index.json", "nested"),
        "nan": (step("NaN"), "NaN"),
        "duplicate-key": (step('7, "step": 8'), "'step'", "twice"),
        "pipe": (instead(INDEX, os.mkfifo), "index.json"),
        "folder": (instead(INDEX, os.mkdir), "index.json"),
        "other-format": (index("megatron", "format"), "format", "megatron"),
        "format-not-text": (index(1, "format"), "format"),
        "later-version": (index(8, "version"), "version 8", "reads 1, 2, 3, 4, 5, 6 and 7"),
        "version-true": (index(True, "version"), "version"),
        "version-text": (index("1", "version"), "version"),
        **{f"no-{key}": (drop(INDEX, key), key) for key in ("format", "version", "step", *FIELDS)},
        **{f"{key}-is-{value!r}": (index(value, key), key) for key in FIELDS for value in (None, "x", 3)},
        "config-empty": (index({}, "config"), "model_type"),
        "config-unknown-family": (index("bert", "config", "model_type"), "bert"),
        "config-family-is-a-list": (index(["llama"], "config", "model_type"), "model_type"),
        "config-unknown-field": (index(4.0, "config", "logit_scale"), "logit_scale"),
        "config-text-for-a-number": (index("6", "config", "hidden_size"), "hidden_size"),
        "config-negative": (index(-5, "config", "num_hidden_layers"), "num_hidden_layers"),
        "config-of-another-size": (index(14, "config", "vocab_size"), "sizes", "14"),
        "config-of-another-tying": (index(True, "config", "tie_word_embeddings"), "head.weight"),
        "config-of-another-family": (other_config, "sizes"),
        "layers-10**18": (layers(10**18, 2, 10**18 - 2), "tensors"),
        "layers-10**7": (layers(10**7, 2, 10**7 - 2), "tensors"),
        "fewer-layers": (layers(4, 2, 2), "also holds layers.4"),
        "vocabulary-10**18": (sized("vocab", "vocab_size", 10**18), "embed.weight"),
        "hidden-10**18": (sized("embed", "hidden_size", 10**18), "norm.weight"),
        "mlp-10**18": (sized("mlp", "intermediate_size", 10**18), "layers.0.mlp"),
        "size-missing": (drop(INDEX, "sizes", "mlp"), "mlp"),
        "size-zero": (index(0, "sizes", "embed"), "sizes"),
        "size-negative": (index(-6, "sizes", "embed"), "sizes"),
        "size-fraction": (index(6.0, "sizes", "embed"), "sizes"),
        "size-too-many": (index(3, "sizes", "colour"), "sizes", "colour"),
        "mesh-missing": (drop(INDEX, "mesh", "tp"), "mesh"),
        "mesh-more": (index(1, "mesh", "dp"), "mesh"),
        "mesh-zero": (index(0, "mesh", "tp"), "mesh"),
        "mesh-10**18": (index(10**18, "mesh", "tp"), "mesh"),
        "mesh-other-than-files": (index(4, "mesh", "tp"), "names the files"),
        "mesh-transposed": (updated(mesh={"pp": 4, "ep": 1, "tp": 1}, layers_per_stage=[2, 1, 1, 1]), "files"),
        "mesh-of-experts": (updated(mesh={"pp": 2, "ep": 2, "tp": 1}), "no experts to spread"),
        "stages-sum": (index([2, 2], "layers_per_stage"), "layers"),
        "stages-zero": (index([5, 0], "layers_per_stage"), "lacks layers.{2..4}"),
        "stages-zero-between": (index([2, 0, 2, 1], "layers_per_stage"), "layers_per_stage"),
        "stages-negative": (index([6, -1], "layers_per_stage"), "layers_per_stage"),
        "stages-odd": (index([2, 2, 1], "layers_per_stage"), "3 virtual stages"),
        "stages-exchanged": (index([3, 2], "layers_per_stage"), "layers.2", "lacks"),
        "stages-interleaved": (index([1, 1, 1, 2], "layers_per_stage"), "layers.1", "lacks"),
        "optimizer-unknown": (index("lion", "optimizer"), "of which only muon is known"),
        "states-unknown": (index(["weights", "master", "exp_avg", "momentum"], "states"), "momentum"),
        "states-without-weights": (index(["master", "exp_avg", "exp_avg_sq"], "states"), "states"),
        "states-twice": (index(["weights", "weights", "master", "exp_avg"], "states"), "states"),
        "states-fewer": (index(["weights"], "states"), "files"),
        "states-of-objects": (index([{}, "weights", "master", []], "states"), "states"),
        "step-negative": (index(-1, "step"), "step"),
        "step-text": (index("7", "step"), "step"),
        "step-10**30": (step(str(10**30)), "64 bits"),
        "files-empty": (index({}, "files"), "files"),
        "file-unnamed": (drop(INDEX, "files", RECORD), "files"),
        "file-outside": (renamed("../x.safetensors"), "names the files", "../x"),
        "file-absolute": (renamed("/etc/passwd"), "names the files", "/etc/passwd"),
        "file-size": (index(8, "files", RECORD, "bytes"), RECORD, "not 8"),
        "file-size-negative": (index(-8, "files", RECORD, "bytes"), RECORD),
        "file-size-text": (index("8", "files", RECORD, "bytes"), "bytes"),
        "file-null": (index(None, "files", RECORD), RECORD),
        "fingerprints-none": (drop(INDEX, *SUMS), "fingerprints"),
        "fingerprints-list": (index([], *SUMS), "fingerprints"),
        "fingerprint-missing": (drop(INDEX, *SUMS, OUT), OUT),
        "fingerprint-of-no-piece": (index({"q": "0" * 16}, *SUMS, OUT), OUT),
        "fingerprint-number": (index({"": 7}, *SUMS, OUT), OUT, "16 hex"),
        "fingerprint-short": (index({"": "ab"}, *SUMS, OUT), OUT, "16 hex"),
        "fingerprint-not-hex": (index({"": "0x" + "0" * 14}, *SUMS, OUT), OUT, "16 hex"),
        "fingerprint-newline": (index({"": "0" * 16 + "\n"}, *SUMS, OUT), OUT, "16 hex"),
        "fingerprint-list": (index(["0" * 16], *SUMS, OUT), OUT, "16 hex"),
        "fingerprint-other": (index({"": "0" * 16}, *SUMS, OUT), OUT, "fingerprints"),
        "parameters-empty": (index([], "parameters"), "embed.weight"),
        "parameter-null": (index(None, "parameters", 0), "parameter"),
        "parameter-missing": (drop(INDEX, "parameters", 0), "embed.weight"),
        "parameter-twice": (edit(INDEX, lambda t: t["parameters"].append(t["parameters"][0])), "twice"),
        "parameter-without-a-name": (drop(INDEX, "parameters", 0, "name"), "name"),
        "pattern-not-text": (index(["vocab", "embed"], "parameters", 0, "pattern"), "pattern"),
        "pattern-unbalanced": (parameter("pattern", "(vocab embed"), "never closed"),
        "pattern-strange": (parameter("pattern", "vocab * embed"), "'*'"),
        "pattern-unlabelled": (parameter("pattern", "(vocab + embed)"), "label"),
        "pattern-empty": (parameter("pattern", ""), "embed.weight"),
        "pattern-nested": (parameter("pattern", "(" * 50_000 + "vocab" + ")" * 50_000), "sentence"),
        "pattern-exponential": (parameter("pattern", "(a: + b:)" * 40), "sentence"),
        "pattern-exponential-of-hf": (parameter("hf_pattern", "(a: + b:)" * 40), "sentence"),
        "pattern-of-another-axis": (parameter("pattern", "vocab colour"), "colour"),
        "pattern-of-two-split-axes": (parameter("pattern", "vocab heads"), "embed.weight"),
        "pattern-of-fewer-axes": (parameter("pattern", "vocab"), "embed.weight"),
        "pieces-twice-an-axis": (sentence("mlp.down.weight", "embed embed"), "embed embed"),
        "pieces-of-fewer-axes": (sentence("mlp.down.weight", "embed"), "mlp.down.weight"),
        "pieces-more": (sentence("mlp.down.weight", "(a: embed mlp + b: embed)"), "mlp.down.weight (a)"),
        "pieces-of-another-label": (sentence(QKV, "(q: heads head + k: kv head + w: kv head) embed"), QKV),
        "pieces-of-another-size": (sentence(QKV, "(q: heads head + k: heads head + v: kv head) embed"), QKV),
        "pieces-fewer": (sentence(QKV, "(q: heads head + k: kv head) embed"), QKV),
        "name-attribute": (parameter("name", "{layer.__class__}"), "{layer.__class__}"),
        "name-attribute-chain": (parameter("name", "{layer.__class__.__init__.__globals__}"), "__globals__"),
        "name-index": (parameter("name", "{0}"), "'0'"),
        "name-field-width": (parameter("name", "{layer:>1000000000}"), ":>1000000000"),
        "name-unknown-axis": (parameter("name", "{colour}.weight"), "colour"),
        "name-open-brace": (parameter("name", "embed.{weight"), "embed.{weight"),
        "name-outside": (parameter("name", "../../embed.weight"), "../../embed.weight"),
        "name-control-characters": (parameter("name", "embed.\u001b[2Jweight"), "weight"),
        "hf-attribute": (parameter("hf", "{0.__class__}"), "hf='{0.__class__}'", "names no tensors"),
        "hf-width": (parameter("hf", "{layer:>1000000000}"), ":>1000000000"),
        "hf-unknown-axis": (parameter("hf", "{colour}.weight"), "embed.weight", "'colour' has no size"),
        "hf-control-characters": (parameter("hf", "\x1b[2J"), "hf='\\x1b[2J'"),
        "at-unknown": (parameter("at", "middle"), "middle"),
        "at-empty": (parameter("at", ""), "at=''"),
        "at-blank": (parameter("at", "  "), "at='  '"),
        "at-the-other-end": (parameter("at", "last"), "embed.weight"),
    },
    RESHARD,
    EXPORT,
)

# -- its files

WEIGHTS = f"ckpt/{RECORD}"
NO_ELEMENTS = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
OTHER_OUT = OUT.replace("out", "other")
TRAINER = "ckpt/trainer.json"


def reheaded(how: Callable[[dict[str, Any]], object]) -> Change:
    """Change a header, and the index's size with it."""

    def change(folder: Path) -> None:
        header(WEIGHTS, how)(folder)
        index((folder / WEIGHTS).stat().st_size, "files", RECORD, "bytes")(folder)

    return change


refused(
    "file",
    {
        "missing": (gone(WEIGHTS), RECORD),
        "state-missing": (lambda folder: shutil.rmtree(folder / "ckpt/weights"), RECORD, "tp1"),
        "folder-in-place": (instead(WEIGHTS, os.mkdir), RECORD, "folder"),
        "pipe-in-place": (instead(WEIGHTS, os.mkfifo), RECORD, "pipe"),
        "dangling-link": (link(WEIGHTS, "nowhere"), RECORD, "nowhere"),
        "empty": (write(WEIGHTS, b""), RECORD, "0 bytes"),
        "truncated": (raw(WEIGHTS, lambda content: content[:-2]), RECORD, "truncated"),
        "longer": (raw(WEIGHTS, lambda content: content + b"  "), RECORD),
        "pickle": (write(WEIGHTS, b"\x80\x04" + b"\x95" * 90), RECORD, "is a pickle"),
        "header-of-10**18": (write(WEIGHTS, headed(bytes(9), 10**18)), RECORD),
        "another-name": (reheaded(lambda tree: tree.update({OTHER_OUT: tree.pop(OUT)})), OUT, OTHER_OUT),
        "tensor-more": (reheaded(lambda tree: tree.update(x=NO_ELEMENTS)), RECORD, "also holds x"),
        "another-shape": (reheaded(lambda tree: tree[OUT]["shape"].reverse()), OUT, "[8, 6]"),
        "integers": (reheaded(lambda tree: tree[OUT].update(dtype="I16")), f"{OUT} is I16[", "of F64/F32/F16/BF16["),
        "of-the-other-stage": (exchange(WEIGHTS, WEIGHTS.replace("pp0", "pp1")), "lacks", "embed.weight"),
        "of-the-other-rank": (
            exchange(WEIGHTS, WEIGHTS.replace("tp0", "tp1")),
            "weights:",
            "layers.0.attn.qkv.weight (k)",
            "fingerprints",
        ),
        "of-another-state": (exchange(WEIGHTS, WEIGHTS.replace("weights", "master")), RECORD, "bytes"),
        "trainer-missing": (gone(TRAINER), "trainer.json", "step 7"),
        "trainer-empty": (write(TRAINER, b""), "trainer.json", "not JSON"),
        "trainer-list": (write(TRAINER, b"[7]"), "trainer.json", "object"),
        "trainer-step-2**62": (updated(step=2**62), "trainer.json has step 7", str(2**62)),
        "trainer-without-a-step": (write(TRAINER, b'{"lr": 1}'), "trainer.json has step None, index.json 7"),
        "trainer-step-7.0": (write(TRAINER, b'{"step": 7.0}'), "trainer.json has step 7.0"),
        "trainer-of-no-run": (index(None, "step"), "trainer.json has step 7, index.json None"),
        "trainer-nan": (write(TRAINER, b'{"lr": NaN}'), "trainer.json", "NaN"),
        "trainer-folder": (instead(TRAINER, os.mkdir), "trainer.json"),
        "trainer-pipe": (instead(TRAINER, os.mkfifo), "trainer.json"),
        "all-at-once": (
            both(
                gone("ckpt/master/pp0-ep0-tp0.safetensors"),
                write("ckpt/exp_avg/pp0-ep0-tp1.safetensors", b""),
                index(5, "files", RECORD, "bytes"),
            ),
            "is damaged:\n",
            "master/pp0-ep0-tp0.safetensors",
            "exp_avg/pp0-ep0-tp1.safetensors: has 0 bytes",
            f"{RECORD} has",
            "not 5",
        ),
        "index-of-another-folder": (led_out(INDEX), "index.json: leads to", "secret"),
        "weights-of-another-folder": (led_out("ckpt/weights"), "leads to", "outside of"),
    },
    RESHARD,
    EXPORT,
)

LAST = "layers.1.mlp.down.weight"


def flipped(state: str, bit: int) -> Change:
    """A bit of the last byte of a file."""
    return raw(f"ckpt/{state}/pp0-ep0-tp0.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ bit]))


refused(
    "bit",
    {
        **{
            f"{state}-{bit}": (flipped(state, bit), f"{state}: ", LAST, "fingerprints")
            for state in STATES
            for bit in (1, 128)
        },
        # Same names, shapes and sizes: only the fingerprints can tell.
        "file-of-the-other-rank": (
            exchange("ckpt/exp_avg/pp0-ep0-tp0.safetensors", "ckpt/exp_avg/pp0-ep0-tp1.safetensors"),
            "exp_avg: ",
            "layers.1.attn.qkv.weight (q)",
            "embed.weight",
        ),
    },
    RESHARD,
)
refused("bit", {"export": (flipped("weights", 1), "weights: ", LAST, "fingerprints")}, EXPORT)

# -- the index of a checkpoint whose places have several files

Slice = Callable[[Any, str, str], object]
"""A change of an index, given a file and a tensor of which that has a slice."""


def sliced(how: Slice) -> Change:
    def change(tree: Any) -> None:
        found = ((path, name) for path, of in tree["files"].items() for name in of.get("ranges", ()))
        how(tree, *min((path, name) for path, name in found if "master/" in path and "tp1" in path))

    return edit("spread/index.json", change)


def cut(*value: object) -> Change:
    return sliced(lambda tree, path, name: tree["files"][path]["ranges"].update({name: list(value)}))


def moved(by: int, end: int) -> Change:
    def how(tree: Any, path: str, name: str) -> None:
        tree["files"][path]["ranges"][name][end] += by

    return sliced(how)


def part_named(to: str) -> Change:
    return sliced(lambda t, path, _: t["files"].update({re.sub(r"-part\d+", to, path): t["files"].pop(path)}))


def other_places(tree: Any, *_: str) -> None:
    """A tensor that both ranks hold is cut here alone."""
    norm = "layers.0.attn_norm.weight"
    held = [of for at, of in tree["files"].items() if at.startswith("master/pp0-ep0-tp1-part")]
    (first,) = (of for of in held if norm in of["fingerprints"])
    other = next(of for of in held if of is not first)
    other["fingerprints"][norm] = first["fingerprints"][norm]
    first.setdefault("ranges", {})[norm], other.setdefault("ranges", {})[norm] = ["embed", 0, 2], ["embed", 2, 6]


NOT_ONCE, NO_RANGE = "which are not all of it once", "is not [axis, start, stop]"
STRANGER = {"layers.9.norm": {"": "0" * 16}}

refused(
    "parts",
    {
        "beyond": (cut("embed", 0, 1 << 62), NOT_ONCE),
        "too-little": (cut("embed", 0, 1), NOT_ONCE),
        "another-axis": (cut("vocab", 0, 6), NOT_ONCE),
        "an-axis-of-one-piece": (cut("heads", 0, 4), NOT_ONCE),
        "nothing": (cut("embed", 3, 3), NO_RANGE),
        "negative": (cut("embed", -1, 3), NO_RANGE),
        "true": (cut("embed", 0, True), NO_RANGE),
        "no-end": (cut("embed", 0), NO_RANGE),
        "no-axis": (cut(1, 2, 3), NO_RANGE),
        "empty": (cut(), NO_RANGE),
        "overlap": (moved(1, 2), NOT_ONCE),
        "gap": (moved(-1, 2), NOT_ONCE),
        "later": (moved(1, 1), NOT_ONCE),
        "whole": (sliced(lambda t, path, name: t["files"][path]["ranges"].pop(name)), "lists all, "),
        "no-fingerprint": (sliced(lambda t, at, n: t["files"][at]["fingerprints"].pop(n)), "which have no finger"),
        "stranger": (sliced(lambda t, at, _: t["files"][at]["fingerprints"].update(STRANGER)), "which do not belong"),
        "missing": (sliced(lambda t, path, name: t["files"].pop(path)), "names the files"),
        "number-large": (part_named("-part99999999"), "names the files"),
        "number-endless": (part_named("-part" + "9" * 5000), "names the files"),
        "number-none": (part_named(""), "names the files"),
        "number-00": (part_named("-part00"), "names the files"),
        "version-1": (put("spread/index.json", 1, "version"), "4 states, but 14 files"),
        "other-places": (sliced(other_places), "cuts replicas of layers.0.attn_norm.weight in master at different"),
    },
    "reshard spread target",
    "convert spread target --to hf",
)

# -- Hugging Face folders

CONFIG, SINGLE, HUB = "hf/config.json", "hf/model.safetensors", "shards/model.safetensors.index.json"
Q0, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
WTE, GPT2_SINGLE = "transformer.wte.weight", "gpt2-hf/model.safetensors"
FIRST = ", ".join([*FAMILIES][:3])
LONG = "k" * 3 * 10**6


def config(**fields: object) -> Change:
    return edit(CONFIG, lambda tree: tree.update(fields))


def weights(how: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    return tensors(SINGLE, how)


def weight(new: str, of: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> Change:
    """Another tensor, or one in the place of another."""
    return weights(lambda held: held.update({new: of(held)}))


def of_gpt2(how: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    return tensors(GPT2_SINGLE, how)


def only(*names: str) -> Change:
    """No weights but these empty files."""
    return both(gone(SINGLE), *(write(f"hf/{name}", b"") for name in names))


def named(new: object) -> Change:
    """Let the index name another file for one tensor."""
    return put(HUB, new, "weight_map", NORM)


def shards(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.glob("shards/model-*.safetensors"))


def twice(folder: Path) -> None:
    """One shard's tensors are in a second one too."""
    first, second, *_ = shards(folder)
    found: dict[str, torch.Tensor] = {}
    tensors(first, found.update)(folder)
    tensors(second, lambda held: held.update(found))(folder)


def swapped(tree: Any) -> None:
    of = tree["weight_map"]
    of[NORM], of[HEAD] = of[HEAD], of[NORM]


def two_dtypes(held: dict[str, torch.Tensor]) -> None:
    """The same bits, which are other numbers."""
    held[WTE] = held[WTE].view(torch.float16)
    held[HEAD] = held[WTE].view(torch.bfloat16)


refused(
    "hf",
    {
        "config-missing": (gone(CONFIG), "config.json is not there"),
        "config-pipe": (instead(CONFIG, os.mkfifo), "config.json is not there, or is no file"),
        "config-broken": (write(CONFIG, "{"), "config.json is not JSON"),
        "config-list": (write(CONFIG, "[]"), "config.json does not hold a JSON object"),
        "config-nan": (write(CONFIG, '{"a": NaN}'), "NaN is not JSON"),
        "config-of-another-folder": (led_out(CONFIG), "config.json: leads to", "secret"),
        "family-unknown": (config(model_type="llamma"), "did you mean 'llama'?", f"there are {FIRST}"),
        "family-missing": (config(model_type=None), f"model_type=None: the families are {FIRST}"),
        "family-list": (config(model_type=["llama"]), "model_type=['llama']: the families"),
        "field-unknown": (config(sliding_window=4, residual=2), "'sliding_window'", "'residual'"),
        "key-long": (config(**{LONG: 1}), "unknown field 'kk", "k [...] k"),
        "number-long": (config(vocab_size=LONG), "not of type int"),
        "quantised-by-config": (
            config(quantization_config={"bits": 4}),
            "quantization_config has quant_method=None, bits=4",
        ),
        "a-billion-layers": (config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000: it may be up to 65536"),
        "sixty-thousand-layers": (
            config(num_hidden_layers=60_000),
            "config.json describes 540003 tensors (layer=60000), but there are 48",
        ),
        "layers-beyond-floats": (config(num_hidden_layers=10**400), "is an integer of more than 64 bits"),
        "vocabulary": (config(vocab_size=2**60), "shape [13, 6] instead of [1152921504606846976, 6]"),
        "pickle": (
            only("pytorch_model.bin"),
            "neither model.safetensors nor model.safetensors.index.json, but pytorch_model.bin",
            "save_pretrained",
        ),
        "pickles-with-an-index": (
            only("pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"),
            "but pytorch_model-00001-of-00001.bin: a pickle can run code",
            "python -c",
        ),
        "pickle-of-another-name": (only("consolidated.00.pth"), "consolidated.00.pth: a pickle"),
        "gguf": (only("model-q4.gguf"), "model-q4.gguf: GGUF is not read here"),
        "no-weights": (only(), "there is neither model.safetensors nor model.safetensors.index.json"),
        "adapter": (write("hf/adapter_config.json", "{}"), "adapter_config.json: an adapter changes"),
        "weights-link-to-nothing": (link(SINGLE, "../../blobs/gone"), "model.safetensors"),
        "weights-truncated": (raw(SINGLE, lambda content: content[:-2]), "model.safetensors", "truncated"),
        "tokenizer-links-to-nothing": (link("hf/tokenizer.json", "gone"), "tokenizer.json is a link to nothing"),
        "companion-of-another-folder": (led_out("hf/LICENSE"), "LICENSE: leads to", "secret"),
        "template-of-another-folder": (led_out("hf/additional_chat_templates/x.jinja"), "x.jinja: leads to", "secret"),
        "companion-large": (
            lambda folder: os.truncate(folder / "hf/LICENSE", limits.COMPANION + 1),
            f"LICENSE has {limits.COMPANION + 1} bytes",
        ),
        "tensor-missing": (weights(lambda t: t.pop(NORM)), f"1 tensors are missing: {NORM}"),
        "tensors-missing-in-layers": (
            weights(lambda t: [t.pop(n) for n in [*t] if "q_proj" in n]),
            "5 tensors are missing: model.layers.{0..4}.self_attn.q_proj.weight",
        ),
        "tensor-unexpected": (weight("extra", lambda t: t[NORM]), "1 tensors are not of this model: extra"),
        "layer-unexpected": (
            config(num_hidden_layers=4),
            "9 tensors are not of this model",
            "model.layers.4.self_attn.q_proj.weight",
        ),
        "bias-unexpected": (
            weight(Q0.replace("weight", "bias"), lambda t: t[NORM]),
            "not of this model: model.layers.0.self_attn.q_proj.bias",
        ),
        "tensor-of-another-name": (
            weight(Q0.replace("q_proj", "qproj"), lambda t: t.pop(Q0)),
            f"missing: {Q0}",
            f"model.layers.0.self_attn.qproj.weight (is it {Q0}?)",
        ),
        "name-for-terminals": (weight("a\x1b[2J", lambda t: t[NORM]), r"'a\x1b[2J'"),
        "shape": (config(intermediate_size=20), "shape [8, 6] instead of [20, 6]: model.layers.{0..4}.mlp.gate"),
        "float8": (weight(Q0, lambda t: t[Q0].to(torch.float8_e4m3fn)), "dtype F8_E4M3 is not one", Q0),
        "integers": (weight(Q0, lambda t: t[Q0].view(torch.int16)), "dtype I16 is not one of", "quantised"),
        "prefix-on-some": (
            weight("norm.weight", lambda t: t[NORM]),
            "some names start with 'model.' and some lack it",
            "; norm.weight",
        ),
        "head-missing": (weights(lambda t: t.pop(HEAD)), "lm_head.weight is missing", "tie_word_embeddings=true"),
        "tied-tables-differ": (config(tie_word_embeddings=True), f"{EMBED} (model.safetensors) and {HEAD} (model.saf"),
    },
    CONVERT,
)
refused(
    "gpt2",
    {
        "matrix-transposed": (
            of_gpt2(lambda t: t.update({n: t[n].T for n in t if n.endswith("c_fc.weight")})),
            "shape [32, 8] instead of [8, 32]: transformer.h.{0..4}.mlp.c_fc.weight",
        ),
        "booleans": (of_gpt2(lambda t: t.update({n: t[n] > 0 for n in t if "ln_f" in n})), "dtype BOOL", "ln_f.bias"),
        "prefix-on-some": (
            of_gpt2(lambda t: t.update({"wpe.weight": t.pop("transformer.wpe.weight")})),
            "some names start with 'transformer.' and some lack it",
            "; wpe.weight",
        ),
        "tied-tables-of-two-dtypes": (of_gpt2(two_dtypes), f"{WTE} (model.safetensors) and {HEAD} (model.safetensors)"),
    },
    "convert gpt2-hf target",
)
refused(
    "shards",
    {
        "without-an-index": (gone(HUB), "model-00001-of-", "the index that names them is missing"),
        "index-broken": (write(HUB, "{"), "index.json is not JSON"),
        "index-list": (write(HUB, "[]"), "does not hold a JSON object"),
        "index-empty": (write(HUB, "{}"), "has no weight_map"),
        "map-list": (write(HUB, '{"weight_map": []}'), "has no weight_map"),
        "leads-up": (named("../x.safetensors"), "no .safetensors file of this folder: ../x.safetensors"),
        "leads-up-inside": (named("a/../../x.safetensors"), "folder: a/../../x.safetensors"),
        "leads-away": (named("/tmp/x.safetensors"), "of this folder: /tmp/x.safetensors"),
        "leads-up-on-windows": (named("..\\x.safetensors"), "folder: ..\\x.safetensors"),
        "number": (named(3), "no .safetensors file of this folder: 3"),
        "pickle": (named("a.bin"), "no .safetensors file of this folder: a.bin"),
        "long-name": (named("x" * 5000 + ".safetensors"), "names files that are not there: xxx"),
        "null-byte": (named("a\0.safetensors"), r"'a\x00.safetensors'"),
        "missing": (lambda folder: gone(*shards(folder)[1:3])(folder), "there: model-00002-of-", ", model-00003-of-"),
        "names-too-much": (
            edit(HUB, lambda tree: tree["weight_map"].update(ghost=tree["weight_map"][NORM])),
            "does not hold",
            "ghost",
        ),
        "names-the-wrong-one": (edit(HUB, swapped), "does not hold what", f".safetensors does): {NORM}"),
        "names-too-little": (drop(HUB, "weight_map", NORM), "does not name tensors of model-", NORM),
        "tensor-in-two": (twice, "tensors lie in several files", EMBED),
    },
    "convert shards target",
)

# -- experts

MOE = "model.layers.{}.block_sparse_moe"


def expert(number: int | str, word: str, layer: int | str = 1) -> str:
    return f"{MOE.format(layer)}.experts.{number}.{word}.weight"


def experts(how: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    return tensors("experts/model.safetensors", how)


def without(*names: str) -> Change:
    return experts(lambda held: [held.pop(name) for name in names])


def stacked(held: dict[str, torch.Tensor]) -> None:
    held[f"{MOE.format(1)}.experts.down_proj"] = torch.stack([held.pop(expert(i, "w2")) for i in range(4)])


WORDS = ("w1", "w2", "w3")
ROUTER = f"{MOE.format(0)}.gate.weight"

refused(
    "experts",
    {
        "one-tensor-missing": (without(expert(2, "w3")), "1 tensors are missing", expert(2, "w3")),
        "one-missing": (
            without(*(expert(3, word, layer) for layer in range(3) for word in WORDS)),
            f"9 tensors are missing: {expert(3, 'w1', '{0..2}')}, ",
        ),
        "all-of-a-layer-missing": (
            without(*(expert(number, word) for number in range(4) for word in WORDS)),
            f"12 tensors are missing: {expert('{0..3}', 'w1')}, ",
        ),
        "one-too-many": (
            experts(lambda t: t.update({expert(4, word): t[expert(0, word)] for word in WORDS})),
            "3 tensors are not of this model",
            expert(4, "w2"),
        ),
        "another-number": (
            experts(lambda t: t.update({expert(9, "w1"): t.pop(expert(1, "w1"))})),
            f"1 tensors are missing: {expert(1, 'w1')}",
            f"{expert(9, 'w1')} (is it {expert(1, 'w1')}?)",
        ),
        "gate-and-down-exchanged": (
            experts(lambda t: t.update({expert(0, "w1"): t[expert(0, "w2")]})),
            "shape [8, 5] instead of [5, 8]",
            expert(0, "w1"),
        ),
        "stacked": (experts(stacked), f"4 tensors are missing: {expert('{0..3}', 'w2')}", "experts.down_proj"),
        "router-missing": (without(ROUTER), "1 tensors are missing", ROUTER),
        "router-of-fewer": (experts(lambda t: t.update({ROUTER: t[ROUTER][:3]})), "shape [3, 8] instead of [4, 8]"),
        "quantised": (
            experts(lambda t: t.update({expert(0, "w1"): t[expert(0, "w1")].to(torch.int8)})),
            "dtype I8",
            expert(0, "w1"),
        ),
        "config-of-more": (
            put("experts/config.json", 5, "num_local_experts"),
            "9 tensors are missing",
            "experts.4.w1",
            "shape [4, 8] instead of [5, 8]",
        ),
        "config-of-fewer": (
            put("experts/config.json", 3, "num_local_experts"),
            "9 tensors are not of this model",
            "shape [4, 8] instead of [3, 8]",
        ),
        "config-of-wider": (
            put("experts/config.json", 6, "intermediate_size"),
            "shape [5, 8] instead of [6, 8]",
            "shape [8, 5] instead of [8, 6]",
        ),
    },
    "convert experts target",
)

# -- arguments

for _group, _of in yaml.safe_load(Path(__file__).with_name("bad_arguments.yaml").read_text()).items():
    asked(_group, _of["command"] or "", _of["rows"])
asked("convert", CONVERT, {"tp-endless": (f"--tp {'9' * 5000}", "--tp")})
asked(
    "folders",
    "",
    {
        "source-name-too-long": (f"convert {'x' * 300} target", "too long"),
        "target-name-too-long": (f"convert hf {'x' * 300}", "too long"),
    },
)
refused("source", {"empty": (lambda folder: (folder / "empty").mkdir(), "config.json")}, "convert empty target")
refused("target", {"in-source-by-a-link": (link("inside", "ckpt"), "lies in", "ckpt")}, "reshard ckpt inside/target")


def within_the_target(folder: Path) -> None:
    (folder / "outer").mkdir()
    (folder / "hf").rename(folder / "outer/hf")


refused("source", {"in-target": (within_the_target, "outer", "exists")}, "convert outer/hf outer")
refused(
    "target",
    {
        "partial-of-someone-else": (write(".target.partial/precious", "mine"), ".target.partial", "remove it"),
        "companion-of-another-folder": (led_out("ckpt/tokenizer/LICENSE"), "LICENSE: leads to", "secret"),
    },
    RESHARD,
    EXPORT,
)
