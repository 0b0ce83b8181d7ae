"""Self-attention over this rank's heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from models.blocks import column, row
from models.context import Context
from parallel import kernels
from parallel.kernels.scoring import Scoring
from parallel.parameters import Parameters


class Attention(nn.Module):
    """x: [tokens/tp, embed] -> [tokens/tp, embed].

    This rank computes ``heads/tp`` heads of queries and ``kv/tp`` (at least 1) of keys and values.
    Scores and their softmax are taken in fp32 by torch's kernels (fp64 for fp64). Ranks that share a kv head each
    compute it; its gradient is the sum over them (law 4 of ``docs/meshes.md``).

    Args:
        parameters: What this rank holds.
        name: Prefix of ``.qkv`` and ``.out``.
        rope: The name of the rotation of queries and keys; None: they do not rotate.
        scoring: How scores are formed and become weights; its dropout is for training.
        norms: Of queries and of keys, [tokens, heads, head] -> same, before they rotate; None: there are none.
        limit: Queries, keys and values are then kept within plus and minus this; None: they are not.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        rope: str | None,
        scoring: Scoring,
        norms: Sequence[nn.Module] | None = None,
        limit: float | None = None,
    ) -> None:
        super().__init__()
        self.qkv, self.out = column(parameters, f"{name}.qkv"), row(parameters, f"{name}.out")
        shard = parameters.shards[f"{name}.qkv.weight"]
        rows, self.head = shard.shape[0], shard.sizes["head"]
        self.kv = shard.piece("v").numel // shard.sizes["embed"] // self.head
        self.heads = rows // self.head - 2 * self.kv
        self.name, self.rope, self.scoring, self.limit = name, rope, scoring, limit
        self.sinks = scoring.sinks
        # Whoever asks whether something drops looks for these.
        self.dropout = nn.Dropout(scoring.dropout)
        self.norms = None if norms is None else nn.ModuleList(norms)
        self._still = replace(scoring, dropout=0.0)
        self._split_and_rotate = kernels.split_and_rotate(parameters.mesh.device)
        self._rotate = kernels.rotate(parameters.mesh.device)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = self._split(self.qkv(x), None if self.rope is None else context.rotations[self.rope])
        scoring = self.scoring if self.training else self._still
        y: Tensor = self.out(context.attention(self.name, q, k, v, scoring).flatten(1))
        return y

    def _split(self, qkv: Tensor, rotation: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """qkv: [tokens, (heads + 2 kv) * head] -> q: [tokens, heads, head], k, v: [tokens, kv, head]."""
        if self.norms is None and self.limit is None and rotation is not None:
            return self._split_and_rotate(qkv, *rotation, self.heads, self.kv)
        q, k, v = qkv.unflatten(-1, (-1, self.head)).split([self.heads, self.kv, self.kv], 1)
        if self.norms is not None:
            of_queries, of_keys = self.norms
            q, k = of_queries(q), of_keys(k)
        if self.limit is not None:
            q, k, v = (x.clamp(-self.limit, self.limit) for x in (q, k, v))
        if rotation is not None:
            q, k = self._rotate(q, *rotation), self._rotate(k, *rotation)
        return q, k, v
