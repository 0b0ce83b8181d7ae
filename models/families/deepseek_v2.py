"""DeepSeek-V2 (DeepSeek-AI 2024, arXiv 2405.04434): latent attention, and experts beside one that all tokens go to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from megacore.models import rope_config
from megacore.models.anatomy import Anatomy
from megacore.models.config import positive
from megacore.models.decoder_config import DecoderConfig, shape
from megacore.models.experts_config import MoEConfig
from megacore.models.rope_config import YarnRope
from megacore.models.weight_rows import in_layers
from megacore.parallel import limits
from megacore.parallel.routing import Routing
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(MoEConfig):
    """The families of DeepSeek have this in common; fields carry their Hugging Face names."""

    harmless: ClassVar[frozenset[str]] = MoEConfig.harmless | {
        "aux_loss_alpha",
        "ep_size",
        "pretraining_tp",
        "seq_aux",
    }
    derived: ClassVar[frozenset[str]] = frozenset({"head_dim", "qk_head_dim"})
    axes: ClassVar[Mapping[str, str]] = {
        **DecoderConfig.axes,
        "head": "qk_head_dim",
        "rest": "qk_nope_head_dim",
        "value": "v_head_dim",
        "kv_latent": "kv_lora_rank",
        "experts": "n_routed_experts",
        "routes": "n_routed_experts",
        "expert_mlp": "moe_intermediate_size",
        "shared_mlp": "shared_intermediate_size",
    }
    # Hugging Face's name of what corrects the choice of experts, where something does.
    correction: ClassVar[str] = ""

    qk_head_dim: int
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    routed_scaling_factor: float
    first_k_dense_replace: int

    @property
    def shared_intermediate_size(self) -> int:
        """Hidden features of the expert that every token goes to."""
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def sizes(self) -> Mapping[str, int]:
        latent = {} if self.q_lora_rank is None else {"q_latent": self.q_lora_rank}
        return {**super().sizes, **latent, "two": 2, "half": self.qk_rope_head_dim // 2}

    @property
    def pairs(self) -> bool:
        """Whether dimensions 2 i and 2 i + 1 turn together on disk."""
        return True

    @property
    def anatomy(self) -> Anatomy:
        return self.anatomy_of(
            rotary_head=self.qk_rope_head_dim,
            attention_scale=_scale(self),
        )

    def params(self) -> tuple[Param, ...]:
        t, dense = self.table(), min(self.first_k_dense_replace, self.num_hidden_layers)
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.latent_attention(latent_queries=self.q_lora_rank is not None, bias=self.attention_bias, pairs=self.pairs),
            t.norm("mlp_norm", "post_attention_layernorm"),
            in_layers(range(dense), t.gated_mlp()),
            in_layers(range(dense, self.num_hidden_layers), t.experts(correction=self.correction) + t.shared_expert()),
            tied=self.tie_word_embeddings,
        )

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        still, rotary = rng.choice((2, 6)), rng.choice((4, 6, 8))
        rope = rope_config.draw(rng, rotary, positions, cls.rope_convention)
        if rope["rope_type"] == "yarn":
            # Of which the first is of the rotation, and the second of the scores as well.
            rope |= {"beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": rng.choice((0.7, 1.3))}
        return drawn | {
            "num_key_value_heads": drawn["num_attention_heads"],
            "q_lora_rank": rng.choice((None, 6, 9)),
            "kv_lora_rank": rng.choice((6, 8)),
            "qk_nope_head_dim": still,
            "qk_rope_head_dim": rotary,
            "v_head_dim": rng.choice((3, 5, still + rotary)),
            "rope_parameters": rope,
            "moe_intermediate_size": rng.choice((6, 11)),
            "n_shared_experts": rng.choice((1, 2)),
            "routed_scaling_factor": rng.choice((1.0, 2.5)),
            "first_k_dense_replace": rng.choice((0, 1)),
        }

    @staticmethod
    def draw_groups(rng: Random, drawn: Mapping[str, Any]) -> dict[str, Any]:
        """Draw groups of the experts that were drawn, two to a group at least."""
        experts, chosen = drawn["n_routed_experts"], drawn["num_experts_per_tok"]
        fitting = [(n, kept) for n, kept in ((1, 1), (2, 1), (2, 2), (4, 2)) if 2 * n <= experts]
        groups, kept = rng.choice([(n, kept) for n, kept in fitting if kept * (experts // n) >= chosen])
        return {"n_group": groups, "topk_group": kept}

    def problems(self) -> list[str]:
        found = super().problems()
        if self.q_lora_rank is not None:
            found += positive(self, "q_lora_rank")
        if self.num_key_value_heads != self.num_attention_heads:
            found.append(
                f"num_key_value_heads is {self.num_key_value_heads}: every head has keys and values of its own, "
                f"so it must be num_attention_heads ({self.num_attention_heads})"
            )
        if self.v_head_dim > self.qk_head_dim:
            found.append(
                f"v_head_dim is {self.v_head_dim}: it may be up to {self.qk_head_dim}, qk_nope_head_dim + "
                "qk_rope_head_dim"
            )
        if self.num_hidden_layers > limits.LAYERS:
            # Which have experts, is listed.
            found.append(f"it has {self.num_hidden_layers} layers, and may have up to {limits.LAYERS}")
        if self.first_k_dense_replace < 0:
            found.append(f"first_k_dense_replace is {self.first_k_dense_replace}: it must be at least 0")
        return found

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        rotary, still = (
            values.setdefault(name, getattr(cls, name)) for name in ("qk_rope_head_dim", "qk_nope_head_dim")
        )
        if isinstance(rotary, int) and isinstance(still, int):
            values["head_dim"], values["qk_head_dim"] = rotary, rotary + still
        if values.get("num_key_value_heads") is None:
            values["num_key_value_heads"] = values.get("num_attention_heads")
        return []


def _scale(config: DeepseekConfig) -> float | None:
    """Return the scale of scores, of which yarn's ``mscale_all_dim`` is a part."""
    rope = config.rope_parameters
    if not isinstance(rope, YarnRope) or not rope.mscale_all_dim or rope.factor <= 1:
        return None
    factor = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    return config.qk_head_dim**-0.5 * factor * factor


