"""Losses of pairs: the formulas, beside TRL's where it is installed, and a head whose tokens are spread over ranks."""

from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

from megacore.models.decoder import Head, Losses
from megacore.parallel.labels import IGNORE
from megacore.parallel.mesh import Mesh
from megacore.parallel.preference import LOSSES, TOLD, MicrobatchPairs, PairLoss, Preference
from megacore.parallel.weights.layout import MeshShape

TOKENS, EMBED, VOCAB, PAIRS = 24, 6, 12, 4
WEIGHTS = {
    "dpo": Preference("dpo", 0.3),
    "dpo smoothed": Preference("dpo", 0.3, label_smoothing=0.2),
    "ipo": Preference("ipo", 0.4),
    "simpo": Preference("simpo", 2.0, gamma=0.7),
    "simpo smoothed": Preference("simpo", 2.0, gamma=0.7, label_smoothing=0.1),
    "orpo": Preference("orpo", 0.6),
    "bradley_terry": Preference("bradley_terry", 1.0),
}


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor, MicrobatchPairs]:
    """x [t, embed], weight [vocab, embed], labels [t], documents of them [t]; pairs, of which the last fills up."""
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(size, EMBED, generator=generator, dtype=torch.float64) for size in (TOKENS, VOCAB))
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    places = torch.tensor([0] * 5 + [1] * 3 + [2] * 4 + [3] * 4 + [4] * 2 + [5] * 6)
    labels[[0, 1, 5, 8, 12, 23]] = IGNORE
    counted = torch.bincount(places[labels != IGNORE], minlength=2 * PAIRS).view(-1, 2)
    reference = -torch.rand(PAIRS, 2, generator=generator, dtype=torch.float64) * 9
    return x, weight, labels, places, MicrobatchPairs(places, counted, reference)


def dense(by: Preference) -> tuple[Tensor, ...]:
    """What the last pair but the filling says, and the gradients of x and of the weight: without our layers."""
    x, weight, labels, places, pairs = drawn()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    logp = (x @ weight.T).log_softmax(1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    logp = x @ weight[0] if by.loss == "bradley_terry" else logp  # the score of each token
    found = torch.stack([logp[(places == d) & (labels != IGNORE)].sum() for d in range(6)]).view(3, 2)
    sizes, reference = pairs.counted[:3], pairs.reference[:3]
    means, beta = found / sizes, by.beta
    rewards = beta * {"dpo": found - reference, "ipo": found - reference, "bradley_terry": found}.get(by.loss, means)
    gap = rewards[:, 0] - rewards[:, 1] - by.gamma
    losses = -(1 - by.label_smoothing) * gap.sigmoid().log() - by.label_smoothing * (-gap).sigmoid().log()
    if by.loss == "ipo":
        ratios = (found - reference) / sizes
        losses = (ratios[:, 0] - ratios[:, 1] - 1 / (2 * beta)) ** 2
    if by.loss == "orpo":
        odds = means.exp() / (1 - means.exp())
        losses = -means[:, 0] - beta * (odds[:, 0] / odds[:, 1]).log().sigmoid().log()
    told = losses.sum(), *rewards.sum(0), (rewards[:, 0] > rewards[:, 1]).sum().double()
    return torch.stack(told).detach(), *torch.autograd.grad(losses.sum(), (x, weight))


def spread(shape: MeshShape) -> dict[str, tuple[Tensor, ...]]:
    """The same of this rank, with tokens dealt out over cp in turn: every rank has some of each document."""
    mesh, found = Mesh.create(shape), dict[str, tuple[Tensor, ...]]()
    for (name, by), some in zip(WEIGHTS.items(), cycle((False, True)), strict=False):
        x, weight, labels, places, pairs = drawn()
        own = slice(mesh.place.cp, None, shape.cp)
        x, labels, places = x[own], labels[own], places[own]
        x = x.chunk(shape.tp)[mesh.place.tp].clone().requires_grad_()
        scores = by.loss == "bradley_terry"
        if scores:  # a head of one row, filled up to one on each rank
            weight = torch.cat([weight[:1], torch.zeros(shape.tp - 1, EMBED, dtype=weight.dtype)])
        own_weight = nn.Parameter(weight.chunk(shape.tp)[mesh.place.tp].clone())
        head = Head(nn.Identity(), own_weight, 1 if scores else VOCAB, mesh.tp)
        head.losses = Losses(chunk=5 if some else None, of_pairs=PairLoss(by, mesh.along("cp", "tp"), scores))
        wanted = torch.arange(len(labels)) if some else None
        told = head(x, labels, wanted, (), MicrobatchPairs(places, pairs.counted, pairs.reference))
        told.backward(torch.ones(TOLD, dtype=torch.float64))
        assert x.grad is not None and own_weight.grad is not None
        found[name] = told.detach(), x.grad, own_weight.grad
    return found


@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(tp=2), MeshShape(tp=4), MeshShape(cp=2, tp=2)], ids=str)
def test_the_loss_of_pairs_is_that_of_plain_torch(pool: Pool, shape: MeshShape) -> None:
    """Each rank counts other pairs, and its gradients are those of all of them."""
    ranks = pool.run(shape.world, spread, shape)
    assert {by.loss for by in WEIGHTS.values()} == set(LOSSES)
    for name, by in WEIGHTS.items():
        told, dx, dw = dense(by)
        assert (dx.abs().sum(1) > 0).sum() == 18
        torch.testing.assert_close(sum(rank[name][0] for rank in ranks), told, rtol=1e-12, atol=1e-12)
        for place in range(shape.cp):
            tp = ranks[place * shape.tp : (place + 1) * shape.tp]
            torch.testing.assert_close(torch.cat([rank[name][1] for rank in tp]), dx[place :: shape.cp])
        sums = [sum(ranks[cp * shape.tp + tp][name][2] for cp in range(shape.cp)) for tp in range(shape.tp)]
        rows = torch.cat(sums)
        torch.testing.assert_close(rows, dw[: len(rows)], rtol=1e-12, atol=1e-12)
        assert not dw[len(rows) :].any()


