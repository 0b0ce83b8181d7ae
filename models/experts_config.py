"""The config of families whose layers have experts, all of them or some. No torch.

A family says in ``axes`` which of its fields hold the sizes of ``experts``, ``routes`` and ``expert_mlp``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

from megacore.models.anatomy import Anatomy
from megacore.models.config import positive
from megacore.models.decoder_config import DecoderConfig
from megacore.models.layer_types import kind_problems
from megacore.models.mtp import MtpConfig
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
        "experts": "num_experts",
        "expert_mlp": "intermediate_size",
    }
    # What is not the same for all in the rule by which experts are chosen and weighed.
    rule: ClassVar[Mapping[str, Any]] = {}
    # One alone of weight 1 would teach the router nothing.
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {"num_experts_per_tok": (2, 3)}

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

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        return drawn | cls.as_saved({cls.axes["experts"]: max(4, 2 * tp)})  # as many as the ranks of the largest meshes


@dataclass(frozen=True, kw_only=True)
class SparseConfig(MoEConfig):
    """Experts in every so many layers, as Qwen has them; the others have one feed-forward network of another size."""

    axes: ClassVar[Mapping[str, str]] = {
        **MoEConfig.axes,
        "mlp": "intermediate_size",
        "expert_mlp": "moe_intermediate_size",
    }
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {"moe_intermediate_size": (6,)}

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

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        step = rng.randint(1, min(2, layers))
        dense = [layer for layer in range(step, layers) if rng.random() < 0.3]  # of those before, the last has experts
        return drawn | {"decoder_sparse_step": step, "mlp_only_layers": dense}


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
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "moe_intermediate_size": (6, 11),
        "n_shared_experts": (1, 2),
        "routed_scaling_factor": (1.0, 2.5),
        "first_k_dense_replace": (0, 1),
    }

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

    @classmethod
    def draw_groups(cls, rng: Random, drawn: Mapping[str, Any]) -> dict[str, Any]:
        """Draw groups of the experts that were drawn, two to a group at least."""
        experts, chosen = (drawn[cls.saved.get(name, name)] for name in ("n_routed_experts", "num_experts_per_tok"))
        fitting = [(n, kept) for n, kept in ((1, 1), (2, 1), (2, 2), (4, 2)) if 2 * n <= experts]
        groups, kept = rng.choice([(n, kept) for n, kept in fitting if kept * (experts // n) >= chosen])
        return {"n_group": groups, "topk_group": kept}

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

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        return drawn | cls.draw_groups(rng, drawn)


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
class TypedLayersConfig(SigmoidConfig):
    """Which layers have experts, ``mlp_layer_types`` may say: ``dense`` or ``sparse`` for each."""

    # None becomes what first_k_dense_replace says.
    mlp_layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.mlp_layer_types is None and self.num_hidden_layers <= limits.LAYERS:
            kinds = (
                "dense" if layer < self.first_k_dense_replace else "sparse" for layer in range(self.num_hidden_layers)
            )
            object.__setattr__(self, "mlp_layer_types", tuple(kinds))
        super().__post_init__()

    @property
    def sparse_layers(self) -> list[int]:
        return [layer for layer, kind in enumerate(self.mlp_layer_types or ()) if kind == "sparse"]

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        kinds = rng.choice((None, [rng.choice(("dense", "sparse")) for _ in range(layers)]))
        return drawn | {"mlp_layer_types": kinds}

    def problems(self) -> list[str]:
        found = super().problems()
        if self.mlp_layer_types is None:  # there are too many layers
            return found
        known = "dense", "sparse"
        return found + kind_problems("mlp_layer_types", self.mlp_layer_types, self.num_hidden_layers, known)
