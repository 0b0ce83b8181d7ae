"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are made of a latent."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megacore.models.anatomy import LayerAttention
from megacore.models.attention import Attention, Projected
from megacore.models.blocks import column, replicated
from megacore.models.context import Context
from megacore.parallel.alignment import Alignment
from megacore.parallel.collectives import all_gather
from megacore.parallel.kernels.scoring import Scoring
from megacore.parallel.layers.indexed import Index, Indexer, divergences, of_all
from megacore.parallel.layers.norm import LayerNorm
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
        layer: The layer.
        looks: How it encodes positions and which tokens it sees: those that an indexer chooses, ``.index``, its own or
            another layer's, or all of them.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        layer: int,
        looks: LayerAttention,
        scoring: Scoring,
        norm: Callable[[str], nn.Module],
    ) -> None:
        sizes = parameters.shards[f"{name}.kv_b.weight"].sizes
        heads, rest = sizes["heads"], sizes["rest"]
        rotary = 2 * parameters.shards[f"{name}.kv_a.weight"].sizes["half"]
        super().__init__(
            parameters, name, looks.rope, scoring, heads=heads, kv=heads, head=rotary + rest, value=sizes["value"]
        )
        latent = f"{name}.q_a.weight" in parameters
        self.q_a = replicated(parameters, f"{name}.q_a") if latent else nn.Identity()
        self.q_a_norm = norm(f"{name}.q_a_norm") if latent else nn.Identity()
        self.q_b = column(parameters, f"{name}.q_b" if latent else f"{name}.q")
        self.kv_a, self.kv_a_norm = replicated(parameters, f"{name}.kv_a"), norm(f"{name}.kv_a_norm")
        self.kv_b = column(parameters, f"{name}.kv_b")
        self.latent, self.rotary, self.rest = sizes["kv_latent"], rotary, rest
        self.group = parameters.mesh.tp
        self.layer, self.looks = layer, looks
        self.indexer = indexer(parameters, f"{name}.index") if f"{name}.index.q.weight" in parameters else None
        self.alignment: Alignment | None = None

    def queries_keys_values(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Projected:
        of_queries = self.q_a_norm(self.q_a(x))
        q = self.q_b(of_queries).unflatten(-1, (self.heads, self.head))
        latent, turning = self.kv_a(x).split([self.latent, self.rotary], -1)
        still, v = self.kv_b(self.kv_a_norm(latent)).split([self.heads * self.rest, self.heads * self.value], -1)
        turning = all_gather(turning, self.group).unsqueeze(1)
        if rotation is not None:
            q, turning = self._rotate(q, *rotation), self._rotate(turning, *rotation)
        still, v = (each.unflatten(-1, (self.heads, -1)) for each in (still, v))
        index = None
        if self.indexer is not None:
            assert rotation is not None  # all layers with indexers rotate
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.alignment is not None):
                index = self.indexer(x, of_queries, rotation)
        return q, torch.cat([turning.expand(-1, self.heads, -1), still], -1), v, None, index

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, index: Index | None, scoring: Scoring, context: Context
    ) -> Tensor:
        if self.looks.top is None:
            return super().attend(q, k, v, index, scoring, context)
        tokens, kept, chooser, scores = context.indexed, context.chosen, self.looks.chooser, None
        assert tokens is not None  # a decoder with indexers has them
        if index is None:
            assert chooser is not None  # whose indexer is another layer's
            chosen = kept[chooser]
        else:
            own, scores = tokens.choose(self.name, index, self.looks.top, self._learns(index, context))
            chosen = of_all(own, self.group)
            if chooser is not None:
                kept[chooser] = chosen
        y, weights = tokens.attend(self.name, q, k, v, chosen, scoring, scores is not None)
        if scores is None or weights is None or self.alignment is None:
            return y
        return self.alignment.attach(self.layer, context.routed, y, divergences(scores, weights, own, self.group))

    def _learns(self, index: Index, context: Context) -> bool:
        """Return whether the indexer is told in a step how far it is from the attention."""
        return self.alignment is not None and context.routed.microbatch is not None and index.q.requires_grad


def indexer(parameters: Parameters, name: str) -> Indexer:
    """Return the indexer of ``name.q``, ``.k``, ``.k_norm`` and ``.weights``."""
    p, heads = parameters, parameters.shards[f"{name}.weights.weight"].sizes["index_heads"]
    q, k, weights = (replicated(p, f"{name}.{each}") for each in ("q", "k", "weights"))
    norm = LayerNorm.of(p[f"{name}.k_norm.weight"], p[f"{name}.k_norm.bias"], 1e-6, p.mesh)
    return Indexer(q, k, norm, weights, heads, p.mesh.tp, p.mesh.device)
