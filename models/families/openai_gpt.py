"""GPT, the first of its name (Radford et al. 2018): learned positions, and norms of the sums behind the branches.

Hugging Face stores its matrices transposed (Conv1D): the axis that is read is spelled first there.
"""

from dataclasses import dataclass

from megacore.models.anatomy import Anatomy
from megacore.models.learned_positions import LearnedPositionsConfig
from megacore.models.weight_rows import HEADS, QKV_EACH, Rows, Table


@dataclass(frozen=True, kw_only=True)
class OpenAiGptConfig(LearnedPositionsConfig):
    family = "openai-gpt"
    architecture = "OpenAIGPTLMHeadModel"
    eps = "layer_norm_epsilon"
    activations = ("gelu", "relu", "silu", "swish")
    derived = LearnedPositionsConfig.derived | {"intermediate_size", "pad_token_id"}
    # Heads for other tasks, and the token for padding, whose embedding is trained as any other.
    harmless = frozenset(
        {
            "n_ctx", "n_special", "pad_token_id", "predict_special_tokens", "summary_activation",
            "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
        }
    )  # fmt: skip
    saved = {
        "attention_dropout": "attn_pdrop",
        "hidden_act": "afn",
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    base_model_prefix = "transformer"
    tied = ("transformer.tokens_embed.weight", "lm_head.weight")
    positions = "transformer.positions_embed"
    # The causal mask.
    ignored = ("transformer.h.{layer}.attn.bias",)
    layer = "transformer.h.{layer}"
    last_norm = ""
    norm_bias = True
    told = {"branch_dropout": "resid_pdrop", "embedding_dropout": "embd_pdrop"}
    parts = {"mixer": "", "attn_sum_norm": "ln_1", "network": "", "mlp_sum_norm": "ln_2"}
    mlp_ratio = 4

    vocab_size: int = 40478
    max_position_embeddings: int = 512
    hidden_act: str = "gelu"
    tie_word_embeddings: bool = True
    attention_dropout: float = 0.1
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5

    @property
    def anatomy(self) -> Anatomy:
        # Of which gelu means the approximation here.
        activation = "gelu_new" if self.hidden_act == "gelu" else self.hidden_act
        return self.anatomy_of(activation=activation, padding_idx=None)

    def mixer(self, t: Table) -> Rows:
        return (
            *t.linear("attn.qkv", QKV_EACH, "embed", "attn.c_attn", bias=True, stored=f"embed {QKV_EACH}"),
            *t.linear("attn.out", "embed", HEADS, "attn.c_proj", bias=True, stored=f"{HEADS} embed", ends=True),
        )

    def network(self, t: Table) -> Rows:
        return (
            *t.linear("mlp.up", "mlp", "embed", "mlp.c_fc", bias=True, stored="embed mlp"),
            *t.linear("mlp.down", "embed", "mlp", "mlp.c_proj", bias=True, stored="mlp embed", ends=True),
        )


PRESETS = {
    "openai-gpt-tiny": {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 512},
    "openai-gpt": {"n_embd": 768, "n_layer": 12, "n_head": 12},
}
