"""StableLM-3B-4E1T, StableLM-2 (Bellagente et al. 2024, arXiv 2402.17834): LLaMA with LayerNorm, of which a quarter of
each head turns; the branches may stand side by side, and each head may have a norm of its own."""

from dataclasses import dataclass, replace

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import shape, tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import NORMS, Rows, Table
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class StableLmConfig(DecoderConfig):
    family = "stablelm"
    architecture = "StableLmForCausalLM"
    eps = "layer_norm_eps"
    # The class drops elements of one branch, and not of the other.
    fixed = {"hidden_dropout": 0.0}
    derived = frozenset({"head_dim"})
    defaults = {"num_key_value_heads": 32}
    rope_convention = Convention(partial_rotary_factor=0.25, pairs=True)
    norm_bias = True
    out_bias = False
    constants = {"norm": "layer"}
    told = {"parallel": "use_parallel_residual"}

    layer_norm_eps: float = 1e-5
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False

    def mixer(self, t: Table) -> Rows:
        of_heads, norms = replace(t, norm_bias=False), "self_attn.{0}_layernorm.norms.{{{1}}}"
        queries = of_heads.norm("attn.q_norm", norms.format("q", "heads"), "heads head")
        keys = of_heads.norm("attn.k_norm", norms.format("k", "kv"), "kv head")
        return t.attention(bias=self.use_qkv_bias) + (queries + keys if self.qk_layernorm else ())

    def params(self) -> tuple[Param, ...]:
        t, norms = self.table(), [*NORMS.items()][: 1 if self.use_parallel_residual else 2]
        return t.model(self.mixer(t), self.network(t), *(t.norm(*names) for names in norms), **self.ends)


_STABLELM2 = {"vocab_size": 100352, "max_position_embeddings": 4096}

PRESETS = {
    "stablelm-tiny": tiny(),
    "stablelm-3b-4e1t": shape(2560, 6912, 32, 32) | {"vocab_size": 50304, "max_position_embeddings": 4096},
    "stablelm-2-1.6b": _STABLELM2 | shape(2048, 5632, 24, 32) | {"use_qkv_bias": True},
    "stablelm-2-12b": _STABLELM2
    | shape(5120, 13824, 40, 32, num_key_value_heads=8, qk_layernorm=True, use_parallel_residual=True),
}
