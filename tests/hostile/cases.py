"""The corpus: what strangers may have put into folders, files and recipes, each a change of sound ones (`ground`).

A find of the fuzzer becomes a line here, and is mended. A case that is known to fail names what it waits for in `OPEN`.
"""

import gzip
import json
import os
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from changes import Change, both, edit, headed, header, huge, instead, link, nothing, put, raw, write

from megacore.data.corpus import Corpus

OUTSIDE = "canary-outside-of-all-folders-77ab"
ESCAPE = "\x1b]0;title\x07\x1b[31mred"

OPEN: Mapping[str, str] = {}
"""{case: the item of the list of holes that it waits for}, each a strict xfail."""


@dataclass(frozen=True)
class Case:
    """A change of sound folders, the command that meets it, and what is said; sound: whether it may well succeed."""

    change: Change
    command: str
    says: tuple[str, ...]
    sound: bool


CASES: dict[str, Case] = {}


def case(name: str, command: str, change: Change, *says: str, sound: bool = False) -> None:
    assert name not in CASES, name
    CASES[name] = Case(change, command, says, sound)


def each(prefix: str, commands: Sequence[str], table: Mapping[str, tuple[Change, str]]) -> None:
    """Cases of a table, which meet the commands by turns; that of which nothing is said may well succeed."""
    for number, (name, (change, says)) in enumerate(table.items()):
        case(f"{prefix}-{name}", commands[number % len(commands)], change, says, sound=not says)


# -- changes


def first(tree: dict[str, Any], **values: object) -> None:
    """Change what a header says of its first tensor."""
    next(value for key, value in tree.items() if key != "__metadata__").update(values)


HF, TOKENIZER, SETTINGS = "hf/model.safetensors", "hf/tokenizer.json", "hf/tokenizer_config.json"
DEEP = b'{"a":' * 100_000
LARGE = b'{"a": "' + b"x" * (40 << 20) + b'"}'
LONG = "k" * 3_000_000

FEW, TUNE = "generate hf --prompt few", "pretrain tuning.yaml"
TOKENIZE = "tokenize data/texts.jsonl --out made --workers 1 --tokenizer hf"
EVALUATE = "evaluate hf --data data/texts.jsonl"
FOLDER = "tokenize data --out made --workers 1 --tokenizer hf"
PARQUET = "evaluate hf --data data/a.parquet"
BOMB = "unpacks to more than 100 times"


def ends(content: bytes | str) -> Change:
    return write("hf/generation_config.json", content)


# -- weights: convert, inspect, generate

each("weights", ("convert hf made", "inspect hf", FEW), {
    "short": (raw(HF, lambda content: content[:-1]), "truncated"),
    "length-2^63": (write(HF, headed(b"{}", 1 << 63)), "claims a header of 9223372036854775808"),
    "length-50-MB": (write(HF, headed(b"{}" + bytes(50 << 20), 50 << 20)), "above the limit"),
    "deep": (write(HF, headed(DEEP)), "not JSON"),
    "twice-long": (write(HF, headed(f'{{"{LONG}":1,"{LONG}":2}}'.encode())), "stands twice"),
    "pickle": (write(HF, b"\x80\x04" + b"cos\nsystem\n(S'touch ../mark'\ntR." * 9), "pickle"),
    "dtype-escapes": (header(HF, lambda tree: first(tree, dtype=ESCAPE)), "dtype"),
    "shape-huge": (header(HF, lambda tree: first(tree, shape=[1 << 62, 4])), "model.safetensors"),
    "shape-many": (header(HF, lambda tree: first(tree, shape=[1] * 100_000)), "model.safetensors"),
    "offsets-beyond": (header(HF, lambda tree: first(tree, data_offsets=[0, 1 << 60])), "model.safetensors"),
    "name-escapes": (header(HF, lambda tree: tree.update({ESCAPE: next(iter(tree.values()))})), "model.safetensors"),
    "name-long": (header(HF, lambda tree: tree.update({LONG: next(iter(tree.values()))})), "model.safetensors"),
    "pipe": (instead(HF, os.mkfifo), "pipe"),
    "device": (link(HF, "/dev/zero"), "leads to"),
    "outside": (link(HF, "../../outside/secret.txt"), "leads to"),
})  # fmt: skip

