"""Replicas that take steps alone (``sync``): the numbers beside a simulation in one process by torch's optimizers, and
runs that are saved and go on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import engine
import numpy as np
import pytest
import torch
from engine import GPT2, RECIPE, trainer
from pool import Pool
from torch import Tensor

from megacore.training.callbacks.evaluation import Evaluation
from megacore.training.lr import learning_rate

OUTER = ["sync.every=2", "sync.lr=0.6", "sync.momentum=0.8"]
CLIP = 0.5
ON = [*OUTER, f"optimizer.clip={CLIP}", "evaluate.every=3", "checkpoint.every=0"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return engine.write_recipe(tmp_path_factory.mktemp("recipe"), RECIPE)


@dataclass
class Simulated:
    """Per step: the mean loss of the replicas, the root of the mean of their squared norms. The validation loss after
    step 3. At the end: the common weights, and those of each replica."""

    losses: list[float]
    norms: list[float]
    evaluated: float
    common: dict[str, np.ndarray]
    own: list[dict[str, np.ndarray]]


def simulate(recipe: str, replicas: int, ranks: int) -> Simulated:
    """All replicas one after the other, each with the batches of so many ranks: gradients are those of one process,
    AdamW, clipping and the outer step are torch's."""
    run = trainer(recipe, ON)
    config, optimizer = run.config, run.train_step.optimizer
    parameters = run.model.parameters
    decays = {name: parameters.shards[name].param.decays for name in parameters}

    def fill(weights: dict[str, Tensor]) -> None:
        for name, weight in weights.items():
            optimizer.load_weight(name, weight.detach())

    begun = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    common = {name: weight.clone().requires_grad_() for name, weight in begun.items()}
    own = [{name: weight.clone().requires_grad_() for name, weight in begun.items()} for _ in range(replicas)]
    inner = [
        torch.optim.AdamW(
            [
                {"params": [w for n, w in weights.items() if decays[n] == kind], "weight_decay": 0.1 if kind else 0.0}
                for kind in (True, False)
            ],
            betas=(0.9, 0.95),
            eps=1e-8,
        )
        for weights in own
    ]
    outer = torch.optim.SGD(common.values(), lr=0.6, momentum=0.8, nesterov=True)
    found = Simulated([], [], 0.0, {}, [])
    for step in range(1, config.train.steps + 1):
        losses, norms = [], []
        for replica, (weights, adamw) in enumerate(zip(own, inner, strict=True)):
            fill(weights)
            given = [
                batch
                for rank in range(replica * ranks, (replica + 1) * ranks)
                for batch in replace(run.batches, data_rank=rank, data_size=replicas * ranks).microbatches(step - 1)
            ]
            stats = run.train_step.backward(run.upload(given, step))
            losses.append(stats.loss.item())
            for part, span, _, _ in run.train_step.gradients.owned():
                weights[span.name].grad = part.gradient.clone()
            norm = torch.stack([weight.grad.square().sum() for weight in weights.values()]).sum().sqrt().item()
            norms.append(norm)
            for weight in weights.values():
                weight.grad /= float(np.float32(max(1.0, (norm + 1e-6) / CLIP)))  # kernels take it in fp32
            for group in adamw.param_groups:
                group["lr"] = learning_rate(step, config.schedule, config.optimizer.lr, config.train.steps)
            adamw.step()
        found.losses.append(float(np.mean(losses)))
        found.norms.append(float(np.sqrt(np.mean(np.square(norms)))))
        if step % 2 == 0:
            for name, weight in common.items():
                ways = [weight.detach() - weights[name].detach() for weights in own]
                weight.grad = torch.stack(ways).mean(0)
            outer.step()
            for weights in own:
                for name, weight in weights.items():
                    weight.data.copy_(common[name].detach())
        if step == 3:
            fill(common)
            found.evaluated = engine.of(run, Evaluation).losses(run)[0]
    found.common = {name: weight.detach().numpy() for name, weight in common.items()}
    found.own = [{name: weight.detach().numpy() for name, weight in weights.items()} for weights in own]
    return found


@pytest.mark.parametrize(
    ("world", "replicas", "ranks", "overrides"),
    [
        pytest.param(2, 2, 1, [], id="dp2"),
        pytest.param(4, 2, 2, ["sync.replicas=2", "zero.shard=parameters"], id="dp4-parameters"),
        pytest.param(4, 2, 1, ["mesh.pp=2", "zero.shard=optimizer"], id="pp2-dp2"),
        pytest.param(8, 2, 1, ["mesh.pp=2", "mesh.tp=2"], id="pp2-tp2-dp2"),
    ],
)
def test_replicas_are_those_of_a_simulation(
    pool: Pool, recipe: str, tmp_path: Path, world: int, replicas: int, ranks: int, overrides: list[str]
) -> None:
    want = simulate(recipe, replicas, ranks)
    overrides = [f"out={tmp_path}", *ON, "checkpoint.at_end=true", *overrides]
    first = pool.run(world, engine.train, recipe, overrides)[0]
    np.testing.assert_allclose(first.values("loss"), want.losses, rtol=1e-12)
    np.testing.assert_allclose(first.values("grad_norm"), want.norms, rtol=1e-12)
    np.testing.assert_allclose(first.values("validation_loss")[0], want.evaluated, rtol=1e-12)
    path = engine.path_of(tmp_path, 5)
    engine.assert_near(engine.whole(path, "weights"), want.common, 1e-12)
    for replica, own in enumerate(want.own):
        engine.assert_near(engine.whole(path, f"local_of_{replica}"), own, 1e-12)


ROUND = ["sync.every=4", "checkpoint.every=2", "evaluate.every=0", "recovery.compare_every=1"]


@pytest.mark.parametrize(
    ("world", "overrides", "files"),
    [
        pytest.param(2, ["train.precision=bf16"], 9, id="dp2-bf16"),
        pytest.param(
            4, ["sync.replicas=2", "zero.shard=gradients", "train.precision=fp32"], 8, id="dp4-gradients-fp32"
        ),
        pytest.param(4, ["mesh.tp=2", "zero.shard=optimizer", "optimizer.name=muon"], 16, id="tp2-dp2-muon"),
    ],
)
def test_a_run_goes_on_within_a_round_bitwise(
    pool: Pool, tmp_path: Path, world: int, overrides: list[str], files: int
) -> None:
    """With dropout, whose masks must be other ones in each replica, and go on too."""
    recipe = engine.write_recipe(tmp_path, RECIPE | {"model": GPT2})
    overrides = [*ROUND, "train.steps=10", *overrides]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    ten = pool.run(world, engine.train, recipe, [f"out={straight}", *overrides])
    start = f"checkpoint.resume={engine.path_of(straight, 6)}"
    rest = pool.run(world, engine.train, recipe, [f"out={resumed}", start, *overrides])
    assert rest[0].values("loss") == ten[0].values("loss")[6:]
    engine.assert_same_files(engine.path_of(straight, 10), engine.path_of(resumed, 10), files)
    found, half = (engine.tensor_files(engine.path_of(straight, step)) for step in (10, 8))
    assert all(data != half[name] for name, data in found.items() if "_of_" in name)  # in a round all else stands still
