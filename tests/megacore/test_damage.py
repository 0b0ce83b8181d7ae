"""Damaged bytes are never used: they are found while they are loaded, and a run goes on from what is whole."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import engine
import pytest
from changes import Change, gone, raw, swap, write
from engine import RECIPE, path_of, train, trainer, write_recipe
from pool import Pool
from test_reads import cannot_read

from megacore import checkpoints
from megacore.inference.model_loader import model_from
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.recipe import ConfigError
from megacore.store.conversions.formats import open_folder
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.tensors import TensorFile
from megacore.store.weight_folders import loader
from megacore.store.weight_folders.audit import DamageError
from megacore.tools import main
from megacore.training import metrics
from megacore.training.check import check
from megacore.training.main import main as pretrain

STEPS = ["train.steps=6", "checkpoint.patience=0", "train.precision=bf16", "evaluate.every=0", "checkpoint.keep=null"]
RECIPE_CHANGES = {"checkpoint": {"every": 2}}


@pytest.fixture(scope="module")
def straight(pool: Pool, recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of tp=2 after steps 2, 4 and 6, with masters."""
    out = tmp_path_factory.mktemp("straight") / "run"
    pool.run(2, train, recipe, [f"out={out}", "mesh.tp=2", *STEPS])
    return out


@pytest.fixture
def out(straight: Path, tmp_path: Path) -> Path:
    return shutil.copytree(straight, tmp_path / "run")


