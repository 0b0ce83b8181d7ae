"""A loss of somebody's own: plain code over the logits of some tokens, of the whole vocabulary, on any layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from megacore.parallel.collectives import all_to_all
from megacore.parallel.import_path import imported
from megacore.parallel.labels import IGNORE
from megacore.parallel.layers.loss import Finish
from megacore.parallel.mesh import Group


@dataclass(frozen=True)
class LossTokens:
    """Some tokens of a microbatch, in no order that a loss may count on.

    Args:
        tokens: [n], those that the model was given.
        labels: [n], the next ones; 0 where none counts.
        counted: [n], bool, whether the loss counts the token.
        positions: [n], its position in its sequence.
    """

    tokens: Tensor
    labels: Tensor
    counted: Tensor
    positions: Tensor

    @classmethod
    def of(cls, tokens: Tensor, labels: Tensor, positions: Tensor) -> LossTokens:
        """tokens, labels, positions: [n] of a microbatch."""
        counted = labels != IGNORE
        return cls(tokens, labels.where(counted, 0), counted, positions)


TokenLoss = Callable[[Tensor, LossTokens], Tensor]
"""(logits [n, vocab], in fp32 at least, their tokens) -> the loss of each: [n]. Each token is handed over on one rank
alone; losses are summed, and divided by the number of counted tokens of the global batch."""


def token_loss(products: Tensor, own: LossTokens, function: TokenLoss, group: Group, vocab: int, by: Finish) -> Tensor:
    """products: [t, padded vocab/tp] of the head, own: this rank's t/tp of the tokens -> the sum of their losses, a
    scalar, in fp32 at least.

    Args:
        function: What gives their losses.
        group: The tensor parallel group.
        vocab: Number of tokens of the vocabulary, without padding.
        by: The change of the products that makes them logits.

    Raises:
        ValueError: the function gives something else than a loss of each token.
    """
    logits = own_rows(products, group, vocab, by)
    losses = function(logits, own)
    if problem := losses_problem(losses, len(own.labels)):
        raise ValueError(f"loss.function {problem}")
    return torch.where(own.counted, losses, 0).to(logits.dtype).sum()


def own_rows(products: Tensor, group: Group, vocab: int, by: Finish) -> Tensor:
    """products: [t, padded vocab/tp] of the head -> the logits of this rank's tokens: [t/tp, vocab], in fp32 at least.

    Ranks exchange columns for rows, so that each has all columns of its own tokens; the backward exchanges them back.
    """
    rows = all_to_all(products, group).unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1)
    return by.differentiable(rows[:, :vocab])


def loss_of(path: str) -> TokenLoss:
    """Return the loss at an import path.

    Raises:
        ImportPathError: there is none.
    """
    return cast(TokenLoss, imported(path))  # problem() calls it


def losses_problem(losses: object, tokens: int) -> str | None:
    """Return what is wrong with what a loss has given for so many tokens."""
    if isinstance(losses, Tensor) and losses.shape == (tokens,) and losses.is_floating_point():
        return None
    given = f"{losses.dtype} {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
    return f"gave {given} for {tokens} tokens: return the loss of each, [{tokens}], which is summed and divided for you"


def problem(function: TokenLoss, vocab: int) -> str | None:
    """Return what is wrong with a loss, which is tried on logits of a few tokens."""
    count, generator = 4, torch.Generator().manual_seed(0)
    logits = torch.randn(count, vocab, generator=generator).requires_grad_()
    ids = torch.arange(count) % vocab
    try:
        with torch.enable_grad():
            losses = function(logits, LossTokens.of(ids, ids.where(ids != 1, IGNORE), torch.arange(count)))
    except Exception as error:  # of code that is not ours
        return f"failed for logits of [{count}, {vocab}]: {type(error).__name__}: {error}"
    if wrong := losses_problem(losses, count):
        return wrong
    return None if losses.requires_grad else "gave losses without a gradient: compute them of the logits"