@pytest.mark.parametrize("loss", LOSSES)
def test_what_only_fills_up_and_extreme_answers_leave_finite_gradients(loss: Any) -> None:
    """An answer of which the model is all but sure, one that it rules out, and a pair of no tokens."""
    found = torch.tensor([[0.0, -900.0], [-900.0, -1e-7], [0.0, 0.0]]).requires_grad_()
    counted = torch.tensor([[1, 30], [30, 1], [0, 0]])
    told = Preference(loss, 0.1)(found, torch.full((3, 2), -3.0), counted)
    told.sum().backward()
    assert told.isfinite().all() and found.grad is not None and found.grad.isfinite().all()
    assert not found.grad[2].any() and found.grad[:2].any()


@pytest.mark.parametrize("name", ["simpo", "simpo smoothed", "orpo"])
def test_losses_without_a_reference_are_trls(name: str) -> None:
    """Those of its experimental trainers, of which nothing but the loss is asked; seen with 1.16. Its ORPO adds the
    cross entropy of prompt and answer, ours that of the answer."""
    pytest.importorskip("trl", minversion="1.16")
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    by, means = WEIGHTS[name], -torch.rand(PAIRS, 2) * 3 - 0.1
    counted = torch.randint(1, 20, (PAIRS, 2))
    facts = {"beta": by.beta, "simpo_gamma": by.gamma, "label_smoothing": by.label_smoothing, "loss_type": by.loss}
    theirs: Any = SimpleNamespace(**facts, alpha=0.0, accelerator=SimpleNamespace(device="cpu"))
    if by.loss == "simpo":
        losses, *rewards = CPOTrainer.cpo_loss(theirs, *means.T)
    else:
        ratios, *rewards = ORPOTrainer.odds_ratio_loss(theirs, *means.T)[:3]
        losses = -means[:, 0] - ratios
    got, mine = LOSSES[by.loss](means * counted, means, counted, by)
    torch.testing.assert_close(got, losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine, torch.stack(rewards, 1), rtol=1e-5, atol=1e-6)
