"""Replicas that take steps alone (``sync``): the numbers beside a simulation in one process by torch's optimizers, and
runs that are saved and go on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import engine
import numpy as np
import pytest
import torch
from engine import GPT2, RECIPE, trainer
from pool import Pool
from torch import Tensor

from megacore.batch_sizes import BatchSizes
from megacore.corruption import Corrupted
from megacore.models.registry import configure
from megacore.planning.costs import ALL_REDUCE
from megacore.planning.overheads import Storage, save_of
from megacore.planning.recipe_setting import setting_of
from megacore.planning.state_bytes import Shares, state
from megacore.planning.traffic import WAYS, traffic
from megacore.recipe import load
from megacore.training import local_steps
from megacore.training.callbacks.evaluation import Evaluation
from megacore.training.local_steps import LocalSteps
from megacore.training.lr import learning_rate
from megacore.training.start import in_no_round
from megacore.training.step import Stats
from megacore.training.trainer import Callback, Trainer

OUTER = ["sync.every=2", "sync.lr=0.6", "sync.momentum=0.8"]
CLIP = 0.5
ON = [*OUTER, f"optimizer.clip={CLIP}", "evaluate.every=3", "checkpoint.every=0"]


@dataclass
class Simulated:
    """Per step: the mean loss of the replicas, the root of the mean of their squared norms. The validation loss after
    step 3. At the end: the common weights, and those of each replica."""

    losses: list[float]
    norms: list[float]
    evaluated: float
    common: dict[str, np.ndarray]
    own: list[dict[str, np.ndarray]]


def simulate(recipe: str, replicas: int) -> Simulated:
    """All replicas one after the other, each with a successive part of the global batch: gradients are those of one
    process, AdamW, clipping and the outer step are torch's."""
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
            share = replace(run.batches, sizes=BatchSizes(config.batch.global_size // replicas))
            given = share.microbatches_from((step - 1) * config.batch.global_size + replica * share._size(0))
            stats = run.train_step.backward(run.upload(given, step))
            losses.append(stats.loss.item())
            gradients = {span.name: part.gradient for part, span, _, _ in run.train_step.gradients.owned()}
            norms.append(torch.stack([each.square().sum() for each in gradients.values()]).sum().sqrt().item())
            over = float(np.float32(max(1.0, (norms[-1] + 1e-6) / CLIP)))  # kernels take it in fp32
            for name, weight in weights.items():
                weight.grad = gradients[name] / over
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


@pytest.mark.in_turn(8)
@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        pytest.param(2, ["batch.micro_size=1"], id="dp2"),
        pytest.param(4, ["sync.replicas=2", "zero.shard=parameters"], id="dp4-parameters"),
        pytest.param(4, ["mesh.pp=2", "zero.shard=optimizer"], id="pp2-dp2"),
        pytest.param(8, ["mesh.pp=2", "mesh.tp=2"], id="pp2-tp2-dp2"),
    ],
)
def test_replicas_are_those_of_a_simulation(
    pool: Pool, recipe: str, tmp_path: Path, world: int, overrides: list[str]
) -> None:
    want = simulate(recipe, replicas=2)
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


@pytest.mark.in_turn(9)
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
    """With dropout, whose masks must go on too."""
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


@dataclass(frozen=True)
class Held:
    """What a rank has of the first norm: the weights that it computes with, the common ones and its first moment."""

    replica: int
    own: np.ndarray
    common: np.ndarray
    moment: np.ndarray


def held(recipe: str, overrides: list[str]) -> Held:
    """What a rank begins with."""
    made = trainer(recipe, overrides)
    optimizer = made.train_step.optimizer
    moments = next(each for each in optimizer.states() if each in ("exp_avg", f"exp_avg_of_{optimizer.replica}"))
    own = made.model.parameters[NORM].detach().clone()
    common, moment = torch.empty_like(own), torch.empty_like(own)
    optimizer.read_weight(NORM, common)
    optimizer.read_into(moments, NORM, moment)
    return Held(optimizer.replica, own.numpy(), common.numpy(), moment.numpy())


NORM = "layers.0.attn_norm.weight"


