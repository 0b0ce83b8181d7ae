"""Choosing the next token from its logits, and what is kept of drafts: pure functions, the same on every layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.parallel.random import key


@dataclass(frozen=True)
class Greedy:
    """The most likely token; of equals, the first."""

    seed: int = 0

    def distribution(self, logits: Tensor) -> Tensor:
        """logits: [n, vocab] -> the probabilities of what it chooses, float64 [n, vocab]."""
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).double()

    def __call__(self, logits: Tensor, which: Sequence[tuple[int, int]]) -> Tensor:
        """logits: [n, vocab] -> token ids: [n]; which: the numbers of each sequence's prompt, and of the token that is
        chosen for it."""
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
        return order.gather(-1, _drawn(p, [_number(self.seed, *each) for each in which]))[:, 0]

    def distribution(self, logits: Tensor) -> Tensor:
        p, order = self.probabilities(logits)
        return torch.zeros_like(p).scatter_(-1, order, p)

    def probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits: [n, vocab] -> probabilities in falling order, float64 [n, vocab], and whose they are: [n, vocab]."""
        ordered, order = logits.double().sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            ordered[:, self.top_k :] = -torch.inf
        p = (ordered / self.temperature).softmax(-1)
        p = p.masked_fill(p.cumsum(-1) - p >= self.top_p, 0.0)
        return p / p.sum(-1, keepdim=True), order


Choice = Greedy | Sampling
"""A way to choose the next token, with random numbers of a seed."""


# -- drafts


def draft(choose: Choice, logits: Tensor, which: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """logits: [n, vocab], another model's -> drafts of the next tokens: [n], and the probabilities that they were drawn
    with: [n, vocab]; which: as of :class:`Greedy`."""
    p = choose.distribution(logits)
    return _drawn(p, [_number(choose.seed, *each, "draft") for each in which])[:, 0], p


def keep(choose: Choice, logits: Tensor, drafts: Sequence[int], p: Tensor, prompt: int, token: int) -> list[int]:
    """Return the first of the drafts of a sequence, as many as are kept, and a token of the model's own behind them.

    It says what the model alone would say, with just the same probabilities (Leviathan et al. 2022, arXiv 2211.17192):
    a draft of probability p is kept by chance min(1, q/p), where that of the model is q, and in place of the first
    that is not kept comes a token drawn by what q has above p.

    Args:
        choose: The way to choose the model's tokens, by which the drafts were drawn, too.
        logits: [k + 1, vocab], the model's, for each of the k drafts and for the token behind them.
        drafts, p: k tokens, and the probabilities that they were drawn with: [k, vocab] or more of these rows.
        prompt, token: The numbers of the sequence's prompt, and of the first token.
    """
    k = len(drafts)
    q = choose.distribution(logits[:k])
    which = torch.tensor(drafts, dtype=torch.int64, device=q.device)[:, None]
    chances = torch.cat([p[:k].gather(1, which), q.gather(1, which)], 1).tolist()
    for at, (drawn_with, own_chance) in enumerate(chances):
        words = choose.seed, prompt, token + at
        if _number(*words, "keep") * drawn_with >= own_chance:
            own = (q[at] - p[at]).clamp(min=0.0)[None]
            return [*drafts[:at], int(_drawn(own, [_number(*words)]).item())]
    return [*drafts, int(choose(logits[k:], [(prompt, token + k)]).item())]


def _drawn(p: Tensor, numbers: Sequence[float]) -> Tensor:
    """p: [n, vocab], what the probabilities are in proportion to; numbers: n from 0 to below 1 -> places: [n, 1]."""
    sums = p.cumsum(-1)
    at = torch.tensor(numbers, dtype=sums.dtype, device=sums.device)[:, None] * sums[:, -1:]
    # A token without probability has the sum of the one before it, and no number falls between the two.
    return torch.searchsorted(sums, at, right=True).clamp_(max=p.shape[-1] - 1)


def _number(*words: object) -> float:
    """Return a random number from 0 to below 1 that goes by some words."""
    return (key(*words) >> 11) * 2.0**-53  # 53 bits, as many as a double below 1 has
