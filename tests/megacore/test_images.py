"""Chats with images: transformers' tokens, features and losses, on any layout; what is none is told before training."""

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml
from chats import FAMILIES, write_jsonl, write_tokenizer
from engine import LLAMA, RECIPE, Result, stopped, train
from families import in_float64
from PIL import Image
from pool import Pool
from safetensors.torch import load_file
from transformers import AutoProcessor
from wrapped import CHATML, IMAGE, PROCESSED, SHOWN, loaded, of_patches, processed, prompts, qwen_processor, saved

from megacore.data import pretrained
from megacore.data.batches import Batch, BatchImage, collate
from megacore.data.examples import Examples
from megacore.data.formats import BadExample, ImageFile, example
from megacore.data.images import open_image
from megacore.data.model_tokenizer import ModelTokenizer
from megacore.data.samples import Sample
from megacore.inference.model_loader import microbatch_of, model_from
from megacore.models import decoder
from megacore.models.assemble import Model
from megacore.models.decoder import Microbatch, MicrobatchImage
from megacore.models.wrappers import WRAPPERS, rope_axes
from megacore.parallel.kernels.documents import Documents, both_ways, image_mask
from megacore.parallel.kernels.scoring import Scoring
from megacore.parallel.labels import IGNORE
from megacore.parallel.mesh import Mesh
from megacore.planning import capacity
from megacore.planning.peak_memory import memory
from megacore.planning.recipe_setting import setting_of
from megacore.planning.trace.measure import Packing, _Watch
from megacore.recipe import ConfigError, load
from megacore.store.conversions.formats import open_folder
from megacore.store.weight_folders.folder import WeightFolder, with_projector
from megacore.tools import convert, evaluate, inspect, reshard, verify
from megacore.training.check import check, tower_elements
from megacore.training.dry_run import image_scores, outlook
from megacore.training.vision_tower import ImageReader, Tower

LENGTH = 256
SEE = [name for name, each in WRAPPERS.items() if not each.no_images and not each.sections]
IN_THREE = [name for name, each in WRAPPERS.items() if each.sections]
"""Those of whose images tokens have three positions."""
MASKS = {"gemma3": 2, "gemma4": 1, "paligemma": 1, "paligemma-gemma2": 2}
"""How many masks of images their layers share: with a window one, and without one another."""


def float64_of(path: Path) -> Any:
    whole = loaded(path).double()
    for buffer in whole.buffers():  # rotary frequencies are of float32
        buffer.data = buffer.data.float() if buffer.is_floating_point() else buffer.data
    return whole


def shown_to(name: str, path: Path) -> Path:
    """A folder of a model, of whose text model another family may be named behind a dash."""
    kind, _, text = name.partition("-")
    return saved(kind, path, SHOWN[kind], **({"model_type": text} if text else {}))


def prompt_of(name: str) -> dict[str, Any]:
    kind = name.partition("-")[0]
    return dict(prompts(kind, SHOWN[kind])[1])


