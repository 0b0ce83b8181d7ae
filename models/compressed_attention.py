"""Attention to the last tokens and to blocks of those before, of which each is one key (DeepSeek-V4)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megacore.models.anatomy import LayerAttention
from megacore.models.attention import Attention
from megacore.models.blocks import column, replicated
from megacore.models.context import Context
from megacore.parallel import kernels
from megacore.parallel.alignment import Alignment
from megacore.parallel.collectives import all_gather
from megacore.parallel.kernels.compressed import pool
from megacore.parallel.kernels.scoring import Scoring
from megacore.parallel.layers.compressed import CompressedTokens
from megacore.parallel.layers.indexed import IndexVectors
from megacore.parallel.parameters import Parameters

_BLOCKS = "blocks", "overlapping"
"""The names of what makes vectors of blocks, whose tokens have a part in one block each, or in two."""


class CompressedAttention(Attention):
    """Attention whose heads share one key a token, which is its value, too. Queries are made of a latent of x.

    As values have turned with their positions, what a head makes of them is turned back by that of the query, so that
    it goes by distances. Groups of heads have a latent each, of which the output is made.

    Heads are split over tp by whole groups; what is made of a token by itself, each rank makes of its own.

    Args:
        parameters, name, scoring: Those of :class:`~models.attention.Attention`. The prefix is also that of ``.q_a``,
            ``.q_b``, ``.kv``, ``.grouped``, of the blocks, ``.blocks`` or ``.overlapping``, and of
            their indexer, ``.index``.
        looks: How it encodes positions, and the blocks that it sees.
        norm: Makes the norm of a name.
        norm_of_queries: That of the heads of queries.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        layer: int,
        looks: LayerAttention,
        scoring: Scoring,
        norm: Callable[[str], nn.Module],
        norm_of_queries: nn.Module,
    ) -> None:
        head = parameters.shards[f"{name}.kv.weight"].shape[0]
        heads = parameters.shards[f"{name}.q_b.weight"].sizes["heads"]
        # Of tokens that blocks are made of more is kept than keys (CompressedTokens).
        kv = 1 if looks.block is None else 0
        super().__init__(parameters, name, looks.rope, scoring, heads=heads, kv=kv, head=head, value=head)
        self.q_a, self.q_b = replicated(parameters, f"{name}.q_a"), column(parameters, f"{name}.q_b")
        self.q_a_norm, self.q_norm = norm(f"{name}.q_a_norm"), norm_of_queries
        self.keys, self.kv_norm = replicated(parameters, f"{name}.kv"), norm(f"{name}.kv_norm")
        self.grouped, self.groups = parameters[f"{name}.grouped"], parameters.shards[f"{name}.grouped"].sizes["groups"]
        self.group, self.layer, self.looks = parameters.mesh.tp, layer, looks
        blocks = next((n for n in _BLOCKS if f"{name}.{n}.kv.weight" in parameters), None)
        self.compressor = None if blocks is None else Compressor(parameters, f"{name}.{blocks}", looks, head, norm)
        self.indexer = None if looks.top is None else BlockIndexer(parameters, f"{name}.index", looks, norm)
        self.alignment: Alignment | None = None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        assert self.rope is not None  # each layer has one
        cos, sin = context.rotations[self.rope]
        latent = self.q_a_norm(self.q_a(x))
        q = self._rotate(self.q_norm(self.q_b(latent).unflatten(-1, (self.heads, self.head))), cos, sin)
        k = self._rotate(all_gather(self.kv_norm(self.keys(x)), self.group)[:, None], cos, sin)
        scoring = self.scoring if self.training else self._still
        if self.compressor is None:
            y = context.attention(self.name, q, k, k, scoring)
        else:
            y = self._among_blocks(x, latent, q, k[:, 0], scoring, context)
        y = self._rotate(y, cos, -sin).flatten(1).unflatten(1, (self.groups, -1))
        y = torch.einsum("tgi,goi->tgo", y, self.grouped.unflatten(0, (self.groups, -1)))
        y = self.out(y.flatten(1))
        return y

    def _among_blocks(
        self, x: Tensor, latent: Tensor, q: Tensor, k: Tensor, scoring: Scoring, context: Context
    ) -> Tensor:
        """-> [tokens, heads, head], what the heads make of the tokens and the blocks that they look at."""
        compressed, looks = context.compressed, self.looks
        assert compressed is not None and self.compressor is not None and looks.block is not None
        assert self.rope is not None
        means, index, learn = self.compressor(x, compressed), None, None
        if self.indexer is not None:
            index = self.indexer(x, latent, context.rotations[self.rope], compressed, self.alignment is not None)
        if self.alignment is not None:
            learn = partial(self.alignment.attach, self.layer, context.routed)
        return self.attend_blocks(compressed, q, k, means, looks.block, scoring, index, looks.top, learn)

    def attend_blocks(self, compressed: CompressedTokens, *given: Any) -> Tensor:
        """-> [tokens, heads, head], what tokens that are compressed make of what is given them."""
        return compressed(self.name, *given)


