"""Choosing the next token from its logits: pure functions, the same on every layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megacore.parallel.random import key


class Choice(Protocol):
    """A way to choose the next token."""

    def __call__(self, logits: Tensor, which: Sequence[tuple[int, int]]) -> Tensor:
        """logits: [n, vocab] -> token ids: [n]; which: the numbers of each sequence's prompt, and of the token that is
        chosen for it."""
        ...


@dataclass(frozen=True)
class Greedy:
    """The most likely token; of equals, the first."""

    def __call__(self, logits: Tensor, which: Sequence[tuple[int, int]]) -> Tensor:
        return logits.argmax(-1)


@dataclass(frozen=True)
class Sampling:
    """A random token, by its probability.

    The random number is a function of (seed, prompt, token), so neither the layout nor the other prompts of a batch
    change what is drawn; logits that differ by rounding do where the number falls between two tokens.

    Args:
        temperature: The divisor of the logits, above 0.
        top_k: Only so many of the most likely tokens; None for all.
        top_p: Only the fewest of the most likely of those that have this probability together (Holtzman et al. 2019,
            arXiv 1904.09751), above 0; 1 for all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __call__(self, logits: Tensor, which: Sequence[tuple[int, int]]) -> Tensor:
        p, order = self.probabilities(logits)
        sums = p.cumsum(-1)
        # 53 bits, as many as a double below 1 has.
        drawn = [(key(self.seed, prompt, token) >> 11) * 2.0**-53 for prompt, token in which]
        numbers = torch.tensor(drawn, dtype=sums.dtype, device=sums.device)[:, None] * sums[:, -1:]
        # A token without probability has the sum of the one before it, and no number falls between the two.
        place = torch.searchsorted(sums, numbers, right=True)
        return order.gather(-1, place.clamp_(max=p.shape[-1] - 1))[:, 0]

    def probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits: [n, vocab] -> probabilities in falling order, float64 [n, vocab], and whose they are: [n, vocab]."""
        ordered, order = logits.double().sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            ordered[:, self.top_k :] = -torch.inf
        p = (ordered / self.temperature).softmax(-1)
        p = p.masked_fill(p.cumsum(-1) - p >= self.top_p, 0.0)
        return p / p.sum(-1, keepdim=True), order
