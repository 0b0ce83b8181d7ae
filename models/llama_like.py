"""What the families that are built as LLaMA is have in common: their config, their weights table, their modules.

Pre-norm decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU. The config and the weights table import
without torch; :func:`build` imports the layers when it is called.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from models import rope_config
from models.config import ModelConfig, positive, probabilities
from models.rope_config import DefaultRope, Rope
from parallel.weights.schema import Param

if TYPE_CHECKING:
    from models.decoder import Decoder
    from parallel.parameters import Parameters


@dataclass(frozen=True, kw_only=True)
class LlamaLikeConfig(ModelConfig):
    """Fields carry their Hugging Face names."""

    fixed: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}
    base_model_prefix: ClassVar[str] = "model"
    tied: ClassVar[tuple[str, str]] = ("model.embed_tokens.weight", "lm_head.weight")
    # Rotary frequencies, which are computed.
    ignored: ClassVar[tuple[str, ...]] = (
        "model.layers.{layer}.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
    )
    axes: ClassVar[Mapping[str, str]] = {
        "layer": "num_hidden_layers",
        "vocab": "vocab_size",
        "embed": "hidden_size",
        "heads": "num_attention_heads",
        "kv": "num_key_value_heads",
        "head": "head_dim",
        "mlp": "intermediate_size",
    }

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    # The token whose embedding gets no gradient from being looked up (padding_idx of transformers' nn.Embedding).
    pad_token_id: int | None = None
    attention_dropout: float = 0.0
    rope_parameters: Rope = field(default_factory=DefaultRope)

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        heads, head_dim = tp * rng.choice((1, 2, 3)), rng.choice((4, 6, 8))
        shared = [kv for kv in (1, 2, 4) if heads % kv == 0 and (kv % tp == 0 or tp % kv == 0)]
        given = rng.random() < 0.7
        return {
            "vocab_size": vocab,
            "hidden_size": heads * (rng.choice((3, 5)) if given else head_dim),
            "intermediate_size": rng.choice((14, 31)),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": rng.choice((*shared, heads)),
            # Where the head size is not given, it follows from the hidden size.
            **({"head_dim": head_dim} if given else {}),
            "max_position_embeddings": positions,
            "rms_norm_eps": rng.choice((1e-6, 1e-2)),
            "pad_token_id": rng.choice((None, 5, -1)),
            "tie_word_embeddings": rng.random() < 0.5,
            "rope_parameters": rope_config.draw(rng, head_dim, positions),
        }

    @property
    def max_positions(self) -> int | None:
        return self.max_position_embeddings

    @property
    @abstractmethod
    def biases(self) -> Collection[str]:
        """The linears that have a bias, of attn.qkv, attn.out, mlp.up and mlp.down."""

    def params(self) -> tuple[Param, ...]:
        ours, theirs = "layers.{layer}", "model.layers.{layer}"
        std = self.initializer_range
        # Outputs of the residual branches start smaller, so that their sum keeps its size (GPT-2).
        out = std / math.sqrt(2 * self.num_hidden_layers)
        qkv, gate_up = "(q: heads head + k: kv head + v: kv head)", "(gate: mlp + up: mlp)"
        qkv_hf, up_hf = f"{theirs}.self_attn.{{q,k,v}}_proj", f"{theirs}.mlp.{{gate,up}}_proj"
        biases = {
            "attn.qkv": Param(f"{ours}.attn.qkv.bias", qkv, f"{qkv_hf}.bias"),
            "attn.out": Param(f"{ours}.attn.out.bias", "embed", f"{theirs}.self_attn.o_proj.bias"),
            "mlp.up": Param(f"{ours}.mlp.up.bias", gate_up, f"{up_hf}.bias"),
            "mlp.down": Param(f"{ours}.mlp.down.bias", "embed", f"{theirs}.mlp.down_proj.bias"),
        }
        head = Param("head.weight", "vocab embed", "lm_head.weight", at="last", std=std)
        tied = self.tie_word_embeddings
        return (
            Param(
                "embed.weight",
                "vocab embed",
                "model.embed_tokens.weight",
                at="first last" if tied else "first",
                std=std,
            ),
            Param(f"{ours}.attn_norm.weight", "embed", f"{theirs}.input_layernorm.weight", mean=1),
            Param(f"{ours}.attn.qkv.weight", f"{qkv} embed", f"{qkv_hf}.weight", std=std),
            Param(f"{ours}.attn.out.weight", "embed (heads head)", f"{theirs}.self_attn.o_proj.weight", std=out),
            *(biases[name] for name in ("attn.qkv", "attn.out") if name in self.biases),
            Param(f"{ours}.mlp_norm.weight", "embed", f"{theirs}.post_attention_layernorm.weight", mean=1),
            Param(f"{ours}.mlp.up.weight", f"{gate_up} embed", f"{up_hf}.weight", std=std),
            Param(f"{ours}.mlp.down.weight", "embed mlp", f"{theirs}.mlp.down_proj.weight", std=out),
            *(biases[name] for name in ("mlp.up", "mlp.down") if name in self.biases),
            Param("norm.weight", "embed", "model.norm.weight", at="last", mean=1),
            *([] if tied else [head]),
        )

    def problems(self) -> list[str]:
        found = positive(self, *self.axes.values(), "max_position_embeddings")
        found += probabilities(self, "attention_dropout")
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            found.append(
                f"pad_token_id is {self.pad_token_id}: it must be below vocab_size ({self.vocab_size}), or null"
            )
        if not found and self.num_attention_heads % self.num_key_value_heads:
            heads, kv = self.num_attention_heads, self.num_key_value_heads
            # Bounded, for the numbers may come from a hostile file.
            near = next(n for n in range(min(kv, heads, 1024), 0, -1) if heads % n == 0)
            found.append(
                f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv}): "
                f"choose {near}, or {heads}"
            )
        return found + self.rope_parameters.problems(self.head_dim)

    @classmethod
    def override(cls, base: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """As the base class; of the rope, what the fields do not name stays (:func:`models.rope_config.override`)."""
        return rope_config.override(base, fields)

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        values, problems = super()._read(config)
        if isinstance(values.get("num_attention_heads"), int) and values["num_attention_heads"] > 0:
            if values.get("num_key_value_heads") is None:
                values["num_key_value_heads"] = values["num_attention_heads"]
            if values.get("head_dim") is None and isinstance(values.get("hidden_size"), int):
                head_dim, rest = divmod(values["hidden_size"], values["num_attention_heads"])
                if rest:
                    problems.append(
                        f"hidden_size ({values['hidden_size']}) is not a multiple of num_attention_heads "
                        f"({values['num_attention_heads']}): give head_dim"
                    )
                values["head_dim"] = head_dim
        values.pop("rope_parameters", None)
        try:
            values["rope_parameters"] = rope_config.from_hugging_face(config)
        except ValueError as error:
            problems.append(str(error))
        return values, problems

    @classmethod
    def _consumed(cls) -> set[str]:
        return set(rope_config.HUGGING_FACE_KEYS)

    def _write(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rope_parameters"}
        return plain | rope_config.to_hugging_face(self.rope_parameters)


def build(config: LlamaLikeConfig, parameters: Parameters, chunk: int) -> Decoder:
    """The modules of one pipeline chunk of this rank, over parameters that the layout has cut."""
    from models.attention import Attention
    from models.blocks import Block, SwiGLU
    from models.decoder import Decoder, Head, TokenEmbedding
    from models.rope import Rotary
    from parallel.layers.norm import RMSNorm

    p, mesh = parameters, parameters.mesh

    def norm(name: str) -> RMSNorm:
        return RMSNorm.of(p[f"{name}.weight"], config.rms_norm_eps, mesh)

    def block(layer: int) -> Block:
        name = f"layers.{layer}"
        return Block(
            norm(f"{name}.attn_norm"),
            Attention(p, f"{name}.attn", dropout=config.attention_dropout),
            norm(f"{name}.mlp_norm"),
            SwiGLU(p, f"{name}.mlp"),
        )

    table = "embed.weight" if config.tie_word_embeddings else "head.weight"
    return Decoder.chunk(
        p,
        chunk,
        embedding=lambda: TokenEmbedding(p, "embed.weight", config.vocab_size, config.pad_token_id),
        block=block,
        head=lambda: Head(norm("norm"), p[table], config.vocab_size, mesh.tp),
        rotary=Rotary(config.rope_parameters, config.head_dim),
    )


def shape(hidden: int, mlp: int, layers: int, heads: int) -> dict[str, Any]:
    """The sizes of a preset."""
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
