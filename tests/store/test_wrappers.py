"""Models of which one part is of a family here, those that also see: the text model is read, trained and written, and
what else there is goes with it byte by byte."""

import json
import shutil
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from changes import edit_config
from engine import RECIPE, write_recipe
from families import in_float64
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING
from wrapped import SECTIONS, loaded, logits, prompts, saved

from megacore.data.batches import Batch
from megacore.inference.model_loader import microbatch_of, model_from
from megacore.models.assemble import Model
from megacore.models.config import ModelConfigError
from megacore.models.registry import configure, family
from megacore.models.wrappers import WRAPPERS, rewrapped, unwrapped
from megacore.parallel.labels import IGNORE
from megacore.parallel.mesh import Mesh
from megacore.store.conversions.formats import open_folder
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.tensors import TensorFile
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.store.weight_folders.index import CARRIED, read_index
from megacore.tools import convert, inspect, reshard, verify
from megacore.training import main
from megacore.training.save import Saver

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that no test changes."""
    return saved("gemma3", tmp_path_factory.mktemp("gemma") / "hf")


@pytest.fixture(scope="module")
def converted(gemma: Path) -> Path:
    """A checkpoint of it, likewise."""
    assert convert.main([str(gemma), str(gemma.parent / "ours"), "--tp", "2", "--pp", "2"]) == 0
    return gemma.parent / "ours"


def copied(path: Path, target: Path) -> Path:
    shutil.copytree(path, target)
    return target


def assert_same(made: Path, theirs: Path) -> None:
    """Every tensor bit for bit, and every field."""
    one, other = load_file(made / WEIGHTS), load_file(theirs / WEIGHTS)
    assert one.keys() == other.keys()
    assert all(one[name].dtype == t.dtype and torch.equal(one[name], t) for name, t in other.items())
    assert json.loads((made / "config.json").read_text()) == json.loads((theirs / "config.json").read_text())


def logits_of(model: Model, tokens: np.ndarray) -> torch.Tensor | None:
    batch = Batch(tokens, np.full_like(tokens, IGNORE), np.arange(tokens.size)[None], None)
    return model.logits(microbatch_of(model, batch))


@pytest.mark.in_turn(11)
@pytest.mark.parametrize(("name", "part"), [(name, part) for name, each in WRAPPERS.items() for part in each.families])
def test_a_model_that_sees_goes_there_and_back(name: str, part: str, tmp_path: Path) -> None:
    text = {} if WRAPPERS[name].called else {"model_type": part}
    theirs, ours, again, back = (tmp_path / folder for folder in ("hf", "ours", "again", "back"))
    saved(name, theirs, **text)
    assert convert.main([str(theirs), str(ours), "--tp", "2", "--pp", "2"]) == 0
    assert inspect.main([str(ours), "--check"]) == verify.main([str(ours), str(theirs)]) == 0
    assert reshard.main([str(ours), str(again)]) == inspect.main([str(again), "--diff", str(theirs)]) == 0
    assert convert.main([str(again), str(back), "--to", "hf"]) == 0
    assert_same(back, theirs)
    assert json.loads((back / "preprocessor_config.json").read_text()) == {"image_std": [0.5]}  # and no code
    for made, wanted in zip(logits(back, name), logits(theirs, name), strict=True):
        assert torch.equal(made, wanted)
    # Of text alone the three numbers of a position are one.
    tokens = prompts(name)[0]["input_ids"].numpy()
    model = model_from(open_folder(again), Mesh.single(), torch.float64)
    found = logits_of(model, tokens)
    assert found is not None
    whole = loaded(theirs).double()
    for buffer in whole.buffers():  # rotary frequencies are of float32
        buffer.data = buffer.data.float() if buffer.is_floating_point() else buffer.data
    with in_float64(), torch.no_grad():
        wanted = whole(**prompts(name)[0]).logits[0]
    assert wanted.dtype == torch.float64
    assert (found - wanted).abs().max() <= 1e-9 * wanted.abs().max()


def turned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inputs first, as Qwen publishes Qwen3-VL with experts; transformers reads both, and saves the other."""
    return {name: t.mT.contiguous() if ".experts." in name else t for name, t in tensors.items()}


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All of a layer in one, as transformers has Qwen3.5's in memory and reads them; it saves each by itself."""
    made = dict(tensors)
    for name in [name for name in tensors if ".experts.0.gate_proj" in name]:
        layer, count = name.split("0.gate_proj")[0], sum(name.split("0.gate")[0] in each for each in tensors) // 3
        gate, up, down = (
            torch.stack([made.pop(f"{layer}{expert}.{each}_proj.weight") for expert in range(count)])
            for each in ("gate", "up", "down")
        )
        made |= {f"{layer}gate_up_proj": torch.cat([gate, up], 1), f"{layer}down_proj": down}
    return made