# -- config.json and the hub's index

each("config", ("convert hf made", "inspect hf", EVALUATE, TUNE), {
    "deep": (write("hf/config.json", DEEP), "not JSON"),
    "large": (write("hf/config.json", LARGE), "more than 33,554,432 bytes"),
    "nan": (write("hf/config.json", b'{"model_type": NaN}'), "NaN"),
    "number-endless": (write("hf/config.json", b'{"a": ' + b"9" * 10**6 + b"}"), "64 bits"),
    "number-float": (write("hf/config.json", b'{"a": 0.' + b"9" * 10**6 + b"}"), "model_type"),
    "family": (put("hf/config.json", ESCAPE, "model_type"), "family"),
    "family-long": (put("hf/config.json", LONG, "model_type"), "family"),
    "key-long": (put("hf/config.json", 1, LONG), "unknown field"),
    "key-escapes": (put("hf/config.json", 1, ESCAPE), "unknown field"),
    "value-escapes": (put("hf/config.json", ESCAPE, "hidden_size"), "hidden_size"),
    "value-long": (put("hf/config.json", LONG, "hidden_act"), "hidden_act"),
    "layers-10^18": (put("hf/config.json", 10**18, "num_hidden_layers"), "hf"),
    "layers-10^7": (put("hf/config.json", 10**7, "num_hidden_layers"), "hf"),
    "vocabulary-10^18": (put("hf/config.json", 10**18, "vocab_size"), "embed_tokens"),
    "rope-nonsense": (put("hf/config.json", {"rope_type": "evil", "factor": []}, "rope_scaling"), "rope"),
    "rope-deep": (put("hf/config.json", json.loads("[" * 900 + "]" * 900), "rope_scaling"), "config.json"),
    "rope-escapes": (put("hf/config.json", {ESCAPE: ESCAPE}, "rope_scaling"), "rope"),
    "positions-10^18": (put("hf/config.json", 10**18, "max_position_embeddings"), ""),
    "index-outside": (write("hf/model.safetensors.index.json", b'{"weight_map": {"a": "../../x.safetensors"}}'), ""),
    "pipe": (instead("hf/config.json", os.mkfifo), "config.json"),
    "outside": (link("hf/config.json", "../../outside/secret.txt"), "leads to"),
    "environment": (link("hf/config.json", "/proc/self/environ"), "leads to"),
})  # fmt: skip


