"""Hugging Face folders as sources: everything that real ones hold is read, everything else is refused by name."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import random_model, rotated, saved, small
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, GPT2LMHeadModel, PreTrainedModel

from megacore.store.accounting import summary
from megacore.store.convert import to_hugging_face
from megacore.store.hugging_face import HuggingFace
from megacore.store.strict_json import StoreError
from models import registry
from models.registry import FAMILIES, configure

Tensors = dict[str, torch.Tensor]

HEAD = "lm_head.weight"
FIRST = ", ".join([*FAMILIES][:3])
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
UNSIGNED = {torch.float64: np.uint64, torch.float32: np.uint32, torch.float16: np.uint16, torch.bfloat16: np.uint16}


def model(family: str, auto: Any = AutoModelForCausalLM, **fields: Any) -> PreTrainedModel:
    sizes = {"vocab_size": 40, "max_position_embeddings": 16, "num_hidden_layers": 2}
    return random_model(small(family, **(sizes | fields)), seed=3, auto=auto)


def assert_holds(folder: Path, tensors: Mapping[str, torch.Tensor]) -> HuggingFace:
    """What is read is bitwise this, and nothing else is."""
    opened = HuggingFace.open(folder)
    stored = {s.name: s for s in opened.stored()}
    assert set(stored) == set(tensors)
    for name, tensor in tensors.items():
        dtype, bits = opened.read()(stored[name])
        assert dtype == opened.dtype("weights", stored[name])
        wanted = tensor.contiguous().flatten().view(torch.uint8).numpy().view(UNSIGNED[tensor.dtype])
        assert bits.shape == tensor.shape == stored[name].shape
        assert np.array_equal(bits.reshape(-1), wanted), name
    return opened


def weights(of: PreTrainedModel) -> Tensors:
    """What it saves, by itself."""
    return {name: t.detach().clone() for name, t in saved(of).items()}


def embedding(of: PreTrainedModel) -> str:
    """The name of its table of tokens."""
    table = of.get_input_embeddings().weight
    return next(name for name, parameter in of.named_parameters() if parameter is table)


def edit(folder: Path, change: Callable[[Tensors], Any]) -> None:
    """Change the tensors of a folder's single file."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, folder / SINGLE, {"format": "pt"})


def edit_json(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


# -- what real folders hold


@pytest.mark.quick
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves(family: str, tied: bool, tmp_path: Path) -> None:
    theirs = model(family, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path)
    opened = assert_holds(tmp_path, weights(theirs))
    assert opened.config.family == family and opened.ignored == ()
    assert opened.raw == json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_in_any_order(family: str, tmp_path: Path) -> None:
    theirs = model(family, tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path, max_shard_size="4KB")
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 3
    assert_holds(tmp_path, weights(theirs))
    # The numbers in the names mean nothing.
    names = {file.name: other.name for file, other in zip(files, [*files[1:], files[0]], strict=True)}
    for file in files:
        file.rename(tmp_path / f"moved-{file.name}")
    for file in files:
        (tmp_path / f"moved-{file.name}").rename(tmp_path / names[file.name])
    edit_json(
        tmp_path, INDEX, lambda i: i.update(weight_map={t: names[f] for t, f in reversed(i["weight_map"].items())})
    )
    assert_holds(tmp_path, weights(theirs))


def test_the_single_file_counts_where_there_is_an_index_too(tmp_path: Path) -> None:
    """As in transformers, which never looks at the index then."""
    old, new = model("gpt2"), model("gpt2")
    torch.nn.init.normal_(new.get_parameter("transformer.wpe.weight"))
    old.save_pretrained(tmp_path, max_shard_size="4KB")
    save_file({name: t.clone() for name, t in weights(new).items()}, tmp_path / SINGLE, {"format": "pt"})
    assert_holds(tmp_path, weights(new))
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.equal(*(of.get_parameter("transformer.wpe.weight") for of in (loaded, new)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_model_lacks_the_prefix(family: str, tmp_path: Path) -> None:
    if any(param.name == "head.bias" for param in configure({"preset": f"{family}-tiny"}).params()):
        pytest.skip("its head has more than the embedding's table")
    theirs = model(family, AutoModel, tie_word_embeddings=True)
    theirs.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / SINGLE))
    prefix = theirs.base_model_prefix
    assert not any(name.startswith(prefix) for name in names)
    opened = assert_holds(tmp_path, {f"{prefix}.{name}": t for name, t in weights(theirs).items()})
    assert opened.config.base_architecture() == type(theirs).__name__

    to_hugging_face(opened, 10**9).write(tmp_path / "again", 1)
    assert set(load_file(tmp_path / "again" / SINGLE)) == names
    again = AutoModel.from_pretrained(tmp_path / "again")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())


