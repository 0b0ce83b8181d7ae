"""A dense model becomes one with experts that computes the same: its family, its config, its factor. No torch.

Every expert is a copy of the dense feed-forward network (Komatsuzaki et al. 2023, arXiv 2212.05055), so that whichever
experts a token goes to give the same, and weights that add up to one leave it as it is. With a granularity g an expert
is one of g slices of the hidden features instead (He et al. 2024, arXiv 2410.07524): g successive experts hold all
slices of one copy, and have one row of the router, so that a token goes to copies as a whole. Each slice then weighs a
g-th of what it should, so what comes out of it is scaled by g.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from megacore.models.config import HARMLESS, ModelConfig, ModelConfigError
from megacore.models.registry import FAMILIES, family
from megacore.parallel.enum_errors import nearest

WITH_EXPERTS: Mapping[str, str] = {"llama": "mixtral", "mistral": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}
"""{family: the one that is the same but for its experts}."""

DENSE, EXPERTS, SHARED = (f"layers.{{layer}}.mlp.{part}" for part in ("", "experts.", "shared."))
ROUTER = "layers.{layer}.mlp.router.weight"
UP, DOWN = "up.weight", "down.weight"


@dataclass(frozen=True)
class Upcycling:
    """The way from a dense model to one with experts.

    Args:
        dense: The config of the dense model.
        raw: The ``config.json`` of the one with experts.
        granularity: The number of slices of the hidden features.
    """

    dense: ModelConfig
    raw: Mapping[str, Any]
    granularity: int

    @cached_property
    def config(self) -> ModelConfig:
        """The config of the model with experts."""
        return family(self.raw["model_type"]).config.from_hugging_face(self.raw)

    @property
    def experts(self) -> int:
        return self.config.sizes["experts"]

    @property
    def scale(self) -> float:
        """The factor of what comes out of an expert: a token's weights add up to the router's factor, and only every
        g-th of them is a slice's."""
        routing = self.config.anatomy.routing
        assert routing is not None
        return self.granularity / routing.factor

    def problems(self) -> Iterator[str]:
        """Yield the reasons why the model with experts would not compute what the dense one does."""
        routing, name = self.config.anatomy.routing, self.config.family
        if routing is None:
            yield f"{name} has no experts"
            return
        if not (routing.normalised or routing.weigh == "chosen"):
            yield f"the weights of a token's experts do not add up to one in {name}: its sum would not be the dense one"
        if self.experts % self.granularity:
            yield (
                f"{self.experts} experts are no whole copies of {self.granularity} slices: choose --experts from the "
                f"multiples of {self.granularity}"
            )
        if routing.top_k % self.granularity:
            yield (
                f"a token that goes to {routing.top_k} experts misses some of the {self.granularity} slices: choose "
                f"--top-k from the multiples of {self.granularity}"
            )
        if self.granularity > 1 and routing.groups > 1:
            yield f"{name} keeps groups of experts, which may part the slices of a copy: choose granularity 1"
        yield from (f"{name} is not {self.dense.family} with experts: {each}" for each in self._others())

    def _others(self) -> Iterator[str]:
        """Yield everything beside the feed-forward networks in which the two models differ."""
        ours, theirs = self.config.anatomy, self.dense.anatomy
        for name in (field.name for field in fields(ours) if field.name != "routing"):
            if getattr(ours, name) != getattr(theirs, name):
                yield f"{name} is {getattr(ours, name)} in the one and {getattr(theirs, name)} in the other"
        there, needed = self.config.schema, {self._named(param.name) for param in self.dense.schema.params}
        lacking = [name for name in sorted(needed) if name not in there.by_name]
        added = {param.name for param in there.params if not param.name.startswith(DENSE)} - needed
        if lacking or added:
            yield f"it lacks {', '.join(lacking) or 'nothing'}, and has {', '.join(sorted(added)) or 'nothing'} besides"
        dense = self.dense.schema
        for param in dense.params if not lacking else ():
            for label in param.sentence.labels:
                axes = {axis: dense.sizes[axis] for axis in param.sentence.piece_axes(label)}
                if "mlp" in axes:
                    axes |= {"experts": self.experts, "expert_mlp": axes.pop("mlp") // self.granularity}
                other = there[self._named(param.name)]
                found = {axis: there.sizes[axis] for axis in other.sentence.piece_axes(label)}
                if found != axes or other.layers != param.layers:
                    yield f"{other.name} is of {found}, and {axes} are there"

    @staticmethod
    def _named(name: str) -> str:
        """Return what the model with experts calls what is made of a dense weight."""
        return name.replace(DENSE, EXPERTS)


def upcycling(
    dense: ModelConfig,
    raw: Mapping[str, Any],
    *,
    experts: int,
    top_k: int,
    granularity: int = 1,
    family_name: str | None = None,
) -> Upcycling:
    """Return the way from a dense model to one with experts.

    Args:
        dense: The config of the dense model.
        raw: Its ``config.json``, of which the fields that change nothing stay.
        experts: The number of experts of each layer.
        top_k: The number of them that a token goes to.
        granularity: The number of slices of the hidden features.
        family_name: The family of the new model; None for that of :data:`WITH_EXPERTS`.

    Raises:
        ModelConfigError: everything that keeps the new model from computing what the dense one does.
    """
    kind, hidden = _with_experts(dense, family_name), dense.sizes["mlp"]
    if hidden % granularity:
        divisors = ", ".join(str(n) for n in range(1, min(hidden, 64) + 1) if hidden % n == 0)
        reason = f"cannot cut mlp ({hidden}) into {granularity} slices: choose --granularity from {divisors}"
        raise ModelConfigError(dense.family, [reason])
    told, read = dense.to_hugging_face(), kind.readable()
    given = {field: value for field, value in raw.items() if field in HARMLESS and field not in read}
    given |= {field: value for field, value in told.items() if field in read}
    given |= {
        "num_experts_per_tok": top_k,
        kind.axes["experts"]: experts,
        kind.axes["expert_mlp"]: hidden // granularity,
    }
    given |= {field: True for field in ("norm_topk_prob",) if field in read}
    given |= {field: hidden for axis, field in kind.axes.items() if axis == "shared_mlp"}
    made = kind.from_hugging_face({**given, "model_type": kind.family})
    named = {"architectures", "model_type"} | read
    kept = {field: value for field, value in given.items() if field not in named}
    found = Upcycling(dense, {**made.to_hugging_face(), **kept}, granularity)
    if problems := list(found.problems()):
        raise ModelConfigError(dense.family, problems)
    return found


def _with_experts(dense: ModelConfig, name: str | None) -> type[ModelConfig]:
    """Return the kind of config of the new model."""
    if dense.labels:
        raise ModelConfigError(dense.family, ["its head scores sequences: take the language model that it was made of"])
    if "experts" in dense.sizes:
        raise ModelConfigError(dense.family, [f"it has {dense.sizes['experts']} experts already"])
    name = name or WITH_EXPERTS.get(dense.family)
    if name is None:
        known = ", ".join(f"{one} ({other})" for one, other in WITH_EXPERTS.items())
        raise ModelConfigError(
            dense.family, [f"no family here is {dense.family} with experts: there are some of {known}"]
        )
    if name not in FAMILIES:
        raise ModelConfigError(dense.family, [f"there is no family {name!r}{nearest(name, FAMILIES)}"])
    kind = family(name).config
    if "experts" not in kind.axes:
        raise ModelConfigError(dense.family, [f"{name} has no experts"])
    return kind