def indexed(weight_map: object) -> Change:
    """A folder of several files."""

    def change(folder: Path) -> None:
        (folder / HF).rename(folder / "hf/a.safetensors")
        (folder / "hf/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


for name, weight_map in {
    "parent": {"a": "../../outside/secret.safetensors"},
    "escapes": {"a": f"{ESCAPE}.safetensors"},
    "long": {"a": f"{LONG}.safetensors"},
    "long-key": {LONG: "a.safetensors"},
    "many": {f"{i}": f"{i}.safetensors" for i in range(100_000)},
}.items():
    case(f"hub-index-{name}", "inspect hf" if "long" in name else "convert hf made", indexed(weight_map), "hf")

# -- index.json and trainer.json of checkpoints


def shared(times: int, layers: str, *also: str) -> Change:
    """So many parameters of these layers, whose tensors others use."""

    def change(tree: Any) -> None:
        one = next(each for each in tree["parameters"] if "{layer}" in each["name"])
        tree.update(version=7, parameters=[one | {"layers": layers, "also": [*also]}] * times)

    return edit("ckpt/index.json", change)


each("index", ("reshard ckpt made", "convert ckpt made --to hf", "generate ckpt --prompt few"), {
    "deep": (write("ckpt/index.json", DEEP), "not JSON"),
    "large": (write("ckpt/index.json", LARGE), "more than 33,554,432 bytes"),
    "format-escapes": (put("ckpt/index.json", ESCAPE, "format"), "format"),
    "format-long": (put("ckpt/index.json", LONG, "format"), "format"),
    "version-10^18": (put("ckpt/index.json", 10**18, "version"), "version"),
    "step-2^62": (put("ckpt/index.json", 1 << 62, "step"), ""),
    "sentence": (put("ckpt/index.json", "(" * 150 + "embed" + ")" * 45, "parameters", 0, "pattern"), "index.json"),
    "sums": (put("ckpt/index.json", "(a + b) " * 8, "parameters", 0, "pattern"), "index.json"),
    "name-escapes": (put("ckpt/index.json", ESCAPE, "parameters", 0, "name"), "index.json"),
    "name-long": (put("ckpt/index.json", LONG, "parameters", 0, "name"), "index.json"),
    "hub-name-format": (put("ckpt/index.json", "{layer.__class__.__init__}", "parameters", 1, "hf"), ""),
    "hub-name-escapes": (put("ckpt/index.json", ESCAPE, "parameters", 0, "hf"), ""),
    "file-outside": (edit("ckpt/index.json", lambda t: t["files"].update({"../../outside": {}})), "index.json"),
    "shared-beyond": (shared(1, "0", "9"), "are not later ones of the 2 layers, ascending"),
    "shared-back": (shared(1, "0-1", "", "0"), "are not later ones of the 2 layers, ascending"),
    "shared-10^6": (shared(1, "0", *["0-999999"] * 1000), "are 1000000000 numbers: there may be 65536"),
    "layers-10^9": (shared(20_000, "0-65535"), "more than 1048576 numbers of layers"),
    "states-escapes": (put("ckpt/index.json", ["weights", ESCAPE], "states"), "states"),
    "frozen-long": (put("ckpt/index.json", [LONG], "frozen"), "frozen"),
    "adapters": (put("ckpt/index.json", {"rank": 1, "base": {"path": "/etc"}}, "adapters"), "adapters"),
    "outside": (link("ckpt/index.json", "../../outside/secret.txt"), "leads to"),
    "weights-outside": (link("ckpt/weights/pp0-ep0-tp0.safetensors", "../../../outside/secret.txt"), "leads to"),
    "bit": (raw("ckpt/weights/pp0-ep0-tp0.safetensors", lambda b: b[:-1] + bytes([b[-1] ^ 1])), "damaged"),
})  # fmt: skip

case("index-shown", "inspect ckpt --tensors", put("ckpt/index.json", ESCAPE, "parameters", 0, "hf"), sound=True)
case("index-verified", "verify ckpt hf", put("ckpt/index.json", 10**9, "sizes", "mlp"), "index.json")
case("index-checked", "inspect ckpt --check", put("ckpt/index.json", "0" * 16, "files"), "files")
case("trainer-escapes", "inspect state", put("state/trainer.json", {"out": ESCAPE}, "recipe"), sound=True)

RESUME = "pretrain recipe.yaml train.steps=8 checkpoint.resume=state"
each("trainer", [RESUME], {
    "deep": (write("state/trainer.json", DEEP), "trainer.json"),
    "large": (write("state/trainer.json", LARGE), "more than"),
    "step-text": (put("state/trainer.json", ESCAPE, "step"), "step"),
    "step-2^62": (put("state/trainer.json", 1 << 62, "step"), "step"),
    "samples-2^62": (put("state/trainer.json", 1 << 62, "consumed_samples"), ""),
    "skipped": (put("state/trainer.json", [[0, 1], [ESCAPE, 3]], "skipped_samples"), "skipped_samples"),
    "scaler": (put("state/trainer.json", {"scale": ESCAPE}, "scaler"), "scaler"),
    "scaler-long": (put("state/trainer.json", {"scale": LONG}, "scaler"), "scaler"),
    "recipe-escapes": (put("state/trainer.json", {"data": {"seed": ESCAPE}}, "recipe"), ""),
    "recipe-long": (put("state/trainer.json", {"data": {"seed": LONG}}, "recipe"), ""),
    "recipe-deep": (put("state/trainer.json", json.loads('{"a":' * 900 + "1" + "}" * 900), "recipe"), ""),
    "outside": (link("state/trainer.json", "../../outside/secret.txt"), "leads to"),
})  # fmt: skip

# -- what travels along, and links

for name in ("LICENSE", "tokenizer.json", "generation_config.json", "additional_chat_templates/a.jinja"):
    for kind, target in {
        "outside": f"{'../' * name.count('/')}../../outside/secret.txt",
        "environment": "/proc/self/environ",
    }.items():
        case(f"companion-{name}-{kind}", "convert hf made", link(f"hf/{name}", target), "leads to")
case("companion-ckpt", "reshard ckpt made", link("ckpt/tokenizer/LICENSE", "/proc/self/environ"), "leads to")
NOTICE = link("ckpt/tokenizer/NOTICE", "../../../outside/secret.txt")
case("companion-export", "convert ckpt made --to hf", NOTICE, "leads to")
case("companion-large", "convert hf made", instead("hf/LICENSE", huge), "LICENSE")
case("companion-pipe", "convert hf made", instead("hf/NOTICE", os.mkfifo), sound=True)
case("template-large", "generate hf --chat --prompt few", instead("hf/chat_template.jinja", huge), "jinja")
CODE = "import os\nopen('../mark', 'w')\nopen('../../mark', 'w')\nclass T: pass\n"
AUTO = {"AutoTokenizer": ["code.T", "code.T"], "AutoConfig": "code.T", "AutoModelForCausalLM": "code.T"}
CODED = both(write("hf/code.py", CODE), put(SETTINGS, AUTO, "auto_map"))
for command in ("convert hf made", FEW, "verify ckpt hf", TUNE):
    case(f"code-{command.split()[0]}", command, both(CODED, put("hf/config.json", AUTO, "auto_map")), sound=True)
case("code-tokenizer", TOKENIZE, both(CODED, instead(TOKENIZER, lambda f: None)), "tokenizer")
case("generation-deep", FEW, ends(DEEP), "not JSON")
case("generation-escapes", FEW, ends(json.dumps({"eos_token_id": ESCAPE})), "eos_token_id")
case("generation-long", FEW, ends(json.dumps({"eos_token_id": LONG})), "eos_token_id")
FAR_IDS = ends('{"eos_token_id": [-5, 18446744073709551615]}')
case("generation-ids", f"{FEW} --max-new-tokens 2", FAR_IDS, sound=True)

# -- tokenizers and chat templates: they are programs

STEP = {"type": "Replace", "pattern": {"String": "e"}, "content": "eeeeeeeeeeeeeeee"}


def splitting(pattern: str) -> Change:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    texts = write("data/texts.jsonl", json.dumps({"text": "a" * 5000 + "!"}))
    return both(put(TOKENIZER, split, "pre_tokenizer"), texts)


EXPLODE = splitting("(a|a|a|a|aa)+$")
BLOW_UP = put(TOKENIZER, {"type": "Sequence", "normalizers": [STEP] * 9}, "normalizer")
case("tokenizer-regex", TOKENIZE, EXPLODE, "the tokenizer fails")
case("tokenizer-regex-evaluated", EVALUATE, EXPLODE, "hf: the tokenizer")
case("tokenizer-replace", TOKENIZE, BLOW_UP, "the tokenizer fails")
case("tokenizer-replace-generated", FEW, BLOW_UP, "hf: the tokenizer")
DECODERS = {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, *[STEP | {"pattern": {"Regex": "."}}] * 9]}
case("tokenizer-decoder", f"{FEW} --max-new-tokens 9", put(TOKENIZER, DECODERS, "decoder"), "hf: the tokenizer")
case("tokenizer-empty", TOKENIZE, write(TOKENIZER, b""), "tokenizer.json")
case("tokenizer-no-json", EVALUATE, write(TOKENIZER, ESCAPE), "tokenizer")
case("tokenizer-deep", TOKENIZE, write(TOKENIZER, DEEP), "tokenizer.json")
case("tokenizer-large", TOKENIZE, write(TOKENIZER, b" " * (65 << 20)), "tokenizer.json has 68157440 bytes")
case("tokenizer-model", FEW, put(TOKENIZER, {"type": "Evil" + ESCAPE}, "model"), "tokenizer")
FAR_ID, ONE = put(TOKENIZER, 4_000_000_000, "model", "vocab", "a"), "generate hf --prompt a"
case("tokenizer-ids", TOKENIZE, FAR_ID, "", sound=True)
case("tokenizer-ids-generated", ONE, FAR_ID, "")
ADDED = {"id": 4_294_967_295, "content": "a", "special": True}
ADDED |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
case("tokenizer-added", ONE, put(TOKENIZER, [ADDED], "added_tokens"), sound=True)
NOTHING = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
case("tokenizer-postprocessor", TUNE, put(TOKENIZER, NOTHING, "post_processor"), sound=True)
case("tokenizer-empty-vocabulary", TOKENIZE, put(TOKENIZER, {}, "model", "vocab"), "")
case("tokenizer-settings-list", TOKENIZE, write(SETTINGS, b"[]"), "tokenizer_config.json")
case("tokenizer-settings-deep", "convert hf made", write(SETTINGS, DEEP), "tokenizer_config.json")
case("tokenizer-settings-class", EVALUATE, put(SETTINGS, "os.system", "tokenizer_class"), sound=True)
case("tokenizer-settings-end", TOKENIZE, put(SETTINGS, {"content": ["x"]}, "eos_token"), "")
case("tokenizer-settings-escapes", TOKENIZE, put(SETTINGS, ESCAPE, "eos_token"), "")
case("tokenizer-settings-long", EVALUATE, put(SETTINGS, LONG, "eos_token"), sound=True)

