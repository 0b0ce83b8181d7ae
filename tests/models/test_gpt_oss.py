"""gpt-oss: the gate of its experts, and what its config may say."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from families import small

from models.config import ModelConfigError, active_parameters
from models.registry import configure, family
from parallel.kernels.activation import clamped_swiglu, gated

READ = family("gpt_oss").config.from_hugging_face


def test_the_gate_is_the_formula_and_its_derivative() -> None:
    """Below, within and above the limits."""
    generator = torch.Generator().manual_seed(0)
    gate_up = (torch.randn(6, 16, generator=generator, dtype=torch.float64) * 6).requires_grad_()
    gate, up = gate_up.detach().chunk(2, -1)
    assert (gate > 7).any() and (gate < -7).any() and (up > 7).any() and (up < -7).any()
    g, u = gate.clamp(max=7), up.clamp(-7, 7)
    torch.testing.assert_close(gated("swiglu_oai", gate_up), (u + 1) * g / (1 + (-1.702 * g).exp()))
    assert torch.autograd.gradcheck(clamped_swiglu, (gate_up,))
    assert not clamped_swiglu(torch.zeros(2, 4)).any()  # what is padded with zeros stays zero


def test_fields_of_the_published_file() -> None:
    """It has names and fields that transformers' class does not write."""
    plain = small("gpt_oss").to_dict()
    other = {name: value for name, value in plain.items() if name not in ("num_experts_per_tok", "swiglu_alpha")}
    assert READ(other | {"experts_per_token": 2, "initial_context_length": 4096}) == READ(plain)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "only None is: let transformers load it with dequantize"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 would change the maths"),
        ({"swiglu_limit": 5.0}, "swiglu_limit=5.0 would change the maths"),
        ({"experts_per_token": 3}, "experts_per_token"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=re.escape(message)):
        READ(small("gpt_oss").to_dict() | fields)


@pytest.mark.parametrize(("preset", "active"), [("gpt-oss-20b", 4_187_440_704), ("gpt-oss-120b", 5_711_982_912)])
def test_a_token_meets_four_experts_of_a_layer(preset: str, active: int) -> None:
    """By hand: all but the experts, and four of those."""
    config = configure({"preset": preset})
    sizes = config.sizes
    each = 3 * sizes["embed"] * sizes["expert_mlp"] + 2 * sizes["expert_mlp"] + sizes["embed"]
    idle = sizes["layer"] * (sizes["experts"] - 4) * each
    assert active_parameters(config) == config.schema.parameters - idle == active
