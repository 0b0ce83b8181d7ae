"""A family that nobody has heard of: its blocks are like no other's, and so are the names of what they hold.

One norm, which is called none, feeds two branches at once: attention with norms on queries and keys and a gate on what
it gives, and a feed-forward network that begins with a narrow product which every rank makes of its own tokens.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.models import registry
from megacore.models.blocks import column, row
from megacore.models.context import Context
from megacore.models.decoder import Decoder, Head, TokenEmbedding
from megacore.models.families.llama import LlamaConfig
from megacore.models.rope import Rotary
from megacore.parallel.kernels import rotation
from megacore.parallel.kernels.scoring import Scoring
from megacore.parallel.layers.norm import RMSNorm
from megacore.parallel.parameters import Parameters
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class OddConfig(LlamaConfig):
    family: ClassVar[str] = "odd"

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, "narrow": 48}

    def params(self) -> tuple[Param, ...]:
        stored = {
            "first": "embed",
            "qkv": "(q: heads head + k: kv head + v: kv head) embed",
            "queries": "head",
            "keys": "head",
            "gate": "(heads head) embed",
            "out": "embed (heads head)",
            "squeeze": "narrow embed",
            "widen": "mlp narrow",
            "close": "embed mlp",
        }
        own = (
            Param(f"layers.{{layer}}.{name}.weight", sentence, f"odd.{{layer}}.{name}", mean=1, std=0.02)
            for name, sentence in stored.items()
        )
        return *(param for param in super().params() if "layer" not in param.named_axes), *own

    def build(self, parameters: Parameters, chunk: int) -> Decoder:
        tp = parameters.mesh.tp.size
        heads, kv = self.num_attention_heads // tp, max(1, self.num_key_value_heads // tp)

        def head() -> Head:
            norm = RMSNorm.of(parameters["norm.weight"], 1e-6, parameters.mesh)
            return Head(norm, parameters["head.weight"], self.vocab_size, parameters.mesh.tp)

        return Decoder.chunk(
            parameters,
            chunk,
            embedding=lambda: TokenEmbedding(parameters, "embed.weight", self.vocab_size),
            block=lambda layer: OddBlock(parameters, f"layers.{layer}", heads, kv),
            head=head,
            rotaries={"rope": Rotary(self.rope_parameters, self.head_dim)},
        )


class OddBlock(nn.Module):
    def __init__(self, parameters: Parameters, name: str, heads: int, kv: int) -> None:
        super().__init__()
        self.first, self.queries, self.keys = (
            RMSNorm.of(parameters[f"{name}.{norm}.weight"], 1e-6, parameters.mesh)
            for norm in ("first", "queries", "keys")
        )
        self.qkv, self.gate = (column(parameters, f"{name}.{each}") for each in ("qkv", "gate"))
        self.widen = column(parameters, f"{name}.widen")
        self.out, self.close = (row(parameters, f"{name}.{each}") for each in ("out", "close"))
        self.squeeze = parameters[f"{name}.squeeze.weight"]
        self.name, self.heads, self.kv = name, heads, kv

    def forward(self, x: Tensor, context: Context) -> Tensor:
        y = self.first(x)
        q, k, v = rotation.split_and_apply(self.qkv(y), *context.rotations["rope"], self.heads, self.kv)
        mixed = context.attention(self.name, self.queries(q), self.keys(k), v, Scoring()).flatten(1)
        gated: Tensor = mixed * torch.sigmoid(self.gate(y))
        turned: Tensor = torch.tanh(self.widen(F.linear(y, self.squeeze)))
        return x + self.out(gated) + self.close(turned)


PRESETS: Mapping[str, Mapping[str, Any]] = {}


@contextmanager
def registered() -> Iterator[None]:
    """For as long as this lasts there is the family ``odd``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "FAMILIES", {**registry.FAMILIES, "odd": f"{__name__}.OddConfig"})
        yield
