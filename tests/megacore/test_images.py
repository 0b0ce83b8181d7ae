"""Chats with images: transformers' tokens, features and losses, on any layout; what is none is told before training."""

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from chats import FAMILIES, write_jsonl, write_tokenizer
from engine import LLAMA, RECIPE, Result, stopped, train
from families import in_float64
from PIL import Image
from pool import Pool
from transformers import AutoProcessor
from wrapped import CHATML, PROCESSED, loaded, processed, prompts, saved

from megacore.data.batches import Batch, BatchImage
from megacore.data.examples import Examples
from megacore.data.formats import BadExample, example
from megacore.data.model_tokenizer import ModelTokenizer
from megacore.inference.model_loader import microbatch_of, model_from
from megacore.models.decoder import MicrobatchImage
from megacore.models.wrappers import WRAPPERS
from megacore.parallel.labels import IGNORE
from megacore.parallel.mesh import Mesh
from megacore.recipe import ConfigError
from megacore.store.conversions.formats import open_folder
from megacore.training.check import check
from megacore.training.vision_tower import ImageReader, Tower

LENGTH = 256
SEE = [name for name, each in WRAPPERS.items() if not each.no_images]


def float64_of(path: Path) -> Any:
    whole = loaded(path).double()
    for buffer in whole.buffers():  # rotary frequencies are of float32
        buffer.data = buffer.data.float() if buffer.is_floating_point() else buffer.data
    return whole


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("name", SEE)
def test_logits_of_a_text_with_an_image(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = open_folder(saved(name, tmp_path / "hf"))
    prompt = dict(prompts(name)[1])
    tokens = prompt.pop("input_ids")
    places = torch.nonzero(tokens[0] == 60).flatten()
    model = model_from(folder, Mesh.single(), torch.float64)
    (chunk,) = model.chunks
    capfd.readouterr()
    chunk.tower = Tower(folder, torch.float64, torch.device("cpu"))
    assert capfd.readouterr() == ("", "")
    batch = Batch(tokens.numpy(), np.full(tokens.shape, IGNORE), np.arange(tokens.numel())[None], None)
    image = MicrobatchImage("", len(places), prompt, torch.arange(len(places)), places)
    with in_float64(), torch.no_grad():  # transformers' towers cast to float32 too
        found = model.logits(replace(microbatch_of(model, batch), images=(image,)))
    floats = {key: each.double() if each.is_floating_point() else each for key, each in prompt.items()}
    whole = float64_of(tmp_path / "hf")
    with in_float64(), torch.no_grad():
        wanted = whole(input_ids=tokens, **floats).logits[0]
    assert found is not None and (found - wanted).abs().max() <= 1e-9 * wanted.abs().max()


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


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", PROCESSED)
def test_tokens_are_those_of_the_processor(name: str, tmp_path: Path) -> None:
    folder = processed(name, tmp_path / "hf")
    tokenizer = ModelTokenizer(folder)
    processor = AutoProcessor.from_pretrained(folder)
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
        places = [at for _, runs in shown for run in runs for at in range(*run)]
        assert places == np.flatnonzero(ids == 60).tolist()


# -- training


def recipe(folder: Path, name: str = "llava", *more: dict[str, Any], **data: Any) -> str:
    """A recipe over chats with images, in files beside it, and a model that sees."""
    if not (folder / "hf").exists():
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


def loss_of_theirs(folder: Path) -> float:
    """The mean loss of all counted tokens of the chats, each by itself."""
    whole, processor = float64_of(folder / "hf"), AutoProcessor.from_pretrained(folder / "hf")
    total = count = 0.0
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
        counted = made.pop("assistant_masks")[0, 1:].bool()
        made = {key: each.double() if each.is_floating_point() else each for key, each in made.items()}
        with in_float64(), torch.no_grad():
            logits = whole(**made).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, made["input_ids"][0, 1:], reduction="none")
        total, count = total + float(losses[counted].sum()), count + int(counted.sum())
    return total / count


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


ALONE = ["chat.pack=false", "batch.global_size=6"]


@cache
def _alone(pool: Pool, folder: Path) -> Result:
    """Each chat in a row of its own, and all of them in a step."""
    result: Result = pool.run(1, train, recipe(folder, "llava_next"), [f"out={folder / 'alone'}", *ALONE])[0]
    return result


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", PROCESSED)
def test_the_loss_is_that_of_transformers(pool: Pool, name: str, tmp_path: Path) -> None:
    made = pool.run(1, train, recipe(tmp_path, name), [f"out={tmp_path / 'run'}", *ALONE, "train.steps=1"])[0]
    np.testing.assert_allclose(made.values("loss"), [loss_of_theirs(tmp_path)], rtol=1e-9)


LAYOUTS = {
    "packed": (1, ["batch.micro_size=3"]),
    "dp2-tp2": (4, ["mesh.dp=2", "mesh.tp=2", "zero.shard=parameters"]),
    "tp2-pp2": (4, ["mesh.tp=2", "mesh.pp=2", "memory.recompute=full"]),
    "cp2-tp2": (4, ["mesh.cp=2", "mesh.tp=2"]),
}
PACKED = ["data.sequence_length=128", "batch.global_size=3"]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_and_packing_train_alike(pool: Pool, folder: Path, layout: str) -> None:
    alone = _alone(pool, folder)
    world, overrides = LAYOUTS[layout]
    common = [f"out={folder / layout}", *PACKED]
    made = pool.run(world, train, str(folder / "recipe.yaml"), [*common, *overrides])
    for key in ("loss", "grad_norm", "validation_loss"):
        assert len(made[0].values(key)) == len(alone.values(key)) > 0
        np.testing.assert_allclose(made[0].values(key), alone.values(key), rtol=1e-9)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("tuned", [[], ["lora.rank=2"]], ids=["all", "lora"])
def test_a_run_goes_on_on_another_layout(pool: Pool, folder: Path, tuned: list[str], tmp_path: Path) -> None:
    """A checkpoint of all weights carries the tower; the order of the images is that of the samples."""
    _alone(pool, folder)
    recipe, common = str(folder / "recipe.yaml"), [*tuned, *PACKED, "batch.global_size=1", "train.steps=4"]
    whole = pool.run(1, train, recipe, [f"out={tmp_path / 'whole'}", *common])[0]
    split = [f"out={tmp_path / 'split'}", *common, "checkpoint.every=2"]
    pool.run(1, stopped, recipe, split, 2)
    last = pool.run(2, train, recipe, [*split, "mesh.pp=2", "checkpoint.resume=auto"])[0]
    np.testing.assert_allclose(last.values("loss"), whole.values("loss"), rtol=1e-9)


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gemma3",
            "not trained on in a gemma3, as its attention within an image goes in both directions: leave them out",
        ),
        ("qwen2_vl", "not trained on in a qwen2_vl, as its rope turns by three positions of a token"),
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


@pytest.mark.parametrize("name", ["gemma3", None])
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
