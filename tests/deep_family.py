"""Mixtral as DeepSeek-V3 is built: dense layers first, many small experts, and a shared one for every token."""

from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.families.mixtral import MixtralConfig
from megacore.models.weight_rows import in_layers
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class DeepConfig(MixtralConfig):
    """Mixtral, and what its fields say.

    Args:
        dense: Layers without experts, the first ones.
        dense_size: Features of their feed-forward network.
        shared_size: Features of the shared expert of the others.
        corrected: Whether the router has a correction, which is a buffer.
    """

    axes: ClassVar[dict[str, str]] = {**MixtralConfig.axes, "mlp": "dense_size", "shared_mlp": "shared_size"}

    dense: int
    dense_size: int
    shared_size: int
    corrected: bool = False

    def params(self) -> tuple[Param, ...]:
        t, layers = self.table(), range(self.num_hidden_layers)
        experts = t.experts(correction="mlp.gate.e_score_correction_bias" if self.corrected else "")
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.attention(),
            t.norm("mlp_norm", "post_attention_layernorm"),
            in_layers(layers[: self.dense], t.gated_mlp()),
            in_layers(layers[self.dense :], (*experts, *t.shared_expert())),
            tied=self.tie_word_embeddings,
        )


def deep(**fields: Any) -> DeepConfig:
    """As large as DeepSeek-V3, unless fields say otherwise."""
    own = {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 2048, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
        "num_local_experts": 256, "num_experts_per_tok": 8, "dense": 3, "dense_size": 18432, "shared_size": 2048,
    }  # fmt: skip
    return DeepConfig.from_hugging_face(own | fields)