def of_prompt(prompt: dict[str, Any], tokens: torch.Tensor) -> dict[str, Any]:
    """What a microbatch has of the image of a prompt."""
    places = torch.nonzero(tokens == 60).flatten()
    own = prompt["token_type_ids"][0] == 0 if "position_ids" in prompt else tokens == 60  # PaliGemma's prompt
    about_tokens = ("input_ids", "position_ids", "token_type_ids", "mm_token_type_ids")
    inputs = {key: each for key, each in prompt.items() if key not in about_tokens}
    image = MicrobatchImage("", len(places), inputs, torch.arange(len(places)), places)
    return {"images": (image,), "image_of": torch.where(own, 0, -1)}


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("name", [*SEE, "paligemma-gemma2"])
def test_logits_of_a_text_with_an_image(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = open_folder(shown_to(name, tmp_path / "hf"))
    prompt = prompt_of(name)
    capfd.readouterr()
    model = seeing(folder)
    assert capfd.readouterr() == ("", "")
    tokens = prompt["input_ids"]
    batch = Batch(tokens.numpy(), np.full(tokens.shape, IGNORE), np.arange(tokens.numel())[None], None)
    with in_float64(), torch.no_grad():  # transformers' towers cast to float32 too
        found = model.logits(replace(microbatch_of(model, batch), **of_prompt(prompt, tokens[0])))
    floats = {key: each.double() if each.is_floating_point() else each for key, each in prompt.items()}
    whole = float64_of(tmp_path / "hf")
    with in_float64(), torch.no_grad():
        wanted = whole(**floats).logits[0]
    assert found is not None and (found - wanted).abs().max() <= 1e-9 * wanted.abs().max()


def of_documents(model: Model, prompts: list[dict[str, torch.Tensor]]) -> Microbatch:
    """A row of prompts, each a document, with their images; each but the last token of one has a label."""
    ids = [each["input_ids"][0].numpy() for each in prompts]
    documents = np.repeat(np.arange(len(ids)), [each.size for each in ids])
    counted = np.arange(len(documents) + 1) < len(documents)
    row = np.concatenate([*ids, [0]]), np.append(documents, documents[-1]), counted
    runs = np.split(at := np.flatnonzero(row[0] == IMAGE), np.flatnonzero(np.diff(at) > 1) + 1)
    grids = [grid for each in prompts for grid in each["image_grid_thw"]]
    sizes = [(grid[1:] // 2).tolist() for grid in grids]
    batch = collate([Sample(*row, images=[("", *each) for each in zip(runs, sizes, strict=True)])], True)
    pixels = torch.cat([each["pixel_values"] for each in prompts]).split([int(grid.prod()) for grid in grids])
    images = tuple(
        MicrobatchImage("", run.size, {"pixel_values": of, "image_grid_thw": grid[None]}, *map(torch.from_numpy, own))
        for run, of, grid, own in zip(runs, pixels, grids, ((e.features, e.places) for e in batch.images), strict=True)
    )
    assert batch.positions_3d is not None
    in_three = torch.from_numpy(batch.positions_3d).view(3, -1)
    return replace(microbatch_of(model, batch), images=images, positions_3d=in_three)


def seeing(folder: WeightFolder) -> Model:
    """A model with its tower, in float64."""
    model, carried = model_from(folder, Mesh.single(), torch.float64), folder.index.carried
    (chunk,) = model.chunks
    chunk.tower = Tower(folder, torch.float64, torch.device("cpu"), chunk.projector)
    assert carried is not None
    if axes := rope_axes(carried.config, model.config):
        chunk.turn_by(axes)
    return model


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("name", IN_THREE)
def test_logits_and_positions_in_three_axes(name: str, tmp_path: Path) -> None:
    """Of two documents in a row, one of which has two images."""
    model, whole = seeing(open_folder(saved(name, tmp_path / "hf"))), float64_of(tmp_path / "hf")
    prompts = [of_patches((4, 8), (8, 4)), of_patches((4, 12))]
    microbatch = of_documents(model, prompts)
    texts = [{key: each for key, each in prompt.items() if key != "pixel_values"} for prompt in prompts]
    wanted = [whole.model.get_rope_index(**each)[0] for each in texts]
    assert microbatch.positions_3d is not None
    assert microbatch.positions_3d.tolist() == torch.cat(wanted, -1)[:, 0].tolist()
    with in_float64(), torch.no_grad():
        found = model.logits(microbatch)
        theirs = [whole(**{**each, "pixel_values": each["pixel_values"].double()}).logits[0] for each in prompts]
    assert found is not None and (found - torch.cat(theirs)).abs().max() <= 1e-9 * found.abs().max()


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("name", [*SEE, *IN_THREE, "paligemma-gemma2"])
def test_gradients_of_a_text_with_an_image(name: str, tmp_path: Path) -> None:
    """In three axes of two documents, one of which has two images."""
    model = seeing(with_projector(open_folder(shown_to(name, tmp_path / "hf"))))
    (chunk,) = model.chunks
    model.parameters.freeze(())
    if name in IN_THREE:
        shown = [of_patches((4, 8), (8, 4)), of_patches((4, 12))]
        microbatch = of_documents(model, shown)
    else:
        shown = [prompt_of(name)]
        tokens = shown[0]["input_ids"]
        labels = np.append(tokens[0, 1:].numpy(), IGNORE)[None]
        batch = Batch(tokens.numpy(), labels, np.arange(tokens.numel())[None], None)
        microbatch = replace(microbatch_of(model, batch), **of_prompt(shown[0], tokens[0]))
    with in_float64(), patch.object(decoder, "image_mask", wraps=decoder.image_mask) as made:
        chunk(None, microbatch).backward()
    assert len(chunk.layers) > made.call_count == MASKS.get(name, 0)
    whole = float64_of(tmp_path / "hf")
    for prompt in shown:
        floats = {key: each.double() if each.is_floating_point() else each for key, each in prompt.items()}
        with in_float64():
            logits = whole(**floats).logits[0, :-1]
            torch.nn.functional.cross_entropy(logits, prompt["input_ids"][0, 1:], reduction="sum").backward()
    ours = {name: each.grad for name, each in model.parameters.items()}
    frozen = WRAPPERS[name.partition("-")[0]].others
    theirs = {key.removeprefix("model."): each.grad for key, each in whole.named_parameters()}
    projector = [key for key in theirs if f"projector.{key}" in ours]
    assert len(projector) == len([key for key in ours if key.startswith("projector.")]) > 0
    for key in projector:
        found, wanted = ours[f"projector.{key}"], theirs[key]
        assert found is not None and wanted is not None and wanted.abs().max() > 0, key
        assert (found - wanted).abs().max() <= 1e-9 * wanted.abs().max(), key
    of_text = [each for key, each in theirs.items() if not key.startswith(frozen) or key in projector]
    norms = [torch.stack([each.norm() for each in all if each is not None]).norm() for all in (ours.values(), of_text)]
    torch.testing.assert_close(*norms, rtol=1e-9, atol=0)


def part(**fields: str) -> dict[str, Any]:
    return {"type": "image" if "text" not in fields else "text", **fields}


def turn(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def rows(folder: Path) -> list[dict[str, Any]]:
    """Chats of none to two images of other sizes, in every form."""
    rng = np.random.default_rng(0)
    for number, size in enumerate(((20, 28), (16, 40), (33, 17))):
        Image.fromarray(rng.integers(0, 255, (*size, 3), np.uint8)).save(folder / f"{number}.png")
    user, said = {**part(text="what?"), "path": None}, turn("assistant", part(text="a cat"))
    two = [turn("user", part(image="0.png"), user), said, turn("user", user, part(path="1.png")), said]
    return [
        {"messages": [turn("user", part(path=str(folder / "0.png")), user), said]},
        {"messages": two},
        {"messages": [turn("user", part(text="hm")), turn("assistant", part(text="no image"))]},
        {
            "images": ["2.png"],
            "messages": [{"role": "user", "content": "<image>so"}, {"role": "assistant", "content": "ok"}],
        },
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "text alone"}]},
        {
            "image": "1.png",
            "conversations": [{"from": "human", "value": "see <image>"}, {"from": "gpt", "value": "yes"}],
        },
    ]


def in_parts(row: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The chat as transformers takes it."""
    turns = row.get("messages") or [
        {"role": {"human": "user", "gpt": "assistant"}[each["from"]], "content": each["value"]}
        for each in row["conversations"]
    ]
    files = iter([row["image"]] if "image" in row else row.get("images", []))
    made = []
    for each in turns:
        content = each["content"]
        if isinstance(content, str):
            first, *more = content.split("<image>")
            content = [part(text=first)] if first else []
            for text in more:
                content += [part(path=next(files)), *([part(text=text)] if text else [])]
        content = [
            {"type": "image", "path": str(folder / next(p[key] for key in ("path", "image") if key in p))}
            if p["type"] == "image"
            else p
            for p in content
        ]
        made.append({"role": each["role"], "content": content})
    return made


def processor_of(name: str, folder: Path) -> Any:
    return pretrained.processor(folder) if name == "paligemma" else AutoProcessor.from_pretrained(folder)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", PROCESSED)
def test_tokens_are_those_of_the_processor(name: str, tmp_path: Path) -> None:
    folder = processed(name, tmp_path / "hf")
    tokenizer, processor = ModelTokenizer(folder), processor_of(name, folder)
    template = tmp_path / "bare" / "chat_template.jinja"
    shutil.copytree(folder, template.parent)
    template.write_text(re.sub("{% (end)?generation %}", "", CHATML))
    bare = ModelTokenizer(template.parent)
    for row in rows(tmp_path)[:4]:
        found = tokenizer.with_images(row, "assistant", tmp_path)
        assert not isinstance(found, str), found
        (((ids, counted), shown),) = found
        wanted = processor.apply_chat_template(
            in_parts(row, tmp_path),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            processor_kwargs={"return_offsets_mapping": True, "return_text_replacement_offsets": True},
        )
        assert ids.tolist() == np.asarray(wanted["input_ids"])[0].tolist()
        assert counted.tolist() == np.asarray(wanted["assistant_masks"])[0].astype(bool).tolist()
        without = bare.with_images(row, "assistant", tmp_path)
        assert not isinstance(without, str), without
        (((same, also), _),) = without
        assert same.tolist() == ids.tolist() and also.tolist() == counted.tolist()  # as the template has no marks
        places = [at for _, runs, _ in shown for run in runs for at in range(*run)]
        assert places == np.flatnonzero(np.isin(ids, processor.image_token_ids)).tolist()


PALIGEMMA = (
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% endif %}{% endfor %}{{ bos_token }}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\n' }}"
    "{% else %}{% generation %}{{ m['content'][0]['text'] }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
"""The template that docs/finetune.md has."""


def test_a_template_writes_the_prompts_of_paligemma(tmp_path: Path) -> None:
    """Tokens, prompts and labels are those of its processor, which is told prompt and answer."""
    folder = processed("paligemma", tmp_path / "hf")
    (folder / "chat_template.jinja").write_text(PALIGEMMA)
    (row, *_) = rows(tmp_path)
    found = ModelTokenizer(folder).with_images(row, "assistant", tmp_path)
    assert not isinstance(found, str), found
    (((ids, counted), shown),) = found
    image = open_image(ImageFile(tmp_path / "0.png", ""))
    theirs = AutoProcessor.from_pretrained(folder)
    wanted = theirs(images=image, text="<image>what?", suffix="a cat", return_tensors="np")
    assert ids.tolist() == wanted["input_ids"][0].tolist()
    assert counted.tolist() == (wanted["labels"][0] != -100).tolist()
    sample = np.append(ids, 0), np.zeros(ids.size + 1, np.int32), np.append(counted, False)
    images = [(file, np.concatenate([np.arange(*run) for run in runs]), size) for file, runs, size in shown]
    prompt_of = collate([Sample(*sample, images=images)], True).prompt_of
    assert prompt_of is not None and (prompt_of < 0).tolist() == wanted["token_type_ids"][0].astype(bool).tolist()


# -- training


def recipe(folder: Path, name: str = "llava", *more: dict[str, Any], **data: Any) -> str:
    """A recipe over chats with images, in files beside it, and a model that sees."""
    if not (folder / "hf").exists():
        folder.mkdir(exist_ok=True)
        processed(name, folder / "hf")
    chats = write_jsonl(folder / "chats.jsonl", *rows(folder), *more)
    sections = {
        "model": {},
        "data": {"train": str(chats), "validation": str(chats), "sequence_length": LENGTH},
        "batch": {"global_size": 4, "micro_size": 1},
        "checkpoint": {"at_end": False, "init": str(folder / "hf")},
        "optimizer": {"lr": 1e-2, "clip": None},
        "train": RECIPE["train"] | {"steps": 3},
        "schedule": {"warmup_steps": 0},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | sections))
    return str(folder / "recipe.yaml")


def loss_of_theirs(folder: Path, whole: Any) -> torch.Tensor:
    """The mean loss of all counted tokens of the chats, each by itself."""
    name = whole.config.model_type
    processor, total, count = processor_of(name, folder / "hf"), torch.zeros(()).double(), 0
    for row in rows(folder):
        text = isinstance(row.get("messages", [{}])[-1].get("content"), str) and "images" not in row
        made = processor.apply_chat_template(
            in_parts(row, folder),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            processor_kwargs={"add_special_tokens": False} if text else {},  # as the tokenizer has it
        )
        made = {key: torch.as_tensor(np.asarray(each)) for key, each in made.items()}
        answers = made.pop("assistant_masks")
        counted = answers[0, 1:].bool()
        if name == "paligemma":
            kinds = (answers.cumsum(1) > 0).long() if "pixel_values" in made else torch.ones_like(answers)
            made = {key: each for key, each in made.items() if key != "labels"}
            made |= {"token_type_ids": kinds, "position_ids": torch.arange(kinds.numel())[None]}
        made = {key: each.double() if each.is_floating_point() else each for key, each in made.items()}
        with in_float64():
            logits = whole(**made).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, made["input_ids"][0, 1:], reduction="none")
        total, count = total + losses[counted].sum(), count + int(counted.sum())
    return total / count


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


ALONE = ["chat.pack=false", "batch.global_size=6"]
TRAINED = ["train.projector=true"]


def trained(recipe: str, overrides: list[str]) -> Result:
    qwen_processor()  # in this process, too
    return train(recipe, overrides)


@cache
def recipe_of(folder: Path, name: str) -> str:
    (folder / name).mkdir()
    return recipe(folder / name, name)


@cache
def _alone(pool: Pool, folder: Path, name: str) -> Result:
    """Each chat in a row of its own, and all of them in a step."""
    overrides = [f"out={folder / name / 'alone'}", *ALONE, *TRAINED]
    result: Result = pool.run(1, trained, recipe_of(folder, name), overrides)[0]
    return result


def with_wide_towers(path: str, overrides: list[str]) -> Result:
    """A run whose towers cast nothing to float32."""

    def wide(tower: Tower, image: MicrobatchImage) -> torch.Tensor:
        with in_float64():
            return call(tower, image)

    with pytest.MonkeyPatch.context() as patch:
        call = Tower.__call__
        patch.setattr(Tower, "__call__", wide)
        return trained(path, overrides)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", PROCESSED)
def test_the_loss_is_that_of_transformers(pool: Pool, name: str, tmp_path: Path) -> None:
    overrides = [f"out={tmp_path / 'run'}", *ALONE, "train.steps=1"]
    made = pool.run(1, with_wide_towers, recipe(tmp_path, name), overrides)[0]
    with torch.no_grad():
        wanted = loss_of_theirs(tmp_path, float64_of(tmp_path / "hf"))
    np.testing.assert_allclose(made.values("loss"), [float(wanted)], rtol=1e-9)


LAYOUTS = {
    "packed": (1, ["batch.micro_size=3"]),
    "dp2-tp2": (4, ["mesh.dp=2", "mesh.tp=2", "zero.shard=parameters"]),
    "tp2-pp2": (4, ["mesh.tp=2", "mesh.pp=2", "memory.recompute=full"]),
    "cp2-tp2": (4, ["mesh.cp=2", "mesh.tp=2"]),
}
PACKED = ["data.sequence_length=128", "batch.global_size=3"]


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("name", ["llava_next", "qwen3_vl", "gemma3", "paligemma"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_and_packing_train_alike(pool: Pool, folder: Path, layout: str, name: str) -> None:
    alone = _alone(pool, folder, name)
    world, overrides = LAYOUTS[layout]
    by_heads = ["context.exchange=heads"] if layout.startswith("cp") and name in ("gemma3", "paligemma") else []
    common = [f"out={folder / name / layout}", *PACKED, *TRAINED, *by_heads]
    made = pool.run(world, trained, recipe_of(folder, name), [*common, *overrides])
    for key in ("loss", "grad_norm", "validation_loss"):
        assert len(made[0].values(key)) == len(alone.values(key)) > 0
        np.testing.assert_allclose(made[0].values(key), alone.values(key), rtol=1e-9)


GOING_ON = {
    "all": ("llava_next", [], "mesh.pp=2"),
    "lora": ("llava_next", ["lora.rank=2"], "mesh.pp=2"),
    "projector": ("llava_next", TRAINED, "mesh.pp=2"),
    "deep-projector": ("qwen3_vl", TRAINED, "mesh.tp=2"),
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("case", GOING_ON)
def test_a_run_goes_on_on_another_layout(pool: Pool, folder: Path, case: str, tmp_path: Path) -> None:
    """A checkpoint of all weights carries the tower; the order of the images is that of the samples."""
    name, tuned, layout = GOING_ON[case]
    recipe = recipe_of(folder, name)
    common = [*tuned, *PACKED, "batch.global_size=1", "train.steps=4"]
    whole = pool.run(1, train, recipe, [f"out={tmp_path / 'whole'}", *common])[0]
    split = [f"out={tmp_path / 'split'}", *common, "checkpoint.every=2"]
    pool.run(1, stopped, recipe, split, 2)
    last = pool.run(2, train, recipe, [*split, layout, "checkpoint.resume=auto"])[0]
    np.testing.assert_allclose(last.values("loss"), whole.values("loss"), rtol=1e-9)


OF_LAYOUTS = {"dp2-tp2": "qwen3_vl", "tp2-pp2": "llava_next"}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("layout", OF_LAYOUTS)
def test_the_projector_alone_is_trained_as_by_transformers(pool: Pool, layout: str, tmp_path: Path) -> None:
    """What is exported is theirs; the rest of it, which is not trained, is what it was."""
    (world, overrides), name = LAYOUTS[layout], OF_LAYOUTS[layout]
    path, out = recipe(tmp_path, name), tmp_path / "run"
    how = ["schedule.name=constant", "train.only=[projector]", "train.steps=2", "checkpoint.at_end=true"]
    made = pool.run(world, with_wide_towers, path, [f"out={out}", *PACKED, *TRAINED, *overrides, *how])[0]
    whole, of = float64_of(tmp_path / "hf").requires_grad_(False), WRAPPERS[name]
    held = {name: each.requires_grad_() for name, each in whole.named_parameters() if of.projects(name)}
    kinds = [[each for each in held.values() if (each.dim() > 1) == decays] for decays in (True, False)]
    groups = [{"params": each, "weight_decay": decay} for each, decay in zip(kinds, (0.1, 0.0), strict=True)]
    optimizer, losses = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of_theirs(tmp_path, whole)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(made.values("loss"), losses, rtol=1e-9)
    checkpoint, export = out / "checkpoints" / "step-00000002", tmp_path / "export"
    assert convert.main([str(checkpoint), str(export), "--to", "hf"]) == 0
    exported, before = float64_of(export), dict(float64_of(tmp_path / "hf").named_parameters())
    for name, found in exported.named_parameters():
        if name in held:
            assert (found - held[name]).abs().max() <= 1e-9 * (held[name] - before[name]).abs().max(), name
        else:
            assert torch.equal(found, before[name]), name
    found = [verify.main([str(checkpoint), str(other)]) for other in (export, tmp_path / "hf")]
    assert found == [0, 1]
    assert inspect.main([str(checkpoint), "--diff", str(export), "--check"]) == 0
    assert reshard.main([str(checkpoint), str(tmp_path / "tp2"), "--tp", "2"]) == 0
    assert inspect.main([str(checkpoint), "--diff", str(tmp_path / "tp2")]) == 0


# -- what is told before anything starts


def problem(folder: Path, *more: dict[str, Any], name: str = "llava") -> str:
    with pytest.raises(ConfigError) as error:
        check(recipe(folder, name, *more), [f"out={folder / 'run'}"], 1, 1)
    return str(error.value)


def shown(file: str, key: str = "path") -> dict[str, Any]:
    return {"messages": [turn("user", part(**{key: file})), turn("assistant", part(text="ok"))]}


def test_images_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    said = problem(tmp_path, shown("broken.png"), shown("nowhere.png", "image"))
    assert (
        f"chats.jsonl, line 7: message 1: path {tmp_path / 'broken.png'} cannot be read as an image: cannot id" in said
    )
    assert f"chats.jsonl, line 8: message 1: image {tmp_path / 'nowhere.png'} cannot be read as an image: [Err" in said


@pytest.mark.parametrize(
    ("messages", "more", "message"),
    [
        ([turn("user", part(url="http://a/b.png"))], {}, "message 1: url http://a/b.png is no file here: save it"),
        ([turn("user", {"type": "video"})], {}, "part 1 of message 1 has the type 'video': choose text or image"),
        ([turn("user", {"type": "image"})], {}, "part 1 of message 1 names no image: give it one file as path"),
        ([turn("assistant", part(text="b"), part(path="0.png"))], {}, "message 1: the assistant says an image"),
        (
            [{"role": "user", "content": "a"}],
            {"images": ["0.png"]},
            "images names 1 images, and the texts of its messages have 0 <image>",
        ),
        ([{"role": "user", "content": "a"}], {"images": [3]}, "images is a list, not the names of files"),
    ],
)
def test_rows_that_are_no_chats_with_images(
    messages: list[dict[str, Any]], more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadExample, match=re.escape(message)):
        example({"messages": messages, **more}, tmp_path)


def test_an_image_token_that_is_text(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(processed("llava", tmp_path / "hf"))
    rows(tmp_path)
    for image in ([part(path="0.png")], []):
        messages = [turn("user", *image, part(text="no <image>")), turn("assistant", part(text="b"))]
        found = tokenizer.with_images({"messages": messages}, "assistant", tmp_path)
        assert isinstance(found, str) and "the model's processor fails: " in found and "<image> tokens" in found


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            [2, 1, 1],
            "mesh.pp, pipeline.chunks: a qwen3_vl adds features of images to what its first 2 layers give, and the "
            "first part of the pipeline has 1: give it 2 with pipeline.layers_per_stage, or choose a smaller mesh.pp",
        ),
        ([2, 1], "model: mrope_section is [2, 1]: it must be three numbers that share out 4 frequencies"),
        ([2, 3, 1], "model: mrope_section is [2, 3, 1]: it must be three numbers that share out 4 frequencies"),
    ],
)
def test_models_that_do_not_fit_their_images(section: list[int], message: str, tmp_path: Path) -> None:
    path, file = recipe(tmp_path, "qwen3_vl"), tmp_path / "hf" / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["rope_parameters"]["mrope_section"] = section
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(path, [f"out={tmp_path / 'run'}", "mesh.pp=4"], 4, 4)


def test_tokens_that_are_no_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen_processor(), "replace_image_token", lambda self, *_, **__: self.image_token * 3)
    tokenizer = ModelTokenizer(processed("qwen3_vl", tmp_path / "hf"))
    found = tokenizer.with_images(rows(tmp_path)[0], "assistant", tmp_path)
    assert isinstance(found, str)
    assert found == (
        "has images of [[2, 4]] tokens in height and width, and its text [3] of them: the processor is another model's"
    )


def test_an_image_behind_the_last_token_is_left_out(tmp_path: Path) -> None:
    overrides = [f"out={tmp_path / 'run'}", "data.sequence_length=40"]
    (found,) = check(recipe(tmp_path), overrides, 1, 1).corpora.corpora
    assert isinstance(found, Examples) and found.lengths[1] <= 41
    assert [len(found.images(number)) for number in range(6)] == [1, 1, 0, 1, 0, 1]


def test_a_rank_reads_the_images_of_its_tokens_alone() -> None:
    asked = list[str]()

    def call(method: str, file: str) -> list[tuple[str, tuple[int, int], np.ndarray]]:
        asked.append(file)
        return [("x", (1, 2), np.zeros(2))]

    guard: Any = SimpleNamespace(call=call)
    places = {"a": [1, 2], "b": [7, 8, 9]}
    images = tuple(BatchImage(file, len(at), np.arange(len(at)), np.array(at)) for file, at in places.items())
    tokens = np.zeros((2, 8), np.int64)
    batch = Batch(tokens, tokens, tokens, None, images=images)
    first, second = (ImageReader(guard, part, 2)(batch).images for part in range(2))
    assert asked == ["a", "b", "b"] and second[0].inputs["x"].shape == (1, 2)
    assert [each.places.tolist() for each in (*first, *second)] == [[1, 2], [7], [0, 1]]
    assert [each.features.tolist() for each in (*first, *second)] == [[0, 1], [0], [1, 2]]


def test_a_projector_that_was_trained_stays(pool: Pool, tmp_path: Path) -> None:
    """Where its checkpoint is begun from and it is not asked for; adapters have no place for it."""
    path, steps = recipe(tmp_path), ["train.steps=1", *PACKED]
    (first,) = pool.run(1, train, path, [f"out={tmp_path / 'first'}", *steps, *TRAINED, "checkpoint.at_end=true"])
    begun = [f"checkpoint.init={tmp_path / 'first' / 'checkpoints' / 'step-00000001'}", *steps]
    (second,) = pool.run(1, train, path, [f"out={tmp_path / 'second'}", *begun])
    held = [name for name in first.weights if name.startswith("projector.")]
    assert len(held) == 4 and all((first.weights[name] == second.weights[name]).all() for name in held)
    assert (first.weights["embed.weight"] != second.weights["embed.weight"]).any()
    with pytest.raises(ConfigError, match="has a projector among its weights, beside which lora trains no adapters"):
        check(path, [f"out={tmp_path / 'third'}", *begun, "lora.rank=2"], 1, 1)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("llava", ["lora.rank=2"], "train.projector is for runs without adapters"),
        ("llava", ["checkpoint.init=null"], "train.projector is of a model that also sees: name its folder or"),
        ("gemma3n", [], "has no projector that can be trained: set it to false"),
        (None, [], "train.projector is true, and no chat of data.train has an image: set it to false"),
        (
            "gemma3",
            ["mesh.cp=2"],
            "the model looks both ways within an image, which only a rank that has all of its keys",
        ),
    ],
)
def test_projectors_and_images_that_are_not_trained(
    name: str | None, overrides: list[str], message: str, tmp_path: Path
) -> None:
    path = recipe(tmp_path)
    if name is None:
        write_jsonl(tmp_path / "chats.jsonl", rows(tmp_path)[4])
    elif name != "llava":
        shutil.rmtree(tmp_path / "hf")
        (processed if name in PROCESSED else saved)(name, tmp_path / "hf")
    if "checkpoint.init=null" in overrides:
        overrides = [*overrides, f"model={json.dumps({**LLAMA, 'vocab_size': 400})}"]
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(path, [f"out={tmp_path / 'run'}", *TRAINED, *overrides], 1 + ("mesh.cp=2" in overrides), 2)


def test_the_tower_has_room_on_the_first_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, overrides = recipe(tmp_path), [f"out={tmp_path / 'run'}"]
    setup = check(path, overrides, 1, 1)
    carried = [name for name in load_file(tmp_path / "hf" / "model.safetensors") if WRAPPERS["llava"].carries(name)]
    elements = sum(load_file(tmp_path / "hf" / "model.safetensors")[name].numel() for name in carried)
    assert tower_elements(setup.start, setup.corpora) == elements > 0
    setting = setting_of(load(path, ["mesh.pp=2"]), setup.model, 2, "cpu")
    bare, seeing = (memory(replace(setting, tower=tower)) for tower in (0, elements))
    added = [now.terms["parameters"] - before.terms["parameters"] for before, now in zip(bare, seeing, strict=True)]
    assert added == [8 * elements, 0]
    alone = check(path, [f"out={tmp_path / 'alone'}", *TRAINED, "train.only=[projector]"], 1, 1)
    (held,) = memory(setting_of(alone.config, alone.model, 1, "cpu"))
    assert held.terms["gradients"] < held.terms["parameters"] and held.terms["activations"] > 0
    needed = 32 * setup.model.schema.parameters + 8 * elements
    monkeypatch.setattr(capacity, "host_memory", lambda: needed)
    check(path, overrides, 1, 1)
    monkeypatch.setattr(capacity, "host_memory", lambda: needed - 1)
    with pytest.raises(ConfigError, match=re.escape(f"of the 1 process here take {needed / 1e9:,.2f} GB")):
        check(path, overrides, 1, 1)
    write_jsonl(tmp_path / "chats.jsonl", rows(tmp_path)[4])
    check(path, [f"out={tmp_path / 'text'}"], 1, 1)


def test_a_dry_run_says_what_images_take(tmp_path: Path) -> None:
    many = ["mesh.pp=2", "batch.micro_size=64", "batch.global_size=128"]
    setup = check(recipe(tmp_path, "gemma3"), [f"out={tmp_path / 'run'}", *many], 2, 2)
    said = next(line for line in outlook(setup, 2, 2).splitlines() if line.strip().startswith("images"))
    # Layers with a window and without one, of two microbatches on the first stage.
    most = image_scores(64 * LENGTH**2, 4, 2 * 2, 2 * 2, softcap=False)
    assert f"up to {most / 1e9:,.2f} GB on each rank for attention both ways" in said and most > 1e8


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_attention_both_ways_takes_is_below_its_estimate(softcap: float | None, dtype: torch.dtype) -> None:
    """Of one layer and of six, which share the mask."""
    length, rows, heads = 256, 2, 4
    q, k, v = (torch.randn(length * rows, n, 4, dtype=dtype, requires_grad=True) for n in (heads, 2, 2))
    image_of, documents = torch.arange(len(q)) // 32, Documents.of([length] * rows, q.device)
    held, kept = [q, k, v, image_of, documents.host, documents.device], []
    scoring = Scoring(window=64, softcap=softcap, both_ways="in the window")
    with _Watch({each.untyped_storage()._cdata for each in held}, Packing(1, 1)) as seen:
        mask = image_mask(documents, rows, image_of, scoring.window, False, dtype)
        for layers in range(1, 7):
            kept.append(both_ways(q, k, v, mask, scoring))
            estimate = image_scores(rows * length**2, heads, layers, 1, softcap is not None)
            assert seen.peak < 1.1 * estimate < 2.5 * seen.peak


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gemma4",
            "not trained on in a gemma4, as its layers are told of tokens, and images have none of those: leave them "
            "out, or start from one of aria, ",
        ),
        ("gemma3n", "not trained on in a gemma3n, as its layers are told of tokens, and images have none of those"),
        (None, "line 1: has images, and the model reads text alone: leave them out"),
    ],
)
def test_models_that_do_not_see_here(name: str | None, message: str, tmp_path: Path) -> None:
    path, family = recipe(tmp_path), FAMILIES["chatml"]
    alone = ["checkpoint.init=null", f"model={json.dumps({**LLAMA, 'vocab_size': 400})}"]
    init = alone if name is None else [f"checkpoint.init={saved(name, tmp_path / name, vocab_size=400)}"]
    write_tokenizer(tmp_path / (name or "."), family.template, family.end)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(path, [f"out={tmp_path / 'run'}", "data.sequence_length=8", *init], 1, 1)


@pytest.mark.parametrize("number", [0, 3, 5])
def test_images_are_not_evaluated(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(tmp_path)
    file = write_jsonl(tmp_path / "one.jsonl", rows(tmp_path)[number])
    assert evaluate.main([str(tmp_path / "hf"), "--data", str(file)]) == 1
    assert f"{file}, line 1: has images, and text alone is evaluated: leave them out" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gemma4", None])
def test_parts_of_text_are_text_where_images_are_not_trained_on(name: str | None, tmp_path: Path) -> None:
    path, family, tokens = recipe(tmp_path), FAMILIES["chatml"], list[list[int]]()
    config = {**LLAMA, "vocab_size": 400, "max_position_embeddings": 64}
    init = ["checkpoint.init=null", f"model={json.dumps(config)}"]
    if name is not None:
        init = [f"checkpoint.init={saved(name, tmp_path / name, vocab_size=400)}"]
    write_tokenizer(tmp_path / (name or "."), family.template, family.end)
    parts = [{**part(text=text), "image": None} for text in ("what ", "is it?")]  # a table has all keys in each
    for asked in (parts, "what is it?"):
        messages = [{"role": "user", "content": asked}, turn("assistant", part(text="b"))]
        file = write_jsonl(tmp_path / "rows.jsonl", {"messages": messages})
        data = [f"data.train={file}", f"data.validation={file}", "data.sequence_length=64"]
        (found,) = check(path, [f"out={tmp_path / 'run'}", *data, *init], 1, 1).corpora.corpora
        assert isinstance(found, Examples)
        tokens.append(found.example(0)[0].tolist())
    assert tokens[0] == tokens[1]
