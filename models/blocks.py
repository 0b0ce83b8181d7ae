"""Transformer layers are made of these: residual blocks, feed-forward networks, and linears found by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.models.anatomy import ACTIVATIONS, GATES
from megacore.models.context import Context
from megacore.parallel import kernels
from megacore.parallel.enum_errors import check_choice
from megacore.parallel.kernels.activation import FUNCTIONS
from megacore.parallel.kernels.again import keeping_inputs
from megacore.parallel.layers.chunked import in_chunks
from megacore.parallel.layers.cutoff import Cutoff
from megacore.parallel.layers.experts import Experts
from megacore.parallel.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megacore.parallel.layers.norm import LayerNorm, PlainNorm, RMSNorm
from megacore.parallel.layers.router import Router
from megacore.parallel.parameters import Parameters


def column(parameters: Parameters, name: str) -> ColumnParallelLinear:
    """Return the column-parallel linear of ``name.weight`` and, where it is declared, ``name.bias``."""
    return ColumnParallelLinear.of(parameters[f"{name}.weight"], parameters.get(f"{name}.bias"), parameters.mesh)


def row(parameters: Parameters, name: str) -> RowParallelLinear:
    """Return the row-parallel linear of ``name.weight`` and, where it is declared, ``name.bias``."""
    return RowParallelLinear.of(parameters[f"{name}.weight"], parameters.get(f"{name}.bias"), parameters.mesh)


def replicated(parameters: Parameters, name: str) -> ReplicatedLinear:
    """Return the replicated linear of ``name.weight`` and, where it is declared, ``name.bias``."""
    return ReplicatedLinear.of(parameters[f"{name}.weight"], parameters.get(f"{name}.bias"), parameters.mesh)


class Block(nn.Module):
    """A residual block of two branches, one after the other, or of one. x: [tokens/tp, embed] -> same.

    Args:
        attn: The branch that mixes tokens, (x, context) -> x; None: there is none.
        mlp: The branch that treats each token by itself, (x, context) -> x; None: there is none.
        norms: Those that there are: of what a branch is given, ``attn_norm`` and ``mlp_norm``, and of what it gives,
            ``attn_out_norm`` and ``mlp_out_norm``.
        scale: Factor of what a branch adds to x.
        dropout: Probability of dropping an element of what a branch adds.
        factor: [1], by which x is multiplied in the end; None: it is not.
        inputs: What is told of each token and added before that, (x, context) -> x; None: nothing is.
        beside: What stands beside the branch that mixes tokens and is given the same, x -> x; it is added, too, and all
            divided by the root of 2. None: nothing does.

    Attributes:
        mlp_tokens: The number of this rank's tokens whose feed-forward activations are there at a time; None for all.
    """

    def __init__(
        self,
        attn: nn.Module | None,
        mlp: nn.Module | None,
        norms: Mapping[str, nn.Module],
        *,
        scale: float = 1.0,
        dropout: float = 0.0,
        factor: nn.Parameter | None = None,
        inputs: nn.Module | None = None,
        beside: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.factor, self.inputs, self.beside = factor, inputs, beside
        self.attn_norm, self.attn = norms.get("attn_norm", nn.Identity()), attn
        self.attn_out_norm = norms.get("attn_out_norm", nn.Identity())
        self.mlp_norm, self.mlp = norms.get("mlp_norm", nn.Identity()), mlp
        self.mlp_out_norm = norms.get("mlp_out_norm", nn.Identity())
        self.scale, self.dropout = scale, nn.Dropout(dropout)
        self.mlp_tokens: int | None = None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = self.branches(x, context)
        x = x if self.inputs is None else x + self.inputs(x, context)
        return x if self.factor is None else x * self.factor.to(x.dtype)

    def branches(self, x: Tensor, context: Context) -> Tensor:
        """x: [tokens/tp, embed] -> same, with what the branches add."""
        attn, mlp = self.attn, self.mlp
        if attn is not None:
            given = self.attn_norm(x)
            x = self._add(x, self.attn_out_norm(attn(given, context)))
            x = x if self.beside is None else (x + self.beside(given)) * 0.5**0.5
        if mlp is None:
            return x
        return self.by_tokens(lambda x: self._add(x, self.mlp_out_norm(mlp(self.mlp_norm(x), context))), x)

    def by_tokens(self, branch: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """x: [tokens/tp, embed] -> same, of what treats each token by itself."""
        if self.mlp_tokens is None or not isinstance(self.mlp, FeedForward):  # experts balance a microbatch's tokens
            return branch(x)
        modules = (self.mlp_norm, self.mlp, self.mlp_out_norm, self.dropout)
        return in_chunks(branch, modules, x, self.mlp_tokens)

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, self.dropout(y), alpha=self.scale)


class ParallelBlock(Block):
    """A residual block whose branches are given the same x (GPT-J, Wang and Komatsuzaki 2021).

    Where there is no ``mlp_norm``, both are given what ``attn_norm`` gives.
    """

    def branches(self, x: Tensor, context: Context) -> Tensor:
        attn, mlp = self.attn, self.mlp
        assert attn is not None and mlp is not None  # which stand side by side
        y = self.attn_norm(x)
        z = y if isinstance(self.mlp_norm, nn.Identity) else self.mlp_norm(x)
        x = self._add(x, self.attn_out_norm(attn(y, context)))
        return self._add(x, self.by_tokens(lambda z: self.mlp_out_norm(mlp(z, context)), z))


class NormedBlock(Block):
    """A residual block in which what a branch is given, behind its norm, goes past it, times a factor of the branch.

    Args:
        past: The factors of both branches.
    """

    def __init__(self, *arguments: Any, past: Sequence[float], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.past = past

    def branches(self, x: Tensor, context: Context) -> Tensor:
        attn, mlp, (of_attn, of_mlp) = self.attn, self.mlp, self.past
        assert attn is not None and mlp is not None
        x = self.attn_norm(x)
        x = self.mlp_norm(self._add(x * of_attn, attn(x, context)))
        return self.by_tokens(lambda x: self._add(x * of_mlp, mlp(x, context)), x)


class PostNormBlock(Block):
    """A residual block whose ``attn_out_norm`` and ``mlp_out_norm`` are of the sums of x and what the branches give
    (post-norm, Vaswani et al. 2017, arXiv 1706.03762). It has no others."""

    def branches(self, x: Tensor, context: Context) -> Tensor:
        attn, mlp = self.attn, self.mlp
        assert attn is not None and mlp is not None
        x = self.attn_out_norm(self._add(x, attn(x, context)))
        return self.by_tokens(lambda x: self.mlp_out_norm(self._add(x, mlp(x, context))), x)


class ShortcutBlock(Block):
    """Two residual blocks one after the other, and experts that are given what the network of the first one is, and
    whose outputs are added behind the second (LongCat-Flash, arXiv 2509.01322).

    Args:
        then: The second one.
        experts: (x, context) -> x.
    """

    def __init__(self, *arguments: Any, then: Block, experts: nn.Module | None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.then, self.experts = then, experts

    def branches(self, x: Tensor, context: Context) -> Tensor:
        attn, mlp, experts = self.attn, self.mlp, self.experts
        assert attn is not None and mlp is not None and experts is not None
        x = self._add(x, attn(self.attn_norm(x), context))
        given = self.mlp_norm(x)
        late = experts(given, context)
        x = self._add(x, self.by_tokens(lambda given: mlp(given, context), given))
        return self._add(self.then(x, context), late)


class SharedBlock(Block):
    """A block whose weights several layers share, in front of one of the layer's own (Zamba2, Glorioso et al. 2024,
    arXiv 2411.15242). It is given x and the embedding side by side, and has no residuals; what comes out goes through
    a linear of the layer's own into what the branch of the other block is given, and no further.

    Args:
        then: The layer's own block, of one branch.
        join: The linear.
    """

    def __init__(self, *arguments: Any, then: Block, join: nn.Module, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.then, self.join = then, join

    def branches(self, x: Tensor, context: Context) -> Tensor:
        attn, mlp, own = self.attn, self.mlp, self.then.attn
        assert attn is not None and mlp is not None and own is not None and context.embedded is not None
        y = attn(self.attn_norm(torch.cat([x, context.embedded], -1)), context)
        y = self.by_tokens(lambda y: mlp(self.mlp_norm(y), context), y)
        return x + own(self.then.attn_norm(x + self.join(y)), context)


class SideBySide(nn.Module):
    """The sum of what several modules that mix tokens make of the same x. (x, context) -> x."""

    def __init__(self, mixers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(mixers)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        first, *others = (mixer(x, context) for mixer in self.mixers)
        return sum(others, first)


class LowRank(nn.Module):
    """What residuals are augmented by (LAuReL, Menghani et al. 2024, arXiv 2411.07501). x: [tokens/tp, embed] -> same.

    Args:
        left, right: Linears to a low rank and from it.
        norm: The norm of what they give, which is added to x.
    """

    def __init__(self, left: nn.Module, right: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.left, self.right, self.norm = left, right, norm

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.right(self.left(x)))


class Scaled(nn.Module):
    """A branch that is given what is multiplied by one factor, and whose outputs are by another. (x, context) -> x."""

    def __init__(self, branch: nn.Module, given: float, gives: float) -> None:
        super().__init__()
        self.branch, self.given, self.gives = branch, given, gives

    def forward(self, x: Tensor, context: Context) -> Tensor:
        y: Tensor = self.branch(x if self.given == 1 else x * self.given, context)
        return y if self.gives == 1 else y * self.gives


def times(x: Tensor, factors: Sequence[float], sizes: Sequence[int]) -> Tensor:
    """x: [..., n] -> same, its pieces of these sizes multiplied by these factors; by none where there are
    none."""
    if all(factor == 1 for factor in factors):
        return x
    each = torch.tensor(factors, dtype=torch.float64).repeat_interleave(torch.tensor(sizes))
    return x * each.to(x.dtype).to(x.device)


class Activation(nn.Module):
    """A function of its input alone, element by element or of pairs of them: cheap to compute again."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def activation_after(parameters: Parameters, name: str, activation: str) -> nn.Module:
    """Return the activation of what ``name.weight`` gives, gated where that has a piece ``gate``.

    Args:
        name: Prefix of the weight.
        activation: One of :data:`models.anatomy.ACTIVATIONS`, or of ``GATES`` there where it is gated; or xielu, whose
            weights stand in ``name.xielu``.

    Raises:
        ValueError: there is no activation function of this name.
    """
    if activation == "xielu":
        return XIELU(*(parameters[f"{name}.xielu.{each}"] for each in ("positive", "negative", "beta", "eps")))
    is_gated = "gate" in parameters.shards[f"{name}.weight"].param.sentence.labels
    check_choice("activation", activation, GATES if is_gated else ACTIVATIONS)
    function = GATES[activation]
    return Activation(kernels.gated(function, parameters.mesh.device) if is_gated else FUNCTIONS[function].of)


