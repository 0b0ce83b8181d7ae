"""The config of families whose layers have experts, all of them or some. No torch.

A family says in ``axes`` which of its fields hold the sizes of ``experts``, ``routes`` and ``expert_mlp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

from megacore.models.anatomy import Anatomy
from megacore.models.config import positive
from megacore.models.decoder_config import DecoderConfig
from megacore.models.weight_rows import Rows, Table, in_layers
from megacore.parallel import limits
from megacore.parallel.routing import Routing


@dataclass(frozen=True, kw_only=True)
class MoEConfig(DecoderConfig):
    """Fields carry their Hugging Face names."""

    # Of transformers' own balance loss, which is none of ours (docs/moe.md).
    harmless: ClassVar[frozenset[str]] = frozenset({"output_router_logits", "router_aux_loss_coef"})
    axes: ClassVar[Mapping[str, str]] = {
        **{axis: field for axis, field in DecoderConfig.axes.items() if axis != "mlp"},
        "expert_mlp": "intermediate_size",
    }

    num_experts_per_tok: int

    @property
    def routing(self) -> Routing:
        """The rule by which a layer's experts are chosen and weighed."""
        return Routing(experts=self.sizes["experts"], top_k=self.num_experts_per_tok)

    def anatomy_of(self, **own: Any) -> Anatomy:
        return super().anatomy_of(**({"routing": self.routing} | own))

    def problems(self) -> list[str]:
        return super().problems() + list(self.routing.problems())

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        # As many as the ranks of the largest meshes of the tests. One alone of weight 1 would teach the router nothing.
        return drawn | {cls.axes["experts"]: max(4, 2 * tp), "num_experts_per_tok": rng.choice((2, 3))}


@dataclass(frozen=True, kw_only=True)
class SparseConfig(MoEConfig):
    """Experts in every so many layers, as Qwen has them; the others have one feed-forward network of another size."""

    axes: ClassVar[Mapping[str, str]] = {**DecoderConfig.axes, "expert_mlp": "moe_intermediate_size"}

    moe_intermediate_size: int
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    @property
    def routing(self) -> Routing:
        return replace(super().routing, normalised=self.norm_topk_prob)

    @property
    def sparse_layers(self) -> list[int]:
        """The layers that have experts."""
        dense, step = {*self.mlp_only_layers}, self.decoder_sparse_step
        return [layer for layer in range(self.num_hidden_layers) if (layer + 1) % step == 0 and layer not in dense]

    def feed_forward(self, t: Table, experts: Rows) -> Rows:
        """Return the rows of the experts in the layers that have some, and of a network in the others."""
        every, sparse = {*range(self.num_hidden_layers)}, {*self.sparse_layers}
        return experts if sparse == every else in_layers(sparse, experts) + in_layers(every - sparse, t.gated_mlp())

    def problems(self) -> list[str]:
        found = super().problems() + positive(self, "decoder_sparse_step")
        if self.num_hidden_layers > limits.LAYERS:
            found.append(f"num_hidden_layers is {self.num_hidden_layers}: it may be up to {limits.LAYERS}")
        if not found and not self.sparse_layers:
            found.append("decoder_sparse_step and mlp_only_layers leave no layer with experts")
        return found

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        if values.get("mlp_only_layers") is None:
            values["mlp_only_layers"] = ()
        return super()._derive(values)

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        step = rng.randint(1, min(2, layers))
        dense = [layer for layer in range(step, layers) if rng.random() < 0.3]  # of those before, the last has experts
        return drawn | {"moe_intermediate_size": 6, "decoder_sparse_step": step, "mlp_only_layers": dense}