@pytest.mark.parametrize("names", ["embedding", "head", "both"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tied_once_or_twice(family: str, names: str, tmp_path: Path) -> None:
    theirs, head = model(family, tie_word_embeddings=True), registry.family(family).config.tied[1]
    theirs.save_pretrained(tmp_path)

    def store(tensors: Tensors) -> None:
        one = embedding(theirs)
        tensors.setdefault(one, tensors.get(head, torch.empty(0)))
        table = tensors.pop(one)
        tensors.pop(head, None)
        tensors |= {"embedding": {one: table}, "head": {head: table}}.get(names, {one: table, head: table})

    edit(tmp_path, store)
    assert_holds(tmp_path, weights(theirs))


def test_tied_twice_is_compared_to_the_last_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megacore.store.accounting._COMPARED_AT_ONCE", 7)
    theirs = model("llama", tie_word_embeddings=True)
    theirs.save_pretrained(tmp_path)

    def store(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[embedding(theirs)].clone()
        tensors[HEAD][-1, -1] = torch.nextafter(tensors[HEAD][-1, -1], torch.tensor(9.0))

    edit(tmp_path, store)
    with pytest.raises(StoreError, match=r"model.embed_tokens.weight .* and lm_head.weight .* differ, though tie_word"):
        HuggingFace.open(tmp_path)


LEFTOVERS: dict[str, tuple[str, Callable[..., Any], Mapping[str, torch.Tensor]]] = {
    "gpt2 masks": (
        "gpt2",
        model,
        {
            f"transformer.h.{i}.attn.{name}": torch.ones(2, 2, dtype=torch.bool)
            for i in (0, 1)
            for name in ("bias", "masked_bias")
        },
    ),
    "gpt2 masks without prefix": (
        "gpt2",
        lambda family: model(family, AutoModel),
        {f"h.{i}.attn.bias": torch.ones(1, 1, 4, 4) for i in (0, 1)},
    ),
    "llama frequencies": (
        "llama",
        model,
        {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in (0, 1)},
    ),
    "llama frequencies once": ("llama", model, {"model.rotary_emb.inv_freq": torch.ones(2)}),
}


@pytest.mark.parametrize("case", LEFTOVERS)
def test_leftovers_that_are_no_weights(case: str, tmp_path: Path) -> None:
    family, make, leftovers = LEFTOVERS[case]
    theirs = make(family)
    theirs.save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update(leftovers))
    prefix = "" if make is model else "transformer."
    opened = assert_holds(tmp_path, {prefix + name: t for name, t in weights(theirs).items()})
    assert set(opened.ignored) == set(leftovers)


def test_leftovers_that_the_index_does_not_name(tmp_path: Path) -> None:
    theirs = model("gpt2")
    theirs.save_pretrained(tmp_path, max_shard_size="4KB")
    shard = next(iter(sorted(tmp_path.glob("model-*.safetensors"))))
    save_file({**load_file(shard), "transformer.h.1.attn.bias": torch.ones(3)}, shard, {"format": "pt"})
    assert assert_holds(tmp_path, weights(theirs)).ignored == ("transformer.h.1.attn.bias",)


def test_mixed_dtypes(tmp_path: Path) -> None:
    theirs = model("llama")
    dtypes = itertools.cycle([torch.float32, torch.bfloat16, torch.float16, torch.float64])
    mixed = {name: t.to(dtype) for (name, t), dtype in zip(weights(theirs).items(), dtypes, strict=False)}
    theirs.save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update(mixed))
    opened = assert_holds(tmp_path, mixed)
    assert {opened.dtype("weights", s) for s in opened.stored()} == {"F32", "BF16", "F16", "F64"}


@pytest.mark.parametrize("shard", ["10GB", "4KB"])
def test_a_snapshot_of_the_hubs_cache(shard: str, tmp_path: Path) -> None:
    """Every file is a link to a blob outside of the folder."""
    theirs = model("llama")
    theirs.save_pretrained(tmp_path / "plain", max_shard_size=shard)
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted((tmp_path / "plain").iterdir())):
        file.rename(blobs / f"{i:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i:064x}")
    opened = assert_holds(snapshot, weights(theirs))
    assert opened.companions()["tokenizer.json"].path == snapshot / "tokenizer.json"


