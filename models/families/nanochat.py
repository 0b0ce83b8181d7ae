"""nanochat (Karpathy 2025): norms without weights, of the embeddings and of heads that have turned too, no gates, and
heads that turn the other way: as if their halves were exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.anatomy import Anatomy
from megacore.models.decoder_config import DecoderConfig, shape
from megacore.models.weight_rows import HEADS
from megacore.parallel.weights.schema import Param

_QKV = "(q: heads ({0}) + k: kv ({0}) + v: kv head)"
_PLAIN = ("embed_norm", "attn_norm", "attn.q_norm", "attn.k_norm", "mlp_norm", "norm")


@dataclass(frozen=True, kw_only=True)
class NanoChatConfig(DecoderConfig):
    family: ClassVar[str] = "nanochat"
    architecture: ClassVar[str] = "NanoChatForCausalLM"

    hidden_act: str = "relu2"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    pad_token_id: int | None = 1
    attention_bias: bool = False
    final_logit_softcapping: float | None = 15.0

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, "half": self.head_dim // 2}

    @property
    def anatomy(self) -> Anatomy:
        softcap = self.final_logit_softcapping
        return self.anatomy_of(plain_norms=frozenset(_PLAIN), norms_after_rope=True, logit_softcap=softcap)

    def params(self) -> tuple[Param, ...]:
        t, bias = self.table(out_std=self.small_ends), self.attention_bias
        here, stored = _QKV.format("a: half + b: half"), _QKV.format("b: half + a: half")
        hf, of_weight = "self_attn.{q,k,v}_proj", f"{stored} embed"
        return t.model(
            t.linear("attn.qkv", here, "embed", hf, bias=bias, stored=of_weight, stored_bias=stored),
            t.linear("attn.out", "embed", HEADS, "self_attn.o_proj", bias=bias, ends=True),
            t.plain_mlp("fc1", "fc2"),
            tied=self.tie_word_embeddings,
            norm="",
        )

    def problems(self) -> list[str]:
        found, softcap = super().problems(), self.final_logit_softcapping
        if softcap is not None and softcap <= 0:
            found.append(f"final_logit_softcapping is {softcap}: it must be above 0, or null")
        return found


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "nanochat-tiny": shape(64, 256, 4, 4) | {"vocab_size": 512, "max_position_embeddings": 512},
    "nanochat-d20": shape(1280, 5120, 20, 10) | {"vocab_size": 65536},
    "nanochat-d32": shape(2048, 8192, 32, 16) | {"vocab_size": 65536},
}

PARAMETERS: Mapping[str, int] = {}
