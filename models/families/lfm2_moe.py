"""LFM2 with experts (Liquid AI 2025): behind two dense layers, chosen by sigmoids that a correction balances."""

from dataclasses import dataclass, field, replace

from megacore.models.anatomy import CONVOLUTION, FULL
from megacore.models.experts_config import MoEConfig
from megacore.models.families.lfm2 import ShortConvolutionConfig
from megacore.models.presets import shape, tiny
from megacore.models.weight_rows import Rows, Table, in_layers
from megacore.parallel.routing import Routing


@dataclass(frozen=True, kw_only=True)
class Lfm2MoeConfig(MoEConfig, ShortConvolutionConfig):
    family = "lfm2_moe"
    architecture = "Lfm2MoeForCausalLM"
    defaults = {"num_key_value_heads": 8}
    axes = {**ShortConvolutionConfig.axes, "experts": "num_experts", "expert_mlp": "moe_intermediate_size"}
    rule = {"score": "sigmoid", "epsilon": 1e-6}

    # As LFM2 has them.
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    # Which is always said.
    layer_types: tuple[str, ...] = field()
    moe_intermediate_size: int = 1792
    num_dense_layers: int = 2
    num_experts: int = 32
    num_experts_per_tok: int = 4
    use_expert_bias: bool = True
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True

    def attends(self, layer: int) -> bool:
        raise NotImplementedError

    @property
    def routing(self) -> Routing:
        return replace(super().routing, factor=self.routed_scaling_factor)

    @property
    def sparse_layers(self) -> range:
        return range(self.num_dense_layers, self.num_hidden_layers)

    def experts(self, t: Table) -> Rows:
        name = "feed_forward.experts.{experts}"
        return t.experts(
            hf=f"{name}.{{w1,w3}}",
            down=f"{name}.w2",
            router="feed_forward.gate",
            correction="feed_forward.expert_bias" if self.use_expert_bias else "",
            held=("feed_forward.experts", "feed_forward.gate"),
        )

    def network(self, t: Table) -> Rows:
        dense = range(min(self.num_dense_layers, self.num_hidden_layers))
        return in_layers(dense, ShortConvolutionConfig.network(self, t)) + in_layers(
            self.sparse_layers, self.experts(t)
        )

    def problems(self) -> list[str]:
        found = super().problems()
        if not 0 <= self.num_dense_layers < self.num_hidden_layers:
            found.append(
                f"num_dense_layers is {self.num_dense_layers}: it must be from 0 to below num_hidden_layers "
                f"({self.num_hidden_layers})"
            )
        return found


_KINDS = [FULL if layer in (2, 6, 10, 14, 18, 21) else CONVOLUTION for layer in range(24)]

PRESETS = {
    "lfm2_moe-tiny": tiny(96, moe_intermediate_size=32, num_experts=8, num_dense_layers=1, layer_types=_KINDS[:4]),
    "lfm2-8b-a1b": shape(2048, 7168, 24, 32, vocab_size=65536, max_position_embeddings=128000, layer_types=_KINDS),
}
