"""A layer of experts beside a dense network of the same work and beside the layers of others, in one interleaved run.

    python -m benchmarks.experts [--rounds 15] [--json results.json]
    python -m benchmarks.experts --rounds 1 --tokens 64          # that it runs
    PYTHONPATH=TORCHTITAN python -m benchmarks.experts          # beside torchtitan's, where it can be imported

Each layer runs forward and backward on the same tokens, in one process with one thread; all have the same weights, and
their outputs are held against ours before anything is timed. Layers take turns in each round. What is told is the
median of the rounds, and the median over the rounds of each layer's time over that of another in the same round: a
drift of the machine meets all alike.

The dense network has as many features as the experts of a token together. It has no router: what that takes is part of
what experts cost. transformers' routers are in the dtype of the tokens, ours and torchtitan's in fp32; torchtitan's
experts are in bf16 always, so it takes no part in fp32.
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

from benchmarks import results
from benchmarks.results import over
from benchmarks.steps import DTYPES
from benchmarks.workload import HEAP
from megacore.models.blocks import Activation
from megacore.parallel import kernels
from megacore.parallel.layers.experts import Experts
from megacore.parallel.layers.router import Router
from megacore.parallel.mesh import ALONE
from megacore.parallel.routing import Routing

EMBED = 512


@dataclass(frozen=True)
class Shape:
    """So many experts of so many features each, of which a token takes a few."""

    experts: int
    top_k: int
    features: int

    def __str__(self) -> str:
        return f"{self.experts} experts, top {self.top_k}"


SHAPES = (Shape(8, 2, 1024), Shape(64, 8, 256))
BARS = {8: 1.2, 64: 1.5}
"""{experts: what a layer may take of the dense network's time}."""


@dataclass(frozen=True)
class Weights:
    """gate and up: [experts, 2 features, embed], down: [experts, embed, features], router: [experts, embed]."""

    up: Tensor
    down: Tensor
    router: Tensor

    @classmethod
    def drawn(cls, shape: Shape, dtype: torch.dtype) -> Weights:
        torch.manual_seed(0)
        e, f = shape.experts, shape.features
        sizes = (e, 2 * f, EMBED), (e, EMBED, f), (e, EMBED)
        return cls(*(torch.randn(size).mul_(size[-1] ** -0.5).to(dtype) for size in sizes))


Layer = Callable[[Tensor], Tensor]
"""x: [tokens, embed] -> same."""


class Dense(nn.Module):
    """Our feed-forward network with the features of a token's experts."""

    def __init__(self, shape: Shape, weights: Weights) -> None:
        super().__init__()
        gate, up = weights.up[: shape.top_k].chunk(2, 1)
        self.up = nn.Parameter(torch.cat([gate.flatten(0, 1), up.flatten(0, 1)]))
        self.down = nn.Parameter(torch.cat(list(weights.down[: shape.top_k]), 1))
        self.activation = Activation(kernels.gated("silu", torch.device("cpu")))

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(nn.functional.linear(x, self.up))
        return nn.functional.linear(h, self.down)


class Ours(nn.Module):
    def __init__(self, shape: Shape, weights: Weights) -> None:
        super().__init__()
        routing = Routing(experts=shape.experts, top_k=shape.top_k, normalised=True)
        self.router = Router(nn.Parameter(weights.router.clone()), routing)
        activation = Activation(kernels.gated("silu", torch.device("cpu")))
        up, down = nn.Parameter(weights.up.clone()), nn.Parameter(weights.down.clone())
        self.experts = Experts(up, down, activation, shape.experts, ALONE, ALONE)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(x, *self.router(x))
        return y


def hugging_face(shape: Shape, weights: Weights, implementation: str) -> nn.Module:
    """transformers' block of Mixtral; `implementation` is that of its experts."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=EMBED,
        intermediate_size=shape.features,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = implementation
    block: Any = MixtralSparseMoeBlock(config).to(weights.up.dtype)
    with torch.no_grad():
        block.gate.weight.copy_(weights.router)
        block.experts.gate_up_proj.copy_(weights.up)
        block.experts.down_proj.copy_(weights.down)
    return _Batched(block)


class _Batched(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x[None])
        return y[0]


def torchtitan(shape: Shape, weights: Weights) -> nn.Module:
    """Raises ImportError where it is not there."""
    titan: Any = importlib.import_module("torchtitan.models.common.config_utils")
    drawn = {"weight": nn.init.zeros_}
    router = titan.make_router_config(
        dim=EMBED,
        num_experts=shape.experts,
        gate_param_init=drawn,
        top_k=shape.top_k,
        score_func="softmax",
        route_norm=True,
    )
    experts = titan.make_routed_experts_config(
        dim=EMBED,
        hidden_dim=shape.features,
        num_experts=shape.experts,
        top_k=shape.top_k,
        param_init={},
        comm_backend="standard",
    )
    config = titan.make_moe_config(num_experts=shape.experts, router=router, routed_experts=experts)
    block: Any = config.build()
    held, (gate, up) = block.routed_experts.inner_experts, weights.up.chunk(2, 1)
    block.to(weights.up.dtype)
    with torch.no_grad():
        block.router.gate.weight.copy_(weights.router)
        held.w1_EFD.copy_(gate)
        held.w3_EFD.copy_(up)
        held.w2_EDF.copy_(weights.down)
        for buffer in block.buffers():
            buffer.zero_()
    made: nn.Module = block
    return made


PEERS: Mapping[str, Callable[[Shape, Weights], nn.Module]] = {
    "transformers, eager": partial(hugging_face, implementation="eager"),
    "transformers, grouped_mm": partial(hugging_face, implementation="grouped_mm"),
    "torchtitan": torchtitan,
}
DENSE, OURS = "dense", "megacore"


def layers(shape: Shape, dtype: torch.dtype, x: Tensor) -> dict[str, nn.Module]:
    """All that can be run here, each with the same outputs as ours."""
    weights = Weights.drawn(shape, dtype)
    found: dict[str, nn.Module] = {DENSE: Dense(shape, weights), OURS: Ours(shape, weights)}
    with torch.no_grad():
        expected = found[OURS](x).float()
    for name, make in PEERS.items():
        if name == "torchtitan" and dtype != torch.bfloat16:
            continue
        try:
            peer = make(shape, weights)
        except ImportError as error:
            print(f"skipped: {name}: {error}")
            continue
        with torch.no_grad():
            away = (peer(x).float() - expected).norm() / expected.norm()
        # Their routers are in bf16, and so some tokens have other experts.
        if away > (0.1 if dtype == torch.bfloat16 else 1e-5):
            raise AssertionError(f"{name} gives something else: {away:.2g} away from ours")
        found[name] = peer
    return found


def seconds(layer: nn.Module, x: Tensor, dy: Tensor) -> float:
    """Of a forward and a backward, gradients of all parameters and of x."""
    for parameter in layer.parameters():
        parameter.grad = None
    given = x.detach().requires_grad_()
    start = time.perf_counter()
    layer(given).backward(dy)
    return time.perf_counter() - start


def measure(shape: Shape, dtype: torch.dtype, tokens: int, rounds: int) -> dict[str, list[float]]:
    """{layer: seconds of each round}."""
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(tokens, EMBED, generator=generator).to(dtype) for _ in range(2))
    ways = {name: partial(seconds, layer, x, dy) for name, layer in layers(shape, dtype, x).items()}
    return results.in_turns(ways, rounds, warm_up=3)


def report(shape: Shape, dtype: str, found: Mapping[str, list[float]]) -> dict[str, object]:
    print(f"\n{shape}, {dtype}: ms forward and backward, x dense, ours over it")
    for name, times in found.items():
        ms = statistics.median(times) * 1e3
        print(f"  {name:26s} {ms:7.1f}   {over(times, found[DENSE]):5.2f}   {over(found[OURS], times):5.2f}")
    ratio = over(found[OURS], found[DENSE])
    peers = {name: over(found[OURS], times) for name, times in found.items() if name in PEERS}
    bar = BARS[shape.experts]
    fastest = max(peers, key=lambda name: peers[name])
    print(f"  bars: {ratio:.2f} <= {bar} x dense: {ratio <= bar}; <= 1.0 x {fastest}: {peers[fastest] <= 1.0}")
    return {"shape": str(shape), "dtype": dtype, "seconds": dict(found), "over dense": ratio, "over peers": peers}


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    arguments = parser.parse_args()
    if not HEAP.keys() <= os.environ.keys():  # glibc reads them when a process starts
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **HEAP, "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    reports = [
        report(shape, name, measure(shape, DTYPES[name], arguments.tokens, arguments.rounds))
        for name in arguments.dtypes
        for shape in SHAPES
    ]
    results.write(reports, arguments.json)


if __name__ == "__main__":
    main()
