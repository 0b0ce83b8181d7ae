"""The config of families whose layers have experts, all of them or some. No torch.

A family says in ``axes`` which of its fields hold the sizes of ``experts``, ``routes`` and ``expert_mlp``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megacore.models.anatomy import Anatomy
from megacore.models.config import positive
from megacore.models.decoder_config import DecoderConfig
from megacore.models.layer_types import kind_problems
from megacore.models.mtp import MtpConfig
from megacore.models.weight_rows import Rows, Table, in_layers
from megacore.parallel.routing import Routing


@dataclass(frozen=True, kw_only=True)
class MoEConfig(DecoderConfig):
    # Of transformers' own balance loss, which is none of ours (docs/moe.md).
    harmless: ClassVar[frozenset[str]] = frozenset({"output_router_logits", "router_aux_loss_coef"})
    axes: ClassVar[Mapping[str, str]] = {
        **{axis: field for axis, field in DecoderConfig.axes.items() if axis != "mlp"},
        "experts": "num_experts",
        "expert_mlp": "intermediate_size",
    }
    # What is not the same for all in the rule by which experts are chosen and weighed.
    rule: ClassVar[Mapping[str, Any]] = {}

    num_experts_per_tok: int

    @property
    def sizes(self) -> Mapping[str, int]:
        sizes = super().sizes
        return {**sizes, "routes": sizes["experts"]}

    @property
    def norm_topk_prob(self) -> bool:
        """Whether the weights of those that are chosen are divided by their sum; a field, where the family has one."""
        return False

    @property
    def routing(self) -> Routing:
        """The rule by which a layer's experts are chosen and weighed."""
        chosen = {"top_k": self.num_experts_per_tok, "normalised": self.norm_topk_prob}
        return Routing(experts=getattr(self, self.axes["experts"]), **{**chosen, **self.rule})

    @property
    def sparse_layers(self) -> Collection[int]:
        """The layers that have experts."""
        return range(self.num_hidden_layers)

    def feed_forward(self, t: Table, experts: Rows, network: Rows = (), *, bias: bool = False) -> Rows:
        """Return the rows of the experts in the layers that have some, and in the others of a network: that of LLaMA,
        with biases or without, if it is not given."""
        every, sparse = {*range(self.num_hidden_layers)}, {*self.sparse_layers}
        dense = in_layers(every - sparse, network or t.gated_mlp(bias=bias))
        return experts if sparse == every else in_layers(sparse, experts) + dense

    def experts(self, t: Table) -> Rows:
        """Return the rows of the experts and their router."""
        return t.experts()

    def network(self, t: Table) -> Rows:
        return self.feed_forward(t, self.experts(t))

    def anatomy_of(self, **own: Any) -> Anatomy:
        return super().anatomy_of(**({"routing": self.routing} | own))

    def problems(self) -> list[str]:
        return super().problems() + list(self.routing.problems())


@dataclass(frozen=True, kw_only=True)
class SparseConfig(MoEConfig):
    """Experts in every so many layers, as Qwen has them; the others have one feed-forward network of another size."""

    axes: ClassVar[Mapping[str, str]] = {
        **MoEConfig.axes,
        "mlp": "intermediate_size",
        "expert_mlp": "moe_intermediate_size",
    }

    moe_intermediate_size: int
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    @property
    def sparse_layers(self) -> list[int]:
        dense, step = {*self.mlp_only_layers}, self.decoder_sparse_step
        return [layer for layer in range(self.num_hidden_layers) if (layer + 1) % step == 0 and layer not in dense]

    def problems(self) -> list[str]:
        found = super().problems() + positive(self, "decoder_sparse_step")
        if not found and not self.sparse_layers:
            found.append("decoder_sparse_step and mlp_only_layers leave no layer with experts")
        return found

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        if values.get("mlp_only_layers") is None:
            values["mlp_only_layers"] = ()
        return super()._derive(values)


@dataclass(frozen=True, kw_only=True)
class NamedLayersConfig(MoEConfig):
    """Which layers have experts, ``mlp_layer_types`` may say: ``dense`` or ``sparse`` for each."""

    # None becomes `leading` layers without experts, and experts in all others.
    mlp_layer_types: tuple[str, ...] | None = None

    @property
    def leading(self) -> int:
        """How many of the first layers have no experts, where ``mlp_layer_types`` is null."""
        return 0

    def __post_init__(self) -> None:
        self.fill_in("mlp_layer_types", lambda layer: "dense" if layer < self.leading else "sparse")
        super().__post_init__()

    @property
    def sparse_layers(self) -> list[int]:
        return [layer for layer, kind in enumerate(self.mlp_layer_types or ()) if kind == "sparse"]

    def problems(self) -> list[str]:
        found = super().problems()
        if self.mlp_layer_types is None:  # there are too many layers
            return found
        known = "dense", "sparse"
        return found + kind_problems("mlp_layer_types", self.mlp_layer_types, self.num_hidden_layers, known)


@dataclass(frozen=True, kw_only=True)
class SharedExpertConfig(MoEConfig):
    """Experts behind some layers without, beside one that every token goes to, as DeepSeek has them."""

    axes: ClassVar[Mapping[str, str]] = {
        **DecoderConfig.axes,
        "experts": "n_routed_experts",
        "expert_mlp": "moe_intermediate_size",
        "shared_mlp": "shared_intermediate_size",
    }
    # Hugging Face's name of what corrects the choice of experts, where something does.
    correction: ClassVar[str] = ""

    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    routed_scaling_factor: float
    first_k_dense_replace: int

    @property
    def shared_intermediate_size(self) -> int:
        """Hidden features of the expert that every token goes to."""
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def routing(self) -> Routing:
        return replace(super().routing, factor=self.routed_scaling_factor)

    def experts(self, t: Table) -> Rows:
        return t.experts(correction=self.correction) + t.shared_expert()

    @property
    def sparse_layers(self) -> Collection[int]:
        return range(self.first_k_dense_replace, self.num_hidden_layers)

    def problems(self) -> list[str]:
        found = super().problems()
        if self.first_k_dense_replace < 0:
            found.append(f"first_k_dense_replace is {self.first_k_dense_replace}: it must be at least 0")
        return found


@dataclass(frozen=True, kw_only=True)
class SigmoidConfig(MtpConfig, SharedExpertConfig):
    """Experts that are chosen by sigmoids, in groups, with a correction that keeps them balanced, as DeepSeek-V3 has
    them."""

    correction: ClassVar[str] = "mlp.gate.e_score_correction_bias"
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True

    @property
    def routing(self) -> Routing:
        return grouped_sigmoids(self)


def grouped_sigmoids(config: Any) -> Routing:
    """Return the rule of DeepSeek-V3, by the fields of a config that has it."""
    return Routing(
        experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        score="sigmoid",
        normalised=config.norm_topk_prob,
        epsilon=1e-20,
        factor=config.routed_scaling_factor,
        groups=config.n_group,
        kept_groups=config.topk_group,
        group_score="top2",
    )


@dataclass(frozen=True, kw_only=True)
class TypedLayersConfig(NamedLayersConfig, SigmoidConfig):
    """The same where ``first_k_dense_replace`` says it of a file without."""

    @property
    def leading(self) -> int:
        return self.first_k_dense_replace
