"""Experts in fp8 against quantisation spelled out in numpy, whoever holds which experts, features and slices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_experts
import torch
import torch.distributed as dist
from pool import Pool
from test_experts import EXPERTS, SHAPES, Drawn, K, alone, joined
from test_fp8 import quantised
from torch import Tensor

from megacore.checks import rules
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.kernels import grouped
from megacore.parallel.kernels.grouped import Groups
from megacore.parallel.layers import fp8_experts
from megacore.parallel.layers.experts import Experts
from megacore.parallel.layers.fp8 import E4M3, MULTIPLE
from megacore.parallel.layers.fp8_experts import Fp8ExpertsWeight, Fp8Products, multiply_by_fp8, multiply_on
from megacore.parallel.mesh import ALONE
from megacore.parallel.weights.layout import MeshShape


def spread(dtype: torch.dtype) -> Drawn:
    """Features of all magnitudes: what is tiny beside the largest depends on the scale. Experts have others."""
    made = Drawn.of(torch.float64)

    def features(x: Tensor, dim: int) -> Tensor:
        shape = [1] * x.dim()
        shape[dim] = -1
        return x * (2.0 ** -(torch.arange(x.shape[dim]) * 7 % 19)).view(shape)

    own = 2.0 ** torch.arange(EXPERTS).view(-1, 1, 1)
    up, down = features(features(made.up, 1) * own, 2), features(made.down / own, 2)
    drawn = replace(made, up=up, down=down, x=features(made.x, 1), dy=features(made.dy, 1))
    dtypes = {"chosen": torch.int64, "weights": torch.promote_types(dtype, torch.float32)}
    return Drawn(**{name: x.to(dtypes.get(name, dtype)) for name, x in vars(drawn).items()})


def rows8(x: np.ndarray) -> np.ndarray:
    return np.stack([quantised(row, E4M3) for row in x])


def spelled_out(drawn: Drawn) -> dict[str, np.ndarray]:
    """Outputs and gradients, each slot of each token by itself; weight gradients of what is not quantised."""
    d = {name: value.double().numpy() for name, value in vars(drawn).items()}
    up8, down8 = (np.stack([quantised(matrix, E4M3) for matrix in d[name]]) for name in ("up", "down"))
    x8, features = rows8(d["x"]), d["down"].shape[2]
    found = {name: np.zeros_like(d[name]) for name in ("x", "weights", "up", "down", "up_bias", "down_bias")}
    found["y"] = np.zeros_like(d["dy"])
    for token, slot in np.ndindex(len(x8), K):
        e, w, dy = int(d["chosen"][token, slot]), d["weights"][token, slot], d["dy"][token]
        h = up8[e] @ x8[token] + d["up_bias"][e]
        gate, other = h[:features], h[features:]
        s = 1 / (1 + np.exp(-gate))
        a = gate * s * other
        found["y"][token] += w * (down8[e] @ quantised(a, E4M3) + d["down_bias"][e])
        da = quantised(w * dy, E4M3) @ down8[e]
        dh = np.concatenate([da * other * s * (1 + gate * (1 - s)), da * gate * s])
        found["x"][token] += quantised(dh, E4M3) @ up8[e]
        found["weights"][token, slot] = (da @ a) / w + dy @ d["down_bias"][e]
        found["down"][e] += np.outer(w * dy, a)
        found["up"][e] += np.outer(dh, d["x"][token])
        found["down_bias"][e] += w * dy
        found["up_bias"][e] += dh
    return found


def on_mesh(shape: MeshShape, features: bool, once: bool) -> dict[str, Tensor]:
    """As without fp8; ``once``: whether weights are cast once for all products."""

    def prepare(experts: Experts) -> None:
        for weight, cast in multiply_by_fp8(experts).items():
            if once:
                largest = cast.largest([(0, weight.detach())])
                assert largest.count_nonzero() == len(weight) and largest.shape == cast.scales == (EXPERTS,)
                for group in (experts.group, experts.features):  # as `parallel.gradients.narrow` does
                    all_reduce_(largest, group, dist.ReduceOp.MAX)
                cast.cast(largest)

    return test_experts.on_mesh(shape, features, torch.float64, True, spread(torch.float64), torch.no_grad()(prepare))


@pytest.mark.parametrize("once", [False, True], ids=["each", "once"])
@pytest.mark.parametrize(
    ("shape", "features"), [*SHAPES, (MeshShape(ep=2, tp=2), True)], ids=["1", "ep2", "ep4", "etp2", "ep2-etp2"]
)
def test_experts_multiply_quantised_numbers_on_every_layout(
    pool: Pool, shape: MeshShape, features: bool, once: bool
) -> None:
    """In fp64 what is left to differ is the order of sums: the quantised numbers are the same on every layout."""
    arguments = shape, features, once
    ranks = [on_mesh(*arguments)] if shape.world == 1 else pool.run(shape.world, on_mesh, *arguments)
    found, want = joined(ranks, shape.tp if features else 1), spelled_out(spread(torch.float64))
    assert found.keys() == want.keys()
    for name, value in found.items():
        np.testing.assert_allclose(
            value.numpy(), want[name], rtol=1e-10, atol=1e-13 * np.abs(want[name]).max(), err_msg=name
        )


def cast_of(dtype: torch.dtype) -> tuple[Experts, list[Fp8ExpertsWeight]]:
    experts = alone(spread(dtype))
    casts: Any = multiply_by_fp8(experts)
    return experts, list(casts.values())


@pytest.mark.parametrize("lengths", [(1, 2, 3), (100, 1, 700, 2000), (383,), (384, 384), (0, 5)], ids=str)
def test_slices_of_experts_are_cast_as_wholes_are(lengths: tuple[int, ...]) -> None:
    """Wherever a slice begins and ends: within an expert, between two, and with none of some."""
    _, (_, cast) = cast_of(torch.bfloat16)
    with torch.no_grad():
        flat = cast.weight.flatten()
        sizes = [*lengths, flat.numel() - sum(lengths)]
        parts = list(zip(np.cumsum([0, *sizes[:-1]]).tolist(), flat.split(sizes), strict=True))
        largest = cast.largest(parts)
        assert torch.equal(largest, cast.weight.abs().amax((1, 2)).float())
        cast.cast(largest)
        whole = cast.products.narrow
        assert whole is not None
        slices = torch.empty_like(flat, dtype=E4M3)
        for narrow, (start, part) in zip(slices.split(sizes), parts, strict=True):
            cast.fill(narrow, part, start, largest)
        assert torch.equal(slices.view(torch.uint8), whole.values.view(torch.uint8).flatten())
        cast.give(whole.values, largest)
        given = cast.products.narrow
        assert given is not None and given.scale is not None and whole.scale is not None
        assert torch.equal(given.scale, whole.scale)


def test_the_hardwares_product_is_given_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch checks it for a GPU, by shapes and strides; it gives what the reference does, to the bit, and sums fast
    in the forward alone. Sizes that it does not take go to the reference."""
    drawn, fast = spread(torch.bfloat16), list[bool]()

    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, **options: Any) -> Tensor:
        told = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (a, b, scale_a, scale_b)
        ]
        torch.ops.aten._scaled_grouped_mm(*told, offs=offs.to("meta"), **options)
        assert all(size % 16 == 0 for size in (*a.shape[1:], *b.shape[1:]))
        fast.append(options["use_fast_accum"])
        wide, matrices = a.bfloat16() * scale_a.bfloat16()[:, None], b.bfloat16() * scale_b.bfloat16()[:, None]
        counts = offs.diff(prepend=offs.new_zeros(1)).tolist()
        return grouped.LOOP.forward(wide, matrices.transpose(1, 2), Groups(len(a), offs, counts))

    monkeypatch.setattr(torch, "_scaled_grouped_mm", product)
    found = []
    for hardware, width in ((False, 32), (True, 32), (True, 24)):
        down, up = drawn.down.repeat(1, 1, 2)[..., :width], drawn.up.repeat(1, 2, 1)[:, : 2 * width]
        experts = alone(replace(drawn, up=up, down=down))
        experts.products = grouped.LOOP
        if hardware:
            monkeypatch.setattr(fp8_experts, "multiply_on", lambda device: fp8_experts.multiply_scaled)
        casts = multiply_by_fp8(experts)
        x = drawn.x.clone().requires_grad_()
        with torch.no_grad():
            for weight, cast in casts.items():
                cast.cast(cast.largest([(0, weight)]))
        y = experts(x, drawn.chosen, drawn.weights)
        y.backward(drawn.dy)
        found.append([y.detach(), x.grad, experts.up.grad, experts.down.grad])
    assert fast == [True, True, False, False, True, False] and all(map(torch.equal, found[0], found[1]))
    nothing = Fp8Products(grouped.KERNEL, fp8_experts.multiply_scaled, None, ALONE, ALONE)
    assert nothing.forward(drawn.x[:0], experts.up, Groups(0, torch.zeros(EXPERTS))).shape == (0, 48)


