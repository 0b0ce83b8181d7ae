"""AdamW with bf16 moments: by hand, beside torch's, and what a step that is left out leaves as it is."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megacore.parallel import kernels
from megacore.parallel.kernels import narrow_adamw as adamw

CPU = torch.device("cpu")
LR, BETAS, EPS, DECAY = 0.1, (0.9, 0.95), 1e-8, 0.1
pytestmark = pytest.mark.quick


def made(parameter: Tensor, moments: torch.dtype | None = torch.bfloat16) -> torch.optim.AdamW:
    return kernels.adamw([{"params": [parameter], "weight_decay": DECAY}], CPU, LR, BETAS, EPS, moments)


def gradients(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(5, 40, generator=generator) for _ in range(steps)]


def go(optimizer: torch.optim.AdamW, parameter: Tensor, gradient: Tensor, yes: bool = True) -> None:
    parameter.grad = gradient.clone()
    kernels.step_if(optimizer, torch.tensor(yes))


def to_bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().double().numpy()


def test_it_is_adamw_with_rounded_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula, in float64; a chunk ends within the tensor."""
    monkeypatch.setattr(adamw, "_CHUNK", {"cpu": 64, "cuda": 64})
    parameter = torch.linspace(-1, 1, 200).view(5, 40)
    optimizer = made(parameter)
    p, m, v = parameter.double().numpy().copy(), np.zeros((5, 40)), np.zeros((5, 40))
    for number, gradient in enumerate(gradients(5), start=1):
        go(optimizer, parameter, gradient)
        g = gradient.double().numpy()
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g**2
        mean, square = m / (1 - BETAS[0] ** number), v / (1 - BETAS[1] ** number)
        p = p * (1 - LR * DECAY) - LR * mean / (np.sqrt(square) + EPS)
        m, v = to_bf16(m), to_bf16(v)
        np.testing.assert_allclose(parameter.numpy(), p, atol=2e-6)
    state = optimizer.state[parameter]
    for found, want in ((state["exp_avg"], m), (state["exp_avg_sq"], v)):
        assert found.dtype == torch.bfloat16
        # What lies beside a tie may be rounded either way.
        assert np.mean(found.double().numpy() == want) > 0.99
    assert kernels.updates(optimizer) == 5


def test_with_wide_moments_it_is_torch_s() -> None:
    ours, theirs = torch.ones(5, 40), torch.ones(5, 40)
    one, other = made(ours), made(theirs, None)
    assert isinstance(one, adamw.NarrowAdamW) and not isinstance(other, adamw.NarrowAdamW)
    state = one.state[ours]
    one.state[ours] = {key: value.float() for key, value in state.items()}
    for gradient in gradients(5):
        go(one, ours, gradient)
        go(other, theirs, gradient)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1.0])
def test_a_step_that_is_left_out_changes_nothing(value: float, first: bool) -> None:
    parameter = torch.ones(5, 40)
    optimizer = made(parameter)
    if not first:
        go(optimizer, parameter, gradients(1)[0])
    state = optimizer.state[parameter]
    before = [tensor.clone() for tensor in (parameter, *state.values())]
    go(optimizer, parameter, torch.full((5, 40), value), yes=False)
    assert all(torch.equal(*each) for each in zip(before, (parameter, *state.values()), strict=True))
    assert torch.isfinite(parameter).all()


def test_moments_of_the_parameter_s_own_dtype_take_the_fused_kernel() -> None:
    assert not isinstance(made(torch.ones(4, dtype=torch.bfloat16)), adamw.NarrowAdamW)


@pytest.mark.parametrize(("beta", "stands_still"), [(0.95, False), (0.99, False), (0.995, False), (0.999, True)])
def test_what_betas_bf16_can_follow(beta: float, stands_still: bool) -> None:
    """A moment decays where 1 - beta is more than half a place, 2^-8: the rule in megacore.checks.rules."""
    parameter = torch.zeros(1)
    optimizer = kernels.adamw([{"params": [parameter]}], CPU, LR, (beta, beta), EPS, torch.bfloat16)
    go(optimizer, parameter, torch.ones(1))
    moment = optimizer.state[parameter]["exp_avg_sq"].fill_(1.0)
    for _ in range(5):
        go(optimizer, parameter, torch.zeros(1))
    assert (moment.item() == 1.0) is stands_still
    assert stands_still or math.isclose(moment.item(), beta**5, rel_tol=0.03)


@pytest.mark.parametrize("moments", [None, torch.bfloat16], ids=["fused", "narrow"])
def test_gradients_are_divided_in_the_update(moments: torch.dtype | None) -> None:
    """On the device, and where the CPU updates what is offloaded: bit for bit as if they had been divided before."""
    divisor = 1 + 2 / 3
    before, ours, host = (torch.linspace(-1, 1, 200).view(5, 40) for _ in range(3))
    plain, optimizer = made(before, moments), made(ours, moments)
    state = [torch.zeros(200, dtype=moments or torch.float32) for _ in range(2)]
    for count, gradient in enumerate(gradients(3), start=1):
        go(plain, before, gradient / torch.tensor(divisor))
        ours.grad = gradient.clone()
        kernels.step_if(optimizer, torch.tensor(True), torch.tensor(divisor))
        step = adamw.Step(count, LR, BETAS, EPS, DECAY, torch.tensor(divisor).item())
        adamw.update(step, [host.view(-1)], [gradient.reshape(-1)], *([each] for each in state))
        assert torch.equal(ours, before) and torch.equal(host, before)
