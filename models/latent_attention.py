"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are made of a latent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megacore.models.anatomy import LayerAttention
from megacore.models.attention import Attention, Projected
from megacore.models.blocks import column, replicated
from megacore.models.context import Context
from megacore.models.positions import Encoding
from megacore.parallel.alignment import Alignment
from megacore.parallel.collectives import all_gather
from megacore.parallel.kernels.scoring import Scoring
from megacore.parallel.layers.indexed import Indexer, IndexVectors
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
            ``.kv_a`` and ``.kv_b``, and of ``.q_a`` and ``.q_b``, or of ``.q`` where queries have no latent; and of
            ``.gate``, where outputs are weighed.
        norm: Makes the norm of a name: ``.kv_a_norm``, and ``.q_a_norm`` where queries have a latent.
        looks: How it encodes positions and which tokens it sees: those that an indexer chooses, ``.index``, its own or
            another layer's, or all of them.
        encoding: That of :class:`~models.attention.Attention`.
        scale: Factor of the latent that keys and values are made of, behind its norm.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        layer: int,
        looks: LayerAttention,
        scoring: Scoring,
        norm: Callable[[str], nn.Module],
        encoding: Encoding | None = None,
        scale: float = 1.0,
    ) -> None:
        sizes = parameters.shards[f"{name}.kv_b.weight"].sizes
        heads, rest = sizes["heads"], sizes["rest"]
        rotary = 2 * parameters.shards[f"{name}.kv_a.weight"].sizes["half"]
        own: dict[str, Any] = {"heads": heads, "kv": heads, "head": rotary + rest, "value": sizes["value"]}
        super().__init__(parameters, name, looks.rope, scoring, **own, encoding=encoding)
        latent = f"{name}.q_a.weight" in parameters
        self.q_a = replicated(parameters, f"{name}.q_a") if latent else nn.Identity()
        self.q_a_norm = norm(f"{name}.q_a_norm") if latent else nn.Identity()
        self.q_b = column(parameters, f"{name}.q_b" if latent else f"{name}.q")
        self.kv_a, self.kv_a_norm = replicated(parameters, f"{name}.kv_a"), norm(f"{name}.kv_a_norm")
        self.kv_b = column(parameters, f"{name}.kv_b")
        self.gate = column(parameters, f"{name}.gate") if f"{name}.gate.weight" in parameters else None
        self.scale = scale
        self.latent, self.rotary, self.rest = sizes["kv_latent"], rotary, rest
        self.group = parameters.mesh.tp
        self.layer, self.looks, index = layer, looks, f"{name}.index"
        self.indexer = Indexer.of(parameters, index) if f"{index}.q.weight" in parameters else None
        self.alignment: Alignment | None = None

    def queries_keys_values(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Projected:
        of_queries = self.q_a_norm(self.q_a(x))
        q = self.q_b(of_queries).unflatten(-1, (self.heads, self.head))
        latent, turning = self.kv_a(x).split([self.latent, self.rotary], -1)
        latent = self.kv_a_norm(latent)
        latent = latent if self.scale == 1 else latent * self.scale
        still, v = self.kv_b(latent).split([self.heads * self.rest, self.heads * self.value], -1)
        turning = all_gather(turning, self.group).unsqueeze(1)
        if rotation is not None:
            q, turning = self._rotate(q, *rotation), self._rotate(turning, *rotation)
        still, v = (each.unflatten(-1, (self.heads, -1)) for each in (still, v))
        index = None if self.indexer is None else self.indexer(x, of_queries, rotation, self.alignment is not None)
        gate = None if self.gate is None else self.gate(x)[..., None]
        return q, torch.cat([turning.expand(-1, self.heads, -1), still], -1), v, gate, index

    @property
    def chooses(self) -> bool:
        return super().chooses or self.looks.top is not None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, index: IndexVectors | None, scoring: Scoring, context: Context
    ) -> Tensor:
        if self.looks.top is None:
            return super().attend(q, k, v, index, scoring, context)
        assert context.indexed is not None  # that of a decoder with indexers
        learn = None if self.alignment is None else partial(self.alignment.attach, self.layer, context.routed)
        return context.indexed(self.name, q, k, v, scoring, index, self.looks.top, self.looks.chooser, learn)
