"""Tokens that an indexer chooses, and what it learns: beside the formulas, of whole sequences at once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from families import drawn
from torch import Tensor

from megacore.models.assemble import Model
from megacore.models.decoder import Microbatch
from megacore.models.families.deepseek_v4 import SPARSE
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.parallel.kernels.indexed import Reaches, choose
from megacore.parallel.layers.compressed import CompressedTokens
from megacore.parallel.layers.indexed import Indexed, IndexVectors
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape

DOCUMENTS = (130, 5, 1, 64)
TOKENS, TOP = sum(DOCUMENTS), 4


def visible() -> Tensor:
    """[t, t], whether a token is before another one in its document, or is that one."""
    document = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))
    return (document[:, None] == document).tril()


def scored(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """[t, t] by the definition, head by head."""
    heads, head = q.shape[1:]
    each = (torch.relu(q[:, h] @ k.T / head**0.5) * weights[:, h, None] for h in range(heads))
    return torch.stack([*each]).sum(0) / heads**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_the_earlier_of_equal_tokens_is_chosen(dtype: torch.dtype) -> None:
    """One head leaves many out: their scores are 0, and those of negative weights below it."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(TOKENS, 1, 6, generator=generator), torch.randn(TOKENS, 6, generator=generator)
    weights = torch.randn(TOKENS, 1, generator=generator)
    q, k, weights = (x.to(dtype) for x in (q, k, weights))
    first = np.repeat(np.cumsum([0, *DOCUMENTS])[:-1], DOCUMENTS)
    found = choose(q, k, weights, Reaches(first, np.arange(TOKENS), torch.device("cpu")), TOP)
    scores, ties = scored(q, k, weights), 0
    for token, (seen, chosen) in enumerate(zip(visible(), found.tolist(), strict=True)):
        order = sorted(seen.nonzero().flatten().tolist(), key=lambda key: (-scores[token, key].item(), key))
        assert [key for key in chosen if key >= 0] == order[:TOP] and len(chosen) == TOP
        ties += len(order) > TOP and scores[token, order[TOP - 1]].item() == scores[token, order[TOP]].item()
    assert ties > 20


def test_indexers_learn_the_attention_of_what_they_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    section = drawn("deepseek_v32", 1, layers=2, vocab=31, positions=256, tp=1, index_topk=TOP)
    asked: list[Any] = []
    call = Indexed.__call__

    def noting(self: Indexed, name: str, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        asked.append((q.detach(), k.detach(), *others[:2]))
        return call(self, name, q, k, v, *others)

    monkeypatch.setattr(Indexed, "__call__", noting)
    learn(section, lambda: [divergence(*each) for each in asked])


def test_indexers_of_blocks_learn_the_attention_of_what_they_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"index_topk": TOP, "layer_types": [SPARSE] * 2, "sliding_window": 5}
    section = drawn("deepseek_v4", 1, layers=2, vocab=31, positions=256, tp=1, **fields)
    asked: list[Any] = []
    call = CompressedTokens.__call__

    def noting(self: CompressedTokens, name: str, q: Tensor, k: Tensor, means: Tensor, *others: Any) -> Tensor:
        asked.append((q.detach(), k.detach(), means.detach(), *others[:3]))
        return call(self, name, q, k, means, *others)

    monkeypatch.setattr(CompressedTokens, "__call__", noting)
    learn(section, lambda: [divergence_of_blocks(*each) for each in asked])


