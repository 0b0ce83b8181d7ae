"""The gated feed-forward network: the formula, and a hand-written backward that is its derivative."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parallel.kernels.activation import swiglu


def test_swiglu_is_silu_of_the_gate_times_up() -> None:
    gate_up = torch.randn(3, 5, 14, dtype=torch.float64)
    gate, up = gate_up[..., :7], gate_up[..., 7:]
    torch.testing.assert_close(swiglu(gate_up), F.silu(gate) * up, rtol=1e-14, atol=0)


def test_its_gradient_is_the_derivative() -> None:
    gate_up = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, gate_up)