@pytest.mark.in_turn(12)
def test_more_or_fewer_replicas_go_on_where_a_round_has_ended(pool: Pool, recipe: str, tmp_path: Path) -> None:
    """Each with the moments of one of those before; within a round as many on another layout."""
    steps = [*ROUND, "train.steps=10"]
    two = pool.run(2, engine.train, recipe, [f"out={tmp_path / 'two'}", *steps])[0]
    within, ended = (f"checkpoint.resume={engine.path_of(tmp_path / 'two', step)}" for step in (6, 8))
    run = [f"out={tmp_path / 'other'}", *steps]
    other = [*run, "mesh.dp=2", "mesh.tp=2", "zero.shard=optimizer", within]
    again = pool.run(4, engine.train, recipe, other)[0]
    np.testing.assert_allclose(again.values("loss"), two.values("loss")[6:], rtol=1e-9)
    for held_state in ("weights", "outer_momentum", "local_of_0", "local_of_1", "exp_avg_sq_of_1"):
        one, two_of = (engine.whole(engine.path_of(tmp_path / name, 10), held_state) for name in ("other", "two"))
        engine.assert_near(one, two_of, 1e-9)

    run = [f"out={tmp_path / 'another'}", *steps]
    (wrong,) = engine.problems(recipe, *run, within, world=4)
    assert "step 6 is within a round of 4 steps (sync.every) that 2 replicas took alone, and there are 4 now" in wrong
    (wrong,) = engine.problems(recipe, *run, within, "sync.every=null", world=2)
    assert "there are 1 now: start 2" in wrong
    states = {r: engine.whole(engine.path_of(tmp_path / "two", 8), f"exp_avg_of_{r}")[NORM] for r in (0, 1)}
    assert not np.array_equal(states[0], states[1])
    for world, overrides in ((4, []), (2, ["sync.every=null"]), (4, ["sync.replicas=2"])):
        for each in pool.run(world, held, recipe, [*run, ended, *overrides]):
            np.testing.assert_array_equal(each.moment, states[each.replica % 2])
            np.testing.assert_array_equal(each.own, each.common)
    pool.run(2, engine.train, recipe, [f"out={tmp_path / 'plain'}", "train.steps=3", "checkpoint.every=2"])
    start = f"checkpoint.resume={engine.path_of(tmp_path / 'plain', 2)}"
    moment = engine.whole(engine.path_of(tmp_path / "plain", 2), "exp_avg")[NORM]
    for each in pool.run(2, held, recipe, [*run, start]):
        np.testing.assert_array_equal(each.moment, moment)
        np.testing.assert_array_equal(each.common, each.own)


def bad_once(recipe: str, overrides: list[str], rank: int) -> engine.Result:
    """A run in which the third loss of a rank is infinite."""
    made = trainer(recipe, overrides, log=True)
    if made.mesh.rank == rank:
        engine.scale_losses(made, {3: float("inf")})
    return engine.result(made, made.fit())


@pytest.mark.in_turn(6)
def test_what_one_replica_cannot_do_none_does(pool: Pool, recipe: str, tmp_path: Path) -> None:
    """The others leave the update out too, so that all count the same; and a round does not end while steps are to be
    repeated that are known to be bad later."""
    run = [*OUTER, "sync.every=4", "train.steps=8", "evaluate.every=0", "recovery.compare_every=1", "log.every=8"]
    run = ["checkpoint.at_end=true", *run]
    pool.run(2, engine.train, recipe, [f"out={tmp_path / 'good'}", *run])
    pool.run(2, bad_once, recipe, [f"out={tmp_path / 'repeated'}", *run, "optimizer.non_finite=repeat"], 1)
    engine.assert_same_files(engine.path_of(tmp_path / "repeated", 8), engine.path_of(tmp_path / "good", 8), 8)
    left_out = pool.run(2, bad_once, recipe, [f"out={tmp_path / 'bad'}", *run, "optimizer.non_finite=skip"], 1)
    assert left_out[0].values("skipped_steps") == [1]


class VetoesTheLastOfARound(Callback):
    """Leaves the update of step 4 out, and notes what is common and what has gone its own way before each step."""

    def __init__(self) -> None:
        self.held = dict[int, tuple[Tensor, Tensor]]()

    def on_gradients(self, run: Trainer, stats: Stats) -> None:
        optimizer = run.train_step.optimizer
        self.held[run.step] = optimizer.weight(NORM).clone(), run.model.parameters[NORM].detach().clone()
        run.veto(torch.tensor(run.step == 4))


def test_a_round_ends_though_its_last_update_is_left_out(recipe: str, tmp_path: Path) -> None:
    """A checkpoint of this step is one of a round that has ended, whose ways no resuming would bring together."""
    vetoes = VetoesTheLastOfARound()
    trainer(recipe, [f"out={tmp_path}", *OUTER, "sync.momentum=0"], callbacks=[vetoes]).fit()
    (start, _), (_, own), (common, from_there) = (vetoes.held[step] for step in (3, 4, 5))
    assert not torch.equal(start, own)
    torch.testing.assert_close(common, start - 0.6 * (start - own), rtol=1e-14, atol=0)
    assert torch.equal(from_there, common)


def test_last_steps_that_no_round_ends_with_are_told(recipe: str) -> None:
    (said,) = in_no_round(load(recipe, ["sync.every=4", "train.steps=10"]))
    assert "the last 2 of 10 steps" in said and "those of step 8; with train.steps=12 one does" in said
    assert not [*in_no_round(load(recipe, ["sync.every=5", "train.steps=10"])), *in_no_round(load(recipe))]