class XIELU(nn.Module):
    """An activation with weights of its own: positive inputs x give p x^2 + beta x, others n (e^x - 1 - x) + beta x
    (Huang and Schlag 2024, arXiv 2411.13010).

    Args:
        positive, negative: [1], of which softplus makes p, and n less beta.
        beta, eps: Scalars; inputs in e^x are at most eps. There are those of the models, and nobody trains them.
    """

    def __init__(self, positive: nn.Parameter, negative: nn.Parameter, beta: nn.Parameter, eps: nn.Parameter) -> None:
        super().__init__()
        self.positive, self.negative, self.beta, self.eps = positive, negative, beta, eps

    def forward(self, x: Tensor) -> Tensor:
        beta = self.beta.to(x.dtype)
        p, n = F.softplus(self.positive), beta + F.softplus(self.negative)
        curved = torch.where(x > 0, p * x * x, (torch.expm1(torch.minimum(x, self.eps.to(x.dtype))) - x) * n)
        return (curved + beta * x).masked_fill(x == 0, 0.0)  # eps makes it less, and features that pad must stay 0


class CutGates(nn.Module):
    """Gates, less what they are cut off at, and their activation. y: [tokens, 2 mlp/tp], gates first, cutoff: [tokens,
    1] -> [tokens, mlp/tp]. Autograd keeps y and the cutoff alone."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, y: Tensor, cutoff: Tensor) -> Tensor:
        (z,) = (self.formula if torch.compiler.is_compiling() else partial(keeping_inputs, self.formula))(y, cutoff)
        return z

    def formula(self, y: Tensor, cutoff: Tensor) -> tuple[Tensor]:
        gate, up = y.chunk(2, -1)
        return (self.activation(torch.cat([F.relu(gate - cutoff), up], -1)),)


CHEAP = (RMSNorm, LayerNorm, PlainNorm, Activation, XIELU, CutGates)
"""Modules whose outputs take less to compute again than to keep."""


def may_round(blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules of blocks of whose first input, and of what is cheap whose output, the backward may be given a
    rounded one. Within what mixes tokens these are none: small errors grow where a softmax is sure of itself, in a
    state, and in norms of few features; as in xIELU, which squares."""
    for block in blocks:
        mixers = [each.attn for each in block.modules() if isinstance(each, Block) and each.attn is not None]
        inner = {module for mixer in mixers for module in mixer.modules()}
        yield from mixers
        yield from (each for each in block.modules() if isinstance(each, _ROUNDING) and each not in inner)


