"""A family that has any of the builder's parts, each by a field: LLaMA, extended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from models import registry
from models.anatomy import ROPE, Anatomy, LayerAttention
from models.builder import build
from models.families.llama import LlamaConfig
from models.rope_config import DefaultRope
from models.table import HEADS
from parallel.weights.schema import Param

__all__ = ["CONFIG", "PARAMETERS", "PRESETS", "ExtendedConfig", "build", "extended"]

LOCAL = "local"


@dataclass(frozen=True, kw_only=True)
class ExtendedConfig(LlamaConfig):
    """LLaMA with what its fields say.

    Args:
        windows: Of each layer; 0 for none, and () for none in any.
        local_rope: Whether layers with a window have a rope of their own.
        softcap: Of the scores.
        sinks: Whether heads have them.
        norms: Whether queries and keys have norms, each over all heads.
        offset: Of the norms.
        parallel: Whether branches stand side by side behind one norm.
        head_bias: Whether the head has a bias.
    """

    family: ClassVar[str] = "extended"

    windows: tuple[int, ...] = ()
    local_rope: bool = False
    softcap: float | None = None
    sinks: bool = False
    norms: bool = False
    offset: float = 0.0
    parallel: bool = False
    head_bias: bool = False

    @property
    def anatomy(self) -> Anatomy:
        layers = tuple(
            LayerAttention(LOCAL if window and self.local_rope else ROPE, window or None)
            for window in self.windows or (0,) * self.num_hidden_layers
        )
        return replace(
            super().anatomy,
            layers=layers,
            ropes={ROPE: self.rope_parameters, LOCAL: DefaultRope()}
            if self.local_rope
            else {ROPE: self.rope_parameters},
            attention_softcap=self.softcap,
            norm_offset=self.offset,
            parallel=self.parallel,
        )

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        sinks = Param("layers.{layer}.attn.sinks", "heads", "model.layers.{layer}.self_attn.sinks", vector=True)
        of_heads = (
            *t.norm("attn.q_norm", "self_attn.q_norm", HEADS),
            *t.norm("attn.k_norm", "self_attn.k_norm", "(kv head)"),
        )
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.attention(),
            of_heads if self.norms else (),
            (sinks,) if self.sinks else (),
            () if self.parallel else t.norm("mlp_norm", "post_attention_layernorm"),
            t.gated_mlp(),
            tied=self.tie_word_embeddings,
            head_bias=self.head_bias,
        )


PRESETS: Mapping[str, Mapping[str, Any]] = {}
PARAMETERS: Mapping[str, int] = {}
CONFIG: type[ExtendedConfig] = ExtendedConfig


@contextmanager
def extended() -> Iterator[None]:
    """For as long as this lasts there is the family ``extended``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "FAMILIES", {**registry.FAMILIES, "extended": __name__})
        yield
