"""What a layer is told of each token beside the activations: embeddings of its own (Gemma 3n, Google 2025)."""

from __future__ import annotations

from torch import Tensor, nn

from megacore.models.anatomy import Anatomy
from megacore.models.blocks import activation_after, replicated
from megacore.models.context import Context
from megacore.models.decoder import rounded
from megacore.parallel.layers.embedding import VocabParallelEmbedding
from megacore.parallel.parameters import Parameters


class LayerInputs(nn.Module):
    """x: [tokens/tp, embed] -> same, what a layer adds to it: gates of x weigh what the layer is told of the tokens.

    That is the sum of a row of the layer's own table and a projection of the embedding. All weights but the table's are
    whole on each rank, which has its own tokens.

    Args:
        name: Prefix of ``.embed``, ``.proj``, ``.gate`` and ``.out``.
        vocab: Rows of the table without padding; tokens beyond them have the first one.
        anatomy: It has the activation of the gates, and whether all factors are rounded as that of the table is.
        norm, out_norm: The norms of the projection, which all layers share, and of what is added.
    """

    def __init__(
        self, parameters: Parameters, name: str, vocab: int, anatomy: Anatomy, norm: nn.Module, out_norm: nn.Module
    ) -> None:
        super().__init__()
        table, embed = parameters[f"{name}.embed.weight"], parameters[f"{name}.gate.weight"].shape[1]
        self.embed = VocabParallelEmbedding.of(table, vocab, parameters.mesh, anatomy.padding_idx)
        self.scale, others = rounded(table.shape[1] ** 0.5, table.dtype), (embed**-0.5, 2**-0.5)
        rounds = anatomy.round_input_scales
        self.of_proj, self.of_sum = (rounded(each, table.dtype) if rounds else each for each in others)
        self.proj, self.norm = replicated(parameters, f"{name}.proj"), norm
        self.gate = replicated(parameters, f"{name}.gate")
        self.activation = activation_after(parameters, f"{name}.gate", anatomy.activation)
        self.out, self.out_norm = replicated(parameters, f"{name}.out"), out_norm

    def forward(self, x: Tensor, context: Context) -> Tensor:
        tokens, embedded = context.tokens, context.embedded
        assert tokens is not None and embedded is not None  # those of a decoder that tells
        rows = self.embed(tokens.masked_fill(tokens >= self.embed.vocab, 0))
        told = self.norm(self.proj(embedded) * self.of_proj) + rows * self.scale
        return self.out_norm(self.out(self.activation(self.gate(x)) * (told * self.of_sum)))