CHAT = "generate hf --chat --prompt few"
TEMPLATES: Mapping[str, str] = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "product": "{{ 'a' * 10000000000 }}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "system": "{{ cycler.__init__.__globals__.os.system('touch ../mark') }}",
    "joiner": "{{ joiner.__init__.__globals__['__builtins__']['open']('../mark', 'w') }}",
    "lipsum": "{{ lipsum.__globals__['os'].environ }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '../../outside/secret.txt' as x %}{{ x }}",
    "raises": "{{ raise_exception('" + ESCAPE + "') }}",
    "raises-long": "{{ raise_exception('x' * 3000000) }}",
    "syntax": "{% for %}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "number": "{{ 3 }}",
    "surrogate": "{{ '\\ud800' }}",
    "wide": "{{ '%1000000000s' % 'a' }}",
    "centre": "{{ 'a'.center(10000000000) }}",
}
for number, (name, text) in enumerate(TEMPLATES.items()):
    command = CHAT if number % 2 else TUNE
    case(f"template-{name}", command, write("hf/chat_template.jinja", text), sound=True)
case("template-none", CHAT, instead("hf/chat_template.jinja", lambda f: None), "no chat template")

# -- data

JSONL: Mapping[str, tuple[bytes, str]] = {
    "deep": (DEEP, "nested too deeply"),
    "no-json": (b"{\n", "not JSON"),
    "no-utf-8": (b'{"text": "\xff"}', "not UTF-8"),
    "nul": (bytes(1000), "not JSON"),
    "number": (b'{"text": ' + b"9" * 10_000 + b"}", "line 1"),
    "line-long": (b'{"text": "' + b"x" * (33 << 20) + b'"}', "longer than 33,554,432 bytes"),
    "keys-long": (json.dumps({LONG: 1}).encode(), "no key 'text'"),
    "keys-escapes": (json.dumps({ESCAPE: 1}).encode(), "no key 'text'"),
    "keys-many": (json.dumps({str(i): 1 for i in range(200_000)}).encode(), "no key 'text'"),
    "surrogate": (b'{"text": "\\ud800"}', "surrogate"),
    "list": (b"[" * 500 + b"]" * 500, "not an object"),
    "empty": (b"", "no text"),
}
for name, (content, says) in JSONL.items():
    case(f"jsonl-{name}", TOKENIZE, write("data/texts.jsonl", content), says)