@pytest.mark.parametrize(("name", "lie"), [("qwen3_vl_moe", turned), ("qwen3_5_moe", stacked)])
def test_experts_that_lie_otherwise(
    name: str, lie: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    theirs, ours, back = (tmp_path / folder for folder in ("hf", "ours", "back"))
    saved(name, theirs)
    wanted, tensors = logits(theirs, name), load_file(theirs / WEIGHTS)
    made = lie(tensors)
    assert any(key not in tensors or tensors[key].shape != tensor.shape for key, tensor in made.items())
    save_file(made, theirs / WEIGHTS, {"format": "pt"})
    assert all(map(torch.equal, logits(theirs, name), wanted))
    assert convert.main([str(theirs), str(ours), "--tp", "2", "--ep", "2"]) == 0
    assert convert.main([str(ours), str(back), "--to", "hf"]) == 0
    assert_same(back, theirs)
    found = logits_of(
        model_from(open_folder(ours), Mesh.single(), torch.float64), prompts(name)[0]["input_ids"].numpy()
    )
    assert found is not None and (found - wanted[0][0]).abs().max() <= 1e-5 * wanted[0].abs().max()


def test_keys_that_nothing_multiplies_are_left_out(tmp_path: Path) -> None:
    """Published files of Gemma 4 have some for layers that look at those of another one."""
    theirs = saved("gemma4", tmp_path / "hf")
    tensors = load_file(theirs / WEIGHTS)
    unused = "model.language_model.layers.3.self_attn.k_proj.weight"
    save_file({**tensors, unused: torch.zeros(2)}, theirs / WEIGHTS, {"format": "pt"})
    said = "have none of their own; 1 tensors of model.layers.3.self_attn.k_proj are left out"
    assert said in "\n".join(HuggingFace.open(theirs).remarks)
    assert convert.main([str(theirs), str(tmp_path / "ours")]) == 0
    assert convert.main([str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "hf"]) == 0
    found = load_file(tmp_path / "back" / WEIGHTS)
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)


@pytest.mark.parametrize(
    "naming", [("model.language_model.", "", "model."), ("language_model.model.", "language_model.", "")]
)
def test_names_are_written_as_they_were_read(naming: tuple[str, str, str], gemma: Path, tmp_path: Path) -> None:
    """Transformers has written them in several ways, and reads all."""
    body, head, before = naming
    theirs = copied(gemma, tmp_path / "hf")
    edit_config(theirs, tie_word_embeddings=False)
    tensors = {"lm_head.weight": torch.randn(64, 32), **load_file(theirs / WEIGHTS)}
    renamed = {
        body + inner
        if (inner := name.removeprefix("language_model.model.")) != name
        else head + name
        if name == "lm_head.weight"
        else before + name: tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, theirs / WEIGHTS, {"format": "pt"})
    assert convert.main([str(theirs), str(tmp_path / "ours")]) == 0
    assert convert.main([str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "hf"]) == 0
    assert_same(tmp_path / "back", theirs)


