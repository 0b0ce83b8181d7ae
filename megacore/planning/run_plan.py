"""The function `megacore.plan`: what a recipe needs of memory, network, time and storage, before it is started."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from megacore.checks.rules import problems
from megacore.config import Config, CorpusConfig
from megacore.data.batches import in_vain
from megacore.devices import CPU_TFLOPS, device_of
from megacore.models.config import ModelConfig, active_parameters
from megacore.models.registry import configure
from megacore.planning.capacity import cpu_of
from megacore.planning.efficiency import LINKS
from megacore.planning.goodput import NODE_S, best_interval, goodput
from megacore.planning.overheads import Overheads, Storage
from megacore.planning.packed_documents import PackedMicrobatch, standing_out, with_documents
from megacore.planning.peak_memory import Load, Memory, loads, memory
from megacore.planning.recipe_setting import setting_of
from megacore.planning.setting import Setting
from megacore.planning.step_time import MARGIN, Cluster, Estimate, estimate
from megacore.planning.traffic import Traffic, traffic
from megacore.recipe import ConfigError, Recipe, load

CPU = "cpu"
BACK_S = 63.0
"""Seconds from a fault to new processes: an assumption, a minute for these and three seconds until it is known."""
AS_IN_THE_TABLE: Mapping[str, float] = MappingProxyType({})


def plan(
    recipe: Recipe,
    overrides: Sequence[str] = (),
    *,
    world: int | None = None,
    gpu: str = "h100-80",
    device: Mapping[str, float] = AS_IN_THE_TABLE,
    tflops: float | None = None,
    storage: float | None = None,
    storage_per_node: float | None = None,
    imbalance: float = 1.0,
    documents: str | None = None,
    mtbf: float | None = None,
) -> dict[str, Any]:
    """Plan what a recipe describes -> what ``megacore plan --json`` prints, in bytes and seconds. Nothing is started.

    Args:
        recipe: A file, the name of one that comes along, a mapping of its sections, or a :class:`megacore.Config`.
        overrides: Overrides of it, ``section.key=value``.
        world: Ranks; by default what the mesh needs.
        gpu: A name of `megacore.devices.DEVICES`, "cpu", or the file of a device that was measured
            (``benchmarks/gpu_first.py --sections calibration``).
        device: {field of `megacore.devices.Device`: what it is instead of the table's}, as ``{"memory": 94e9}``.
        tflops: The peak of matrix products in the recipe's precision, instead of the table's.
        storage, storage_per_node: Bytes/s of the shared storage, and between a node and it.
        imbalance: The rows that the experts of the fullest rank get, over the mean of all ranks.
        documents: The prefix of a token file, within whose documents attention stays.
        mtbf: Mean seconds from one fault of a node to the next; by default as Llama 3's of 8 devices.

    Raises:
        ConfigError, ModelConfigError: all that is wrong with the recipe.
        ModuleNotFoundError: there is no torch, which a block of the model is measured with.
    """
    config = load(recipe, overrides)
    cluster = cluster_of(gpu, config.train.precision, tflops, device, world or ranks_of(config))
    both = storage, storage_per_node
    return Plan.of(config, cluster, gpu == CPU, world, both, imbalance, documents, mtbf).as_data()


def ranks_of(config: Config) -> int:
    """Return the ranks that a mesh needs at the least."""
    return config.mesh.model_ranks * (config.mesh.dp or 1)


def cluster_of(
    name: str, precision: str, tflops: float | None, changed: Mapping[str, float], world: int = 1
) -> Cluster:
    """Return devices of the table or of a file, or CPUs, some of whose fields are others. Nodes with CPUs have the
    memory of this machine, which their ranks share. Raises ConfigError: there is no such device."""
    try:
        device = cpu_of(min(world, int(changed.get("per_node", world)))) if name == CPU else device_of(name)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    peak = tflops or (CPU_TFLOPS if name == CPU else device.tflops(precision))
    return Cluster(replace(device, **changed), peak)  # type: ignore[arg-type]  # per_node is a whole number


@dataclass(frozen=True)
class Survival:
    """The share of the time that a run keeps under faults, a node's every ``node_s`` seconds: with its own checkpoints,
    in memory or on disk, one after every ``interval`` seconds of training that stops it for ``stall`` (None where it
    has none), and from disk alone at the ``best_interval``."""

    node_s: float
    share: float | None
    in_memory: bool
    interval: float | None
    stall: float
    best_share: float
    best_interval: float

    @classmethod
    def of(
        cls, config: Config, setting: Setting, cluster: Cluster, beside: Overheads, step_s: float, node_s: float | None
    ) -> Survival:
        """Return what becomes of a recipe, a step of which takes so many seconds. In memory counts on several nodes
        alone: one that is lost takes its own along."""
        node_s = node_s or NODE_S * 8 / cluster.device.per_node
        mesh, device, save = setting.layout.mesh, cluster.device, beside.save
        rate, background = beside.nodes / node_s, config.checkpoint.background
        restart, copy = BACK_S + (beside.start.seconds or 0.0) + beside.resume.seconds, save.busiest / device.host
        if setting.shard != "none":  # replicas send each other what each has of the tensors that one of them writes
            copy += save.size * mesh.dp * mesh.cp / mesh.world / (cluster.bandwidth(mesh, "dp x cp") * LINKS)
        stall, publish = (copy, save.seconds) if background else (save.seconds, 0.0)
        best = max(best_interval(rate, stall), step_s, publish - stall)
        at_best, interval, share = goodput(rate, best, stall, publish, restart), save.interval, None
        if in_memory := config.recovery.memory and beside.nodes > 1:
            send, saves = save.busiest / min(device.network * LINKS, device.host), stall / interval if interval else 0.0
            interval = math.ceil(max(copy / config.recovery.overhead, send) / step_s) * step_s
            share = goodput(rate, interval, copy, send, restart) / (1 + saves)
        elif interval is not None:
            share = goodput(rate, interval, stall, publish, restart)
        return cls(node_s, share, in_memory, interval, copy if in_memory else stall, at_best, best)


@dataclass(frozen=True)
class Plan:
    """The plan of a run: all that is known of it on paper."""

    setting: Setting
    cluster: Cluster
    memory: tuple[Memory, ...]
    loads: tuple[Load, ...]
    traffic: tuple[tuple[Traffic, ...], ...]
    time: Estimate
    overheads: Overheads
    survival: Survival
    packed: tuple[PackedMicrobatch, ...] = ()

    @classmethod
    def of(
        cls,
        config: Config,
        cluster: Cluster,
        on_cpus: bool,
        world: int | None = None,
        storage: tuple[float | None, float | None] = (None, None),
        imbalance: float = 1.0,
        documents: str | None = None,
        mtbf: float | None = None,
    ) -> Plan:
        """Return the plan of a recipe; the other arguments, and the errors, are those of :func:`plan`."""
        model, world = configure(config.model, config.scores), world or ranks_of(config)
        if found := problems_on_paper(config, world, model):
            raise ConfigError(found)
        setting = replace(setting_of(config, model, world, "cpu" if on_cpus else "cuda"), imbalance=imbalance)
        setting, microbatches = with_documents(setting, documents, config.data.seed)
        time = estimate(setting, cluster)
        beside = Overheads.of(config, setting, cluster, time.total, Storage.of(world, *storage))
        return cls(
            setting,
            cluster,
            memory(setting),
            loads(setting),
            tuple(traffic(setting, stage) for stage in range(setting.layout.mesh.pp)),
            time,
            beside,
            Survival.of(config, setting, cluster, beside, time.total, mtbf),
            standing_out(setting, microbatches, cluster) if microbatches else (),
        )

    @property
    def fullest(self) -> Memory:
        return max(self.memory, key=lambda each: each.peak)

    @property
    def fits(self) -> bool:
        return self.fullest.peak <= self.cluster.room and self.host <= self.cluster.host_room

    @property
    def host(self) -> int:
        """The most bytes of host memory that a rank takes."""
        return max(each.host for each in self.memory)

    @property
    def in_a_sentence(self) -> str:
        """Of which peak the MFU is, and what most of a step is spent on."""
        time, spent = self.time, dict(self.time.spent)
        products = spent.pop("products") / time.total
        most = max(spent, key=lambda each: spent[each])
        mfu = time.tflops_per_device / self.cluster.tflops
        return (
            f"The MFU of {mfu:.1%} is of {self.cluster.peak}: {products:.0%} of a step are products, and of the rest "
            f"most is {most} ({spent[most] / time.total:.0%})."
        )

    def warnings(self) -> Iterator[str]:
        share = self.cluster.device.host_memory / 1e9
        if self.host > self.cluster.host_room:
            yield (
                f"memory: {self.host / 1e9:,.2f} GB of each rank do not fit its {share:,.2f} GB of host memory less "
                f"{MARGIN:.0%}: --fit looks for what does"
            )
        if self.fullest.peak > self.cluster.room:
            yield (
                f"memory: {self.fullest.peak / 1e9:,.2f} GB do not fit {self.cluster.device.memory / 1e9:,.2f} GB less "
                f"{MARGIN:.0%}: --fit looks for what does"
            )
        yield from in_vain(self.setting.sequences, self.setting.micro_size, self.setting.layout.mesh.data)
        for each in self.packed:
            if each.peak > self.cluster.room:
                yield (
                    f"documents: the microbatch with {each.which} takes {each.peak / 1e9:,.2f} GB, which do not fit: "
                    "choose context.balance=auto, or more mesh.cp"
                )
        yield from self.overheads.warnings()

    def as_data(self) -> dict[str, Any]:
        s, mesh = self.setting, self.setting.layout.mesh
        return {
            "parameters": s.model.schema.parameters,
            "active": active_parameters(s.model),
            "trained": s.tuning.trained(s.model.schema),
            "mesh": {dim: mesh[dim] for dim in mesh.DIMS},
            "layers": s.layout.layers,
            "schedule": s.schedule,
            "microbatches": s.microbatches,
            "blank_sequences": s.blank,
            "tokens_of_a_microbatch": s.tokens,
            "bytes_of_an_element": asdict(s.widths),
            "shard": s.shard,
            "recompute": s.recompute,
            "compress_activations": s.compress_activations,
            "context": asdict(s.context),
            "memory": [asdict(m) | {"peak": m.peak, "largest": m.largest} for m in self.memory],
            "imbalance": s.imbalance,
            "loads": [asdict(load) for load in self.loads],
            "documents": [asdict(each) for each in self.packed],
            "traffic": [[asdict(x) | {"sent": x.sent} for x in row] for row in self.traffic],
            "time": self.time.as_data(self.cluster),
            "beside": asdict(self.overheads),
            "survival": asdict(self.survival),
            "warnings": list(self.warnings()),
            "in_a_sentence": self.in_a_sentence,
        }


def problems_on_paper(config: Config, world: int, model: ModelConfig) -> list[str]:
    """Return the problems of the numbers; where data and models lie and what this machine has does not matter here."""
    stand_in = CorpusConfig("-" if config.preference is None else "-.jsonl")
    named = replace(config, data=replace(config.data, train=config.data.train or (stand_in,)))
    if config.lora is not None:
        named = replace(named, checkpoint=replace(config.checkpoint, init=config.checkpoint.init or "-"))
    return problems(named, world, model, gpus=world, local_ranks=world)