for name, row in {
    "role-escapes": {"messages": [{"role": ESCAPE, "content": "x"}]},
    "role-long": {"messages": [{"role": LONG, "content": "x"}]},
    "messages-text": {"messages": ESCAPE},
    "content-deep": {"messages": [{"role": "user", "content": json.loads("[" * 900 + "]" * 900)}]},
    "tools-deep": {"messages": [{"role": "assistant", "content": "x"}], "tools": "[" * 100_000},
    "tools-number": {"messages": [{"role": "assistant", "content": "x"}], "tools": [{"a": 10**300}]},
    "keys-escapes": {ESCAPE: 1},
    "empty": {"prompt": "", "completion": ""},
    "calls-deep": {"conversations": [{"from": "function_call", "value": "[" * 100_000}]},
    "speakers": {"conversations": [{"from": ESCAPE, "value": "x"}]},
}.items():
    command = TUNE if "tools" not in name else "evaluate hf --data data/chats.jsonl"
    case(f"chats-{name}", command, write("data/chats.jsonl", json.dumps(row)), "", sound="tools" in name)

PACKED = "pretrain tuning.yaml data.train=data/a.jsonl.gz"


def filled(begin: bytes, fill: bytes, size: int) -> Change:
    """A gzip file of so many MiB, which are made when they are written: most sessions only look at the cases."""

    def change(folder: Path) -> None:
        (folder / "data/a.jsonl.gz").write_bytes(gzip.compress(begin + fill * (size << 20), 1))

    return change


