"""GPT-NeoX-20B, Pythia (Black et al. 2022, arXiv 2204.06745; Biderman et al. 2023, arXiv 2304.01373): branches side by
side, each behind a LayerNorm of its own; heads of which a quarter turns, whose queries, keys and values stand together
on disk."""

from dataclasses import dataclass
from typing import Any

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import shape
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import BRANCHES, BY_HEAD, NORMS


@dataclass(frozen=True, kw_only=True)
class GptNeoxConfig(DecoderConfig):
    family = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"
    eps = "layer_norm_eps"
    base_model_prefix = "gpt_neox"
    tied = ("gpt_neox.embed_in.weight", "embed_out.weight")
    harmless = frozenset({"attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob"})
    # The causal mask and its fill value, and rotary frequencies.
    ignored = tuple(
        f"gpt_neox.layers.{{layer}}.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
    )
    derived = frozenset({"head_dim", "num_key_value_heads"})
    rope_convention = Convention(partial_rotary_factor=0.25, theta_key="rotary_emb_base", partial_key="rotary_pct")
    layer = "gpt_neox.layers.{layer}"
    last_norm = "gpt_neox.final_layer_norm"
    norm_bias = True
    constants = {"norm": "layer", "padding_idx": None}
    told = {
        "parallel": "use_parallel_residual",
        **dict.fromkeys(("branch_dropout", "embedding_dropout"), "hidden_dropout"),
    }
    parts = NORMS | BRANCHES
    attention_rows = {"hf": "attention.query_key_value", "out": "attention.dense"} | BY_HEAD
    network_rows = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    mlp_bias = True
    gated_network = False

    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    hidden_dropout: float = 0.0
    use_parallel_residual: bool = True
    attention_bias: bool = True


def _pythia(vocab: int, hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {"vocab_size": vocab, "max_position_embeddings": 2048} | shape(hidden, 4 * hidden, layers, heads)


PRESETS = {
    "gpt_neox-tiny": _pythia(512, 64, 4, 4) | {"max_position_embeddings": 512},
    "pythia-70m": _pythia(50304, 512, 6, 8),
    "pythia-160m": _pythia(50304, 768, 12, 12),
    "pythia-410m": _pythia(50304, 1024, 24, 16),
    "pythia-1b": _pythia(50304, 2048, 16, 8),
    "pythia-1.4b": _pythia(50304, 2048, 24, 16),
    "pythia-2.8b": _pythia(50304, 2560, 32, 32),
    "pythia-6.9b": _pythia(50432, 4096, 32, 32),
    "pythia-12b": _pythia(50688, 5120, 36, 40),
    "gpt-neox-20b": _pythia(50432, 6144, 44, 64),
}