class Compressor(nn.Module):
    """Makes one vector of each block of tokens. x: [tokens/tp, embed] -> [blocks of all documents, head].

    Each rank makes what it is made of, values and logits, of its own tokens, and all ranks take the means.

    Args:
        name: Prefix of ``.kv``, ``.gate``, ``.places`` and ``.norm``.
        looks: The number of tokens of a block, and the rope by which vectors turn.
        head: Size of a vector.
        norm: Makes the norm of a name.
    """

    def __init__(
        self, parameters: Parameters, name: str, looks: LayerAttention, head: int, norm: Callable[[str], nn.Module]
    ) -> None:
        super().__init__()
        assert looks.block is not None and looks.rope is not None
        self.kv, self.gate = replicated(parameters, f"{name}.kv"), replicated(parameters, f"{name}.gate")
        self.places, self.norm = parameters[f"{name}.places"], norm(f"{name}.norm")
        self.name, self.rope, self.block, self.head = name, looks.rope, looks.block, head
        self.group, self._rotate = parameters.mesh.tp, kernels.rotate(parameters.mesh.device)

    def forward(self, x: Tensor, compressed: CompressedTokens) -> Tensor:
        own = all_gather(torch.cat([self.kv(x), self.gate(x)], -1), self.group)
        means = pool(compressed.every(self.name, own), self.places, compressed.blocks(self.block), self.head)
        rotation = compressed.rotation(self.rope, self.block)
        return self._rotate(self.norm(means)[:, None], *rotation)[:, 0]


class BlockIndexer(nn.Module):
    """What makes of this rank's tokens what they choose blocks by, as :class:`~parallel.layers.indexed.Indexer` does it
    of tokens.

    Args:
        parameters, looks, norm: Those of :class:`Compressor`.
        name: Its prefix, which is also that of ``.q`` and ``.weights``.
    """

    def __init__(
        self, parameters: Parameters, name: str, looks: LayerAttention, norm: Callable[[str], nn.Module]
    ) -> None:
        super().__init__()
        self.q, self.weights = replicated(parameters, f"{name}.q"), replicated(parameters, f"{name}.weights")
        sizes = parameters.shards[f"{name}.q.weight"]
        self.heads = sizes.sizes["index_heads"]
        self.compressor = Compressor(parameters, name, looks, sizes.shape[0] // self.heads, norm)
        self.group, self._rotate = parameters.mesh.tp, kernels.rotate(parameters.mesh.device)

    def forward(
        self, x: Tensor, latent: Tensor, rotation: tuple[Tensor, Tensor], compressed: CompressedTokens, learns: bool
    ) -> IndexVectors:
        """x: [tokens/tp, embed], latent: [tokens/tp, q_latent], cos, sin: [tokens, turning/2] -> an index.

        What it is given gets no gradient from it; where it does not learn, neither do its weights.
        """
        group, x, latent = self.group, x.detach(), latent.detach()
        own = [each.chunk(group.size)[group.index] for each in rotation]
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            q = self._rotate(self.q(latent).unflatten(-1, (self.heads, -1)), *own)
            return IndexVectors(q, self.compressor(x, compressed), self.weights(x), group)
