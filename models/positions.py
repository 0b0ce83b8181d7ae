"""What the positions of tokens do to queries and keys beside rotating them, and to embeddings if none are learned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.models.anatomy import Alibi, Sinusoids, Temperature


class Encoding(Protocol):
    """(q: [t, heads, head], k: [t, kv, head], positions: [t]) -> q and k, with further ``dimensions`` of a head."""

    dimensions: ClassVar[int]

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Tempered:
    """Queries that are multiplied by a factor of their position, in fp32."""

    dimensions: ClassVar[int] = 0

    temperature: Temperature

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        steps = ((positions + self.temperature.start) / self.temperature.every).floor()
        factors = steps.log1p() * self.temperature.scale + 1
        return q * factors.to(q.dtype)[:, None, None], k


@dataclass(frozen=True, eq=False)
class Distances:
    """ALiBi as further dimensions of heads, so that any kernel of attention serves.

    A slope s times the distance from key j to query i is s (i - j), and a softmax does not see what all keys of a query
    have in common: s j is added to the score. It is the product of s with the key's position, which lies in two
    dimensions: a multiple of 128, and a number below, which bf16 has exactly. Kernels for GPUs take multiples of eight
    dimensions, so that six are zero.

    Args:
        factors: [heads], of this rank, in fp64: the slopes, divided by the scale of scores.
    """

    dimensions: ClassVar[int] = 8

    factors: Tensor

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        low = positions % 128
        of_keys = torch.stack([positions - low, low], -1).to(k.dtype)[:, None].expand(-1, k.shape[1], -1)
        of_queries = self.factors.to(q)[:, None].expand(len(q), -1, 2)
        q, k = torch.cat([q, of_queries], -1), torch.cat([k, of_keys], -1)
        return F.pad(q, (0, self.dimensions - 2)), F.pad(k, (0, self.dimensions - 2))


def slopes(alibi: Alibi, heads: int) -> Tensor:
    """Return the slopes of the heads of a layer: [heads], in fp32, in the order of operations of transformers."""
    if alibi.of_power:
        below = 2 ** math.floor(math.log2(heads))
        first, between = (torch.tensor(2 ** (-alibi.most / n), dtype=torch.float32) for n in (below, 2 * below))
        return torch.cat([first ** torch.arange(1, below + 1), between ** (2 * torch.arange(heads - below) + 1)])
    n = 2 ** math.ceil(math.log2(heads))
    found = 1.0 / 2 ** (torch.arange(1, n + 1).float() * (alibi.most / n))
    return found if n == heads else torch.cat([found[1::2], found[::2]])[:heads]


class Waves:
    """positions: [t] -> [t, embed], sines and then cosines, in fp32 and in the order of operations of transformers.

    Args:
        of: The frequencies.
        embed: The features, of which an odd one is a sine more, or a zero where there is none.
        device: That of the positions.
    """

    def __init__(self, of: Sinusoids, embed: int, device: torch.device) -> None:
        numbers = torch.arange(embed // 2 + embed % 2 * of.of_power, dtype=torch.float32, device="cpu")
        found = (
            1 / torch.pow(10000, numbers / of.steps) if of.of_power else (numbers * -(math.log(10000) / of.steps)).exp()
        )
        self.frequencies, self.embed, self.none = found.to(device), embed, of.none

    def __call__(self, positions: Tensor) -> Tensor:
        angles = positions.float()[:, None] * self.frequencies
        waves = torch.cat([angles.sin(), angles[:, : self.embed // 2].cos()], 1)
        waves = F.pad(waves, (0, self.embed - waves.shape[1]))
        return waves if self.none is None else waves.masked_fill(positions[:, None] == self.none, 0.0)
