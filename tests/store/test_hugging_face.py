"""Hugging Face folders as sources: everything that real ones hold is read, everything else is refused by name."""

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from changes import link
from families import LIGHTNING, NEVER_TIED, random_model, rotated, saved, small
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, GPT2LMHeadModel, PreTrainedModel
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from megacore.models import registry
from megacore.models.registry import FAMILIES, configure
from megacore.store.conversions.conversion import to_hugging_face
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.accounting import summary
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.tools import convert

Tensors = dict[str, torch.Tensor]

HEAD = "lm_head.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
UNSIGNED = {
    torch.int64: np.uint64,
    torch.float64: np.uint64,
    torch.float32: np.uint32,
    torch.float16: np.uint16,
    torch.bfloat16: np.uint16,
}


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


def in_shards(folder: Path, of: PreTrainedModel) -> None:
    (folder / SINGLE).unlink()
    of.save_pretrained(folder, max_shard_size="4KB")


def shuffled(folder: Path, of: PreTrainedModel) -> None:
    """Shards whose names are exchanged: the numbers in them mean nothing."""
    in_shards(folder, of)
    files = sorted(file.name for file in folder.glob("model-*.safetensors"))
    assert len(files) > 3
    names = dict(zip(files, [*files[1:], files[0]], strict=True))
    for file in files:
        (folder / file).rename(folder / f"moved-{file}")
    for file in files:
        (folder / f"moved-{file}").rename(folder / names[file])
    edit_json(folder, INDEX, lambda i: i.update(weight_map={t: names[f] for t, f in reversed(i["weight_map"].items())}))


def named(*words: str) -> Callable[[Path, PreTrainedModel], None]:
    """The table that is embedding and head by the name of one of them, or of both."""

    def form(folder: Path, of: PreTrainedModel) -> None:
        names = {"embedding": embedding(of), "head": registry.family(of.config.model_type).config.tied[1]}

        def store(tensors: Tensors) -> None:
            (table, *_) = [t for t in map(tensors.pop, names.values(), [None, None]) if t is not None]
            tensors |= {names[word]: table for word in words}

        edit(folder, store)

    return form


FORMS: dict[str, tuple[bool, Callable[[Path, PreTrainedModel], object]]] = {
    "tied": (True, lambda folder, of: None),
    "untied": (False, lambda folder, of: None),
    "shards": (False, in_shards),
    "shards in any order": (False, shuffled),
    "tied, by the embedding": (True, named("embedding")),
    "tied, by the head": (True, named("head")),
    "tied, twice": (True, named("embedding", "head")),
}
"""{what a folder holds: (whether the model is tied, how what transformers saves becomes that)}"""


@pytest.mark.in_turn(10)
@pytest.mark.quick
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves(family: str, tmp_path: Path) -> None:
    models = {tied: model(family, tie_word_embeddings=tied) for tied in (False, True)}
    for name, (tied, form) in FORMS.items():
        if tied and family in NEVER_TIED:
            continue
        folder, theirs = tmp_path / name, models[tied]
        theirs.save_pretrained(folder)
        form(folder, theirs)
        opened = assert_holds(folder, weights(theirs))
        assert opened.config.family == family and opened.ignored == ()
        assert opened.raw == json.loads((folder / "config.json").read_text())


def test_the_single_file_counts_where_there_is_an_index_too(tmp_path: Path) -> None:
    """As in transformers, which never looks at the index then."""
    old, new = model("gpt2"), model("gpt2")
    torch.nn.init.normal_(new.get_parameter("transformer.wpe.weight"))
    old.save_pretrained(tmp_path, max_shard_size="4KB")
    save_file({name: t.clone() for name, t in weights(new).items()}, tmp_path / SINGLE, {"format": "pt"})
    assert_holds(tmp_path, weights(new))
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.equal(*(of.get_parameter("transformer.wpe.weight") for of in (loaded, new)))


@pytest.mark.in_turn(10)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_model_lacks_the_prefix(family: str, tmp_path: Path) -> None:
    head = any(param.name == "head.bias" for param in configure({"preset": f"{family}-tiny"}).params())
    if head or family in NEVER_TIED:
        pytest.skip("its head has more than the embedding's table")
    theirs = model(family, AutoModel, tie_word_embeddings=True)
    theirs.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / SINGLE))
    prefix = theirs.base_model_prefix
    assert not any(name.startswith(prefix) for name in names)
    whole = {bare: name for name, bare in configure({"preset": f"{family}-tiny"}).base_names.items()}
    opened = assert_holds(tmp_path, {whole.get(name, f"{prefix}.{name}"): t for name, t in weights(theirs).items()})
    assert opened.config.base_architecture() == type(theirs).__name__

    to_hugging_face(opened, 10**9).write(tmp_path / "again", 1)
    assert set(load_file(tmp_path / "again" / SINGLE)) == names
    again = AutoModel.from_pretrained(tmp_path / "again")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())