def test_an_old_file_whose_text_fields_stand_among_the_others(tmp_path: Path) -> None:
    """As Qwen publishes Qwen2-VL, by the name of that time for its rope."""
    theirs = saved("qwen2_vl", tmp_path / "hf")
    config = json.loads((theirs / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text = {**text, "rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    (theirs / "config.json").write_text(json.dumps({**text, **config}))
    assert convert.main([str(theirs), str(tmp_path / "ours")]) == 0
    assert verify.main([str(tmp_path / "ours"), str(theirs)]) == 0
    assert convert.main([str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "hf"]) == 0
    assert_same(tmp_path / "back", theirs)


@pytest.mark.in_turn(2)
def test_a_run_trains_the_text_model_and_carries_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the folder that it began from is gone by its first checkpoint, and where it goes on, from the last
    checkpoint whose bytes are sound."""
    theirs = saved("qwen3_vl", tmp_path / "hf")
    before, config = load_file(theirs / WEIGHTS), json.loads((theirs / "config.json").read_text())
    (theirs / WEIGHTS).unlink()
    files = {name: f"{'visual' if 'visual' in name else 'text'}.safetensors" for name in before}
    for file in {*files.values()}:
        save_file({name: before[name] for name in files if files[name] == file}, theirs / file, {"format": "pt"})
    (theirs / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": files}))
    settings = {"train": {**RECIPE["train"], "steps": 2, "precision": "fp32"}, "checkpoint": {"at_end": True}}
    recipe = write_recipe(tmp_path, RECIPE | {"model": {}, "schedule": {"warmup_steps": 0}} | settings)
    out, made, last = tmp_path / "run", tmp_path / "made", tmp_path / "last"
    started = [
        f"checkpoint.init={theirs}",
        f"out={out}",
        "checkpoint.every=1",
        "checkpoint.keep=2",
        "checkpoint.patience=0.0005",
    ]
    save = Saver.save

    def without_its_source(self: Saver, *arguments: Any) -> None:
        shutil.rmtree(theirs, ignore_errors=True)
        save(self, *arguments)

    monkeypatch.setattr(Saver, "save", without_its_source)
    assert main.main([recipe, *started, f"checkpoint.export={made}"]) == 0
    assert not theirs.exists()
    assert main.main([recipe, *started, "train.steps=3", "checkpoint.resume=auto", f"checkpoint.export={last}"]) == 0
    damaged = out / "checkpoints" / "step-00000003"
    flip(damaged / CARRIED)
    assert main.main([recipe, *started, "train.steps=3", "checkpoint.resume=auto"]) == 0
    assert damaged.with_name("step-00000003.damaged").exists() and damaged.exists()
    for folder in (made, last):
        after = load_file(folder / WEIGHTS)
        assert after.keys() == before.keys() and json.loads((folder / "config.json").read_text()) == config
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        assert changed and not any("visual" in name for name in changed)
        assert "model.language_model.layers.3.mlp.down_proj.weight" in changed
        loaded(folder)(**prompts("qwen3_vl")[1])


@pytest.mark.in_turn(3)
def test_a_save_takes_what_is_carried_from_the_source_where_the_newest_has_rotted(
    gemma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"train": {**RECIPE["train"], "steps": 2, "precision": "fp32"}}
    recipe = write_recipe(tmp_path, RECIPE | {"model": {}, "schedule": {"warmup_steps": 0}} | settings)
    out, save, rotten = tmp_path / "run", Saver.save, list[int]()

    def after_damage(self: Saver, step: int, *arguments: Any) -> None:
        if step == 2:
            assert not rotten, "the save has failed and is tried again"
            rotten.append(step)
            self.finish()
            flip(out / "checkpoints" / "step-00000001" / CARRIED)
        save(self, step, *arguments)

    monkeypatch.setattr(Saver, "save", after_damage)
    assert main.main([recipe, f"checkpoint.init={gemma}", f"out={out}", "checkpoint.every=1"]) == 0
    found, whole = load_file(out / "checkpoints" / "step-00000002" / CARRIED), load_file(gemma / WEIGHTS)
    assert found and all(torch.equal(tensor, whole[name]) for name, tensor in found.items())


def flip(path: Path) -> None:
    """Change the last byte of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_head_of_its_own(gemma: Path, tmp_path: Path) -> None:
    """The whole says whether it is tied, and older files keep the head with the text model."""
    folder = copied(gemma, tmp_path / "hf")
    head = torch.randn(64, 32)
    tensors = {**load_file(folder / WEIGHTS), "language_model.lm_head.weight": head}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    edit_config(folder, tie_word_embeddings=False)
    opened = HuggingFace.open(folder)
    read = opened.read()
    (found,) = [read(stored)[1] for stored in opened.stored() if stored.name == "lm_head.weight"]
    assert not opened.config.tie_word_embeddings and np.array_equal(found.view(np.float32), head.numpy())


def test_what_is_of_no_part_is_an_error(gemma: Path, tmp_path: Path) -> None:
    folder = copied(gemma, tmp_path / "hf")
    strange = {"model.embed_tokens.weight": torch.zeros(64, 32)}
    save_file({**load_file(folder / WEIGHTS), **strange}, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(StoreError, match=r"1 tensors are not of this model: model\.embed_tokens\.weight"):
        HuggingFace.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("vision_tower.post_layernorm.bias"),
            "only {ours} carries vision_tower.post_layernorm.bias",
        ),
        (
            lambda tensors: tensors["vision_tower.post_layernorm.bias"].neg_(),
            f"{CARRIED}: vision_tower.post_layernorm.bias: values",
        ),
    ],
)
def test_what_is_carried_is_verified(
    change: Callable[[dict[str, torch.Tensor]], object],
    message: str,
    gemma: Path,
    converted: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = copied(gemma, tmp_path / "hf")
    tensors = load_file(other / WEIGHTS)
    change(tensors)
    save_file(tensors, other / WEIGHTS, {"format": "pt"})
    assert inspect.main([str(converted), "--diff", str(other)]) == verify.main([str(converted), str(other)]) == 1
    assert message.format(ours=converted) in capsys.readouterr().out


def test_damage_of_what_is_carried_is_found(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = copied(converted, tmp_path / "ours")
    file = TensorFile.open(ours / CARRIED)
    one, other = (file.entries[f"vision_tower.encoder.layers.{n}.mlp.fc1.weight"] for n in (0, 1))
    data = bytearray((ours / CARRIED).read_bytes())
    data[one.start : one.stop], data[other.start : other.stop] = (data[x.start : x.stop] for x in (other, one))
    (ours / CARRIED).write_bytes(data)
    assert inspect.main([str(ours), "--check"]) == 1
    assert "carried/tensors.safetensors: vision_tower.encoder.layers.1.mlp.fc1.weight has" in capsys.readouterr().out
    made = tmp_path / "made"
    for make in (
        partial(convert.main, [str(ours), str(made), "--to", "hf"]),
        partial(reshard.main, [str(ours), str(made)]),
    ):
        assert make() == 1 and "the source does not have the fingerprints" in capsys.readouterr().err
        assert not made.exists()
    (ours / CARRIED).unlink()
    assert inspect.main([str(ours)]) == 1
    assert f"{ours / CARRIED}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"naming": ["model.", 1]}, "naming=['model.', 1], which are no two beginnings of names"),
        ({"naming": ["{0.__class__}", ""]}, "which are no two beginnings of names"),
        ({"files": {}}, f"names the files [] instead of {CARRIED}"),
        ({"config": {"model_type": "llama"}}, "of which no part is a gemma3_text"),
        (
            {"config": {"model_type": "llava", "text_config": {"model_type": "llama"}}},
            "of which no part is a gemma3_text",
        ),
        ({"config": {"model_type": "gemma3"}}, "text_config is None"),
    ],
)
def test_an_index_that_carries_what_cannot_be(
    change: dict[str, Any], message: str, converted: Path, tmp_path: Path
) -> None:
    tree = json.loads((converted / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**tree, "carried": {**tree["carried"], **change}}))
    with pytest.raises(StoreError) as caught:
        read_index(tmp_path / "index.json")
    assert message in str(caught.value)


