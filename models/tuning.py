"""A tuning says what of a model is trained: all of it, some of its weights, or adapters beside them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megacore.models import lora, names
from megacore.models.lora import Lora
from megacore.parallel.enum_errors import BaseDtype
from megacore.parallel.weights.block_formats import block_problems
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.schema import Schema, Split


@dataclass(frozen=True)
class Tuning:
    """The weights of a model that are trained.

    Args:
        lora: Adapters, which are trained alone or with a head of scores; None for none.
        only: Patterns of the tensors that are trained; None for all.
        freeze: Patterns of the tensors that are not.
        projector: Whether the projector of a model that also sees is trained, where it has one here.
    """

    lora: Lora | None = None
    only: tuple[str, ...] | None = None
    freeze: tuple[str, ...] = ()
    projector: bool = False

    def schema(self, model: Schema) -> Schema:
        """Return what a run holds of a model."""
        return model if self.lora is None else lora.adapted(model, self.lora)

    def kept(self, model: Schema) -> Schema:
        """Return what a checkpoint of the run holds: of adapters these and what is trained beside them, else all."""
        return model if self.lora is None else lora.trained(model, self.lora)

    def frozen(self, model: Schema) -> frozenset[str]:
        """Return the tensors of a model that are not trained, by their names."""
        if self.lora is None:
            still = () if self.projector else (each for each in model.by_name if each.startswith(names.PROJECTOR))
            return names.frozen(model, self.only, self.freeze).union(still)
        return frozenset(name for name, _ in names.tensors(model)) - lora.in_full(model)

    def quantised(self, model: Schema) -> Mapping[str, BaseDtype]:
        """Return {weight: the format that it is held in} of what is held in fewer bits than the rest."""
        return {} if self.lora is None else lora.quantised(model, self.lora)

    def block_problems(self, model: Schema, mesh: MeshShape, split: Split) -> list[str]:
        """Return the weights whose blocks are cut, by their size or by a mesh that can split the model."""
        held = self.quantised(model)
        found = block_problems([model[name] for name in held], model.sizes, mesh, split)
        return [f"lora.base_dtype {self.lora.base_dtype}: {problem}" for problem in found] if self.lora else []

    def predicts(self, model: Schema) -> bool:
        """Return whether some of the layers that predict further tokens are trained."""
        predicting = [name for param in model.params if param.predicts for name in names.whole_names(model, param)]
        return bool(predicting) and not self.frozen(model).issuperset(predicting)

    def trained(self, model: Schema) -> int:
        """Return how many parameters are trained."""
        schema, still = self.schema(model), self.frozen(model)
        found = 0
        for param in schema.params:
            tensors = list(names.whole_names(schema, param))
            found += schema.numel(param) // len(tensors) * sum(name not in still for name in tensors)
        return found

    def problems(self, model: Schema) -> list[str]:
        """Return everything that is wrong with it for this model."""
        if self.lora is None:
            return names.problems(model, self.only, self.freeze)
        both = [
            f"train.{key} is for runs without adapters: lora trains its adapters alone; leave out one of them"
            for key, given in (
                ("only", self.only is not None),
                ("freeze", self.freeze),
                ("projector", self.projector),
            )
            if given
        ]
        return [*lora.problems(model, self.lora), *both]


EVERYTHING = Tuning()
