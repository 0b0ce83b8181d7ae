"""Apertus (Swiss AI 2025, arXiv 2509.14233): no gate, and an activation with weights of its own (xIELU)."""

from dataclasses import dataclass

from megacore.models.anatomy import ACTIVATIONS
from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import llama3, shape
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Rows, Table, around


@dataclass(frozen=True, kw_only=True)
class ApertusConfig(DecoderConfig):
    family = "apertus"
    architecture = "ApertusForCausalLM"
    rope_convention = Convention(rope_theta=12000000.0, parameters=llama3(12000000.0, 8.0))
    derived = frozenset({"head_dim"})
    # What the checkpoints of its makers also say: of the norms and the activation, which the class has in any case.
    activations = (*ACTIVATIONS, "xielu")
    fixed = {"qk_norm": True, "post_norm": False, "mlp_bias": False}
    parts = around("attention_layernorm", "feedforward_layernorm")
    head_norms = {}

    hidden_act: str = "xielu"
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 65536
    pad_token_id: int | None = 3
    attention_bias: bool = False

    def network(self, t: Table) -> Rows:
        name, hf = "mlp.up.xielu", "mlp.act_fn"
        activation = (
            # softplus makes 0.8 of the one, and 0.3 of the other, which beta makes 0.8.
            t.row(f"{name}.positive", "one", f"{hf}.alpha_p", mean=0.2033, vector=True),
            t.row(f"{name}.negative", "one", f"{hf}.alpha_n", mean=-1.0502, vector=True),
            t.row(f"{name}.beta", "", f"{hf}.beta", mean=0.5, buffer=True, vector=True),
            t.row(f"{name}.eps", "", f"{hf}.eps", mean=-1e-6, buffer=True, vector=True),
        )
        return t.plain_mlp() + (activation if self.hidden_act == "xielu" else ())


_EACH = {"vocab_size": 131072, "num_key_value_heads": 8}

PRESETS = {
    "apertus-tiny": shape(64, 256, 4, 4) | {"vocab_size": 512, "num_key_value_heads": 2},
    "apertus-8b": shape(4096, 21504, 32, 32) | _EACH,
    "apertus-70b": shape(8192, 43008, 80, 64) | _EACH,
}