_METHODS = ("greedy", "group_limited_greedy")


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(DeepseekConfig):
    family: ClassVar[str] = "deepseek_v2"
    architecture: ClassVar[str] = "DeepseekV2ForCausalLM"
    # Where norm_topk_prob is true, DeepSeek's own code divides by the sum, and transformers does not.
    fixed: ClassVar[Mapping[str, Any]] = {
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    }

    moe_intermediate_size: int = 1407
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    num_experts_per_tok: int
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    n_group: int | None = None
    topk_group: int | None = None
    topk_method: str = "greedy"

    @property
    def routing(self) -> Routing:
        # Where nothing limits them to groups, all are in one.
        groups, kept = (1, 1) if self.topk_method == "greedy" else (self.n_group, self.topk_group)
        return Routing(
            experts=self.n_routed_experts,
            top_k=self.num_experts_per_tok,
            factor=self.routed_scaling_factor,
            groups=1 if groups is None else groups,
            kept_groups=1 if kept is None else kept,
        )

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        return drawn | cls.draw_groups(rng, drawn) | {"topk_method": rng.choice(_METHODS)}

    def problems(self) -> list[str]:
        found = super().problems()
        if self.topk_method not in _METHODS:
            found.append(f"topk_method {self.topk_method!r} is not one of {', '.join(_METHODS)}")
        elif self.topk_method != "greedy":
            found += [
                f"{name} is missing: topk_method {self.topk_method!r} needs it"
                for name in ("n_group", "topk_group")
                if getattr(self, name) is None
            ]
        return found


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_EACH = {"vocab_size": 102400, "max_position_embeddings": 163840, "num_experts_per_tok": 6, "first_k_dense_replace": 1}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2-tiny": shape(64, 96, 4, 4)
    | {
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
    },
    "deepseek-v2-lite": _EACH
    | shape(2048, 10944, 27, 16)
    | {"q_lora_rank": None, "moe_intermediate_size": 1408, "rope_parameters": _YARN},
    "deepseek-v2": _EACH
    | shape(5120, 12288, 60, 128)
    | {
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "routed_scaling_factor": 16.0,
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "rope_parameters": _YARN,
    },
}

PARAMETERS: Mapping[str, int] = {"deepseek-v2-lite": 15_706_484_224, "deepseek-v2": 235_741_434_880}
