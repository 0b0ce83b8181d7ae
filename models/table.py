"""Rows of weights tables that many families share: a norm, a linear, the two ends of a model. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from parallel.weights.schema import Param

QKV = "(q: heads head + k: kv head + v: kv head)"
HEADS = "(heads head)"
GATE_UP = "(gate: mlp + up: mlp)"

Rows = tuple[Param, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of one family's weights table.

    Our names are ``layers.{layer}.<name>`` within a block, where Hugging Face's are ``<layer>.<name>``.

    Args:
        layer: How Hugging Face's names of a block begin.
        std: Standard deviation of initial weights.
        out_std: That of the linears that end a branch.
        norm_mean: Initial weight of norms.
        norm_bias: Whether norms have biases.
    """

    layer: str = "model.layers.{layer}"
    std: float
    out_std: float
    norm_mean: float = 1.0
    norm_bias: bool = False

    def norm(self, name: str, hf: str, pattern: str = "embed", *, mean: float | None = None) -> Rows:
        """A norm of a block, with a bias where norms have one."""
        mean = self.norm_mean if mean is None else mean
        weight = Param(f"layers.{{layer}}.{name}.weight", pattern, f"{self.layer}.{hf}.weight", mean=mean, vector=True)
        bias = Param(f"layers.{{layer}}.{name}.bias", pattern, f"{self.layer}.{hf}.bias", vector=True)
        return (weight, bias) if self.norm_bias else (weight,)

    def linear(
        self,
        name: str,
        out: str,
        inner: str,
        hf: str,
        *,
        bias: bool = False,
        stored: str = "",
        stored_bias: str = "",
        ends: bool = False,
    ) -> Rows:
        """A linear of a block.

        Args:
            name: Our name.
            out, inner: Sentences of what it gives and what it takes.
            hf: Hugging Face's name; ``{q,k,v}`` where each piece is a tensor of its own.
            bias: Whether it has one.
            stored, stored_bias: How Hugging Face stores the weight and the bias, where that differs.
            ends: Whether it ends a branch.
        """
        std = self.out_std if ends else self.std
        weight = Param(
            f"layers.{{layer}}.{name}.weight", f"{out} {inner}", f"{self.layer}.{hf}.weight", stored, std=std
        )
        if not bias:
            return (weight,)
        return weight, Param(f"layers.{{layer}}.{name}.bias", out, f"{self.layer}.{hf}.bias", stored_bias)

    def attention(
        self, *, bias: bool = False, out_bias: bool = False, hf: str = "self_attn.{q,k,v}_proj", out: str = "o_proj"
    ) -> Rows:
        """Queries, keys, values and what comes out, as LLaMA's ``self_attn`` has them."""
        return (
            *self.linear("attn.qkv", QKV, "embed", hf, bias=bias),
            *self.linear("attn.out", "embed", HEADS, f"self_attn.{out}", bias=out_bias, ends=True),
        )

    def gated_mlp(self, *, bias: bool = False) -> Rows:
        """A gated feed-forward network, as LLaMA's ``mlp`` has it."""
        return (
            *self.linear("mlp.up", GATE_UP, "embed", "mlp.{gate,up}_proj", bias=bias),
            *self.linear("mlp.down", "embed", "mlp", "mlp.down_proj", bias=bias, ends=True),
        )

    def plain_mlp(self, up: str, down: str, *, bias: bool = False) -> Rows:
        """A feed-forward network of two linears, of these names."""
        return (
            *self.linear("mlp.up", "mlp", "embed", f"mlp.{up}", bias=bias),
            *self.linear("mlp.down", "embed", "mlp", f"mlp.{down}", bias=bias, ends=True),
        )

    def model(
        self,
        *block: Rows,
        tied: bool,
        embed: str = "model.embed_tokens",
        norm: str = "model.norm",
        head: str = "lm_head",
        head_bias: bool = False,
    ) -> Rows:
        """The whole table: the embedding, the rows of a block, the final norm, and the head unless it is tied."""
        last_norm = Param("norm.weight", "embed", f"{norm}.weight", at="last", mean=self.norm_mean)
        return (
            Param("embed.weight", "vocab embed", f"{embed}.weight", at="first last" if tied else "first", std=self.std),
            *(param for rows in block for param in rows),
            last_norm,
            *([Param("norm.bias", "embed", f"{norm}.bias", at="last")] if self.norm_bias else []),
            *([] if tied else [Param("head.weight", "vocab embed", f"{head}.weight", at="last", std=self.std)]),
            *([Param("head.bias", "vocab", f"{head}.bias", at="last")] if head_bias else []),
        )
