"""The parts of a step by the plan, beside a traced one: by the speeds of a data sheet, or by those of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from megacore.config import Config
from megacore.devices import CPU_TFLOPS, DEVICES, SMALL_CPU, Device, device_of
from megacore.models.config import ModelConfig
from megacore.models.registry import configure
from megacore.planning.capacity import cpu_of
from megacore.planning.fit import fit, spelled
from megacore.planning.layout_choice import overrides
from megacore.planning.peak_memory import peaks
from megacore.planning.recipe_setting import alone, setting_of
from megacore.planning.run_plan import problems_on_paper
from megacore.planning.setting import Setting
from megacore.planning.step_time import Cluster, Estimate, estimate
from megacore.planning.traffic import SEND, traffic
from megacore.recipe import ConfigError, load
from megacore.recipe_yaml import flat
from megacore.say import brief
from megacore.training.diagnosis import BUBBLE, OPTIMIZER, PRODUCTS, RECOMPUTATION, StepSplit, axes_of
from megacore.training.traces import CPU, TracedStep

ABOVE = 1.2
"""Times what is planned, from which on a part takes longer."""
ROUNDS = 8
"""Rounds in which the speed of a link is found: messages have a latency too, and a part of them is hidden."""


def name_of(part: str) -> str:
    """Return what the plan calls a part of a traced step: it has messages by axis, those that stages send each other in
    the bubble, and all sums of gradients and parameters over other ranks than those of a pipeline as those of dp."""
    axes = axes_of(part)
    if not axes:
        return part
    if axes == ["pp"] and part.startswith("send"):
        return BUBBLE
    return f"messages of {axes[0] if axes in (['tp'], ['ep'], ['cp'], ['pp']) else 'dp'}"


def by_the_plan(found: StepSplit) -> Mapping[str, float]:
    """Return the seconds of a traced step by the names of the plan."""
    seconds = {PRODUCTS: 0.0}
    for each in found.parts:
        seconds[name_of(each.name)] = seconds.get(name_of(each.name), 0.0) + each.seconds
    return seconds


@dataclass(frozen=True)
class StepPlan:
    """A run on paper: its setting, and the devices that it runs on."""

    config: Config
    model: ModelConfig
    setting: Setting
    cluster: Cluster

    @classmethod
    def of(cls, config: Config, step: TracedStep, gpu: str | None = None, tflops: float | None = None) -> StepPlan:
        """Return the plan of a run. ``gpu``: its devices, as `megacore plan` names them; None for those of the table
        that the trace names; ``tflops``: the peak of their products, if it is known. Raises ModelConfigError: the model
        is that of a checkpoint which names no family; ValueError: there are no such devices."""
        model, kind = configure(config.model), "cpu" if step.device == CPU else "cuda"
        per_node = step.per_node or step.mesh.world
        device = _device(step.device, per_node) if gpu is None else device_of(gpu)
        device = replace(device, per_node=per_node)
        peak = tflops or (CPU_TFLOPS if device.peak == SMALL_CPU.peak else device.tflops(config.train.precision))
        setting = setting_of(config, model, step.mesh.world, kind)  # type: ignore[arg-type]
        return cls(config, model, setting, Cluster(device, peak))

    @cached_property
    def time(self) -> Estimate:
        return estimate(self.setting, self.cluster)

    @property
    def parts(self) -> Mapping[str, float]:
        """{part: its seconds in a step}."""
        time = self.time
        return {
            PRODUCTS: time.compute,
            RECOMPUTATION: time.recompute,
            BUBBLE: time.bubble,
            "messages of tp": time.tensor,
            "messages of ep": time.experts,
            "messages of cp": time.context,
            "messages of dp": max(0.0, time.data - self._summed),
            "messages of pp": self._summed,
            OPTIMIZER: time.optimizer,
        }

    @cached_property
    def _summed(self) -> float:
        """The seconds of sums over the stages of a pipeline: of a table at both ends. The plan has them among those of
        dp."""
        mesh = self.setting.layout.mesh
        rows = (
            [x for x in traffic(self.setting, stage) if x.axis == "pp" and x.kind != SEND] for stage in (0, mesh.pp - 1)
        )
        return min(self.time.data, max(self.cluster.seconds(mesh, row) for row in rows))

    def mfu(self, seconds: float) -> float:
        """Return the share of the peak that a step of so many seconds has of the model's own operations."""
        return self.time.model_tflop / seconds / self.cluster.tflops

    def as_measured(self, found: StepSplit) -> StepPlan:
        """Return the plan with devices whose products and memory, and links over which messages take longer than
        planned, are as fast as those of a traced step."""
        measured, plan = by_the_plan(found), self
        for _ in range(ROUNDS):
            device, planned = plan.cluster.device, plan.parts
            speed = planned[PRODUCTS] / measured[PRODUCTS] if measured[PRODUCTS] else 1.0
            device = replace(device, reach=device.reach * speed, bandwidth=device.bandwidth * speed)
            for dim in ("tp", "ep", "cp", "dp"):
                took, meant = (seconds.get(f"messages of {dim}", 0.0) for seconds in (measured, planned))
                if meant and took > ABOVE * meant:
                    link = "network" if plan.crosses(dim) else "link"
                    device = replace(device, **{link: getattr(device, link) * meant / took})
            plan = replace(plan, cluster=replace(plan.cluster, device=device))
        return plan

    def crosses(self, *axes: str) -> bool:
        """Return whether a group along some axes lies on several nodes."""
        return len({rank // self.cluster.device.per_node for rank in self.setting.layout.mesh.along(0, *axes)}) > 1

    def fits(self, changes: str) -> bool:
        """Return whether a run could be made with these overrides: no rule is against it, and there is memory."""
        try:
            made = load(self.config, changes.split())
        except ConfigError:
            return False
        world = self.setting.layout.mesh.world
        if problems_on_paper(made, world, self.model):
            return False
        try:
            setting = setting_of(made, self.model, world, self.setting.device)
        except ConfigError:  # the order of the pipeline is for other sizes
            return False
        return all(peak <= self.cluster.room for peak in peaks(setting))

    def best(self) -> tuple[str, float]:
        """Return the overrides of the layout that is fastest by this plan, and the share of a step that it saves."""
        base = setting_of(alone(self.config), self.model, 1, self.setting.device)
        found = fit(base, self.setting.layout.mesh.world, self.cluster, 1)
        if not found:
            return "", 0.0
        here = {key: spelled(value) for key, value in flat(asdict(self.config)).items()}
        wanted = {
            key: value for key, value in overrides(found[0], self.config).items() if spelled(value) != here.get(key)
        }
        return " ".join(f"{key}={value}" for key, value in wanted.items()), 1 - found[0].time.total / self.time.total


def _device(name: str, ranks: int) -> Device:
    """Return a device of the table by what its driver calls it; so many ranks share the memory of CPUs. Raises
    ValueError: the table has none that is called so."""
    if name == CPU:
        return cpu_of(ranks)
    found = next((each for each in DEVICES.values() if each.peak in name), None)
    if found is None:
        raise ValueError(
            f"the table has no {brief(name)}: name a device that comes near it with --gpu, of {', '.join(DEVICES)}"
        )
    return found
