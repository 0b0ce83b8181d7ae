"""The router: against numpy by hand, against those of transformers, and where scores are equal."""

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from operators import kept_for_backward
from torch import Tensor, nn

from megacore.parallel.layers.router import Router, highest
from megacore.parallel.routing import Routing

TOKENS, EMBED, EXPERTS = 64, 12, 16


def made(routing: Routing, dtype: torch.dtype = torch.float64, correction: bool = False, bias: bool = False) -> Router:
    draw = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape, generator=draw).to(dtype))

    return Router(
        normal(routing.experts, EMBED),
        routing,
        normal(routing.experts) if bias else None,
        nn.Parameter(normal(routing.experts).float() / 4, requires_grad=False) if correction else None,
    )


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(TOKENS, EMBED, generator=torch.Generator().manual_seed(3)).to(dtype)


def by_hand(x: np.ndarray, router: Router) -> tuple[np.ndarray, np.ndarray]:
    """One token and one expert at a time."""
    routing = router.routing
    weight, bias, correction = (
        None if each is None else each.detach().double().numpy()
        for each in (router.weight, router.bias, router.correction)
    )
    assert weight is not None
    experts, weights = [], []
    for token in x:
        logits = weight @ token + (0 if bias is None else bias)
        exponentials = np.exp(logits - logits.max())
        scores = exponentials / exponentials.sum() if routing.score == "softmax" else 1 / (1 + np.exp(-logits))
        scores = np.sqrt(np.log1p(np.exp(logits))) if routing.score == "sqrtsoftplus" else scores
        choice = (logits if routing.weigh == "chosen" else scores) + (0 if correction is None else correction)
        groups = np.split(np.arange(routing.experts), routing.groups)
        best_of = max if routing.group_score == "max" else lambda group: sum(sorted(group)[-2:])
        of_groups = [best_of(choice[group]) for group in groups]
        kept = sorted(range(routing.groups), key=lambda g: (-of_groups[g], g))[: routing.kept_groups]
        candidates = [e for g in sorted(kept) for e in groups[g]]
        best = sorted(candidates, key=lambda e: (-choice[e], e))[: routing.top_k]
        if routing.weigh == "chosen":
            own = np.exp(logits[best] - logits[best].max())
            own = own / own.sum()
        else:
            own = scores[best]
        if routing.normalised:
            own = own / (own.sum() + routing.epsilon)
        experts.append(best)
        weights.append(own * routing.factor)
    return np.array(experts), np.array(weights)


def of_16(top_k: int = 3, **more: Any) -> Routing:
    return Routing(experts=EXPERTS, top_k=top_k, **more)


NORMALISED, CHOSEN = of_16(normalised=True), of_16(weigh="chosen")
GROUPS: dict[str, Any] = {"groups": 4, "kept_groups": 2}
BY_TOP_2: dict[str, Any] = {"score": "sigmoid", "normalised": True, "factor": 2.5, "group_score": "top2", **GROUPS}
ROUTINGS = {
    "softmax": of_16(),
    "normalised": NORMALISED,
    "of the chosen": of_16(4, weigh="chosen"),
    "one": of_16(1, normalised=False, factor=2.0),
    "all": of_16(EXPERTS, normalised=True),
    "groups by max": of_16(factor=16.0, **GROUPS),
    "groups by top2": of_16(6, epsilon=0.125, **BY_TOP_2),
    "roots of softplus": of_16(3, score="sqrtsoftplus", normalised=True, epsilon=0.125),
    "one group of two": of_16(8, score="sigmoid", groups=2, kept_groups=1),
}