def flip(path: Path, tensor: str, bit: int = 0) -> None:
    """Turns one bit of the middle of a tensor over."""
    entry = TensorFile.open(path).entries[tensor]
    with path.open("r+b") as file:
        file.seek((entry.start + entry.stop) // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1 << bit]))


def refused(recipe: str, overrides: list[str]) -> str:
    with pytest.raises(DamageError) as error:
        trainer(recipe, overrides)
    return str(error.value)


TENSOR = "layers.1.attn.qkv.weight"
PLACES = [("master", 7), ("exp_avg", 0), ("exp_avg_sq", 3)]


@pytest.mark.in_turn(12)
@pytest.mark.parametrize(("state", "bit"), PLACES)
@pytest.mark.parametrize(("world", "mesh"), [(1, []), (4, ["mesh.tp=4"]), (4, ["mesh.tp=2", "mesh.pp=2"]), (2, [])])
def test_one_bit_is_found_on_any_layout(
    pool: Pool, recipe: str, out: Path, state: str, bit: int, world: int, mesh: list[str]
) -> None:
    file = f"{state}/pp0-ep0-tp1.safetensors"
    flip(path_of(out, 6) / file, TENSOR, bit)
    overrides = [f"out={out.with_name('new')}", f"checkpoint.resume={path_of(out, 6)}", *STEPS, *mesh]
    said = {refused(recipe, overrides)} if world == 1 else {*pool.run(world, refused, recipe, overrides)}
    (message,) = said
    assert message.startswith(f"{path_of(out, 6)} is damaged:\n{file}: {TENSOR} (") and message.count("\n") == 1
    assert "when it was written" in message


@pytest.mark.in_turn(2, 1)
def test_what_ranks_of_tp_and_ep_read_for_each_other_is_found_by_all(pool: Pool, tmp_path: Path) -> None:
    """A damaged norm, which all of them share, experts, and a rank that cannot read."""
    recipe = write_recipe(tmp_path, RECIPE | {"model": {"preset": "mixtral-tiny", "num_hidden_layers": 1}})
    common = ["mesh.tp=2", "mesh.ep=2", *STEPS, "checkpoint.every=6"]
    pool.run(4, train, recipe, [f"out={tmp_path / 'run'}", *common])
    at = path_of(tmp_path / "run", 6)
    again = [f"out={tmp_path / 'new'}", f"checkpoint.resume={at}", *common]
    for place, tensor in (("ep0-tp1", "attn_norm.weight"), ("ep1-tp0", "mlp.experts.up.weight")):
        file = f"master/pp0-{place}.safetensors"
        flip(at / file, f"layers.0.{tensor}")
        (message,) = {*pool.run(4, refused, recipe, again)}
        assert message.startswith(f"{at} is damaged:\n{file}: layers.0.{tensor} ") and message.count("\n") == 1
        flip(at / file, f"layers.0.{tensor}")
    (message,) = {*pool.run(4, cannot_read, recipe, again, 3, StoreError("on fire"))}
    assert message.startswith("StoreError: rank 3 (") and message.endswith("): on fire")


def test_one_bit_of_what_rounding_has_left_is_found(pool: Pool, recipe: str, tmp_path: Path) -> None:
    """Each rank reads its own alone."""
    overrides = [f"out={tmp_path}", "zero.compress=int8", "train.precision=fp32", *STEPS, "checkpoint.every=6"]
    pool.run(2, train, recipe, overrides)
    file = "residual_of_1/pp0-ep0-tp0.safetensors"
    flip(path_of(tmp_path, 6) / file, TENSOR)
    (message,) = {*pool.run(2, refused, recipe, [*overrides, f"checkpoint.resume={path_of(tmp_path, 6)}"])}
    assert f"{file}: {TENSOR} (" in message


def opened(folder: Path, tp: int) -> str:
    with pytest.raises(DamageError) as error:
        model_from(open_folder(folder), Mesh.create(MeshShape(tp=tp)))
    return str(error.value)


@pytest.mark.parametrize("tp", [1, 2])
def test_what_computes_with_a_model_refuses_it(pool: Pool, recipe: str, out: Path, tp: int) -> None:
    """Generating, evaluating and verifying load it alike; and a start from its weights."""
    flip(path_of(out, 4) / "weights/pp0-ep0-tp0.safetensors", "embed.weight")
    (message,) = {*pool.run(tp, opened, path_of(out, 4), tp)}
    assert "weights/pp0-ep0-tp0.safetensors: embed.weight has the fingerprint" in message
    for file in path_of(out, 4).glob("master/*"):  # a run starts from the weights that are most exact
        flip(file, TENSOR)
    assert f"{TENSOR} (" in refused(recipe, [f"checkpoint.init={path_of(out, 4)}", *STEPS])


def reads_wrongly(recipe: str, overrides: list[str]) -> str:
    """A rank whose memory turns a bit over."""
    plain = loader.assemble

    def broken(*arguments: Any) -> Any:
        made = plain(*arguments)
        arguments[-1].update({label: value ^ 1 for label, value in arguments[-1].items()})
        return made

    world = Mesh.create(MeshShape(dp=2))
    with (
        mock.patch.object(loader, "assemble", broken if world.rank == 1 else plain),
        pytest.raises(StoreError) as error,
    ):
        trainer(recipe, overrides)
    assert not isinstance(error.value, DamageError)
    return str(error.value)


def test_a_rank_that_reads_something_else_is_found_though_the_files_are_sound(
    pool: Pool, recipe: str, straight: Path, tmp_path: Path
) -> None:
    overrides = [f"out={tmp_path / 'new'}", f"checkpoint.resume={path_of(straight, 4)}", *STEPS]
    (message,) = {*pool.run(2, reads_wrongly, recipe, overrides)}
    assert "memory, a disk or a network on the way is at fault" in message


# -- auto


def going_on(recipe: str, out: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """What a run in this folder says that goes on by itself."""
    assert pretrain([recipe, f"out={out}", "checkpoint.resume=auto", *STEPS, *overrides]) == 0
    return capsys.readouterr().out


def names(out: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.folder_of(out).iterdir())


def bad_bit(path: Path) -> None:
    flip(path / "exp_avg_sq" / "pp0-ep0-tp0.safetensors", TENSOR)


cut = raw("index.json", lambda content: content[:1000])
WAYS: dict[str, tuple[Change, str]] = {
    "cut": (cut, "is not JSON"),
    "empty": (gone("index.json"), "was not written to its end"),
    "without a file": (gone("exp_avg/pp0-ep0-tp1.safetensors"), "No such file"),
    "bad counts": (write("trainer.json", '{"step": 6, "recipe": {}}'), "has no consumed_samples"),
    "another step": (swap("trainer.json", '"step": 6', '"step": 4'), "trainer.json has step 4, index.json 6"),
    "bad bit": (bad_bit, "has the fingerprint"),
}


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("damage", WAYS)
def test_a_run_goes_on_from_the_newest_whole_checkpoint(
    recipe: str, out: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """And ends as if it had been started from that one by hand; what is damaged is kept, out of the way."""
    other = out.with_name("other")
    train(recipe, [f"out={other}", f"checkpoint.resume={path_of(out, 4)}", *STEPS])
    change, why = WAYS[damage]
    change(path_of(out, 6))
    before = {path: path.read_bytes() for path in path_of(out, 6).rglob("*.*") if path.is_file()}
    said = going_on(recipe, out, capsys)
    (line,) = [line for line in said.splitlines() if line.startswith("Set aside as step-00000006.damaged: ")]
    assert str(path_of(out, 6)) in line and why in said
    assert "Resuming after step 4" in said
    assert names(out) == ["step-00000002", "step-00000004", "step-00000006", "step-00000006.damaged"]
    for path, data in before.items():
        assert (out / "checkpoints/step-00000006.damaged" / path.relative_to(path_of(out, 6))).read_bytes() == data
    assert [step for step, _ in metrics.curve(metrics.read(out / "metrics.jsonl"), "loss")] == [1, 2, 3, 4, 5, 6]
    engine.assert_same_files(path_of(other, 6), path_of(out, 6), 4)


@pytest.mark.in_turn(2, 0)
def test_two_damaged_ones_in_a_row(recipe: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One is found before anything starts, one while it is loaded, and the rest of a third is in the way."""
    cut(path_of(out, 6))
    bad_bit(path_of(out, 4))
    path_of(out, 5).mkdir()
    (checkpoints.folder_of(out) / "step-00000006.damaged").mkdir()
    said = going_on(recipe, out, capsys)
    assert said.count("Set aside as") == 3 and "Resuming after step 2" in said
    kept = ["step-00000002", "step-00000004", "step-00000006"]
    aside = ["step-00000004.damaged", "step-00000005.damaged", "step-00000006.damaged", "step-00000006.damaged-2"]
    assert names(out) == sorted([*kept, *aside])


def test_nothing_is_begun_anew_where_all_are_damaged(
    recipe: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (2, 4):
        cut(path_of(out, step))
    bad_bit(path_of(out, 6))
    before = (out / "metrics.jsonl").read_bytes()
    assert pretrain([recipe, f"out={out}", "checkpoint.resume=auto", *STEPS]) == 1
    said = capsys.readouterr().err
    assert "has no checkpoint that is whole" in said and "move" in said and "away to begin anew" in said
    assert names(out) == ["step-00000002", "step-00000004", "step-00000006"]
    assert (out / "metrics.jsonl").read_bytes() == before
    # And before anything starts, where that can be seen.
    cut(path_of(out, 6))
    each = r"step-00000006/index.json is not JSON: .*step-00000002/index.json is not JSON: "
    with pytest.raises(ConfigError, match=rf"(?s)has no checkpoint that is whole.*{each}"):
        check(recipe, [f"out={out}", "checkpoint.resume=auto", *STEPS], 1, 1)


def test_another_version_is_not_damage(recipe: str, out: Path) -> None:
    index = path_of(out, 6) / "index.json"
    index.write_text(index.read_text().replace('"version": 1', '"version": 9'))
    with pytest.raises(ConfigError, match="version 9, and this release reads 1, 2, 3, 4, 5, 6 and 7: use the one"):
        check(recipe, [f"out={out}", "checkpoint.resume=auto", *STEPS], 1, 1)


@pytest.mark.in_turn(2, 1)
def test_where_to_go_on_is_named(recipe: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest of the other checkpoints that is whole, to its last byte."""
    bad_bit(path_of(out, 4))
    flip(path_of(out, 6) / "weights/pp0-ep0-tp0.safetensors", TENSOR)
    bad_bit(path_of(out, 6))
    arguments = [recipe, f"out={out.with_name('new')}", f"checkpoint.resume={path_of(out, 6)}", *STEPS]
    assert pretrain(arguments) == 1
    said = capsys.readouterr().err
    beside = f"The newest whole checkpoint beside it is {path_of(out, 2)}"
    assert f"{path_of(out, 6)} is damaged" in said and beside in said
    assert main.main(["evaluate", str(path_of(out, 6)), "--data", str(Path(recipe).with_name("corpus"))]) == 1
    assert beside in capsys.readouterr().err
    cut(path_of(out, 4))
    for command in (
        ["inspect", str(path_of(out, 4))],
        ["reshard", str(path_of(out, 4)), str(out.with_name("other")), "--tp", "1"],
    ):
        assert main.main(command) == 1
        said = capsys.readouterr().err
        assert "is not JSON" in said and beside in said