def test_what_is_not_finite_is_seen_in_its_rows_alone() -> None:
    experts, _ = cast_of(torch.bfloat16)
    drawn = spread(torch.bfloat16)
    drawn.x[3, 2] = torch.inf
    y = experts(drawn.x, drawn.chosen, drawn.weights)
    assert torch.isfinite(y).all(1).tolist() == [token != 3 for token in range(len(y))]


def test_the_check_before_a_run_knows_what_the_product_takes() -> None:
    """Which imports no torch, and has the number by itself."""
    assert rules.MULTIPLE == MULTIPLE


def test_cpus_use_the_reference() -> None:
    assert multiply_on(torch.device("cpu")) is None


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10), reason="needs a GPU"
)
def test_the_gpu_multiplies_as_the_reference() -> None:
    drawn, found = spread(torch.bfloat16), []
    for device in ("cpu", "cuda"):
        experts = alone(replace(drawn, up=drawn.up.repeat(1, 4, 1), down=drawn.down.repeat(1, 1, 4))).to(device)
        multiply_by_fp8(experts)
        found.append(experts(*(x.to(device) for x in (drawn.x, drawn.chosen, drawn.weights))).detach().cpu())
    torch.testing.assert_close(found[0], found[1], rtol=2**-6, atol=2**-6 * found[0].abs().max().item())
