"""Self-attention over this rank's heads."""

from __future__ import annotations

from torch import Tensor, nn

from models.blocks import column, row
from models.context import Context
from parallel import kernels
from parallel.parameters import Parameters


class Attention(nn.Module):
    """x: [tokens/tp, embed] -> [tokens/tp, embed].

    This rank computes ``heads/tp`` heads of queries and ``kv/tp`` (at least 1) of keys and values.
    Scores and their softmax are taken in fp32 by torch's kernels (fp64 for fp64). Ranks that share a kv head each
    compute it; its gradient is the sum over them (law 4 of ``docs/meshes.md``).

    Args:
        parameters: What this rank holds.
        name: Prefix of ``.qkv`` and ``.out``.
        dropout: Probability of dropping an attention weight in training.
    """

    def __init__(self, parameters: Parameters, name: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = column(parameters, f"{name}.qkv"), row(parameters, f"{name}.out")
        sizes = parameters.shards[f"{name}.qkv.weight"].sizes
        self.heads, self.head = sizes["heads"], sizes["head"]
        self.kv = sizes.get("kv", self.heads)
        self.dropout, self.name = nn.Dropout(dropout), name
        self.rotate = kernels.split_and_rotate(parameters.mesh.device)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        qkv = self.qkv(x)
        if context.rotation:
            q, k, v = self.rotate(qkv, *context.rotation, self.heads, self.kv)
        else:
            q, k, v = qkv.unflatten(-1, (-1, self.head)).split([self.heads, self.kv, self.kv], 1)
        dropout = self.dropout.p if self.training else 0.0
        y: Tensor = self.out(context.attention(self.name, q, k, v, dropout).flatten(1))
        return y
