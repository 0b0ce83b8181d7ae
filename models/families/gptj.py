"""GPT-J (Wang and Komatsuzaki 2021): branches side by side behind one LayerNorm, heads of which the first dimensions
turn, in pairs on disk, and a head with a bias."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megacore.models.anatomy import ROPE, Anatomy, LayerAttention
from megacore.models.families.gpt2 import Gpt2Config
from megacore.models.rope_config import DefaultRope, partial_rotary_factor
from megacore.models.weight_rows import HEADS, Pairs, Rows, Table
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class GptjConfig(Gpt2Config):
    family = "gptj"
    architecture = "GPTJForCausalLM"
    fixed = {"rotary": True, "scale_attn_weights": True}

    n_positions: int = 2048
    rotary_dim: int = 64
    resid_pdrop: float = 0.0
    embd_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    tie_word_embeddings: bool = False

    @property
    def pairs(self) -> Pairs:
        """The pairs of numbers that turn together in heads of queries and keys."""
        return Pairs(self.n_embd // self.n_head, self.rotary_dim)

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, **self.pairs.sizes}

    @property
    def anatomy(self) -> Anatomy:
        rope = DefaultRope(partial_rotary_factor=partial_rotary_factor(self.rotary_dim, self.pairs.head))
        layers = (LayerAttention(),) * self.n_layer
        return replace(super().anatomy, layers=layers, ropes={ROPE: rope}, parallel=True)

    def queries_keys_values(self, t: Table) -> Rows:
        """Return the row of queries, keys and values."""
        of = "(q: heads {0} + k: heads {0} + v: heads head)"
        here, stored = of.format(self.pairs.here), of.format(self.pairs.stored)
        return t.linear("attn.qkv", here, "embed", "attn.{q,k,v}_proj", stored=f"{stored} embed")

    def params(self) -> tuple[Param, ...]:
        std = self.initializer_range
        t = Table(layer="transformer.h.{layer}", std=std, out_std=std, norm_bias=True)
        return t.model(
            t.norm("attn_norm", "ln_1"),
            self.queries_keys_values(t),
            t.linear("attn.out", "embed", HEADS, "attn.out_proj", ends=True),
            t.plain_mlp("mlp.fc_in", "mlp.fc_out", bias=True),
            tied=self.tie_word_embeddings,
            embed="transformer.wte",
            norm="transformer.ln_f",
            head_bias=True,
        )

    def problems(self) -> list[str]:
        found = super().problems()
        if not found and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.pairs.head):
            found.append(f"rotary_dim is {self.rotary_dim}: it must be even, and at most the head's {self.pairs.head}")
        return found


PRESETS = {
    "gptj-tiny": {"vocab_size": 512, "n_positions": 512, "n_embd": 64, "n_layer": 4, "n_head": 4, "rotary_dim": 8},
    "gpt-j-6b": {"vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 28, "n_head": 16},
}