def streamed(recipe: str, overrides: list[str]) -> dict[str, np.ndarray]:
    made = trainer(recipe, overrides)
    made.fit()
    return {name: tensor.numpy() for name, tensor in made.weights(everywhere=True)}


def damaged(recipe: str, overrides: list[str]) -> str:
    """What is said of a run in which the momentum of the outer step is another one on rank 1 from step 3 on."""
    made = trainer(recipe, overrides)
    optimizer = made.train_step.optimizer
    assert isinstance(optimizer, LocalSteps)

    def damage(step: int) -> None:
        if step == 3 and made.mesh.rank == 1:
            next(iter(optimizer._momenta.values())).view(-1)[0] += 1e-9

    engine.in_steps(made, damage)
    with pytest.raises(Corrupted) as error:
        made.fit()
    return str(error.value)


@pytest.mark.in_turn(5)
def test_what_all_have_alike_is_streamed_and_compared(pool: Pool, recipe: str, tmp_path: Path) -> None:
    run = [*OUTER, "train.steps=3", "checkpoint.at_end=true", "recovery.compare_every=1"]
    for found in pool.run(2, streamed, recipe, [f"out={tmp_path / 'sound'}", *run]):
        want = engine.whole(engine.path_of(tmp_path / "sound", 3), "weights")[NORM]
        np.testing.assert_array_equal(found["model.layers.0.input_layernorm.weight"], want)
    for said in pool.run(2, damaged, recipe, [f"out={tmp_path / 'damaged'}", *run]):
        assert "ranks 0-1 differ in the outer momentum of" in said and said.count("after step 3") == 1


def first_loss(recipe: str, overrides: list[str]) -> float:
    made = trainer(recipe, overrides)
    return made.train_step.backward(made.upload(made.batches.microbatches(0), 1)).loss.item()


@pytest.mark.in_turn(5, 1)
def test_replicas_drop_what_ranks_of_dp_drop(pool: Pool, tmp_path: Path) -> None:
    """Before they have gone ways of their own all of the loss is that of one replica, to the masks."""
    recipe = engine.write_recipe(tmp_path, RECIPE | {"model": GPT2})
    one_each = ["batch.micro_size=4"]  # of one microbatch replicas have the samples that ranks of dp have
    (one, _), (other, _) = (pool.run(2, first_loss, recipe, [*one_each, *given]) for given in ([], OUTER))
    assert one == pytest.approx(other, rel=1e-14)


def sent_and_held(recipe: str, overrides: list[str]) -> tuple[int, int]:
    """The bytes that this rank averages at the end of a round, and those of its part of the outer state."""
    made = trainer(recipe, overrides)
    made.fit()
    optimizer, sent = made.train_step.optimizer, list[int]()
    assert isinstance(optimizer, LocalSteps)

    def note(x: Tensor, *_: Any) -> Tensor:
        sent.append(x.nbytes)
        return x

    with mock.patch.object(local_steps, "all_reduce_", note):
        optimizer.end_round()
    return sum(sent), sum(each.nbytes for each in (*optimizer._start.values(), *optimizer._momenta.values()))


@pytest.mark.in_turn(6, 3)
def test_the_plan_counts_them(pool: Pool, recipe: str, tmp_path: Path) -> None:
    given = [f"out={tmp_path}", *OUTER, "sync.replicas=2", "zero.shard=gradients", "train.precision=bf16"]
    given += ["train.steps=3", "checkpoint.at_end=true"]
    sent, held = (sum(each) for each in zip(*pool.run(4, sent_and_held, recipe, given), strict=True))
    config = load(recipe, given)
    setting = setting_of(config, configure(config.model), 4, "cpu")
    elements = sum(part.elements for part in Shares.of(setting).stages[0])
    (ways,) = (each for each in traffic(setting, 0) if each.what == WAYS)
    assert (ways.ranks, ways.kind) == (2, ALL_REDUCE)
    assert 2 * 4 * elements == pytest.approx(4 * ways.size * 2, rel=1e-3) == pytest.approx(sent, rel=0.07)  # padding
    without = replace(setting, widths=replace(setting.widths, outer=0))
    (whole, less) = (state(Shares.of(setting).stages[0], each).total for each in (setting, without))
    assert 4 * (whole - less) == pytest.approx(held, rel=0.07)
    files = engine.tensor_files(engine.path_of(tmp_path, 3))
    save = save_of(setting, 4, Storage(1e9, 1e9), None)
    sizes = [int.from_bytes(data[:8], "little") + 8 for data in files.values()]  # of headers
    assert (save.files, save.size) == (len(files), sum(map(len, files.values())) - sum(sizes))
