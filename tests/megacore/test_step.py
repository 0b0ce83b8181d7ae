"""One process against plain torch and against itself: what a comparison of layouts with one process cannot see."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from device_store import device_store
from engine import GPT2, LENGTH, LLAMA, VOCAB

from megacore.models.assemble import Model
from megacore.models.decoder import Losses, Microbatch
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.parallel.gradients import reduce
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.labels import IGNORE
from megacore.parallel.mesh import Mesh
from megacore.parallel.pipeline.run import Pipeline
from megacore.parallel.weights.layout import MeshShape
from megacore.training.states.optimizer import Optimizer
from megacore.training.step import TrainStep, evaluate

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = [pytest.param(LLAMA, id="llama"), pytest.param(GPT2 | NO_DROPOUT, id="gpt2")]


def made(section: dict[str, Any], losses: Losses | None = None) -> tuple[Model, TrainStep]:
    mesh, config = Mesh.single(), configure(section)
    model = Model.create(config, layout_of(config, mesh.shape), mesh, torch.float64, losses)
    model.parameters.initialise(3)
    gradients = Gradients(model.parameters, model.chunks, torch.float64)
    return model, TrainStep(mesh, Pipeline(mesh, model.chunks, torch.float64), gradients, Optimizer(gradients, lr=0.1))


def microbatch(tokens: torch.Tensor, labels: torch.Tensor, documents: tuple[int, ...] | None = None) -> Microbatch:
    """tokens, labels: [sequences, length]."""
    sequences, length = tokens.shape
    return Microbatch(
        tokens.flatten(),
        labels.flatten(),
        torch.arange(length).repeat(sequences),
        sequences,
        (tokens.numel(), 16),
        documents,
    )


def drawn(sequences: int = 4, ignored: float = 0.4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCAB, (sequences, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < ignored] = IGNORE
    return tokens[:, :-1], labels


def gradients(model: Model) -> dict[str, np.ndarray]:
    return {name: p.grad.numpy().copy() for name, p in model.parameters.items() if p.grad is not None}


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-9, atol=1e-14, err_msg=name)


@pytest.mark.parametrize("section", MODELS)
@pytest.mark.parametrize("losses", [Losses(), Losses(0.1), Losses(0.1, 0.01)], ids=["plain", "smoothed", "z-loss"])
def test_loss_and_gradients_are_those_of_torch(section: dict[str, Any], losses: Losses) -> None:
    model, step = made(section, losses)
    tokens, labels = drawn()
    whole = microbatch(tokens, labels)
    (chunk,) = model.chunks
    assert chunk.head is not None
    logits = chunk.head(chunk.hidden(None, whole), None)
    counted = labels.flatten() != IGNORE
    want = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, label_smoothing=losses.label_smoothing)
    want = want + losses.z_loss * logits.logsumexp(1)[counted].square().mean()
    for parameter in model.parameters.values():
        parameter.grad = None
    want.backward()
    expected = gradients(model)
    # In microbatches of unlike numbers of counted labels: each label counts the same.
    stats = step.backward([microbatch(tokens[:1], labels[:1]), microbatch(tokens[1:], labels[1:])])
    assert stats.tokens.item() == counted.sum().item() < labels.numel()
    assert stats.loss.item() == pytest.approx(want.item(), rel=1e-12)
    assert_same(gradients(model), expected)
    norm = np.sqrt(sum(np.square(value).sum() for value in expected.values()))
    assert stats.grad_norm.item() == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize("section", MODELS)
def test_documents_that_are_kept_apart_are_sequences_of_their_own(section: dict[str, Any]) -> None:
    model, step = made(section)
    tokens, labels = drawn(sequences=2, ignored=0.0)
    lengths = (3, 5, 6, 2)
    packed = microbatch(tokens, labels, lengths)
    restarted = torch.cat([torch.arange(n) for n in lengths])
    stats = step.backward([replace(packed, positions=restarted)])
    got = gradients(model)
    parts = [(0, 0, 3), (0, 3, 8), (1, 0, 6), (1, 6, 8)]
    alone = step.backward([microbatch(tokens[i, a:b][None], labels[i, a:b][None]) for i, a, b in parts])
    assert stats.loss.item() == pytest.approx(alone.loss.item(), rel=1e-12)
    assert_same(got, gradients(model))
    # And it is another function than one of joined documents.
    assert step.backward([microbatch(tokens, labels)]).loss.item() != pytest.approx(stats.loss.item(), rel=1e-3)


def test_a_step_starts_from_no_gradient_and_evaluation_leaves_none() -> None:
    model, step = made(LLAMA)
    tokens, labels = drawn()
    batch = [microbatch(tokens, labels)]
    first = step.backward(batch)
    assert step.backward(batch).grad_norm.item() == first.grad_norm.item()
    before = gradients(model)
    loss, count = evaluate(step.mesh, step.pipeline, batch)
    assert (loss.item(), count.item()) == (first.loss.item(), first.tokens.item())
    assert_same(gradients(model), before)


def test_a_batch_without_labels_is_no_division_by_zero() -> None:
    _, step = made(LLAMA)
    tokens, labels = drawn()
    stats = step([microbatch(tokens, torch.full_like(labels, IGNORE))], 0.1)
    assert (stats.loss.item(), stats.grad_norm.item(), stats.tokens.item()) == (0.0, 0.0, 1.0)


def test_the_gradients_of_a_step_do_not_live_through_the_next() -> None:
    _, step = made(LLAMA)
    tokens, labels = drawn()
    step([microbatch(tokens, labels)], 0.1)
    assert all(target.tensor.grad is None for target in device_store(step.optimizer).targets)


def test_adamw_is_the_paper_s() -> None:
    """Two steps against the formula, on all matrices and norms."""
    model, step = made(LLAMA)
    tokens, labels = drawn()
    batches = [[microbatch(tokens, labels)], [microbatch(tokens.flip(0), labels)]]
    state = {n: (p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)) for n, p in model.parameters.items()}
    lrs: Sequence[float] = (0.1, 0.05)
    for t, (batch, lr) in enumerate(zip(batches, lrs, strict=True), start=1):
        stats = step.backward(batch)
        over = float(np.float32(max(1.0, stats.grad_norm.item() + 1e-6)))  # kernels take it in fp32
        for name, parameter in model.parameters.items():
            weight, m, v = state[name]
            assert parameter.grad is not None
            gradient = parameter.grad / over
            m.mul_(0.9).add_(gradient, alpha=0.1)
            v.mul_(0.95).add_(gradient.square(), alpha=0.05)
            weight.mul_(1 - lr * (0.0 if "norm" in name else 0.1))
            weight.sub_(lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8))
        step.optimizer.update(lr, stats.grad_norm)
        step.gradients.updated()
    for name, parameter in model.parameters.items():
        torch.testing.assert_close(parameter.detach(), state[name][0], rtol=1e-10, atol=1e-12, msg=name)


def test_a_message_of_another_sum_is_no_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo fills the beginning of a sum with a shorter message; the rest is what the memory held before, of the sum of
    the last step at worst."""
    gradients, before = made(LLAMA)[1].gradients, list[torch.Tensor]()

    def all_reduce_(x: torch.Tensor, *_: object) -> torch.Tensor:
        before.append(x.clone())
        return x if len(before) < 3 else torch.stack([x[0] + 0.5, before[-2][1]])

    monkeypatch.setattr(reduce, "all_reduce_", all_reduce_)
    squares = torch.tensor(4.0, dtype=torch.float64)
    assert [gradients.norm(squares).item() for _ in range(2)] == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="another rank was at another message"):
        gradients.norm(squares)
    assert squares == 4.0


@pytest.mark.parametrize("cut", [False, True])
def test_on_a_gpu_a_message_that_was_cut_makes_the_norm_no_number(monkeypatch: pytest.MonkeyPatch, cut: bool) -> None:
    """What is queued behind it still runs, and the device leaves the update out: nobody waits for the host. A message
    that was aborted leaves what was there before, or the sum of some ranks."""

    def all_reduce_(x: torch.Tensor, *_: object) -> torch.Tensor:
        return x if cut else 2 * x

    monkeypatch.setattr(reduce, "all_reduce_", all_reduce_)
    gpu = SimpleNamespace(device=torch.device("cuda"), world=None, shape=MeshShape(dp=2))
    norm = reduce.norm_of(torch.tensor(2.0, dtype=torch.float64), 7, torch.float32, gpu)  # type: ignore[arg-type]
    assert torch.isnan(norm) if cut else norm == 2.0