PARTS = {
    wrapper.called or part: (name, part)
    for name, wrapper in WRAPPERS.items()
    for part in wrapper.families
    if wrapper.called or part in ("gemma", "gemma2", "llama", "mistral", "qwen2", "qwen3")
}


@pytest.mark.parametrize("part", PARTS)
def test_what_a_text_config_leaves_out(part: str) -> None:
    """Is what transformers' class of that name takes, not what its class of our family does."""
    name, of = PARTS[part]
    kind, sized = family(of).config, bool(WRAPPERS[name].called)  # those always say their sizes
    said = cast(Any, CONFIG_MAPPING[part])(**({"num_attention_heads": 64} if sized else {})).to_dict()
    sizes = {each.name: said[each.name] for each in fields(kind) if each.default is MISSING and each.name in said}
    left = {key: value for key, value in sizes.items() if sized and key not in ("num_key_value_heads", "head_dim")}
    told, left_out = (
        unwrapped({"model_type": name, "text_config": text})[0] for text in (said, {"model_type": part, **left})
    )
    assert kind.from_hugging_face(left_out) == kind.from_hugging_face(told)


def test_a_changed_text_field_is_written_where_it_stands() -> None:
    whole = {
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "text_config": {"rope_parameters": SECTIONS, "dtype": "bfloat16", "vocab_size": 9, "strange": 1},
        "vision_config": {"dtype": "bfloat16", "vocab_size": 5},
        "quantization_config": {"quant_method": "fp8"},
    }
    raw, _ = unwrapped(whole)
    assert raw["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}
    part = {key: value for key, value in raw.items() if key not in ("strange", "quantization_config")}
    longer = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    made = rewrapped(whole, {**part, "dtype": "float32", "vocab_size": 8, "rope_parameters": longer}, ["strange"])
    text = {
        "rope_parameters": {**longer, "mrope_section": [2, 1, 1]},
        "dtype": "float32",
        "vocab_size": 8,
        "strange": 1,
    }
    assert made == {
        "model_type": "qwen3_vl",
        "dtype": "float32",
        "text_config": text,
        "vision_config": {"dtype": "bfloat16", "vocab_size": 5},
    }
    assert rewrapped(whole, raw, []) == whole


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_config": None}, "gemma3: text_config is None: it must be a mapping, the text model's"),
        ({"text_config": {"model_type": "gemma2"}}, "text_config is of family 'gemma2': only gemma3_text is read"),
        ({"text_config": {"num_layers": 3}}, "gemma3_text: unknown field 'num_layers'"),
    ],
)
def test_configs_that_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", **fields}))
    with pytest.raises(ModelConfigError) as caught:
        configure({"config": str(tmp_path)})
    assert message in str(caught.value)
    with pytest.raises(StoreError) as refused:
        HuggingFace.open(tmp_path)
    assert message.partition(": ")[2] in str(refused.value) or message in str(refused.value)