@pytest.mark.quick
@pytest.mark.parametrize("correction", [False, True], ids=["", "correction"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_router_is_the_formula(name: str, correction: bool) -> None:
    """Experts in their order, and weights that the correction has no part in."""
    router = made(ROUTINGS[name], correction=correction, bias=True)
    chosen, weights = router(tokens())
    experts, expected = by_hand(tokens().numpy(), router)
    assert np.array_equal(chosen.numpy(), experts)
    np.testing.assert_allclose(weights.detach().numpy(), expected, rtol=1e-12)


def test_gradients_of_the_router() -> None:
    """Through the weights alone, of x, the weight and the bias, by differences."""
    for name in ("normalised", "of the chosen", "groups by top2", "roots of softplus"):
        router = made(ROUTINGS[name], correction=True, bias=True)
        x = tokens()[:4].requires_grad_()

        def call(x: Tensor, weight: Tensor, bias: Tensor, router: Router = router) -> Tensor:
            out: Tensor = torch.func.functional_call(router, {"weight": weight, "bias": bias}, (x,))[1]
            return out

        assert router.bias is not None
        assert torch.autograd.gradcheck(call, (x, router.weight, router.bias))
        router(x)[1].sum().backward()
        assert router.correction is not None and router.correction.grad is None


# -- those of transformers: {name: (module, prefix of its classes, config, table)}

_DEEPSEEK = {"routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2, "norm_topk_prob": True}
GREEDY, LIMITED = ({**_DEEPSEEK, "topk_method": method} for method in ("greedy", "group_limited_greedy"))
PEERS: dict[str, tuple[str, str, dict[str, Any], Routing]] = {
    "mixtral": ("mixtral", "Mixtral", {}, NORMALISED),
    "qwen2_moe": ("qwen2_moe", "Qwen2Moe", {"norm_topk_prob": False}, of_16()),
    "qwen3_moe": ("qwen3_moe", "Qwen3Moe", {"norm_topk_prob": True}, NORMALISED),
    "olmoe": ("olmoe", "Olmoe", {"norm_topk_prob": False}, of_16()),
    "deepseek_v2 greedy": ("deepseek_v2", "DeepseekV2", GREEDY, of_16(factor=2.5)),
    "deepseek_v2 groups": ("deepseek_v2", "DeepseekV2", LIMITED, of_16(factor=2.5, **GROUPS)),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3", _DEEPSEEK, of_16(epsilon=1e-20, **BY_TOP_2)),
    "gpt_oss": ("gpt_oss", "GptOss", {}, CHOSEN),
    "granitemoe": ("granitemoe", "GraniteMoe", {}, CHOSEN),
}


@pytest.mark.parametrize("name", PEERS)
def test_router_is_that_of_transformers(name: str) -> None:
    """The same experts, and for each the same weight; theirs need not be in order."""
    module, prefix, settings, routing = PEERS[name]
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    kind = getattr(modeling, f"{prefix}TopKRouter", None) or getattr(modeling, f"{prefix}TopkRouter")
    fields = {"num_experts_per_tok": 3, "num_local_experts": EXPERTS, "num_experts": EXPERTS, "hidden_size": EMBED}
    theirs = kind(SimpleNamespace(**fields, n_routed_experts=EXPERTS, **settings))
    held = theirs.state_dict()
    ours = made(routing, torch.float32, "e_score_correction_bias" in held, "bias" in held)
    assert len(held) == 1 + (ours.bias is not None) + (ours.correction is not None)
    theirs.load_state_dict({key: _of(ours, key) for key in held})
    x = tokens(torch.float32)
    chosen, weights = ours(x)
    _, their_weights, their_experts = theirs(x)
    order = their_weights.argsort(-1, descending=True)
    if ours.correction is None:
        assert chosen.equal(their_experts.gather(-1, order))

    def of_experts(chosen: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros(TOKENS, EXPERTS).scatter_(-1, chosen, weights.detach())

    torch.testing.assert_close(of_experts(chosen, weights), of_experts(their_experts, their_weights), rtol=1e-6, atol=0)


def _of(router: Router, key: str) -> Tensor:
    found = router.correction if "correction" in key else router.bias if key.endswith("bias") else router.weight
    assert found is not None
    return found


# -- equal scores


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_equal_scores_the_lower_expert_wins(dtype: torch.dtype) -> None:
    """Among few different numbers, zeros of either sign, infinities and the smallest that there are."""
    tiny = torch.finfo(torch.float32).smallest_normal / 2
    values = torch.tensor([-torch.inf, -1.5, -tiny, -0.0, 0.0, tiny, 0.25, 0.25 + 2**-25, 1.0, torch.inf], dtype=dtype)
    draw = torch.Generator().manual_seed(0)
    for m, k in ((8, 2), (64, 8), (256, 8), (5, 5)):
        scores = values[torch.randint(len(values), (200, m), generator=draw)]
        want = [sorted(range(m), key=lambda e, row=row: (-row[e], e))[:k] for row in scores.tolist()]  # type: ignore[misc]
        assert highest(scores, k).tolist() == want


def test_of_equal_groups_the_lower_is_kept() -> None:
    """And so in a router whose tokens say nothing."""
    for name, routing in ROUTINGS.items():
        for dtype in (torch.float32, torch.float64):
            router = made(routing, dtype)
            chosen, weights = router(torch.zeros(3, EMBED, dtype=dtype))
            assert chosen.tolist() == [list(range(routing.top_k))] * 3, name
            assert weights.dtype == dtype and (weights == weights[0, 0]).all()


def test_logits_choose_where_their_softmax_weighs_the_chosen() -> None:
    """Of two experts whose scores over all are 0, the one with the higher logit."""
    chosen_of_three = Routing(experts=3, top_k=2, weigh="chosen")
    router = Router(nn.Parameter(torch.tensor([[300.0], [10.0], [20.0]])), chosen_of_three)
    assert router(torch.ones(1, 1))[0].tolist() == [[0, 2]]


# -- narrow numbers


def test_narrow_tokens_are_routed_in_fp32_and_kept_as_they_are() -> None:
    router = made(ROUTINGS["normalised"], torch.bfloat16, correction=True, bias=True)
    wide = made(ROUTINGS["normalised"], torch.float32, correction=True, bias=True)
    with torch.no_grad():
        for ours, theirs in zip(router.parameters(), wide.parameters(), strict=True):
            theirs.copy_(ours)
    x = tokens(torch.bfloat16).requires_grad_()
    with kept_for_backward() as saved:
        chosen, weights = router(x)
    assert not any(tensor.shape == x.shape and tensor.dtype != x.dtype for tensor in saved)
    x_wide = x.detach().float().requires_grad_()
    chosen_wide, weights_wide = wide(x_wide)
    assert weights.dtype == torch.float32 and chosen.equal(chosen_wide) and weights.equal(weights_wide)
    gradient = tokens(torch.float32)[:, :3]
    weights.backward(gradient)
    weights_wide.backward(gradient)
    assert x.grad is not None and x_wide.grad is not None and x.grad.equal(x_wide.grad.bfloat16())
    for ours, theirs in zip(router.parameters(), wide.parameters(), strict=True):
        if ours.requires_grad:
            assert ours.grad is not None and theirs.grad is not None and ours.grad.equal(theirs.grad.bfloat16())