def test_what_lightning_attention_computes_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers saves it, and computes it again where a file has none."""
    monkeypatch.setattr(MiniMaxLightningAttention, "__init__", LIGHTNING)
    theirs = model("minimax")
    theirs.save_pretrained(tmp_path / "theirs")
    names = {*theirs.state_dict()} - {name for name, _ in theirs.named_parameters()}
    opened = HuggingFace.open(tmp_path / "theirs")
    assert {*opened.ignored} == names and len(names) == 4
    to_hugging_face(opened, 10**9).write(tmp_path / "ours", 1)
    assert names.isdisjoint(load_file(tmp_path / "ours" / SINGLE))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())


def test_tied_twice_is_compared_to_the_last_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megacore.store.tensor_files.accounting._COMPARED_AT_ONCE", 7)
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
    "llama": ("llama", model, {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in (0, 1)}),
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


# -- what is refused, beside the table of bad folders


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
        t["strange.weight"] = t.pop("model.norm.weight")
        t["model.layers.0.self_attn.q_proj.weight"] = t["model.layers.0.self_attn.q_proj.weight"][:3]
        t["model.layers.1.mlp.up_proj.weight"] = t["model.layers.1.mlp.up_proj.weight"].to(torch.int8)

    edit(tmp_path, change)
    link("tokenizer.json", "gone")(tmp_path)
    with pytest.raises(StoreError) as caught:
        HuggingFace.open(tmp_path)
    assert len(str(caught.value).splitlines()) == 6
    for name in ("model.norm", "strange.weight", "0.self_attn.q_proj", "1.mlp.up_proj.weight", "tokenizer.json"):
        assert name in str(caught.value)
    # Of the config too, with what can be told of the files without it.
    edit_json(tmp_path, "config.json", lambda c: c.update(quantization_config={"bits": 4}, sliding_window=3))
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


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("family", "value"),
    rotated([..., None, True, -1, 0, 2**63, 1.5, 1e9, "x", [], [1], {}, {"a": 1}, {"rope_type": 3}], few=4),
)
def test_any_value_in_any_field_is_read_or_refused(family: str, value: object, tmp_path: Path) -> None:
    """Also none at all, in a file of all fields, and in one of so few that the others follow from them."""
    model(family).save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    kind, presets = registry.family(family)
    few = {"model_type": family, **next(fields for preset, fields in presets.items() if preset.endswith("-tiny"))}
    for fields in (whole, few):
        for name in {*fields, *kind.readable()}:
            given = {each: held for each, held in {**fields, name: value}.items() if held is not ...}
            (tmp_path / "config.json").write_text(json.dumps(given))
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


def as_published(tensors: Tensors) -> None:
    """Norms of layers that attend have another name, and convolutions end where queries, keys and values do."""
    for name in [*tensors]:
        layer = name.removesuffix("post_feedforward_layernorm.weight")
        if layer != name:
            tensors[f"{layer}post_attention_layernorm.weight"] = tensors.pop(f"{layer}feedforward_layer_norm.weight")
        elif "q_conv1d" in name:
            names = [name.replace("q_conv1d", f"{each}_conv1d") for each in "qkv"]
            parts = torch.cat([tensors[each] for each in names]).split([64, 64, 96])
            tensors |= dict(zip(names, parts, strict=True))


def test_published_olmo_hybrid_goes_there_and_back(tmp_path: Path) -> None:
    theirs, ours, back = (tmp_path / each for each in ("theirs", "ours", "back"))
    made = model("olmo_hybrid", linear_value_head_dim=24)
    made.save_pretrained(theirs)
    with pytest.raises(
        StoreError, match=r"conv1d have \[75, 75, 74\] channels, as transformers .* into \[64, 64, 96\]"
    ):
        HuggingFace.open(theirs)
    edit(theirs, as_published)
    assert convert.main([str(theirs), str(ours), "--tp", "2", "--pp", "2"]) == 0
    assert convert.main([str(ours), str(back), "--to", "hf"]) == 0
    written, tensors = load_file(back / SINGLE), load_file(theirs / SINGLE)
    assert written.keys() == tensors.keys() and all(torch.equal(written[name], t) for name, t in tensors.items())
    read, tokens = AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32), torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, made.eval()(tokens).logits)
