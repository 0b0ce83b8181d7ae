"""SantaCoder, StarCoder (Li et al. 2023, arXiv 2305.06161): GPT-2 whose heads share one key and one value."""

from collections.abc import Mapping
from dataclasses import dataclass

from megacore.models.families.gpt2 import Gpt2Config
from megacore.models.weight_rows import HEADS, QKV, QKV_BY_HEAD, QKV_EACH, Rows, Table


@dataclass(frozen=True, kw_only=True)
class GptBigCodeConfig(Gpt2Config):
    family = "gpt_bigcode"
    architecture = "GPTBigCodeForCausalLM"
    # How scores are rounded and caches kept; and what follows from multi_query, whatever it says.
    harmless = Gpt2Config.harmless | {
        "attention_softmax_in_fp32", "inference_runner", "max_batch_size", "max_sequence_length",
        "num_key_value_heads", "pad_key_length", "pre_allocate_kv_cache", "scale_attention_softmax_in_fp32",
        "validate_runner_input",
    }  # fmt: skip
    fixed = {"scale_attn_weights": True}

    activation_function: str = "gelu_pytorch_tanh"
    multi_query: bool = True

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, "kv": 1 if self.multi_query else self.n_head}

    def block(self, t: Table) -> tuple[Rows, ...]:
        queries, stored = (QKV, "") if self.multi_query else (QKV_EACH, QKV_BY_HEAD)
        of_weight = stored and f"{stored} embed"
        return (
            t.norm("attn_norm", "ln_1"),
            t.linear("attn.qkv", queries, "embed", "attn.c_attn", bias=True, stored=of_weight, stored_bias=stored),
            t.linear("attn.out", "embed", HEADS, "attn.c_proj", bias=True, ends=True),
            t.norm("mlp_norm", "ln_2"),
            t.plain_mlp("mlp.c_fc", "mlp.c_proj", bias=True),
        )


PRESETS = {
    "gpt_bigcode-tiny": {"vocab_size": 512, "n_positions": 512, "n_embd": 64, "n_layer": 4, "n_head": 4},
    "santacoder": {"vocab_size": 49280, "n_positions": 2048, "n_embd": 2048, "n_layer": 24, "n_head": 16},
    "starcoder": {"vocab_size": 49152, "n_positions": 8192, "n_embd": 6144, "n_layer": 40, "n_head": 48}
    | {"n_inner": 24576},
}
