"""The balance of a router's experts over the global batch, whoever holds which token: counts, losses and biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.mesh import Mesh
from parallel.routing import Routing


@dataclass(frozen=True, eq=False)
class RoutedTokens:
    """The n tokens of a microbatch that this rank routes: t/tp successive ones of its t tokens.

    Args:
        sequences: The number of sequences of the whole microbatch, of equal length.
        padding: [n], true where a token is padding, which does not count; None: nowhere.
        microbatch: The number of the microbatch in its step; None where no training step is under way.
    """

    sequences: int = 1
    padding: Tensor | None = None
    microbatch: int | None = None


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of the terms that the objective has for the balance of experts, none of which is part of the
    loss, and the rate at which biases move.

    Args:
        sequence: Coefficient of the mean over sequences of each one's balance.
        batch: Coefficient of the balance of the global batch.
        z_loss: Coefficient of the mean square of the logits' log-sum-exp.
        bias_rate: The step of a bias.
    """

    sequence: float = 0.0
    batch: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0


NONE = Coefficients()


class Balance:
    """The balance of all routers of this rank over the steps of a run.

    Args:
        layers: The layers of this rank that have routers.
        routing: The table of the routers.
        mesh: The live mesh.
        coefficients: Those of the run.
    """

    ACROSS = ("dp", "ep", "cp", "tp")
    """The dimensions of the mesh whose ranks share the tokens of a step."""

    def __init__(self, layers: Sequence[int], routing: Routing, mesh: Mesh, coefficients: Coefficients) -> None:
        self.layers, self.routing, self.mesh, self.coefficients = tuple(layers), routing, mesh, coefficients
        self.counts = torch.zeros(len(self.layers), 0, routing.experts, dtype=torch.int64, device=mesh.device)
        """[layers, microbatches, experts], how many of this rank's tokens of a step were sent where."""

    def begin(self, microbatches: int) -> None:
        """Start a step of so many microbatches."""
        self.counts = self.counts.new_zeros(len(self.layers), microbatches, self.routing.experts)

    def attach(self, layer: int, tokens: RoutedTokens, logits: Tensor, chosen: Tensor) -> Tensor:
        """Count the experts that were chosen, and let the gradients of the balance enter at the logits."""
        if tokens.microbatch is not None:
            counted = chosen if tokens.padding is None else chosen[~tokens.padding]
            # Written, not added: a block that is computed again for its backward counts once.
            found = torch.bincount(counted.flatten(), minlength=self.routing.experts)
            self.counts[self.layers.index(layer), tokens.microbatch] = found
        return logits