case("gz-bomb", PACKED, filled(b"", b"\n", 300), BOMB)
case("gz-bomb-line", PACKED, filled(b"", b" ", 300), BOMB)
case("gz-bomb-example", PACKED, filled(b'{"text": "', b"x", 34), "longer than")
case("gz-truncated", PACKED, write("data/a.jsonl.gz", gzip.compress(b"{}\n" * 99)[:-9]), "no whole gzip file")
case("gz-garbage", PACKED, write("data/a.jsonl.gz", b"\x1f\x8b" + bytes(99)), "no whole gzip file")
case("parquet-garbage", PARQUET, write("data/a.parquet", b"PAR1" + bytes(99) + b"PAR1"), "parquet")
FOOTER = b"PAR1" + bytes(99) + struct.pack("<I", 1 << 31) + b"PAR1"
case("parquet-footer", PARQUET, write("data/a.parquet", FOOTER), "parquet")


def zstandard(folder: Path) -> None:
    import pyarrow

    data = b"\n" * (300 << 20)
    (folder / "data/a.jsonl.zst").write_bytes(pyarrow.Codec("zstd").compress(data, asbytes=True))


ZSTANDARD, FOLDER_OF = "pretrain tuning.yaml data.train=data/a.jsonl.zst", "pretrain tuning.yaml data.train=data/set"
case("zst-bomb", ZSTANDARD, zstandard, BOMB)
case("zst-garbage", ZSTANDARD, write("data/a.jsonl.zst", b"\x28\xb5\x2f\xfd" + bytes(99)), "no whole zstandard file")
case("arrow-garbage", FOLDER_OF, write("data/set/train.arrow", b"\xff" * 999), "no arrow file")
STATE = both(write("data/set/state.json", "[" * 9999), write("data/set/a.jsonl", b""))
case("set-state", FOLDER_OF, STATE, "state.json")
case("set-link", FOLDER_OF, link("data/set/train.jsonl", "../../../outside/secret.txt"), "leads out of its folder")


