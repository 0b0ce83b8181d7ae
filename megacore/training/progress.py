"""The progress of a run: what ``trainer.json`` says beside the tensors of a checkpoint."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

from megacore.config import Config, MeshConfig
from megacore.data.samples import ORDER
from megacore.data.skipped import NONE, SampleRange, SkippedSamples, in_recipe, in_words
from megacore.parallel.weights.layout import MeshShape
from megacore.say import brief
from megacore.store.io.strict_json import StoreError

_FIELDS = {"step": "step", "samples": "consumed_samples", "tokens": "tokens", "updates": "optimizer_steps"}
"""{field of Progress: its name in the file}."""
_ORDER = "data_order"
"""The version of the order of the data that the samples are counted in."""
_SKIPPED = "skipped_samples"
DATA = "data"


@dataclass(frozen=True)
class Progress:
    """Counts since the run began, whatever it has been resumed with: the next step begins with the sample at the
    position ``samples`` of the run's order, from which ``skipped_samples`` are cut, and ``updates`` are the steps that
    have changed the weights. ``scaler`` is the state of the loss scale; None where losses are not scaled."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    updates: int = 0
    scaler: Mapping[str, Any] | None = None
    skipped_samples: SkippedSamples = NONE

    @property
    def skipped(self) -> int:
        return self.step - self.updates

    def at(self, step: int, config: Config, updates: int = 0, scaler: Mapping[str, Any] | None = None) -> Progress:
        """Return the progress at a later step of a run that goes on from here with this config."""
        samples = config.batch.sizes.after(self.samples, step - self.step)
        tokens = self.tokens + (samples - self.samples) * config.data.sequence_length
        return replace(self, step=step, samples=samples, tokens=tokens, updates=updates, scaler=scaler)

    def without(self, ranges: Iterable[SampleRange]) -> Progress:
        """Return the progress of a run that leaves out these samples too, from here on. Raises StoreError: it has been
        trained on some of them."""
        asked = SkippedSamples.of(ranges)
        if done := self.skipped_samples.left_out_by(asked, self.samples):
            raise StoreError(
                f"recovery.skip_samples ({in_recipe(asked)}): the run has been trained on samples {in_words(done)} by "
                f"step {self.step:,}: resume from a checkpoint before that, or leave out samples from "
                f"{self.skipped_samples.sample(self.samples):,} on"
            )
        return replace(self, skipped_samples=self.skipped_samples | asked)

    @classmethod
    def read(cls, tree: Mapping[str, Any], where: object) -> Progress:
        """Read the progress from a ``trainer.json``. Raises StoreError: a count is missing or none, the state of the
        loss scale is none, or the order of the data is another one."""
        wrong = [
            name
            for name in _FIELDS.values()
            if not isinstance(tree.get(name), int) or isinstance(tree[name], bool) or tree[name] < 0
        ]
        if wrong or not isinstance(tree.get("recipe"), dict):
            raise StoreError(f"{where}: has no {' and no '.join([*wrong, *([] if 'recipe' in tree else ['recipe'])])}")
        scaler = tree.get("scaler")
        if not is_scaler_state(scaler):
            raise StoreError(f"{where}: scaler is no state of a loss scale: {scaler!r:.80}")
        # The first one, of before the first release, had no number; of which no sample was taken, there is none.
        order = tree.get(_ORDER, 1 if tree["consumed_samples"] else ORDER)
        if type(order) is not int or order != ORDER:
            raise StoreError(
                f"{where}: {_ORDER} is {order!r:.80}, and this version has the samples in order {ORDER} alone: go on "
                "with the version of megacore that wrote it, or begin another run with its weights by checkpoint.init"
            )
        skipped = SkippedSamples.read(tree.get(_SKIPPED, []))
        if skipped is None:
            raise StoreError(f"{where}: {_SKIPPED} are no ascending ranges [a, b]: {brief(tree[_SKIPPED])}")
        counts = {field: tree[name] for field, name in _FIELDS.items()}
        return cls(**counts, scaler=scaler, skipped_samples=skipped)


def is_scaler_state(value: Any) -> bool:
    """Return whether this is a state of :meth:`~megacore.training.scaler.Scaler.state`."""
    match value:
        case None:
            return True
        case {"scale": float(scale), "good_steps": int(good)}:
            return math.frexp(scale)[0] == 0.5 and type(good) is int and good >= 0
    return False


def recipe(config: Config, mesh: MeshShape) -> dict[str, Any]:
    """Return the recipe of a run with the sizes of the mesh that it ran on."""
    return asdict(replace(config, mesh=MeshConfig(**{dim: mesh[dim] for dim in mesh.DIMS})))


def document(
    progress: Progress, lr: float, config: Config, mesh: MeshShape, data: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a ``trainer.json``; data: the identity of each corpus to train on.

    There is no state of random numbers: samples and masks are functions of the seeds in the recipe, the step and the
    sample. ``lr`` was the learning rate of the last step; the recipe says how it goes on.
    """
    return {
        **{name: getattr(progress, field) for field, name in _FIELDS.items()},
        _ORDER: ORDER,
        **({_SKIPPED: [list(each) for each in progress.skipped_samples]} if progress.skipped_samples else {}),
        DATA: list(data),
        "lr": lr,
        "scaler": progress.scaler,
        "recipe": recipe(config, mesh),
        "versions": {"python": platform.python_version(), "torch": version("torch")},
    }
