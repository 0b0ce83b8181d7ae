"""nanochat (Karpathy 2025): norms without weights, of the embeddings and of heads that have turned too, no gates, and
heads that turn the other way: as if their halves were exchanged."""

from collections.abc import Mapping
from dataclasses import dataclass

from megacore.models.config import above_zero
from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import shape
from megacore.models.weight_rows import BRANCHES

_QKV = "(q: heads ({0}) + k: kv ({0}) + v: kv head)"
_PLAIN = ("embed_norm", "attn_norm", "attn.q_norm", "attn.k_norm", "mlp_norm", "norm")


@dataclass(frozen=True, kw_only=True)
class NanoChatConfig(DecoderConfig):
    family = "nanochat"
    architecture = "NanoChatForCausalLM"
    last_norm = ""
    constants = {"plain_norms": frozenset(_PLAIN), "norms_after_rope": True}
    told = {"logit_softcap": "final_logit_softcapping"}
    parts = BRANCHES
    small_ends = True
    attention_rows = {"here": _QKV.format("a: half + b: half"), "stored": _QKV.format("b: half + a: half")}
    network_rows = ("mlp.fc1", "mlp.fc2")
    gated_network = False

    hidden_act: str = "relu2"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    pad_token_id: int | None = 1
    attention_bias: bool = False
    final_logit_softcapping: float | None = 15.0

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, "half": self.head_dim // 2}

    def problems(self) -> list[str]:
        return super().problems() + above_zero(self, "final_logit_softcapping")


PRESETS = {
    "nanochat-tiny": shape(64, 256, 4, 4) | {"vocab_size": 512, "max_position_embeddings": 512},
    "nanochat-d20": shape(1280, 5120, 20, 10) | {"vocab_size": 65536},
    "nanochat-d32": shape(2048, 8192, 32, 16) | {"vocab_size": 65536},
}
