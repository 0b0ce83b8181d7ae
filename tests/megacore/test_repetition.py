"""Bad steps are done again: hardware that was at fault is told from data, whose samples are then left out."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine
import pytest
import torch
from engine import Result, trainer
from pool import Pool

from megacore import checkpoints, exits, incidents
from megacore.incidents import Incident
from megacore.models.decoder import Microbatch
from megacore.parallel.pipeline.schedules import Kind
from megacore.training import build, main
from megacore.training.callbacks import repeat_steps
from megacore.training.callbacks.bad_steps import NonFinite
from megacore.training.callbacks.repeat_steps import UnsoundHardware
from megacore.training.resume import Start
from megacore.training.trainer import Callback

REPEAT = ["optimizer.non_finite=repeat", "train.steps=6", "checkpoint.every=3", "evaluate.every=0"]


def poison_samples(made: engine.Trainer, samples: list[int], factor: float) -> None:
    """Multiply the losses of microbatches that hold some samples."""
    plain = made.train_step.pipeline.train
    poisoned = {bytes(made.batches.source.sample(each).tokens[:-1]) for each in samples}

    def train(microbatches: list[Microbatch], scale: torch.Tensor, enter: Callable[[Kind], object]) -> torch.Tensor:
        rows = [bytes(row.numpy()) for each in microbatches for row in each.tokens.view(-1, engine.LENGTH)]
        return plain(microbatches, scale * factor if poisoned & set(rows) else scale, enter)

    made.train_step.pipeline.train = train  # type: ignore[assignment, method-assign]


class Heard(Callback):
    """What befalls a run."""

    def __init__(self) -> None:
        self.told = list[Incident]()

    def on_incident(self, run: engine.Trainer, incident: Incident) -> None:
        self.told.append(incident)


def poisoned_runs(monkeypatch: pytest.MonkeyPatch, samples: list[int], factor: float) -> None:
    """Poison samples of all runs from here on."""

    def poisoned(*given: Any) -> engine.Trainer:
        made = build.trainer_of(*given)
        poison_samples(made, samples, factor)
        return made

    monkeypatch.setattr(main, "trainer_of", poisoned)


def run(
    recipe: str,
    overrides: list[str],
    calls: dict[int, float] | None = None,
    rank: int = 0,
    poisoned: list[int] | None = None,
    factor: float = torch.nan,
) -> tuple[Result, list[Incident]]:
    heard = Heard()
    made = trainer(recipe, overrides, log=True, callbacks=[heard])
    if calls and made.mesh.rank == rank:
        engine.scale_losses(made, calls)
    if poisoned:
        poison_samples(made, poisoned, factor)
    found = engine.result(made, made.fit())
    if made.mesh.rank == 0:
        new: dict[str, Any] = {"number": 0, "recovered": None, "steps_lost": None, "seconds_lost": None}
        assert [replace(each, **new) for each in incidents.read(Path(made.config.out))] == heard.told
    return found, heard.told


def assert_same(one: Result, other: Result) -> None:
    for key in ("loss", "grad_norm", "tokens", "skipped_steps"):
        assert one.values(key) == other.values(key), key
    assert engine.same(one.weights, other.weights)


def kinds(told: list[Incident]) -> list[tuple[str, str]]:
    return [(each.kind, each.action) for each in told]


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("precision", ["fp64", "fp16"])
@pytest.mark.parametrize("every", [1, 4], ids=["at-once", "at-the-next-record"])
def test_a_step_that_is_bad_once_leaves_no_trace(recipe: str, tmp_path: Path, every: int, precision: str) -> None:
    """Steps that were halted meanwhile are done again, and the loss scale has not moved in them."""
    common = [*REPEAT, f"log.every={every}", f"train.precision={precision}", "checkpoint.every=0"]
    common += ["loss_scale.growth_interval=2"]
    plain, _ = run(recipe, [f"out={tmp_path / 'plain'}", *common])
    found, told = run(recipe, [f"out={tmp_path / 'found'}", *common], {3: torch.nan})
    assert kinds(told) == [("non_finite", "repeat"), ("unrepeatable", "tell")]
    assert [(each.step, each.samples) for each in told] == [(3, (16, 24))] * 2
    assert told[1].rank == 0 and "differed: rank 0" in told[1].detail
    assert [each.steps_lost for each in incidents.read(tmp_path / "found")] == [0, None]
    assert_same(found, plain)
    assert found.values("loss_scale") == plain.values("loss_scale")


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("world", "overrides", "known"), [(2, [], 1), (2, ["mesh.pp=2"], None)], ids=["dp2", "pp2"])
def test_all_ranks_repeat_and_name_the_one(
    pool: Pool, recipe: str, tmp_path: Path, world: int, overrides: list[str], known: int | None
) -> None:
    common = [*REPEAT, "log.every=2", "checkpoint.every=0", *overrides]
    plain = pool.run(world, run, recipe, [f"out={tmp_path / 'plain'}", *common])
    found = pool.run(world, run, recipe, [f"out={tmp_path / 'found'}", *common], {3: torch.nan}, 1)
    for (one, told), (other, _) in zip(found, plain, strict=True):
        assert kinds(told) == [("non_finite", "repeat"), ("unrepeatable", "tell")]
        assert told[1].rank == known and "differed: rank 1 (" in told[1].detail
        assert told == found[0][1]
        assert_same(one, other)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(
    ("world", "overrides"),
    [(1, ["log.every=4"]), (2, ["mesh.tp=2", "log.every=2"]), (2, ["log.every=3"])],
    ids=["one", "tp2", "dp2"],
)
def test_poisoned_samples_are_left_out_as_if_they_had_been_from_the_start(
    pool: Pool, recipe: str, tmp_path: Path, world: int, overrides: list[str]
) -> None:
    """Those of two steps, of which the second comes after the first range."""
    poisoned = [12, 33, 38]
    common = [*REPEAT, *overrides]
    found = pool.run(world, run, recipe, [f"out={tmp_path / 'found'}", *common], None, 0, poisoned)
    skip = "recovery.skip_samples=[8-16,32-40]"
    plain = pool.run(world, run, recipe, [f"out={tmp_path / 'plain'}", *common, skip], None, 0, poisoned)
    for (one, told), (other, none) in zip(found, plain, strict=True):
        assert kinds(told) == [("non_finite", "repeat"), ("bad_data", "skip")] * 2 and none == []
        assert_same(one, other)
    for name in ("found", "plain"):
        tree = json.loads((engine.path_of(tmp_path / name, 6) / "trainer.json").read_text())
        assert tree["skipped_samples"] == [[8, 16], [32, 40]]
        assert (tree["consumed_samples"], tree["optimizer_steps"]) == (48, 6)


def test_a_spent_budget_ends_with_the_samples(recipe: str, tmp_path: Path) -> None:
    overrides = [f"out={tmp_path}", *REPEAT, "optimizer.max_skipped=1"]
    made = trainer(recipe, overrides)
    poison_samples(made, [12, 33], torch.nan)
    with pytest.raises(NonFinite) as error:
        made.fit()
    said = str(error.value)
    assert said.startswith("step 4, samples 32 to 39 of the training data: the loss is not finite on rank 0 (")
    assert "1 of 100 steps are left out already; left out: 8-16" in said
    assert error.value.status == exits.FAILED


def test_steps_that_end_a_run_or_are_left_out_are_incidents(recipe: str, tmp_path: Path) -> None:
    for choice, action in (("stop", "end"), ("skip", "skip")):
        overrides = [f"out={tmp_path / choice}", *REPEAT, f"optimizer.non_finite={choice}"]
        made = trainer(recipe, overrides, log=True)
        engine.scale_losses(made, {3: torch.nan})
        with pytest.raises(NonFinite) if choice == "stop" else nullcontext() as error:
            made.fit()
        assert error is None or error.value.status == exits.FAILED
        (found,) = incidents.read(tmp_path / choice)
        assert (found.kind, found.step, found.action) == ("non_finite", 3, action)
        assert (found.recovered is None) == (choice == "stop")


def test_other_numbers_that_are_bad_again_are_the_hardware_s(recipe: str, tmp_path: Path) -> None:
    made = trainer(recipe, [f"out={tmp_path}", *REPEAT])
    engine.scale_losses(made, {3: torch.nan, 4: torch.inf})
    with pytest.raises(UnsoundHardware, match=r"step 3 was bad twice, .* differed: rank 0 \(") as error:
        made.fit()
    assert error.value.status == exits.EVICT


def files_left(recipe: str, out: Path, left_out: list[int], *overrides: str) -> dict[str, bytes]:
    """The tensor files at the end of a run that goes back to any of its checkpoints, which has left samples out."""
    often = [f"out={out}", *REPEAT, "checkpoint.every=2", "checkpoint.keep=null", *overrides]
    assert engine.fit(recipe, often) == 6
    path = checkpoints.complete(checkpoints.folder_of(out))[6]
    tree = json.loads((path / "trainer.json").read_text())
    assert tree["skipped_samples"] == [left_out] and tree["consumed_samples"] == 48
    return {each.name: each.read_bytes() for each in path.rglob("*.safetensors")}


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["disk", "store"])
def test_the_run_goes_back_before_bad_data(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], elsewhere: bool
) -> None:
    """To the newest checkpoint, twice, leaving out all from there on."""
    poisoned_runs(monkeypatch, [34, 41], torch.nan)

    def files(name: str, override: str) -> dict[str, bytes]:
        url = [f"checkpoint.folder=file://{tmp_path / name / 'checkpoints'}"] if elsewhere else []
        return files_left(recipe, tmp_path / name, [32, 48], *url, override)

    found = files("found", "recovery.go_back=true")
    said = capfd.readouterr()
    assert said.out.count("Resuming after step 4 (") == 2 and "left out: 32 to 39." in said.out
    assert found and found == files("plain", "recovery.skip_samples=[32-48]")


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("damage", "restarted"), [("a bit", False), ("the index", False), ("a bit", True)])
def test_the_run_goes_back_over_a_damaged_checkpoint(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, restarted: bool
) -> None:
    """To the one before it, and still without the samples that were found to be bad, and those before."""
    prepare = repeat_steps._before
    newest = engine.path_of(tmp_path / "found", 4)

    def damaged(*given: Any) -> Start:
        if damage == "a bit" and newest.exists():
            (path,) = (newest / "weights").glob("*.safetensors")
            held = bytearray(path.read_bytes())
            held[-1] ^= 1
            path.write_bytes(held)
        elif newest.exists():
            (newest / "index.json").write_text("{")
        return prepare(*given)

    poisoned_runs(monkeypatch, [34], torch.nan)
    expected = files_left(recipe, tmp_path / "plain", [16, 40], "recovery.skip_samples=[16-40]")
    monkeypatch.setattr(repeat_steps, "_before", damaged)
    back = ["recovery.go_back=true", *(["checkpoint.resume=auto"] if restarted else [])]
    found = files_left(recipe, tmp_path / "found", [16, 40], *back)
    assert found == expected and newest.with_name(f"{newest.name}.damaged").exists()


# -- spikes

SPIKES = ["train.steps=44", "optimizer.lr=1e-4", "checkpoint.every=0", "evaluate.every=0", "schedule.warmup_steps=0"]
"""Of which the first 32 records are no spikes, whatever they are."""


@pytest.mark.in_turn(3, 1)
def test_a_spike_is_told(recipe: str, tmp_path: Path) -> None:
    """Its steps stay; where it begins it is told, once."""
    found, told = run(recipe, [f"out={tmp_path}", *SPIKES], {41: 1e3, 42: 1e3})
    assert found.last == 44 and kinds(told) == [("spike", "tell")]
    assert told[0].step == 41 and "grad_norm" in told[0].detail


@pytest.mark.in_turn(6, 2)
def test_a_spike_of_the_hardware_leaves_no_trace_and_one_of_data_is_left_out(recipe: str, tmp_path: Path) -> None:
    common = [*SPIKES, "optimizer.non_finite=repeat", "recovery.spikes=true"]
    plain, none = run(recipe, [f"out={tmp_path / 'plain'}", *common])
    assert none == []
    found, told = run(recipe, [f"out={tmp_path / 'found'}", *common], {41: 1e3})
    assert kinds(told) == [("spike", "repeat"), ("unrepeatable", "tell")]
    assert_same(found, plain)
    found, told = run(recipe, [f"out={tmp_path / 'data'}", *common], None, 0, [325], 1e3)
    assert kinds(told) == [("spike", "repeat"), ("bad_data", "skip")]
    without, none = run(recipe, [f"out={tmp_path / 'without'}", *common, "recovery.skip_samples=[320-328]"])
    assert_same(found, without)


@pytest.mark.in_turn(6, 0)
def test_a_run_that_is_started_again_knows_what_a_spike_is(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    poisoned_runs(monkeypatch, [325], 1e3)
    common = [*SPIKES, f"out={out}", "checkpoint.at_end=true", "schedule.name=constant"]
    for steps in 38, 44:
        assert engine.fit(recipe, [*common, f"train.steps={steps}", "checkpoint.resume=auto"]) == steps
    assert [(each.kind, each.step) for each in incidents.read(out)] == [("spike", 41)]


@pytest.mark.in_turn(2, 0)
def test_a_run_that_is_started_again_knows_what_it_has_left_out(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned_runs(monkeypatch, [12, 33], torch.nan)
    common = [*REPEAT, f"out={tmp_path}", "optimizer.max_skipped=1", "checkpoint.resume=auto", "checkpoint.at_end=true"]
    assert engine.fit(recipe, [*common, "train.steps=3"]) == 3
    with pytest.raises(NonFinite, match="1 of 100 steps are left out already"):
        engine.fit(recipe, common)
    # Somebody has read why: there is room again.
    assert engine.fit(recipe, common) == 6


@pytest.mark.in_turn(6, 5)
def test_a_run_that_has_gone_back_knows_what_a_spike_is(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    common = [*SPIKES, "optimizer.non_finite=repeat", "recovery.spikes=true"]
    poisoned_runs(monkeypatch, [290, 340], 1e3)
    back = [*common, "recovery.go_back=true", "checkpoint.every=18"]
    assert engine.fit(recipe, [f"out={tmp_path / 'back'}", *back]) == 44
    assert capfd.readouterr().err.count(". Go back to the newest checkpoint before the step") == 2
