"""A package of a user's own, outside of the repository: its family, data, loss and callback, on any layout."""

import importlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import engine
import numpy as np
import pytest
import torch
import yaml
from engine import RECIPE, Result, assert_near, problems, same
from own_package import OWN, importable
from pool import Pool

from megacore import ConfigError, convert, plan, train
from megacore.data import own_rows
from megacore.data.blend import Blend
from megacore.data.corpora import streams
from megacore.recipe import load
from megacore.training.trainer import callbacks_of

LAYOUT = ["mesh.tp=2", "mesh.pp=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("own")
    with importable(made):
        recipe = {**RECIPE, **OWN, "data": {**RECIPE["data"], **OWN["data"]}, "batch": {"global_size": 6}}
        recipe["train"] = {**RECIPE["train"], "steps": 4}
        (made / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        yield made


def run(folder: Path, overrides: Sequence[str]) -> Result:
    """A run on this rank, with the callbacks of its recipe."""
    with importable(folder):
        recipe = str(folder / "recipe.yaml")
        return engine.train(recipe, overrides, callbacks_of(load(recipe, overrides)))


def whole(folder: Path, out: Path) -> dict[str, dict[str, np.ndarray]]:
    with importable(folder):
        return {state: engine.whole(engine.path_of(out, 4), state) for state in ("weights", "exp_avg", "exp_avg_sq")}


SPLIT = ["mesh.cp=2", "mesh.dp=2", "zero.shard=parameters", "batch.micro_size=2"]


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    ("data", "layout"), [("acme.rest:Rows", LAYOUT), ("acme.rest:Stream", SPLIT)], ids=["rows", "stream"]
)
def test_a_layout_computes_what_one_process_does_and_resumes_bitwise(
    folder: Path, tmp_path: Path, pool: Pool, data: str, layout: list[str]
) -> None:
    asked = [f"data.train={data}", "evaluate.every=0" if "Stream" in data else "evaluate.every=2"]
    ways: dict[str, tuple[int, list[str]]] = {"one": (1, []), "four": (4, layout)}
    found = {}
    for name, (world, mesh) in ways.items():
        given = [*asked, *mesh, f"out={tmp_path / name}", "checkpoint.every=2"]
        found[name] = pool.run(world, run, folder, given)[0]
    one = found["one"]
    assert one.values("noted") == [4.0, 8.0, 12.0, 16.0]
    states = {name: whole(folder, tmp_path / name) for name in ways}
    for name, other in found.items():
        for key in ("loss", "grad_norm", *([] if "Stream" in data else ["validation_loss"])):
            assert len(one.values(key)) >= 2
            np.testing.assert_allclose(other.values(key), one.values(key), rtol=1e-9, err_msg=f"{name} {key}")
        for state, tensors in states[name].items():
            assert_near(tensors, states["one"][state], 1e-9)
    held = json.loads((engine.path_of(tmp_path / "four", 2) / "trainer.json").read_text()).get("data_states", {})
    assert {name: each["row"] for name, each in held.items()} == ({data: 12} if "Stream" in data else {})
    given = [*asked, *layout, f"out={tmp_path / 'again'}", f"checkpoint.resume={engine.path_of(tmp_path / 'four', 2)}"]
    again = pool.run(4, run, folder, [*given, "checkpoint.every=4"])[0]
    assert again.values("loss") == found["four"].values("loss")[2:]
    assert all(same(tensors, states["four"][state]) for state, tensors in whole(folder, tmp_path / "again").items())


@pytest.mark.quick
def test_a_stream_goes_back_and_on_from_its_states(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like one that is read from its beginning; what is resumed is not."""
    config = load(str(folder / "recipe.yaml"), ["batch.global_size=3"])

    def opened(name: str) -> Any:
        return own_rows.opened(config, replace(config.data.train[0], path=f"acme.rest:{name}"))

    whole = [opened("Stream").sample(index).tokens.tolist() for index in range(40)]
    stream = opened("Stream")
    for index in (0, 5, 5, 30, 4, 39, 11, 10, 33):
        assert stream.sample(index).tokens.tolist() == whole[index]
    assert len(stream._states) <= own_rows.KEPT + 1
    known = stream.state(35)
    assert known["row"] in range(30, 36)
    with pytest.raises(OSError, match="busy"), monkeypatch.context() as once:
        once.setattr(type(stream._rows), "load_state_dict", mock.Mock(side_effect=OSError("busy")))
        stream.sample(2)
    assert stream.sample(2).tokens.tolist() == whole[2]
    resumed = opened("Stream")
    resumed.resume(**known)
    pulled = len(resumed._rows.pulled)
    assert [resumed.sample(index).tokens.tolist() for index in range(35, 40)] == whole[35:]
    assert len(resumed._rows.pulled) - pulled == 40 - known["row"]
    assert resumed.sample(1).tokens.tolist() == whole[1]
    blend = Blend([opened("Rows"), stream, resumed], [0.5, 0.3, 0.2])
    for index in (0, 1, 77, 70_000):
        corpora, within = blend.locate(np.arange(index, index + 99))
        wanted = [int(within[corpora == each][0]) for each in (1, 2)]
        assert [row for _, row in streams(blend, index)] == wanted


@pytest.mark.quick
def test_rows_of_each_epoch_are_all_rows_and_those_held_out_are_others(folder: Path) -> None:
    config = load(str(folder / "recipe.yaml"))
    train, held_out = own_rows.opened(config, config.data.train[0]).split(0.3, "")
    assert isinstance(train, own_rows.IndexedRows) and isinstance(held_out, own_rows.IndexedRows)
    of = {
        name: {train.sample(epoch * count + i).tokens.tobytes() for i in range(count)}
        for name, train, count, epoch in (
            ("first", train, train.per_epoch, 0),
            ("second", train, train.per_epoch, 1),
            ("held out", held_out, held_out.per_epoch, 0),
        )
    }
    assert of["first"] == of["second"] and not of["first"] & of["held out"]
    assert len(of["first"] | of["held out"]) == train.per_epoch + held_out.per_epoch == 23
    sample = own_rows.sample_of({"input_ids": [5, 6, 7], "labels": [-100, 6, -100], "documents": [0, 0, 1]}, 4, "row")
    assert sample.tokens.tolist() == [5, 6, 7, 0, 0] and sample.counted.tolist() == [False, True, False, False, False]
    assert sample.documents.tolist() == [0, 0, 1, 2, 2] and sample.filled == 3


WRONG = [
    ("data.train=acme.nothing:Rows",
     r"data.train: acme.nothing:Rows: there is no module acme.nothing in the search path \(.*own.*\): "
     r"install its package \(pip install -e FOLDER\), or name the folder that it is in by PYTHONPATH"),
    ("data.train=acmee:Rows", "data.train: acmee:Rows: there is no module acmee in the search path"),
    ("data.train=acme.rest:Rowz", "data.train: acme.rest:Rowz: .*rest.py has no Rowz: did you mean 'Rows'"),
    ("data.train=acme.rest:row", r"data: acme.rest:row, called with the config: TypeError: row\(\) missing 1"),
    ("data.train=acme.rest:__name__", r"data: row 0 of acme.rest:__name__ has <U1 of shape \[\]: give 2 to 9 token"),
    ("data.train=acme.wrong:broken", "data: acme.wrong:broken, called with the config: ZeroDivisionError"),
    ("data.train=acme.wrong:long", r"row 0 of acme.wrong:long has int64 of shape \[10\]: give 2 to 9 token ids"),
    ("data.train=acme.wrong:labelled", "row 0 of acme.wrong:labelled: labels must be input_ids, or -100"),
    ("data.train=acme.wrong:named", "row 0 of acme.wrong:named has text: a row has input_ids, labels, documents"),
    ("data.train=acme.wrong:once", "acme.wrong:once is an iterator, which cannot begin again"),
    ("data.train=acme.wrong:Sets", "acme.wrong:Sets: what state_dict gives cannot be written as JSON: .*set"),
    ("data.train=acme.rest:Stream", "evaluate.every has nothing to evaluate, for nothing can be held out"),
    ("loss.function=acme.rest:focus", "loss.function: acme.rest:focus: .*has no focus: did you mean 'focal'"),
    ("loss.function=acme.rest:mean", r"loss.function: acme.rest:mean gave torch.float32 \[\] for 4 tokens: return"),
    ("loss.function=acme.rest:row", r"acme.rest:row failed for logits of \[4, 61\]: TypeError"),
    ("loss.z_loss=0.1", r"loss.function \(acme.rest:focal\) takes the place of loss.z_loss \(0.1\) too: leave"),
    ("callbacks=[acme.rest:Note]", "callbacks: acme.rest:Note: .*has no Note: did you mean 'Notes'"),
    ("callbacks=[acme.raises:Notes]", "callbacks: acme.raises:Notes: acme.raises cannot be imported: ZeroDiv"),
    ("callbacks=[acme]", "callbacks: acme is no import path: write it as package.module:name"),
    ("model.family=acme.family:Own", "model: acme.family:Own: .*family.py has no Own"),
    ("model.family=acme.rest:Rows", "model: .*Rows.* is no config of a family: derive a class from ModelConfig"),
    ("model.family=acme.wrong:Llama", "model: Llama: llama is one that comes along: rename it"),
]  # fmt: skip
WRONG_MODULE = """
from dataclasses import dataclass
from megacore.models.families.llama import LlamaConfig
from acme.rest import Stream

long, labelled = [list(range(10))], [{"input_ids": [1, 2], "labels": [1, 3]}]
named, once = [{"text": "a"}], iter([[1, 2]])
broken = lambda config: 1 / 0

class Sets(Stream):
    def state_dict(self):
        return {1}

@dataclass(frozen=True, kw_only=True)
class Llama(LlamaConfig):
    pass
"""


@pytest.mark.quick
def test_what_is_wrong_is_told_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    (folder / "acme/wrong.py").write_text(WRONG_MODULE)
    (folder / "acme/raises.py").write_text("1 / 0")
    for override, says in WRONG:
        told = problems(str(folder / "recipe.yaml"), override, f"out={tmp_path / 'run'}")
        assert len(told) == 1 and re.search(says, told[0]), (override, told)
    made = load(str(folder / "recipe.yaml"), ["callbacks=[acme.rest:Rows, acme.rest:Notes]"])
    with pytest.raises(ConfigError, match=r"1 problem(.|\n)*acme.rest:Rows: TypeError: Rows is no megacore.Ca"):
        callbacks_of(made)
    assert not (tmp_path / "run").exists()


@pytest.mark.in_turn(2, 1)
def test_objects_from_python_are_those_of_import_paths(folder: Path, tmp_path: Path) -> None:
    """A list of rows, a function and a class of a script, and what moves weights knows the family."""
    rest, family = importlib.import_module("acme.rest"), importlib.import_module("acme.family")
    recipe = str(folder / "recipe.yaml")
    known = train(recipe, [f"out={tmp_path / 'known'}", "checkpoint.at_end=true"])
    rows = [rest.row(number, 8) for number in range(23)]

    def loss(logits: torch.Tensor, batch: Any) -> Any:
        return rest.focal(logits, batch)

    given = train(
        {key: value for key, value in yaml.safe_load(Path(recipe).read_text()).items() if key not in OWN}
        | {"model": {"preset": "own-tiny", "max_position_embeddings": 8}},
        [f"out={tmp_path / 'given'}", "data.sequence_length=8", "data.validation_fraction=0.2"],
        [rest.Notes(load(recipe))],
        model=family.OwnConfig,
        data=rows,
        loss=loss,
    )
    shown = ("loss", "grad_norm", "validation_loss", "noted")
    one, other = ([{key: each.get(key) for key in shown} for each in made.metrics] for made in (known, given))
    assert one == other and len(one) == 6
    assert str(given.config.loss.function).startswith(f"{__name__}:test_objects")
    assert plan(recipe)["parameters"] == 9840
    exported = convert(known.checkpoints[-1], tmp_path / "hf", to="hf").path
    assert json.loads((exported / "config.json").read_text())["model_type"] == "own"
    back = convert(exported, tmp_path / "back", tp=2, pp=2)
    for name, values in engine.whole(back.path, "weights").items():
        np.testing.assert_array_equal(values, engine.whole(known.checkpoints[-1], "weights")[name])
