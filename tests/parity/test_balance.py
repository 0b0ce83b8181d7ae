"""The balance of experts against formulas in float64 on the whole batch in one piece, on any layout: gradients, values,
counts and biases."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from extended_family import extended
from oracle import LENGTH, Case, Run, expected, gradient_arrays, lively, microbatches, relative
from pool import Pool
from torch import Tensor

from megacore.models.assemble import Model
from megacore.models.decoder import Microbatch
from megacore.models.moe import MixtureOfExperts
from megacore.models.stages import layout_of
from megacore.parallel.balance import NONE, Balance, Coefficients, Loads, RoutedTokens
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.memory.recompute import Activations
from megacore.parallel.mesh import Mesh
from megacore.parallel.pipeline.run import Pipeline
from megacore.parallel.routing import Routing
from megacore.parallel.weights.layout import MeshShape
from megacore.training.scaler import UNSCALED, Scaling
from megacore.training.states.optimizer import Optimizer
from megacore.training.step import TrainStep, counted_tokens, evaluate

SEQUENCES, EXPERTS, TOP_K, RATE = 4, 8, 3, 1e-3
MODEL = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "num_experts": EXPERTS,
    "routing": {"top_k": TOP_K, "score": "sigmoid", "normalised": True},
    "experts": [0, 1, 1],
    "correction": True,
}
CASE = Case("balance", {"family": "extended", **MODEL}, sequences=SEQUENCES, ignored=0.3)
SOFTMAX = replace(CASE, model={**CASE.model, "routing": {"top_k": TOP_K}})
SOFTPLUS = replace(CASE, model={**CASE.model, "routing": {**CASE.model["routing"], "score": "sqrtsoftplus"}})
SEQUENCE = Coefficients(sequence=0.3, z_loss=0.02, bias_rate=RATE)
BATCH = Coefficients(batch=0.3, z_loss=0.02, bias_rate=RATE)


def padding_of(step: int) -> np.ndarray:
    """[SEQUENCES, LENGTH], rows that are filled to different lengths: one to its end, one with a single token."""
    lengths = np.roll([LENGTH, 1, LENGTH - 1, LENGTH // 2], step)
    return np.arange(LENGTH) >= lengths[:, None]


def padded(run: Run, step: int, mesh: Mesh) -> list[Microbatch]:
    """The microbatches of a rank, with padding."""
    blank = np.ones((-SEQUENCES % (mesh.shape.data * run.micro), LENGTH), np.bool_)
    filled = torch.from_numpy(np.concatenate([padding_of(step), blank]))
    rows = filled.view(-1, mesh.shape.data, run.micro * LENGTH)[:, mesh.data_rank]
    made = microbatches(CASE, run, step, mesh)
    return [replace(each, padding=own) for each, own in zip(made, rows, strict=True)]


@dataclass
class Found:
    gradients: dict[str, np.ndarray]
    loss: float
    loads: Loads
    corrections: dict[str, np.ndarray]


def train_step(run: Run, coefficients: Coefficients, scaling: Scaling = UNSCALED, case: Case = CASE) -> TrainStep:
    mesh = Mesh.create(run.mesh)
    layout = lively(layout_of(case.config, run.mesh, run.chunks))
    model = Model.create(
        case.config, layout, mesh, torch.float64, activations=run.kept(mesh), coefficients=coefficients
    )
    model.parameters.initialise(seed=1)
    gradients = Gradients(model.parameters, model.chunks, torch.float64, run.shard)
    pipeline = Pipeline(mesh, model.chunks, torch.float64, run.schedule)
    return TrainStep(mesh, pipeline, gradients, Optimizer(gradients, lr=1e-2, clip=None), scaling, model.balance)


def corrections_of(parameters: Any) -> dict[str, np.ndarray]:
    named = ((name, p) for name, p in parameters.items() if name.endswith(".correction"))
    return {name: p.detach().numpy().copy() for name, p in named}


def measure(run: Run, coefficients: Coefficients, scaling: Scaling = UNSCALED, case: Case = CASE) -> Found:
    with extended():
        step = train_step(run, coefficients, scaling, case)
        stats = step(padded(run, 0, step.mesh), 0.0)
        assert step.balance is not None
        loads = step.balance.read(3)
        found = gradient_arrays(step.gradients)
        return Found(found, stats.loss.item(), loads, corrections_of(step.gradients.parameters))


# -- the reference


@dataclass
class Capture:
    """In the place of a balance: keeps the logits of each layer in the graph, and adds nothing."""

    logits: dict[int, Tensor] = field(default_factory=dict)
    chosen: dict[int, Tensor] = field(default_factory=dict)

    def attach(self, layer: int, tokens: RoutedTokens, logits: Tensor, chosen: Tensor) -> Tensor:
        self.logits[layer], self.chosen[layer] = logits, chosen
        return logits


def terms(logits: Tensor, chosen: Tensor, inside: Tensor, c: Coefficients, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """(balance, z-loss, counts) of one layer by the definitions. inside: [t], no padding."""
    scores = (1 + logits.exp()).log().sqrt() if case is SOFTPLUS else logits.sigmoid()
    scores = logits.softmax(-1) if case is SOFTMAX else scores / scores.sum(-1, keepdim=True)
    sets = torch.arange(len(logits)) // LENGTH if c.sequence else torch.zeros(len(logits), dtype=torch.long)
    balances = []
    for each in range(int(sets.max()) + 1):
        own = inside & (sets == each)
        counts = torch.stack([(chosen[own] == expert).sum() for expert in range(EXPERTS)])
        f = counts / (TOP_K * own.sum()).double()
        balances.append(EXPERTS * (f * scores[own].mean(0)).sum())
    counts = torch.stack([(chosen[inside] == expert).sum() for expert in range(EXPERTS)])
    return torch.stack(balances).mean(), logits[inside].logsumexp(-1).square().mean(), counts


def reference(c: Coefficients, case: Case = CASE) -> Found:
    """One process, all sequences in one microbatch, and autograd."""
    with extended():
        run = Run(micro=SEQUENCES)
        step = train_step(run, NONE, case=case)
        capture, (batch,) = Capture(), padded(run, 0, step.mesh)
        modules = [module for chunk in step.pipeline.chunks for module in chunk.modules()]  # type: ignore[attr-defined]
        for mixture in modules:
            if isinstance(mixture, MixtureOfExperts):
                mixture.balance = capture  # type: ignore[assignment]
        loss = step.pipeline.chunks[0](None, batch) / counted_tokens([batch], step.mesh)
        assert batch.padding is not None
        layers, inside = tuple(sorted(capture.logits)), ~batch.padding
        found = [terms(capture.logits[n], capture.chosen[n], inside, c, case) for n in layers]
        balance, z_loss, counts = (torch.stack(each) for each in zip(*found, strict=True))
        objective = loss + (c.sequence + c.batch) * balance.sum() + c.z_loss * z_loss.sum()
        named = {name: p for name, p in step.gradients.parameters.items() if p.requires_grad}
        made = torch.autograd.grad(objective, list(named.values()), allow_unused=True)
        pairs = zip(named.items(), made, strict=True)
        gradients = {name: np.zeros(p.shape) if g is None else g.numpy() for (name, p), g in pairs}
        before = corrections_of(step.gradients.parameters)
        signs = torch.sign(counts.double().mean(-1, keepdim=True) - counts).numpy()
        after = {
            name: values + np.float32(c.bias_rate) * sign.astype(np.float32)
            for (name, values), sign in zip(before.items(), signs, strict=True)
        }
        loads = Loads(layers, counts, balance.detach(), z_loss.detach(), None)
        return Found(gradients | before, loss.item(), loads, after)


@pytest.fixture(scope="module", autouse=True)
def _family() -> Iterator[None]:
    with extended():
        yield


@pytest.fixture(scope="module")
def references(_family: None) -> dict[Coefficients, Found]:
    return {c: reference(c) for c in (SEQUENCE, BATCH)}


def check(run: Run, want: Found, ranks: list[Found]) -> None:
    for rank, got in enumerate(ranks):
        np.testing.assert_allclose(got.loss, want.loss, rtol=1e-12)  # none of it is in the loss
        assert got.loads.layers == want.loads.layers
        assert torch.equal(got.loads.counts, want.loads.counts)
        np.testing.assert_allclose(got.loads.balance, want.loads.balance, rtol=1e-9)
        np.testing.assert_allclose(got.loads.z_loss, want.loads.z_loss, rtol=1e-9)
        for name, values in got.corrections.items():
            assert values.dtype == np.float32
            assert np.array_equal(values, want.corrections[name]), f"rank {rank}: {name}"
        for name, gradient in expected(CASE, run, rank, want.gradients).items():
            if not name.endswith(".correction"):
                error = relative(got.gradients[name], gradient)
                assert error <= 1e-9, f"rank {rank}: the gradient of {name} is off by {error:.1e}"


RUNS = (
    Run(),
    Run(micro=2),
    Run(micro=4, activations=Activations("full")),
    Run(MeshShape(tp=2), micro=1),
    Run(MeshShape(tp=4), micro=2),
    Run(MeshShape(dp=2), activations=Activations("full")),
    Run(MeshShape(ep=2), micro=2, shard="parameters"),
    Run(MeshShape(ep=2, tp=2), micro=1, activations=Activations("full")),
    Run(MeshShape(pp=2, tp=2), micro=2),
    Run(MeshShape(pp=2, dp=2), schedule="gpipe", activations=Activations("selective")),
    Run(MeshShape(dp=2, ep=2, tp=2), micro=1, shard="gradients"),
)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_each_layout_has_the_gradients_of_the_formulas(
    pool: Pool, references: dict[Coefficients, Found], run: Run
) -> None:
    check(run, references[SEQUENCE], pool.run(run.mesh.world, measure, run, SEQUENCE))
    at_once = run.micro * run.mesh.data == SEQUENCES
    run = run if at_once else replace(run, schedule="gpipe")
    check(run, references[BATCH], pool.run(run.mesh.world, measure, run, BATCH))


@pytest.mark.parametrize("case", [SOFTMAX, SOFTPLUS], ids=["softmax", "softplus"])
def test_the_scores_of_a_softmax_are_balanced_as_they_are(case: Case) -> None:
    """And roots of softplus over their sum."""
    check(Run(micro=2), reference(SEQUENCE, case), [measure(Run(micro=2), SEQUENCE, case=case)])
    gpipe = Run(schedule="gpipe")
    check(gpipe, reference(BATCH, case), [measure(gpipe, BATCH, case=case)])


def test_the_loss_scale_is_a_factor_of_what_enters(references: dict[Coefficients, Found]) -> None:
    """Which the optimizer takes out of the gradients again."""
    found = measure(Run(), SEQUENCE, Scaling(1024.0))
    check(Run(), references[SEQUENCE], [found])


def test_nothing_moves_in_steps_that_are_left_out_or_in_evaluation() -> None:
    step = train_step(Run(), SEQUENCE)
    assert step.balance is not None
    before, batch = corrections_of(step.gradients.parameters), padded(Run(), 0, step.mesh)

    def moved() -> bool:
        now = corrections_of(step.gradients.parameters)
        return any(not np.array_equal(now[name], values) for name, values in before.items())

    step(batch, 0.0, halted=torch.tensor(True))
    assert not moved()
    counts, values = step.balance.counts.clone(), step.balance.values.clone()
    evaluate(step.mesh, step.pipeline, batch)
    assert torch.equal(step.balance.counts, counts) and torch.equal(step.balance.values, values) and not moved()
    step(batch, 0.0)
    assert moved()


def test_a_balance_of_the_batch_waits_for_no_microbatch_that_is_still_to_come() -> None:
    step = train_step(Run(schedule="1f1b"), BATCH)
    early = r"counts of all 4 microbatches .* and there are 1: choose the schedule gpipe"
    with pytest.raises(RuntimeError, match=early):
        step.backward(padded(Run(), 0, step.mesh))


def test_there_is_one_balance_at_the_most() -> None:
    with pytest.raises(ValueError, match="over each sequence or over the batch"):
        Coefficients(sequence=0.1, batch=0.1)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_the_gradient_has_the_dtype_of_the_logits_however_small_they_are(dtype: torch.dtype) -> None:
    """Sigmoids of logits so small are zeros in fp32, and so is their sum."""
    routing = Routing(experts=4, top_k=1, score="sigmoid")
    balance, one = Balance([0], routing, Mesh.single(), Coefficients(sequence=1.0)), torch.ones((), dtype=torch.float64)
    balance.begin(1, one, one * 2, one.float())
    logits = torch.tensor([[-200.0, -201, -202, -203]] * 2, dtype=dtype, requires_grad=True)
    balance.attach(0, RoutedTokens(microbatch=0), logits, torch.zeros(2, 1, dtype=torch.long)).sum().backward()
    assert logits.grad is not None and logits.grad.dtype == dtype
    p = logits.detach().softmax(-1)  # whose ratios those sigmoids have
    toward = torch.tensor([2.0, 0, 0, 0], dtype=dtype)
    torch.testing.assert_close(logits.grad - 1, p * (toward - (p * toward).sum(-1, keepdim=True)))