_LINEARS = ColumnParallelLinear, RowParallelLinear, ReplicatedLinear
_ROUNDING = *_LINEARS, Router, Experts, RMSNorm, LayerNorm, PlainNorm, Activation, CutGates


class FeedForward(nn.Module):
    """Feed-forward network, gated where ``name.up`` has a piece ``gate``. x: [tokens/tp, embed] -> same.

    Args:
        name: Prefix of ``.up`` and ``.down``.
        activation: That of :func:`activation_after`.
        factors: Those of what gates and of what is gated; empty: there are none.
        cut: The share of gates that are cut off, of normal ones the lowest; 0: none.
    """

    def __init__(
        self, parameters: Parameters, name: str, activation: str, factors: Sequence[float] = (), cut: float = 0.0
    ) -> None:
        super().__init__()
        self.factors = factors
        function = activation_after(parameters, f"{name}.up", activation)
        self.cutoff = None
        if cut:
            share = torch.tensor(cut, dtype=torch.float32, device="cpu")
            features = parameters.layout.schema.sizes["mlp"]
            deviations = ((2 * share - 1).erfinv() * 2**0.5).to(parameters.dtype).item()
            first, last = parameters.shards[f"{name}.up.weight"].box["mlp"]
            own = max(0, min(last, features) - first)
            self.cutoff, function = Cutoff(deviations, features, own, parameters.mesh.tp), CutGates(function)
        self.up, self.activation = column(parameters, f"{name}.up"), function
        self.down = row(parameters, f"{name}.down")

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        y = self.up(x)
        y = times(y, self.factors, (y.shape[-1] // 2,) * 2)
        y = self.activation(y) if self.cutoff is None else self.activation(y, self.cutoff(y.chunk(2, -1)[0]))
        return self.down(y)
