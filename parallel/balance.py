"""The balance of a router's experts over the global batch, whoever holds which token: counts, losses and biases.

None of it is part of the loss. A balance and the z-loss are terms of the objective whose gradients enter at the logits,
in the backward, by formula: what is sent for them is counts of tokens, and a block that is computed again for its
backward counts, and adds, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.parallel.collectives import all_reduce_
from megacore.parallel.mesh import Mesh
from megacore.parallel.rank_sets import TOKENS
from megacore.parallel.routing import Routing


@dataclass(frozen=True, eq=False)
class RoutedTokens:
    """The n tokens of a microbatch that this rank routes: t/tp successive ones of its t tokens.

    Args:
        sequences: The number of sequences of the whole microbatch, of equal length.
        padding: [n], true where a token is padding, which does not count; None: nowhere.
        microbatch: The number of the microbatch in its step; None where no training step is under way.
        rows: [n], the sequence that each is of; None: they are successive ones of successive sequences.
        tokens: [n], what they are.
    """

    sequences: int = 1
    padding: Tensor | None = None
    microbatch: int | None = None
    rows: Tensor | None = None
    tokens: Tensor | None = None


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of the terms that the objective has for the balance of experts, none of which is part of the
    loss, and the rate at which biases move.

    Args:
        sequence: Coefficient of the mean over sequences of each one's balance (DeepSeek-V3, arXiv 2412.19437, equations
            17 to 20).
        batch: Coefficient of the balance of the global batch (arXiv 2501.11873).
        z_loss: Coefficient of the mean square of the logits' log-sum-exp (ST-MoE, arXiv 2202.08906).
        bias_rate: The step of a bias (arXiv 2408.15664).

    Raises:
        ValueError: there are both balances.
    """

    sequence: float = 0.0
    batch: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        if self.sequence and self.batch:
            raise ValueError("experts are balanced over each sequence or over the batch: choose one of the two")

    @property
    def balance(self) -> float:
        """The coefficient of the balance, over whatever it is."""
        return self.sequence or self.batch


NONE = Coefficients()


@dataclass(frozen=True)
class Loads:
    """The loads of all experts of the model in a step, on the host, the same on all ranks.

    Args:
        layers: The layers that have routers.
        counts: int64 [layers, experts], the tokens that each expert was sent, padding left out.
        balance: fp64 [layers], 1 where it is perfect; zeros where it has no coefficient.
        z_loss: fp64 [layers]; zeros where it has no coefficient.
        biases: fp32 [layers that have some, 2], the least and the largest; None where no layer has some.
    """

    layers: tuple[int, ...]
    counts: Tensor
    balance: Tensor
    z_loss: Tensor
    biases: Tensor | None


