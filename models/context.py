"""What the blocks are told of the tokens, beside their activations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Context:
    """Of t tokens, the same for all blocks.

    Args:
        sequences: How many sequences the tokens are of.
        rotation: cos, sin: [t, head/2] at their positions, for families that rotate.
        mask: [sequences, 1, s, s], True where a token may look; None is causal.
    """

    sequences: int
    rotation: tuple[Tensor, Tensor] | None = None
    mask: Tensor | None = None
