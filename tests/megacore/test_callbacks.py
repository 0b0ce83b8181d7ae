"""Callbacks: who hears of what, what a veto, a rewind and an answer do, and ranks that do not have the same."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import engine
import numpy as np
import pytest
import torch
from engine import trainer
from pool import Pool

import megacore
from megacore.training.step import Stats
from megacore.training.trainer import Callback, Trainer

QUIET = ["evaluate.every=0"]


class Hears(Callback):
    """Notes the steps that it hears of."""

    def __init__(self) -> None:
        self.heard = list[tuple[str, int]]()

    def on_step(self, run: Trainer, stats: Stats) -> None:
        self.heard.append(("step", run.step))

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        self.heard.append(("answers", run.step))

    def on_rewind(self, run: Trainer) -> None:
        self.heard.append(("rewind", run.step))

    def on_error(self, run: Trainer, error: BaseException) -> None:
        self.heard.append((str(error), run.step))


class Rewinds(Callback):
    """Has the run go on after step 1 instead of 3, once."""

    def __init__(self) -> None:
        self.done = False

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        if run.step == 3 and not self.done:
            self.done = True
            run.rewind(1)


class Vetoes(Callback):
    """Leaves the update of step 2 out, and keeps the weights before each step."""

    def __init__(self) -> None:
        self.weights = dict[int, dict[str, np.ndarray]]()

    def on_gradients(self, run: Trainer, stats: Stats) -> None:
        self.weights[run.step] = engine.weights(run)
        run.veto(torch.tensor(run.step == 2))
        run.veto(torch.tensor(False))


class Fails(Callback):
    """Raises in step 2."""

    def on_gradients(self, run: Trainer, stats: Stats) -> None:
        if run.step == 2:
            raise ValueError("mine")


def test_who_stands_behind_a_rewind_does_not_hear_of_the_step(recipe: str, tmp_path: Path) -> None:
    before, behind = Hears(), Hears()
    made = trainer(recipe, [f"out={tmp_path / 'run'}", *QUIET], callbacks=[before, Rewinds(), behind])
    assert made.fit() == 5
    steps = [1, 2, 3, 2, 3, 4, 5]
    assert [step for what, step in before.heard if what == "step"] == steps
    assert [step for what, step in before.heard if what == "answers"] == steps
    assert [step for what, step in behind.heard if what == "answers"] == [1, 2, 2, 3, 4, 5]
    assert behind.heard[5:7] == [("rewind", 1), ("step", 2)] and before.heard[6:8] == behind.heard[5:7]


def test_a_veto_leaves_an_update_out(recipe: str, tmp_path: Path) -> None:
    vetoes = Vetoes()
    trainer(recipe, [f"out={tmp_path / 'run'}", *QUIET], callbacks=[vetoes]).fit()

    def changed(step: int) -> bool:
        one, other = vetoes.weights[step], vetoes.weights[step + 1]
        return any(not np.array_equal(value, other[name]) for name, value in one.items())

    assert [changed(step) for step in (1, 2, 3, 4)] == [True, False, True, True]


def others(recipe: str, overrides: list[str]) -> str:
    given: list[Callback] = [Hears()] if torch.distributed.get_rank() else []
    with pytest.raises(ValueError) as error:
        trainer(recipe, overrides, callbacks=given).fit()
    return str(error.value)


def test_ranks_with_other_callbacks_do_not_start(pool: Pool, recipe: str, tmp_path: Path) -> None:
    found = pool.run(2, others, recipe, [f"out={tmp_path / 'run'}", *QUIET])
    assert "'Hears'" in found[0] and all("give all ranks the same" in said for said in found)


def test_all_hear_of_an_error_which_says_its_step(recipe: str, tmp_path: Path) -> None:
    before, behind = Hears(), Hears()
    made: Any = trainer(recipe, [f"out={tmp_path / 'run'}", *QUIET], callbacks=[before, Fails(), behind])
    with pytest.raises(ValueError, match="mine") as error:
        made.fit()
    assert error.value.__notes__ == ["at step 2"]
    assert before.heard[-1] == behind.heard[-1] == ("mine", 2)


@pytest.mark.in_turn(3, 1)
def test_two_steps_are_profiled_on_the_first_replica(pool: Pool, recipe: str, tmp_path: Path) -> None:
    overrides = [f"out={tmp_path}", "mesh.tp=2", "train.steps=5", "log.profile=3", "batch.global_size=4"]
    pool.run(4, engine.train, recipe, overrides)
    traces = sorted((tmp_path / "profiles").iterdir())
    assert [each.name for each in traces] == ["step-3-rank-0.json", "step-3-rank-1.json"]
    names = [each.get("name", "") for each in json.loads(traces[0].read_text())["traceEvents"]]
    assert any("all_reduce" in name or "allreduce" in name for name in names) and "aten::mm" in names


class Forgets(Callback):
    """Forgets an argument."""

    def on_step(self, run: Trainer) -> None:  # type: ignore[override]
        pass


def test_a_method_that_cannot_be_called_is_told_before_anything_starts() -> None:
    with pytest.raises(TypeError, match=r"Forgets\.on_step is called with \(run, stats\): too many positional"):
        megacore.train("nowhere.yaml", callbacks=[Hears(), Forgets()])
    given: Any = Hears
    with pytest.raises(TypeError, match=r"callbacks: Hears is a class: give what it makes, Hears\(\)"):
        megacore.train("nowhere.yaml", callbacks=[given])
    given = object()
    with pytest.raises(TypeError, match=r"callbacks: <object .*> is no megacore.Callback: derive its class from that"):
        megacore.finetune("nowhere.yaml", callbacks=[given])