class Balance:
    """The balance of all routers of this rank over the steps of a run.

    Args:
        layers: The layers of this rank that have routers.
        routing: The table of the routers.
        coefficients: Those of the run.
        corrections: [experts] each, the biases of the layers that have some.
    """

    ACROSS = TOKENS

    def __init__(
        self,
        layers: Sequence[int],
        routing: Routing,
        mesh: Mesh,
        coefficients: Coefficients,
        corrections: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.layers, self.routing, self.mesh, self.coefficients = tuple(layers), routing, mesh, coefficients
        self.corrections = dict(corrections or {})
        self.counts = torch.zeros(len(self.layers), 0, routing.experts, dtype=torch.int64, device=mesh.device)
        """[layers, microbatches, experts], how many of this rank's tokens of a step were sent where."""
        self.values = torch.zeros(len(self.layers), 2, dtype=torch.float64, device=mesh.device)
        """[layers, 2], this rank's part of the balance and of the z-loss of a step, without their coefficients."""

    def begin(self, microbatches: int, sequences: Tensor, tokens: Tensor, scale: Tensor) -> None:
        """Start a step.

        Args:
            microbatches: The number of microbatches of this rank.
            sequences: The number of sequences of the global batch, an fp64 scalar.
            tokens: The number of its tokens that are no padding, an fp64 scalar of at least 1.
            scale: The factor of all gradients, a scalar.
        """
        self.counts = self.counts.new_zeros(len(self.layers), microbatches, self.routing.experts)
        self.values.zero_()
        self._sequences, self._tokens, scale = sequences, tokens, scale.double()
        self._of_balance = scale * self.coefficients.balance
        self._of_z_loss = scale * (2 * self.coefficients.z_loss) / tokens
        self._counted = [set[int]() for _ in self.layers]
        self._of_batch = dict[int, Tensor]()

    def attach(self, layer: int, tokens: RoutedTokens, logits: Tensor, chosen: Tensor) -> Tensor:
        """Count the experts that were chosen, and let the gradients of the balance enter at the logits.

        Args:
            tokens: Those that are routed.
            logits: [n, experts].
            chosen: [n, k].
        """
        if tokens.microbatch is None:
            return logits
        at, rows = self.layers.index(layer), self._rows(tokens, len(chosen))
        counts = self._count(tokens, rows, chosen)
        # Written, not added: a block that is computed again for its backward counts once.
        self.counts[at, tokens.microbatch] = counts.sum(0)
        self._counted[at].add(tokens.microbatch)
        if not (self.coefficients.balance or self.coefficients.z_loss) or not logits.requires_grad:
            return logits
        return _Enter.apply(logits, counts, rows, tokens.padding, self, at)

    def _rows(self, tokens: RoutedTokens, n: int) -> Tensor | None:
        """Return the sequence of the microbatch that each of this rank's tokens is of, [n]; None where they count as
        one."""
        group = self.mesh.tp
        if not self.coefficients.sequence or tokens.sequences == 1:
            return None
        if tokens.rows is not None:
            return tokens.rows
        length = n * group.size // tokens.sequences
        return torch.arange(group.index * n, (group.index + 1) * n, device=self.mesh.device) // length

    def _count(self, tokens: RoutedTokens, rows: Tensor | None, chosen: Tensor) -> Tensor:
        """Return how many of this rank's tokens of each sequence were sent where: [sequences or 1, experts].

        The device alone knows, and nobody waits for it, as for the result of a bincount or of a mask.
        """
        experts, padding = self.routing.experts, tokens.padding
        places = chosen if rows is None else rows[:, None] * experts + chosen
        ones = chosen.new_ones(1, 1) if padding is None else (~padding).long()[:, None]
        counts = chosen.new_zeros(experts if rows is None else tokens.sequences * experts)
        return counts.scatter_add_(0, places.flatten(), ones.expand_as(chosen).flatten()).view(-1, experts)

    def gradient(
        self, at: int, dy: Tensor, logits: Tensor, counts: Tensor, rows: Tensor | None, padding: Tensor | None
    ) -> Tensor:
        """Return dy, [n, experts], and the gradient of the terms of a layer at its logits; their values are noted.

        With f_i = count_i / (k T) and P_i, the mean of the normalised scores p_i of T tokens, a balance is experts x
        sum of f_i P_i; f has no gradient. By p_i it is experts f_i / T.
        """
        if self.coefficients.balance:
            toward = self._toward(at, counts).to(logits.dtype)
            toward = toward if rows is None else toward[rows]
            if padding is not None:
                toward = toward.masked_fill(padding[:, None], 0)
            if self.routing.score == "softmax":
                p = slope = logits.softmax(-1)
            elif self.routing.score == "sqrtsoftplus":
                log = torch.where(logits < -30, logits, F.softplus(logits).log())
                p = (log / 2).softmax(-1)
                slope = p * (F.logsigmoid(logits) - log).exp() / 2
            else:  # sigmoids over their sum, which may all be so small that they are zeros
                p = F.logsigmoid(logits).softmax(-1)
                slope = p * (-logits).sigmoid()
            each = (p * toward).sum(-1, keepdim=True)
            self.values[at, 0] += each.sum(dtype=torch.float64)
            dy = dy.addcmul(slope, (toward - each) * self._of_balance)
        if self.coefficients.z_loss:
            z = logits.logsumexp(-1, keepdim=True)
            if padding is not None:
                z = z.masked_fill(padding[:, None], 0)
            self.values[at, 1] += z.square().sum(dtype=torch.float64) / self._tokens
            dy = dy.addcmul(logits.softmax(-1), z * self._of_z_loss)
        return dy

    def _toward(self, at: int, counts: Tensor) -> Tensor:
        """Return the gradient of the balance by the scores of a token: fp64 [sequences, experts] or [1, experts]."""
        if self.coefficients.sequence:
            counts, parts = all_reduce_(counts.clone(), self.mesh.along("cp", "tp")), self._sequences
        else:
            counts, parts = self._batch(at)[None], torch.ones_like(self._sequences)
        chosen = counts.sum(-1, keepdim=True).clamp(min=1).double()  # k T
        return counts * (self.routing.experts * self.routing.top_k) / chosen.square() / parts

    def _batch(self, at: int) -> Tensor:
        """Return the counts of the global batch of a layer: [experts]."""
        if at not in self._of_batch:
            counts = self.counts[at]
            if len(self._counted[at]) < len(counts):
                raise RuntimeError(
                    f"the balance of the batch needs the counts of all {len(counts)} microbatches before the first "
                    f"backward, and there are {len(self._counted[at])}: choose the schedule gpipe, or one microbatch"
                )
            self._of_batch[at] = all_reduce_(counts.sum(0), self.mesh.along(*self.ACROSS))
        return self._of_batch[at]

    @torch.no_grad()
    def finish(self) -> None:
        """Sum the counts that the biases move by over the ranks, once the last backward of a step is over."""
        if self.coefficients.bias_rate and self.corrections:
            self._summed = all_reduce_(self.counts.sum(1), self.mesh.along(*self.ACROSS))

    @torch.no_grad()
    def move_biases(self, go: Tensor) -> None:
        """Move each bias towards its mean load by the counts of the step; where ``go`` (a bool scalar) is false, none.

        Counts are integers, so that all ranks move theirs alike, bit for bit.
        """
        if not self.coefficients.bias_rate or not self.corrections:
            return
        counts = self._summed
        under = (counts.sum(-1, keepdim=True) - counts * self.routing.experts).sign()
        moves = torch.where(go, under, 0) * self.coefficients.bias_rate
        for layer, correction in self.corrections.items():
            correction.add_(moves[self.layers.index(layer)])

    @torch.no_grad()
    def read(self, layers: int) -> Loads:
        """Read the loads of the last step, of a model of so many layers; all ranks call this, and wait for the step."""
        experts = self.routing.experts
        # Counts up to 2^53 are exact. What all ranks of a stage have in common comes from the first of them.
        table = torch.zeros(layers, experts + 5, dtype=torch.float64, device=self.mesh.device)
        for at, layer in enumerate(self.layers):
            table[layer, :experts] = self.counts[at].sum(0)
            table[layer, experts : experts + 2] = self.values[at]
            if layer in self.corrections and self.mesh.along(*self.ACROSS).index == 0:
                table[layer, experts + 2 : experts + 4] = torch.stack(self.corrections[layer].aminmax())
                table[layer, experts + 4] = 1
        table = all_reduce_(table, self.mesh.world).cpu()
        there = table[:, :experts].sum(-1).nonzero().flatten()
        table = table[there]
        biases = table[table[:, -1] > 0, experts + 2 : experts + 4].float()
        return Loads(
            tuple(there.tolist()),
            table[:, :experts].long(),
            table[:, experts],
            table[:, experts + 1],
            biases if len(biases) else None,
        )


class _Enter(torch.autograd.Function):
    """logits: [n, experts] -> the same, where the gradient of the balance enters."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        counts: Tensor,
        rows: Tensor | None,
        padding: Tensor | None,
        balance: Balance,
        at: int,
    ) -> Tensor:
        ctx.save_for_backward(logits, counts, rows, padding)
        ctx.balance, ctx.at = balance, at
        return logits.view_as(logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.balance.gradient(ctx.at, dy, *ctx.saved_tensors), None, None, None, None, None
