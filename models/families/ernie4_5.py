"""ERNIE-4.5 0.3B (Baidu 2025): LLaMA whose heads turn in pairs."""

from dataclasses import dataclass

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import shape, tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class Ernie4_5Config(DecoderConfig):
    family = "ernie4_5"
    architecture = "Ernie4_5ForCausalLM"
    harmless = frozenset({"weight_share_add_bias"})
    derived = frozenset({"attention_dropout"})
    defaults = {"num_key_value_heads": 2, "head_dim": 128}
    rope_convention = Convention(rope_theta=500000.0, pairs=True)
    in_pairs = True
    taken = {"attention_dropout": 0.0}  # the class has none

    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    use_bias: bool = False

    def mixer(self, t: Table) -> Rows:
        return t.attention(bias=self.use_bias, out_bias=self.use_bias, pairs=self.pairs)

    def network(self, t: Table) -> Rows:
        return t.gated_mlp(bias=self.use_bias)


PRESETS = {
    "ernie4_5-tiny": tiny(head_dim=16),
    "ernie-4.5-0.3b": shape(1024, 3072, 18, 16, vocab_size=103424, max_position_embeddings=131072, head_dim=128),
}
