"""Llama 4 (Meta 2025): attention in chunks, layers without a rope, and experts whose inputs are scaled."""

from dataclasses import dataclass

from megacore.models.anatomy import CHUNKED, FULL, ROPE, Anatomy, LayerAttention, Temperature
from megacore.models.config import positive
from megacore.models.experts_config import MoEConfig
from megacore.models.layer_types import RotatingConfig
from megacore.models.presets import llama3, shape, tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Rows, Table
from megacore.parallel import limits


@dataclass(frozen=True, kw_only=True)
class Llama4Config(MoEConfig, RotatingConfig):
    family = "llama4_text"
    architecture = "Llama4ForCausalLM"
    harmless = MoEConfig.harmless | {"for_llm_compressor", "router_jitter_noise"}
    defaults = {"num_key_value_heads": 8, "head_dim": 128}
    axes = {
        **MoEConfig.axes,
        "experts": "num_local_experts",
        "mlp": "intermediate_size_mlp",
        "shared_mlp": "intermediate_size",
    }
    rope_convention = Convention(rope_theta=5e5)
    other = CHUNKED
    in_pairs = True
    rule = {"score": "sigmoid", "scales_inputs": True}
    constants = {"norms_after_rope": True}
    of_text = True

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    intermediate_size_mlp: int = 16384
    num_local_experts: int = 16
    num_experts_per_tok: int = 1
    moe_layers: tuple[int, ...] | None = None
    interleave_moe_layer_step: int = 1
    use_qk_norm: bool = True
    attention_chunk_size: int | None = 8192
    attn_temperature_tuning: bool = True
    floor_scale: int = 8192
    attn_scale: float = 0.1

    def __post_init__(self) -> None:
        if self.moe_layers is None and self.interleave_moe_layer_step > 0 and self.num_hidden_layers <= limits.LAYERS:
            step = self.interleave_moe_layer_step
            object.__setattr__(self, "moe_layers", tuple(range(step - 1, self.num_hidden_layers, step)))
        super().__post_init__()

    def kind(self, layer: int) -> str:
        return CHUNKED if self.rotates(layer) else FULL

    @property
    def sparse_layers(self) -> list[int]:
        return [layer for layer in range(self.num_hidden_layers) if layer in (self.moe_layers or ())]

    @property
    def anatomy(self) -> Anatomy:
        chunks = {CHUNKED: self.attention_chunk_size, FULL: None}
        tempered = Temperature(self.attn_scale, self.floor_scale, 1) if self.attn_temperature_tuning else None
        layers = (
            LayerAttention(ROPE, chunk=chunks[kind])
            if self.rotates(layer)
            else LayerAttention(None, chunk=chunks[kind], temperature=tempered, plain_norms=False)
            for layer, kind in enumerate(self.kinds)
        )
        norms = frozenset({"attn.q_norm", "attn.k_norm"} if self.use_qk_norm else ())
        return self.anatomy_of(layers=tuple(layers), plain_norms=norms)

    def experts(self, t: Table) -> Rows:
        router = t.linear("mlp.router", "routes", "embed", "feed_forward.router")
        stacked = t.stacked_experts(hf="feed_forward.experts", turned=True)
        return stacked + router + t.shared_expert("feed_forward.shared_expert")

    def network(self, t: Table) -> Rows:
        dense = t.gated_mlp("feed_forward.{gate,up}_proj", "feed_forward.down_proj")
        return self.feed_forward(t, self.experts(t), dense)

    def problems(self) -> list[str]:
        found = super().problems() + positive(self, "floor_scale", "interleave_moe_layer_step")
        if CHUNKED in self.kinds and (self.attention_chunk_size or 0) < 1:
            found.append(f"layer_types names {CHUNKED}, and there is no attention_chunk_size: give one")
        return found


_EACH = shape(5120, 8192, 48, 40) | {"vocab_size": 202048}

PRESETS = {
    "llama4_text-tiny": tiny(
        96, head_dim=16, intermediate_size_mlp=192, interleave_moe_layer_step=2, attention_chunk_size=128
    ),
    "llama-4-scout": _EACH | {"max_position_embeddings": 10485760, "rope_parameters": llama3(5e5, 16.0, high=1.0)},
    "llama-4-maverick": _EACH
    | {"max_position_embeddings": 1048576, "num_local_experts": 128, "interleave_moe_layer_step": 2}
    | {"use_qk_norm": False},
}
