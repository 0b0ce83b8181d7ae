"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are made of a latent."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megacore.models.attention import Attention, Projected
from megacore.models.blocks import column, replicated
from megacore.parallel.collectives import all_gather
from megacore.parallel.kernels.scoring import Scoring
from megacore.parallel.parameters import Parameters


class LatentAttention(Attention):
    """Attention whose keys and values are projections of a latent of x, and mostly its queries of another one.

    Each head of queries and keys has a part that turns, its first dimensions, and one that does not. The part of the
    keys that turns is made of x, and all heads share it.

    Heads are split over tp, latents are not: each rank makes those of its own tokens by weights that all ranks hold
    (law 4 of ``docs/meshes.md`` sums their gradients), and what the ranks send each other is the latents and the shared
    part of the keys, which together are narrower than x.

    Args:
        parameters, name, rope, scoring: Those of :class:`~models.attention.Attention`. The prefix is also that of
            ``.kv_a`` and ``.kv_b``, and of ``.q_a`` and ``.q_b``, or of ``.q`` where queries have no latent.
        norm: Makes the norm of a name: ``.kv_a_norm``, and ``.q_a_norm`` where queries have a latent.
    """

    def __init__(
        self, parameters: Parameters, name: str, rope: str | None, scoring: Scoring, norm: Callable[[str], nn.Module]
    ) -> None:
        sizes = parameters.shards[f"{name}.kv_b.weight"].sizes
        heads, rest = sizes["heads"], sizes["rest"]
        rotary = 2 * parameters.shards[f"{name}.kv_a.weight"].sizes["half"]
        super().__init__(
            parameters, name, rope, scoring, heads=heads, kv=heads, head=rotary + rest, value=sizes["value"]
        )
        latent = f"{name}.q_a.weight" in parameters
        self.q_a = replicated(parameters, f"{name}.q_a") if latent else nn.Identity()
        self.q_a_norm = norm(f"{name}.q_a_norm") if latent else nn.Identity()
        self.q_b = column(parameters, f"{name}.q_b" if latent else f"{name}.q")
        self.kv_a, self.kv_a_norm = replicated(parameters, f"{name}.kv_a"), norm(f"{name}.kv_a_norm")
        self.kv_b = column(parameters, f"{name}.kv_b")
        self.latent, self.rotary, self.rest = sizes["kv_latent"], rotary, rest
        self.group = parameters.mesh.tp

    def queries_keys_values(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Projected:
        q = self.q_b(self.q_a_norm(self.q_a(x))).unflatten(-1, (self.heads, self.head))
        latent, turning = self.kv_a(x).split([self.latent, self.rotary], -1)
        still, v = self.kv_b(self.kv_a_norm(latent)).split([self.heads * self.rest, self.heads * self.value], -1)
        turning = all_gather(turning, self.group).unsqueeze(1)
        if rotation is not None:
            q, turning = self._rotate(q, *rotation), self._rotate(turning, *rotation)
        still, v = (each.unflatten(-1, (self.heads, -1)) for each in (still, v))
        return q, torch.cat([turning.expand(-1, self.heads, -1), still], -1), v, None