def repeating(folder: Path) -> None:
    """A table of a hundred rows that all are the same MiB, which is in the file once."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": ["x" * 2**20] * 100})
    pyarrow.parquet.write_table(table, folder / "data/a.parquet", compression="zstd")


case("parquet-bomb", PARQUET, repeating, BOMB)
case("parquet-bomb-tokenized", TOKENIZE.replace("texts.jsonl", "a.parquet"), repeating, BOMB)
case("data-pipe", TOKENIZE, instead("data/texts.jsonl", os.mkfifo), "", sound=False)
case("data-device", FOLDER, link("data/a.txt", "/dev/zero"), sound=True)
case("data-link", FOLDER, link("data/a.txt", "../../outside/secret.txt"), sound=True)
case("data-link-folder", FOLDER, link("data/more", "../../outside"), sound=True)
case("data-name", FOLDER, write(f"data/{ESCAPE}.jsonl", b"{"), "not JSON")
LARGE_TEXT = instead("data/a.txt", huge)
case("text-large", TOKENIZE.replace("texts.jsonl", "a.txt"), LARGE_TEXT, "more than 134,217,728 bytes")


def idx(how: Callable[[bytearray], object], name: str = "data/tokens.idx") -> Change:
    def changed(content: bytes) -> bytes:
        made = bytearray(content)
        how(made)
        return bytes(made)

    return raw(name, changed)


def overlapping(folder: Path) -> None:
    """A kilobyte of data, and an index of 20,000 sequences that all are that."""
    count = 20_000
    (folder / "data/tokens.bin").write_bytes(bytes(2**20))
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, count, 2) + struct.pack("<i", 2**19) * count
    (folder / "data/tokens.idx").write_bytes(index + bytes(8 * count) + struct.pack("<qq", 0, count))


TOKENS: Mapping[str, tuple[Change, str]] = {
    "overlapping": (overlapping, "they overlap"),
    "empty": (write("data/tokens.idx", b""), "fewer than its header"),
    "magic": (write("data/tokens.idx", ESCAPE.encode() * 9), "no index of tokens"),
    "sequences-2^62": (idx(lambda b: struct.pack_into("<Q", b, 18, 1 << 62)), "bytes"),
    "bounds-2^62": (idx(lambda b: struct.pack_into("<Q", b, 26, 1 << 62)), "bytes"),
    "dtype": (idx(lambda b: struct.pack_into("<B", b, 17, 200)), "dtype"),
    "length-negative": (idx(lambda b: struct.pack_into("<i", b, 34, -5)), "tokens.idx"),
    "pointer-beyond": (idx(lambda b: struct.pack_into("<q", b, 34 + 32, 1 << 60)), "tokens.idx"),
    "ids-beyond": (write("data/tokens.bin", b"\xff" * 192), "65535"),
    "ids-negative": (both(idx(lambda b: b.__setitem__(17, 3)), write("data/tokens.bin", b"\xff" * 192)), "-1"),
    "bin-short": (write("data/tokens.bin", b"\0"), "tokens"),
    "bin-pipe": (instead("data/tokens.bin", os.mkfifo), "tokens.bin"),
}
for number, (name, (change, says)) in enumerate(TOKENS.items()):
    command = "evaluate hf --data data/tokens" if number % 2 or "ids" in name else "pretrain recipe.yaml"
    case(f"tokens-{name}", command, change, says)
FACTS = asdict(Corpus("tokens", 1, 1, 1, 1.0, 9, 0, 1.0, 0, 0))
for name, content in {
    "deep": DEEP,
    "list": b"[]",
    "large": LARGE,
    "fields": b'{"a": 1}',
    "escapes": json.dumps(FACTS | {"vocabulary": ESCAPE}).encode(),
    "number": json.dumps(FACTS | {"vocabulary": 1 << 60}).encode(),
}.items():
    command = "inspect data" if name in ("escapes", "fields", "list") else "pretrain recipe.yaml"
    case(f"corpus-{name}", command, write("data/corpus.json", content), "")

# -- parts of a corpus, and what an interrupted run has left

PART, MERGE = "parts/corpus.part-1-of-1", "merge_tokens parts"
for name, (change, says) in {
    "deep": (write(f"{PART}/part.json", DEEP), "is damaged"),
    "large": (write(f"{PART}/part.json", LARGE), "part.json"),
    "escapes": (put(f"{PART}/part.json", ESCAPE, "made", "--text-key"), ""),
    "counts": (put(f"{PART}/part.json", [1 << 62] * 9, "tally", "counts"), "holds other documents"),
    "device": (link(f"{PART}/part.json", "/dev/zero"), "not finished"),
    "outside": (link(f"{PART}/part.json", "../../../outside/secret.txt"), "leads to"),
    "tokenizer": (link(f"{PART}/tokenizer.json", "../../../outside/secret.txt"), "leads to"),
    "number": (write(f"parts/corpus.part-1-of-{10**200}/part.json", b"{}"), "has parts of 1 and of"),
}.items():
    case(f"part-{name}", MERGE, change, says, sound=name == "escapes")
case("partial-link", TOKENIZE, link("made/.corpus.partial", "../../outside"), "was not made here")
for name, content in {"deep": DEEP, "list": b"[]", "escapes": ESCAPE.encode()}.items():
    kept = both(write("made/.corpus.partial/.lock", b""), write("made/.corpus.partial/progress.json", content))
    case(f"partial-{name}", f"{TOKENIZE} --resume", kept, "is damaged")

# -- recipes

RECIPES: Mapping[str, tuple[str, str]] = {
    "environment": ("out: '${oc.env:MEGACORE_CANARY}'", "is not resolved"),
    "tag": ("out: !!python/object/apply:os.system ['touch ../mark']", "recipe.yaml"),
    "tag-new": ("out: !!python/object/new:os.system ['touch ../mark']", "recipe.yaml"),
    "alias-bomb": (
        "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
        + "\n".join(f"{y}: &{y} [{','.join(['*' + x] * 10)}]" for x, y in zip("abcdefgh", "bcdefghi", strict=True)),
        "recipe.yaml",
    ),
    "alias-loop": ("model: &a {a: *a}", "recipe.yaml"),
    "merge-bomb": (
        "a0: &a0 {x: 1}\n" + "\n".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 40)),
        "<< takes one mapping",
    ),
    "alias-chain": (
        "a0: &a0 [1]\n" + "\n".join(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 3000)),
        "nested more than 32",
    ),
    "deep": ("model: " + "[" * 100_000, "nested more than 32"),
    "deep-dotted": ("model: {a: 1}\nout: " + "{a: " * 100 + "1" + "}" * 100, "nested more than 32"),
    "large": ("a: 1\n" * 2**18, "more than 1,048,576 bytes"),
    "key-long": (f"? {LONG[:900_000]}\n: 1", "unknown key"),
    "key-escapes": ('"\\e[31mred": 1', ""),
    "value-escapes": ('train: {steps: "\\e[31mred"}', "train.steps"),
    "value-long": (f"train: {{steps: {LONG[:900_000]}}}", "train.steps"),
    "path-escapes": ('data: {train: "\\e[31mred"}', ""),
    "nul": ("out: \0", "recipe.yaml"),
    "not-utf-8": ("\udcff", "recipe.yaml"),
    "numbers": ("train: {steps: 999999999999999999999999999999}\nmesh: {tp: 99999999999999}", ""),
    "batch": ("batch: {global_size: 1000000000000, micro_size: 1}\n", ""),
    "preset": ('model: {preset: "\\e[31m"}', ""),
    "config-device": ("model: {config: /dev/zero}", ""),
    "config-outside": ("model: {config: ../outside/secret.txt}", ""),
}
for number, (name, (text, says)) in enumerate(RECIPES.items()):
    command = ("pretrain recipe.yaml", "plan recipe.yaml")[number % 2]
    case(f"recipe-{name}", command, write("recipe.yaml", text), says)
case("recipe-pipe", "pretrain recipe.yaml", instead("recipe.yaml", os.mkfifo), "recipe.yaml")
case("recipe-override", "pretrain recipe.yaml out=${oc.env:MEGACORE_CANARY}", nothing, "is not resolved")
case("template-outside", TUNE + " chat.template=/proc/self/environ", nothing, "")

# -- the folders of runs

RUN = "pretrain recipe.yaml checkpoint.resume=auto"
for name in ("config.yaml", "metrics.jsonl", "experts.jsonl", "loss.png", "run.lock"):
    case(f"run-{name}", RUN, link(f"run/{name}", "../../outside/secret.txt"), sound=True)
case("run-checkpoints", RUN, link("run/checkpoints", "../../outside"), sound=True)
case("run-metrics-deep", RUN, write("run/metrics.jsonl", DEEP), sound=True)
case("run-experts-deep", RUN, write("run/experts.jsonl", DEEP), sound=True)
case("run-index-deep", RUN, write("run/checkpoints/step-00000001/index.json", DEEP), "not JSON")
case("run-lock-deep", RUN, write("run/run.lock", DEEP), sound=True)


def random_bytes(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


OF_RANDOM_BYTES = ("hf/config.json", TOKENIZER, SETTINGS, "ckpt/index.json", "data/tokens.idx", "recipe.yaml")
for number, name in enumerate((*OF_RANDOM_BYTES, "hf/chat_template.jinja")):
    command = {"d": "pretrain recipe.yaml", "r": "plan recipe.yaml", "c": "inspect ckpt"}.get(name[0], CHAT)
    case(f"random-{Path(name).name}", command, write(name, random_bytes(4096, number)), "")