def test_companions(tmp_path: Path) -> None:
    model("llama").save_pretrained(tmp_path)
    travels = [
        *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
        *("vocab.json", "merges.txt", "qwen.tiktoken", "chat_template.jinja", "additional_chat_templates/tool.jinja"),
        *("tekken.json", "tokenizer.model.v7", "tiktoken.model", "chat_template.json", "vocab.txt"),
        *("LICENSE", "LICENSE.txt", "USE_POLICY.md", "generation_config.json"),
    ]
    stays = ["README.md", "training_args.bin", "optimizer.pt", "modeling_custom.py", "original/tokenizer.model"]
    stays += ["processor_config.json", "preprocessor_config.json", "additional_chat_templates/tool.txt"]
    for name in travels + stays:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    found = list(HuggingFace.open(tmp_path).companions())
    assert sorted(found) == sorted(travels)


def test_nothing_heavy_is_imported() -> None:
    script = (
        "import sys, megacore.store.hugging_face, megacore.store.export, models.families.llama, models.families.gpt2\n"
        "print({'torch', 'transformers', 'safetensors'} & set(sys.modules))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# -- what is refused

Break = Callable[[Path], Any]


def config(**fields: Any) -> Break:
    return lambda folder: edit_json(folder, "config.json", lambda c: c.update(fields))


def tensors(change: Callable[[Tensors], Any]) -> Break:
    return lambda folder: edit(folder, change)


def index(change: Callable[[dict[str, Any]], Any]) -> Break:
    return lambda folder: edit_json(folder, INDEX, change)


def named(old: str, new: object) -> Break:
    """Let the index name another file for one tensor."""
    return index(lambda i: i["weight_map"].update({old: new}))


def text(name: str, content: str) -> Break:
    return lambda folder: (folder / name).write_text(content)


def only(*names: str) -> Break:
    """No weights but these empty files."""

    def change(folder: Path) -> None:
        (folder / SINGLE).unlink()
        for name in names:
            (folder / name).write_bytes(b"")

    return change


def renamed(old: str, new: str) -> Break:
    return tensors(lambda t: t.update({new: t.pop(old)}))


def twice(folder: Path) -> None:
    """One tensor in a second shard too."""
    first, second, *_ = sorted(folder.glob("model-*.safetensors"))
    save_file({**load_file(second), **load_file(first)}, second, {"format": "pt"})


def two_dtypes(tensors: Tensors) -> None:
    """The same bits, which are other numbers."""
    tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"].half()
    tensors[HEAD] = tensors["transformer.wte.weight"].view(torch.bfloat16)


def swapped(folder: Path) -> None:
    def change(i: dict[str, Any]) -> None:
        i["weight_map"]["model.norm.weight"], i["weight_map"]["lm_head.weight"] = (
            i["weight_map"]["lm_head.weight"],
            i["weight_map"]["model.norm.weight"],
        )

    edit_json(folder, INDEX, change)


def no_shards(folder: Path) -> None:
    for file in sorted(folder.glob("model-*.safetensors"))[1:3]:
        file.unlink()


def dangling(name: str) -> Break:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("../../blobs/gone")

    return change


def pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


Q0, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"

# {case: (family, sharded, what is done to the folder, what the message says)}
REFUSED: dict[str, tuple[str, bool, Break, tuple[str, ...]]] = {
    "no config": ("llama", False, lambda f: (f / "config.json").unlink(), ("config.json is not there",)),
    "config is a pipe": ("llama", False, pipe, ("config.json is not there, or is no file",)),
    "config is broken": ("llama", False, text("config.json", "{"), ("config.json is not JSON",)),
    "config is a list": ("llama", False, text("config.json", "[]"), ("config.json does not hold a JSON object",)),
    "config has NaN": ("llama", False, text("config.json", '{"a": NaN}'), ("NaN is not JSON",)),
    "config has infinity": ("llama", False, text("config.json", '{"a": 1e999}'), ("1e999 is beyond the range",)),
    "config has a key twice": ("llama", False, text("config.json", '{"a": 1, "a": 2}'), ("'a' stands twice",)),
    "config is deep": ("llama", False, text("config.json", '{"a":' * 100_000), ("config.json is not JSON",)),
    "model_type unknown": (
        "llama",
        False,
        config(model_type="llamma"),
        ("did you mean 'llama'?", f"there are {FIRST}"),
    ),
    "model_type missing": ("llama", False, config(model_type=None), (f"model_type=None: the families are {FIRST}",)),
    "model_type no text": ("llama", False, config(model_type=["llama"]), ("model_type=['llama']: the families",)),
    "field unknown": ("llama", False, config(sliding_window=4, residual=2), ("'sliding_window'", "'residual'")),
    "quantised by config": (
        "llama",
        False,
        config(quantization_config={"bits": 4}),
        ("quantization_config={'bits': 4}",),
    ),
    "a billion layers": (
        "llama",
        False,
        config(num_hidden_layers=10**9),
        ("config.json describes 9000000003 tensors (layer=1000000000), but there are 21",),
    ),
    "layers beyond floats": ("gpt2", False, config(n_layer=10**400), ("is an integer of more than 64 bits",)),
    "vocabulary beyond memory": (
        "llama",
        False,
        config(vocab_size=2**60),
        ("shape [40, 16] instead of [1152921504606846976, 16]",),
    ),
    "pickle": (
        "llama",
        False,
        only("pytorch_model.bin"),
        ("neither model.safetensors nor model.safetensors.index.json, but pytorch_model.bin", "save_pretrained"),
    ),
    "pickles with an index": (
        "llama",
        False,
        only("pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"),
        ("but pytorch_model-00001-of-00001.bin: a pickle can run code", "python -c"),
    ),
    "pickle of another name": ("llama", False, only("consolidated.00.pth"), ("consolidated.00.pth: a pickle",)),
    "gguf": ("llama", False, only("model-q4.gguf"), ("model-q4.gguf: GGUF is not read here",)),
    "shards without an index": (
        "llama",
        True,
        lambda f: (f / INDEX).unlink(),
        ("model-00001-of-", "the index that names them is missing"),
    ),
    "no weights": ("llama", False, only(), ("there is neither model.safetensors nor model.safetensors.index.json",)),
    "adapter": ("llama", False, text("adapter_config.json", "{}"), ("adapter_config.json: an adapter changes",)),
    "weights link to nothing": ("llama", False, dangling(SINGLE), (SINGLE,)),
    "weights truncated": ("llama", False, lambda f: os.truncate(f / SINGLE, 3000), (SINGLE,)),
    "tokenizer links to nothing": (
        "llama",
        False,
        dangling("tokenizer.json"),
        ("tokenizer.json is a link to nothing",),
    ),
    "tensor missing": ("llama", False, tensors(lambda t: t.pop(NORM)), (f"1 tensors are missing: {NORM}",)),
    "tensors missing in layers": (
        "llama",
        False,
        tensors(lambda t: [t.pop(n) for n in [*t] if "q_proj" in n]),
        ("2 tensors are missing: model.layers.{0..1}.self_attn.q_proj.weight",),
    ),
    "tensor unexpected": (
        "llama",
        False,
        tensors(lambda t: t.update(extra=t[NORM])),
        ("1 tensors are not of this model: extra",),
    ),
    "layer unexpected": (
        "llama",
        False,
        config(num_hidden_layers=1),
        ("9 tensors are not of this model", "model.layers.1.self_attn.q_proj.weight"),
    ),
    "biases unexpected": (
        "llama",
        False,
        tensors(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": t[NORM]})),
        ("not of this model: model.layers.0.self_attn.q_proj.bias",),
    ),
    "tensor of another name": (
        "llama",
        False,
        renamed(Q0, Q0.replace("q_proj", "qproj")),
        (f"missing: {Q0}", f"model.layers.0.self_attn.qproj.weight (is it {Q0}?)"),
    ),
    "name for terminals": ("llama", False, tensors(lambda t: t.update({"a\x1b[2J": t[NORM]})), (r"'a\x1b[2J'",)),
    "shape wrong": (
        "llama",
        False,
        config(intermediate_size=20),
        ("shape [24, 16] instead of [20, 16]: model.layers.{0..1}.mlp.gate",),
    ),
    "matrix transposed": (
        "gpt2",
        False,
        tensors(lambda t: t.update({n: t[n].T for n in t if n.endswith("c_fc.weight")})),
        ("shape [64, 16] instead of [16, 64]: transformer.h.{0..1}.mlp.c_fc.weight",),
    ),
    "float8": (
        "llama",
        False,
        tensors(lambda t: t.update({Q0: t[Q0].to(torch.float8_e4m3fn)})),
        ("dtype F8_E4M3 is not one", Q0),
    ),
    "integers": (
        "llama",
        False,
        tensors(lambda t: t.update({Q0: t[Q0].to(torch.int8)})),
        ("dtype I8 is not one of", "quantised"),
    ),
    "booleans": (
        "gpt2",
        False,
        tensors(lambda t: t.update({n: t[n] > 0 for n in t if "ln_f" in n})),
        ("dtype BOOL", "ln_f.bias"),
    ),
    "prefix on some": (
        "gpt2",
        False,
        renamed("transformer.wpe.weight", "wpe.weight"),
        ("some names start with 'transformer.' and some lack it", "; wpe.weight"),
    ),
    "prefix on some, both there": (
        "llama",
        False,
        tensors(lambda t: t.update({"norm.weight": t[NORM]})),
        ("some names start with 'model.' and some lack it", "; norm.weight"),
    ),
    "head missing": (
        "llama",
        False,
        tensors(lambda t: t.pop(HEAD)),
        ("lm_head.weight is missing", "tie_word_embeddings=true"),
    ),
    "tied tables differ": (
        "llama",
        False,
        config(tie_word_embeddings=True),
        ("model.embed_tokens.weight (model.safetensors) and lm_head.weight (model.safetensors) differ",),
    ),
    "tied tables of two dtypes": (
        "gpt2",
        False,
        tensors(two_dtypes),
        ("transformer.wte.weight (model.safetensors) and lm_head.weight (model.safetensors) differ",),
    ),
    "index is broken": ("llama", True, text(INDEX, "{"), ("index.json is not JSON",)),
    "index has NaN": ("llama", True, text(INDEX, '{"metadata": {"total_size": NaN}}'), ("NaN is not JSON",)),
    "index is a list": ("llama", True, text(INDEX, "[]"), ("does not hold a JSON object",)),
    "index is empty": ("llama", True, text(INDEX, "{}"), ("has no weight_map",)),
    "weight_map is a list": ("llama", True, text(INDEX, '{"weight_map": []}'), ("has no weight_map",)),
    "index names a tensor twice": (
        "llama",
        True,
        text(INDEX, '{"weight_map": {"a": "x", "a": "y"}}'),
        ("'a' stands twice",),
    ),
    "index leads up": (
        "llama",
        True,
        named(NORM, "../x.safetensors"),
        ("no .safetensors file of this folder: ../x.safetensors",),
    ),
    "index leads up inside": ("llama", True, named(NORM, "a/../../x.safetensors"), ("folder: a/../../x.safetensors",)),
    "index leads away": ("llama", True, named(NORM, "/tmp/x.safetensors"), ("of this folder: /tmp/x.safetensors",)),
    "index leads up on Windows": ("llama", True, named(NORM, "..\\x.safetensors"), ("folder: ..\\x.safetensors",)),
    "index names a number": ("llama", True, named(NORM, 3), ("no .safetensors file of this folder: 3",)),
    "index names a pickle": ("llama", True, named(NORM, "a.bin"), ("no .safetensors file of this folder: a.bin",)),
    "index names a long file": (
        "llama",
        True,
        named(NORM, "x" * 5000 + ".safetensors"),
        ("names files that are not there: xxx",),
    ),
    "index with a null byte": ("llama", True, named(NORM, "a\0.safetensors"), (r"'a\x00.safetensors'",)),
    "shards missing": ("llama", True, no_shards, ("not there: model-00002-of-", ", model-00003-of-")),
    "index names too much": (
        "llama",
        True,
        index(lambda i: i["weight_map"].update(ghost=i["weight_map"][NORM])),
        ("does not hold", "ghost"),
    ),
    "index names the wrong shard": (
        "llama",
        True,
        swapped,
        ("does not hold what", ".safetensors does): model.norm.weight"),
    ),
    "index names too little": (
        "llama",
        True,
        index(lambda i: i["weight_map"].pop(NORM)),
        (f"{INDEX} does not name tensors of model-", NORM),
    ),
    "tensor in two shards": ("llama", True, twice, ("tensors lie in several files", "model.embed_tokens.weight")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    family, sharded, change, messages = REFUSED[case]
    theirs = model(family)
    folder = tmp_path / "model"
    theirs.save_pretrained(folder, max_shard_size="2KB" if sharded else "1GB")
    HuggingFace.open(folder)
    change(folder)
    with pytest.raises(StoreError) as caught:
        HuggingFace.open(folder)
    assert str(caught.value).startswith(f"{folder} cannot be used:\n- ")
    for message in messages:
        assert message in str(caught.value)


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "nowhere"):
        with pytest.raises(StoreError, match="is not a folder: give the one that holds"):
            HuggingFace.open(path)


def test_a_base_model_without_a_head(tmp_path: Path) -> None:
    model("llama", AutoModel).save_pretrained(tmp_path)
    with pytest.raises(StoreError) as caught:
        HuggingFace.open(tmp_path)
    (problem,) = str(caught.value).splitlines()[1:]
    assert problem == (
        "- lm_head.weight is missing: a base model without its head cannot be trained as a language model. Take the "
        "folder of the LlamaForCausalLM; or if model.embed_tokens.weight serves as head, let config.json say "
        "tie_word_embeddings=true"
    )


def test_all_problems_at_once(tmp_path: Path) -> None:
    model("llama").save_pretrained(tmp_path)

    def change(t: Tensors) -> None:
        t["strange.weight"] = t.pop(NORM)
        t[Q0] = t[Q0][:3]
        t["model.layers.1.mlp.up_proj.weight"] = t["model.layers.1.mlp.up_proj.weight"].to(torch.int8)

    edit(tmp_path, change)
    dangling("tokenizer.json")(tmp_path)
    with pytest.raises(StoreError) as caught:
        HuggingFace.open(tmp_path)
    assert len(str(caught.value).splitlines()) == 6
    for name in (NORM, "strange.weight", Q0, "model.layers.1.mlp.up_proj.weight", "tokenizer.json"):
        assert name in str(caught.value)
    # Of the config too, with what can be told of the files without it.
    config(quantization_config={"bits": 4}, sliding_window=3)(tmp_path)
    os.truncate(tmp_path / SINGLE, 100)
    with pytest.raises(StoreError) as caught:
        HuggingFace.open(tmp_path)
    for name in ("quantization_config", "sliding_window", SINGLE, "tokenizer.json"):
        assert name in str(caught.value)


def test_the_command_that_makes_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is run as it is printed, with a folder whose name a shell would take apart."""
    folder = tmp_path / "my model's"
    theirs = model("gpt2").bfloat16()
    theirs.save_pretrained(folder)
    (folder / SINGLE).unlink()
    torch.save(theirs.state_dict(), folder / "pytorch_model.bin")  # noqa: TID251
    with pytest.raises(StoreError) as caught:
        HuggingFace.open(folder)
    program, option, code, *arguments = shlex.split(str(caught.value).partition("tokenizer's files: ")[2])
    assert (program, option) == ("python", "-c")
    monkeypatch.setattr(sys, "argv", ["-c", *arguments])
    exec(code, {})
    assert_holds(tmp_path / "my model's-safetensors", weights(theirs))


@pytest.mark.parametrize(
    ("family", "value"), rotated([None, True, -1, 0, 2**63, 1.5, "x", [], [1], {}, {"a": 1}, {"rope_type": 3}])
)
def test_any_value_in_any_field_is_read_or_refused(family: str, value: object, tmp_path: Path) -> None:
    model(family).save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    for name in {*whole, "rope_scaling", "rope_theta", "head_dim", "tie_word_embeddings"}:
        (tmp_path / "config.json").write_text(json.dumps({**whole, name: value}))
        try:
            HuggingFace.open(tmp_path)
        except StoreError as error:
            assert str(error).count("\n") < 20  # a line for each kind of weight


def test_summary() -> None:
    names = [f"h.{i}.a.weight" for i in (2, 0, 1, 5)] + ["h.7.b.weight", "x", "h.01.a", "h.3.mlp.4.w", "h.3.mlp.5.w"]
    names += [f"h.{i}.e.{j}.w" for i in range(2) for j in range(4)] + ["h.1.f.0.w", "h.0.f.1.w", "h.1.f.1.w"]
    experts = ["h.{0..1}.e.{0..3}.w", "h.1.f.0.w", "h.{0..1}.f.1.w"]
    assert summary(names) == ["h.{0..2,5}.a.weight", "h.7.b.weight", "x", "h.01.a", "h.3.mlp.{4..5}.w", *experts]
    assert summary([]) == []
