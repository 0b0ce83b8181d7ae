"""Averages of weights against torch.optim.swa_utils: on every layout, saved, resumed, evaluated and exported."""

from pathlib import Path

import engine
import numpy as np
import pytest
import torch
from engine import assert_near, path_of, trainer, weights, whole
from pool import Pool
from safetensors.numpy import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megacore import convert
from megacore.store.tensor_files.tensors import TensorFile
from megacore.training import main
from megacore.training.callbacks.evaluation import Evaluation
from megacore.training.step import Stats
from megacore.training.trainer import Callback, Trainer

DECAY = 0.7
"""So low that five steps show all of it."""
ON = [f"ema.decay={DECAY}", "ema.evaluate=true", "checkpoint.every=3", "checkpoint.at_end=true", "evaluate.every=5"]


class ByTorch(Callback):
    """Averages the weights after each step, as a plain loop would."""

    def on_start(self, run: Trainer) -> None:
        self.model = nn.ParameterDict({_key(n): p.detach().clone() for n, p in run.model.parameters.items()})
        self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def on_step(self, run: Trainer, stats: Stats) -> None:
        for name, parameter in run.model.parameters.items():
            self.model[_key(name)].data.copy_(parameter)
        self.averaged.update_parameters(self.model)

    @property
    def found(self) -> dict[str, np.ndarray]:
        averages = dict(self.averaged.module.named_parameters())
        return {name.replace("/", "."): each.detach().numpy() for name, each in averages.items()}


def _key(name: str) -> str:
    return name.replace(".", "/")


Straight = tuple[Path, engine.Result, dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def straight(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Five steps of one process -> (folder, result, averages by torch)."""
    out, by_torch = tmp_path_factory.mktemp("straight"), ByTorch()
    found = engine.train(recipe, [f"out={out}", *ON, "checkpoint.keep=null"], [by_torch])
    return out, found, by_torch.found


def test_one_process_averages_as_torch_does(straight: Straight) -> None:
    out, found, by_torch = straight
    assert_near(whole(path_of(out, 5), "ema"), by_torch, 1e-14)
    assert max(np.abs(by_torch[name] - found.weights[name]).max() for name in by_torch) > 1e-3


LAYOUTS = [
    pytest.param(4, 0, ["mesh.tp=4"], id="tp4"),  # kv heads shared, vocabulary padded
    pytest.param(4, 3, ["mesh.pp=2", "zero.shard=parameters"], id="pp2-dp2-parameters"),
    pytest.param(2, 3, ["zero.shard=gradients"], id="dp2-gradients"),
    pytest.param(2, 0, ["memory.offload_optimizer=host"], id="dp2-host"),
]
"""(ranks, the step of one process after which they go on, overrides)."""


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(("world", "after", "overrides"), LAYOUTS)
def test_another_layout_begins_or_goes_on_with_the_same(
    pool: Pool, recipe: str, straight: Straight, tmp_path: Path, world: int, after: int, overrides: list[str]
) -> None:
    out, found, by_torch = straight
    start = [f"checkpoint.resume={path_of(out, after)}"] * (after > 0)
    ranks = pool.run(world, engine.train, recipe, [f"out={tmp_path}", *ON, *overrides, *start])
    assert_near(whole(path_of(tmp_path, 5), "ema"), by_torch, 1e-9)
    for key in ("validation_loss", "ema_validation_loss"):
        np.testing.assert_allclose(ranks[0].values(key), found.values(key), rtol=1e-9)


@pytest.mark.in_turn(3, 0)
def test_they_are_evaluated_and_exported_and_change_nothing(recipe: str, straight: Straight, tmp_path: Path) -> None:
    out, found, by_torch = straight
    averages = path_of(out, 5) / "ema"
    begun = trainer(recipe, [f"out={tmp_path / 'begun'}", f"checkpoint.init={averages}", "evaluate.every=5"])
    assert_near(weights(begun), by_torch, 1e-14)
    ((loss,), (other,)) = (found.values(f"{kind}validation_loss") for kind in ("ema_", ""))
    assert engine.of(begun, Evaluation).losses(begun) == [loss] != [other]
    assert engine.same(engine.train(recipe, [f"out={tmp_path / 'plain'}"]).weights, found.weights)
    main.main([recipe, f"out={tmp_path / 'again'}", *ON, f"checkpoint.export={tmp_path / 'hf'}", "ema.export=true"])
    convert(averages, tmp_path / "converted", to="hf")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "converted"))
    assert engine.same(one, two) and len(one) == len(two)
    np.testing.assert_allclose(one["model.norm.weight"], by_torch["norm.weight"], rtol=1e-14)


@pytest.mark.in_turn(2)
def test_averages_of_masters_know_more_than_bf16(recipe: str, tmp_path: Path) -> None:
    """And the export is as wide as the weights."""
    exports = ["train.precision=bf16", f"checkpoint.export={tmp_path / 'hf'}", "ema.export=true"]
    main.main([recipe, f"out={tmp_path / 'run'}", *ON, *exports])
    averages = whole(path_of(tmp_path / "run", 5), "ema")
    assert all((torch.from_numpy(each).bfloat16() != torch.from_numpy(each)).any() for each in averages.values())
    assert {entry.dtype for entry in TensorFile.open(tmp_path / "hf/model.safetensors").entries.values()} == {"BF16"}
