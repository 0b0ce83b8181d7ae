"""MiniMax-M2 (MiniMax 2025): 256 experts chosen by sigmoids, norms of all queries and all keys at once, and heads of
which a part turns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.decoder_config import DecoderConfig
from megacore.models.experts_config import MoEConfig
from megacore.models.presets import shape, tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import OF_ALL, Rows, Table


@dataclass(frozen=True, kw_only=True)
class RotaryDimConfig(DecoderConfig):
    """Published files say by ``rotary_dim`` how much of a head turns."""

    reads = frozenset({"rotary_dim"})

    @classmethod
    def _read_ropes(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        turning, head, rope = (
            {**cls.defaults, **config}.get(name) for name in ("rotary_dim", "head_dim", "rope_parameters")
        )
        said = {**config, **(rope if isinstance(rope, Mapping) else {})}.get("partial_rotary_factor")
        if isinstance(turning, int) and said is None and isinstance(head, int) and head > 0:
            config = {**config, "partial_rotary_factor": turning / head}
        return super()._read_ropes(config)


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2Config(RotaryDimConfig, MoEConfig):
    family = "minimax_m2"
    architecture = "MiniMaxM2ForCausalLM"
    # Of layers that predict further tokens, which are not published, and the kinds of layers, all of which see all.
    harmless = MoEConfig.harmless | {
        "attn_type_list", "layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta",
        "mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "use_mtp",
    }  # fmt: skip
    fixed = {
        "qk_norm_type": "per_layer",
        "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_qk_norm": True,
        "use_routing_bias": True,
    }
    defaults = {"num_key_value_heads": 8, "head_dim": 128}
    spellings = {"num_experts": "num_local_experts"}
    axes = {**MoEConfig.axes, "experts": "num_local_experts"}
    rope_convention = Convention(rope_theta=5e6, partial_rotary_factor=1.0)
    rule = {"score": "sigmoid", "normalised": True}
    head_norms = {"of": OF_ALL}

    rms_norm_eps: float = 1e-6
    num_local_experts: int = 256
    num_experts_per_tok: int = 8

    def experts(self, t: Table) -> Rows:
        moe = "block_sparse_moe"
        return t.experts(
            hf=f"{moe}.experts.{{experts}}.{{w1,w3}}",
            down=f"{moe}.experts.{{experts}}.w2",
            router=f"{moe}.gate",
            correction=f"{moe}.e_score_correction_bias",
        )


PRESETS = {
    "minimax_m2-tiny": tiny(32, head_dim=16, rotary_dim=8, num_local_experts=16, num_experts_per_tok=4),
    "minimax-m2": shape(3072, 1536, 62, 48)
    | {"vocab_size": 200064, "head_dim": 128, "rotary_dim": 64, "max_position_embeddings": 196608},
}
