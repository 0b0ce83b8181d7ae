"""Self-attention over this rank's heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from megacore.models.blocks import column, row
from megacore.models.context import Context
from megacore.models.positions import Encoding
from megacore.parallel import kernels
from megacore.parallel.kernels.delta_rule import GATES
from megacore.parallel.kernels.scoring import Scoring
from megacore.parallel.layers.indexed import IndexVectors
from megacore.parallel.parameters import Parameters

Projected = tuple[Tensor, Tensor, Tensor, Tensor | None, IndexVectors | None]


class Attention(nn.Module):
    """x: [tokens/tp, embed] -> [tokens/tp, embed]: the branch of a block that mixes tokens.

    Scores and their softmax are taken in fp32 by torch's kernels (fp64 for fp64). How queries, keys and values are made
    of x, a class says that is made of this one.

    Args:
        name: Prefix of ``.out`` and of what makes queries, keys and values.
        rope: The name of the rotation of queries and keys; None: they do not rotate.
        scoring: The rule by which scores are formed and become weights; its dropout is for training.
        heads: Heads of queries on this rank.
        kv: Heads of keys and values on this rank.
        head: Size of a head of queries and of keys, before positions are encoded.
        value: Size of a head of values.
        encoding: What positions do to queries and keys beside rotating them; None: nothing.
        gate: The function of what outputs are weighed by, where they are, of :data:`parallel.kernels.delta_rule.GATES`.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        rope: str | None,
        scoring: Scoring,
        *,
        heads: int,
        kv: int,
        head: int,
        value: int,
        encoding: Encoding | None = None,
        gate: str = "sigmoid",
    ) -> None:
        super().__init__()
        self.weigh = GATES[gate]
        self.out = row(parameters, f"{name}.out")
        self.heads, self.kv, self.value = heads, kv, value
        self.head = head + (0 if encoding is None else encoding.dimensions)
        self.name, self.rope, self.scoring, self.encoding = name, rope, scoring, encoding
        self.sinks = scoring.sinks
        # Whoever asks whether something drops looks for these.
        self.dropout = nn.Dropout(scoring.dropout)
        self._still = replace(scoring, dropout=0.0)
        self._rotate = kernels.rotate(parameters.mesh.device)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        rotation = None if self.rope is None else context.rotations[self.rope]
        q, k, v, gate, index = self.queries_keys_values(x, rotation)
        if self.encoding is not None:
            assert context.positions is not None  # those of a decoder
            q, k = self.encoding(q, k, context.positions)
        scoring = self.scoring if self.training else self._still
        y = self.attend(q, k, v, index, scoring, context)
        y = self.out((y if gate is None else y * self.weigh(gate)).flatten(1))
        return y

    @property
    def chooses(self) -> bool:
        """Whether only where it runs it is known how many pieces documents have, or what tokens look at."""
        return self.scoring.chunk is not None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, index: IndexVectors | None, scoring: Scoring, context: Context
    ) -> Tensor:
        """-> [tokens, heads, value], what the heads make of the tokens that they look at."""
        return context.attention(self.name, q, k, v, scoring)

    def queries_keys_values(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Projected:
        """x: [tokens/tp, embed] -> q: [tokens, heads, head], k: [tokens, kv, head], v: [tokens, kv, value]; the logits
        of what the outputs are weighed by, [tokens, heads, value] or [tokens, heads, 1], where they are; and what an
        indexer chooses by."""
        raise NotImplementedError


class MultiHeadAttention(Attention):
    """Attention whose queries, keys and values are projections of x (Vaswani et al. 2017, arXiv 1706.03762).

    This rank computes ``heads/tp`` heads of queries and ``kv/tp`` (at least 1) of keys and values. Ranks that share a
    kv head each compute it; its gradient is the sum over them (law 4 of ``docs/meshes.md``).

    Args:
        parameters, name, rope, scoring: Those of :class:`Attention`; the prefix is also that of ``.qkv``.
        norms: The norms of queries, of keys and, where they have one, of values, [tokens, heads, head] -> same; None:
            there are none.
        limit: Queries, keys and values are then kept within plus and minus this; None: they are not.
        norms_after_rope: Whether those norms are of heads that have rotated.
        encoding, gate: Those of :class:`Attention`.
        shares: Whether layers behind look at its keys and values.

    Where ``.qkv`` has a piece ``q.gate`` or ``gate``, behind the queries, the outputs are weighed by it: each by its
    own, or all of a head by one.
    Where it has none ``v``, the keys before their norm are the values, too.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        rope: str | None,
        scoring: Scoring,
        norms: Sequence[nn.Module] | None = None,
        limit: float | None = None,
        norms_after_rope: bool = False,
        encoding: Encoding | None = None,
        shares: bool = False,
        gate: str = "sigmoid",
    ) -> None:
        shard = parameters.shards[f"{name}.qkv.weight"]
        sentence = shard.param.sentence
        of_values = "v" if "v" in sentence.labels else "k"
        rows, head = shard.shape[0], shard.sizes["local_head" if "local_head" in sentence.axes else "head"]
        value = shard.sizes["value"] if "value" in shard.piece(of_values).axes else head
        kv, own = shard.piece(of_values).numel // shard.shape[1] // value, of_values == "v"
        weighs = next((shard.piece(each) for each in ("q.gate", "gate") if each in sentence.labels), None)
        of_each = weighs is not None and {"head", "local_head"}.isdisjoint(weighs.axes)  # one of all of a head
        wide = 0 if weighs is None else 1 if of_each else head
        heads = (rows - kv * (head + value * own)) // (head + wide)
        sizes = {"heads": heads, "kv": kv, "head": head, "value": value}
        super().__init__(parameters, name, rope, scoring, **sizes, encoding=encoding, gate=gate)
        self.gated, self.own_values, self.shares = weighs is not None, own, shares
        self.pieces = ((heads, head), (heads * self.gated, wide), (kv, head), (kv * own, value))
        self.limit, self.norms_after_rope = limit, norms_after_rope
        self.qkv = column(parameters, f"{name}.qkv")
        self.norms = None if norms is None else nn.ModuleList(norms)
        self._split_and_rotate = kernels.split_and_rotate(parameters.mesh.device)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, index: IndexVectors | None, scoring: Scoring, context: Context
    ) -> Tensor:
        if self.shares:
            context.keys[self.name] = k, v
        return super().attend(q, k, v, index, scoring, context)

    def queries_keys_values(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Projected:
        qkv = self.qkv(x)
        plain = self.norms is None and self.limit is None and self.own_values and not self.gated
        if plain and self.value == self.pieces[0][1] and rotation is not None:
            return *self._split_and_rotate(qkv, *rotation, self.heads, self.kv), None, None
        parts = qkv.split([heads * size for heads, size in self.pieces], -1)
        q, gate, k, v = (part.unflatten(-1, piece) for part, piece in zip(parts, self.pieces, strict=True))
        v = v if self.own_values else k
        if self.norms is not None and len(self.norms) > 2:
            v = self.norms[2](v)
        if not self.norms_after_rope:
            q, k = self._normalised(q, k)
        if self.limit is not None:
            q, k, v = (x.clamp(-self.limit, self.limit) for x in (q, k, v))
        if rotation is not None:
            q, k = self._rotate(q, *rotation), self._rotate(k, *rotation)
        if self.norms_after_rope:
            q, k = self._normalised(q, k)
        return q, k, v, gate if self.gated else None, None

    def _normalised(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.norms is None:
            return q, k
        return self.norms[0](q), self.norms[1](k)


class SharedKeysAttention(Attention):
    """Attention whose queries look at the keys and values of a layer before it (Brandon et al. 2024, arXiv 2405.12981).

    Args:
        parameters, name, rope, scoring: Those of :class:`Attention`; the prefix is also that of ``.q``.
        source: The attention whose keys and values they are, on the same virtual stage.
        norm: The norm of queries, [tokens, heads, head] -> same.
    """

    def __init__(
        self, parameters: Parameters, name: str, rope: str | None, scoring: Scoring, source: str, norm: nn.Module
    ) -> None:
        shard = parameters.shards[f"{name}.q.weight"]
        heads, head = shard.sizes["heads"], shard.shape[0] // shard.sizes["heads"]
        start, stop = parameters.layout.box("local_kv" if "local_head" in shard.sizes else "kv", parameters.mesh.place)
        super().__init__(parameters, name, rope, scoring, heads=heads, kv=stop - start, head=head, value=head)
        self.q, self.norm, self.name = column(parameters, f"{name}.q"), norm, source

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q = self.norm(self.q(x).unflatten(-1, (self.heads, self.head)))
        q = q if self.rope is None else self._rotate(q, *context.rotations[self.rope])
        k, v = context.keys[self.name]
        scoring = self.scoring if self.training else self._still
        return self.out(self.attend(q, k, v, None, scoring, context).flatten(1))
