"""What transformer layers are made of: residual blocks, feed-forward networks, and how their linears are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from models.context import Context
from parallel import kernels
from parallel.choices import check_choice
from parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel.layers.norm import LayerNorm, RMSNorm
from parallel.parameters import Parameters


def column(parameters: Parameters, name: str) -> ColumnParallelLinear:
    """The column-parallel linear of ``name.weight`` and, where it is declared, ``name.bias``."""
    return ColumnParallelLinear.of(parameters[f"{name}.weight"], parameters.get(f"{name}.bias"), parameters.mesh)


def row(parameters: Parameters, name: str) -> RowParallelLinear:
    """The row-parallel linear of ``name.weight`` and, where it is declared, ``name.bias``."""
    return RowParallelLinear.of(parameters[f"{name}.weight"], parameters.get(f"{name}.bias"), parameters.mesh)


class Block(nn.Module):
    """A pre-norm residual block. x: [tokens/tp, embed] -> same."""

    def __init__(
        self, attn_norm: nn.Module, attn: nn.Module, mlp_norm: nn.Module, mlp: nn.Module, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.attn_norm, self.attn, self.mlp_norm, self.mlp = attn_norm, attn, mlp_norm, mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x), context))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Activation(nn.Module):
    """A function of its input alone, element by element or of pairs of them: cheap to compute again."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


CHEAP = (RMSNorm, LayerNorm, Activation)
"""Modules whose outputs take less to compute again than to keep."""


class SwiGLU(nn.Module):
    """Gated feed-forward network. x: [tokens/tp, embed] -> same."""

    def __init__(self, parameters: Parameters, name: str) -> None:
        super().__init__()
        self.up, self.down = column(parameters, f"{name}.up"), row(parameters, f"{name}.down")
        self.activation = Activation(kernels.swiglu(parameters.mesh.device))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
}


class Mlp(nn.Module):
    """Feed-forward network of two linears. x: [tokens/tp, embed] -> same.

    Raises:
        ValueError: there is no activation function of this name.
    """

    def __init__(self, parameters: Parameters, name: str, activation: str) -> None:
        super().__init__()
        check_choice("activation", activation, _ACTIVATIONS)
        self.up, self.down = column(parameters, f"{name}.up"), row(parameters, f"{name}.down")
        self.activation = Activation(_ACTIVATIONS[activation])

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))