def learn(section: dict[str, Any], divergences: Callable[[], list[Tensor]]) -> None:
    """Of documents, some tokens of which are padding; no other weight has a gradient of it."""
    config = configure(section)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(31, (TOKENS,), generator=generator)
    batch = Microbatch(tokens, tokens, positions_of(), 1, (TOKENS, config.sizes["embed"]), DOCUMENTS)
    padding = torch.arange(TOKENS) > TOKENS - 20
    found = []
    for coefficient in (0.7, 0.0):
        model = Model.create(config, layout_of(config, MeshShape()), Mesh.single(), torch.float64, index=coefficient)
        model.parameters.initialise(0)
        for name, parameter in model.parameters.items():
            if not name.endswith("table"):
                torch.nn.init.normal_(
                    parameter, 1.0 if "norm" in name else 0.0, 0.3, generator=generator.manual_seed(1)
                )
        assert (model.alignment is not None) == (coefficient > 0) and model.balance is not None
        there = (~padding).sum().double()
        model.balance.begin(1, there.new_ones(()), there, there.new_tensor(2.0))
        if model.alignment is not None:
            model.alignment.begin(there, there.new_tensor(2.0))
        loss = model.chunks[0](None, replace(batch, padding=padding, number=0))
        wanted = list[Tensor]()
        if model.alignment is not None:
            indexers = {n: p for n, p in model.parameters.items() if ".index." in n}
            far = torch.stack([each[~padding].mean() for each in divergences()])
            wanted = [*torch.autograd.grad(0.7 * 2.0 * far.sum(), [*indexers.values()], retain_graph=True)]
        loss.backward()
        found.append({name: p.grad for name, p in model.parameters.items()})
        if model.alignment is not None:
            torch.testing.assert_close(model.alignment.read(2), far.detach(), rtol=1e-12, atol=0)
            for name, gradient in zip(indexers, wanted, strict=True):
                own = found[0][name]
                assert own is not None and gradient.any()
                torch.testing.assert_close(own, gradient, rtol=1e-9, atol=1e-12)
    for name, alone in found[1].items():
        beside = found[0][name]
        assert (alone is None) == (".index." in name or name.endswith(("correction", "table")))
        assert alone is None or (beside is not None and torch.equal(alone, beside))


def divergence(q: Tensor, k: Tensor, scoring: Any, index: IndexVectors) -> Tensor:
    """[t]: KL(p || softmax of the chosen scores), p the attention of all heads over its sum."""
    scores = scored(index.q, index.k, index.weights).masked_fill(~visible(), -torch.inf)
    chosen = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    chosen.scatter_(1, scores.argsort(dim=1, descending=True, stable=True)[:, :TOP], True)
    chosen &= visible()
    products = torch.einsum("qhd,khd->hqk", q, k) * scoring.factor(q.shape[-1])
    p = products.masked_fill(~chosen, -torch.inf).softmax(-1).sum(0)
    p = p / p.sum(-1, keepdim=True)
    log_q = scores.masked_fill(~chosen, -torch.inf).log_softmax(-1).masked_fill(~chosen, 0)
    return torch.nn.functional.kl_div(log_q, p, reduction="none").sum(-1)


def divergence_of_blocks(q: Tensor, k: Tensor, means: Tensor, rate: int, scoring: Any, index: IndexVectors) -> Tensor:
    """As :func:`divergence`, of blocks beside tokens in a window and a logit that stands for none; 0 of a token that
    has no block before it."""
    ends = torch.stack([place for place in torch.arange(TOKENS) if (positions_of()[place] + 1) % rate == 0])
    seen, near = visible()[:, ends], visible() & ~visible().tril(-scoring.window)
    scores = scored(index.q, index.k, index.weights).masked_fill(~seen, -torch.inf)
    chosen = torch.zeros_like(seen)
    chosen.scatter_(1, scores.argsort(dim=1, descending=True, stable=True)[:, :TOP], True)
    chosen &= seen
    products = torch.einsum("qhd,kd->hqk", q, torch.cat([k, means])) * scoring.factor(q.shape[-1])
    products = products.masked_fill(~torch.cat([near, chosen], 1), -torch.inf)
    sinks = scoring.sinks.detach()[:, None, None].expand(-1, TOKENS, 1)
    p = torch.cat([products, sinks], -1).softmax(-1).sum(0)[:, TOKENS:-1]
    some = seen.any(-1)
    p = p[some] / p[some].sum(-1, keepdim=True)
    log_q = scores[some].masked_fill(~chosen[some], -torch.inf).log_softmax(-1).masked_fill(~chosen[some], 0)
    found = torch.nn.functional.kl_div(log_q, p, reduction="none").sum(-1)
    return found.new_zeros(TOKENS).masked_scatter(some, found)


def positions_of() -> Tensor:
    """[t], the position of each token in its document."""
    return torch.cat([torch.arange(length) for length in DOCUMENTS])
