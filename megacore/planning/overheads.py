"""The costs of a run on a cluster beside its steps: starting, saving, resuming, its data, and connections.

Nothing here is a formula of its own: who writes and reads what, which groups are made and what the data holds is asked
of the code that does it, for all ranks.
"""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megacore import open_files
from megacore import rank_hierarchy as levels
from megacore.checkpoints import KEPT_IN_MEMORY
from megacore.config import Config
from megacore.data.batches import HELD, Batches
from megacore.data.blend import Blend
from megacore.data.indexed import IndexedDataset, Integers
from megacore.data.samples import BLOCKS, Source, parts
from megacore.models import names
from megacore.parallel.rank_sets import (
    TOKENS,
    RankSet,
    Rounds,
    across,
    channel_kinds,
    copy_dims,
    divided,
    of_context,
    of_copies,
    of_matrices,
    of_mesh,
    parts_of_dp,
)
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.pattern import Sizes
from megacore.parallel.weights.transfer import Stored, native
from megacore.planning.setting import Setting
from megacore.planning.step_time import Cluster
from megacore.store.tensor_files.shares import share_out, share_reads
from megacore.store.weight_folders.index import (
    EMA,
    KINDS,
    MASTER,
    MOMENTS,
    OUTER,
    RESIDUAL,
    ROUND_STATES,
    STATES,
    on_disk,
)

WEIGHTS = STATES[0]
STORAGE_OF_A_DEVICE = 2e12 / 16384
"""Bytes/s of the shared storage for each device, where nothing is said: 2 TB/s for 16,384 GPUs, sustained, is what
Llama 3 was trained with (arXiv 2407.21783, 3.3.1)."""
STORAGE_OF_A_NODE = 4e9
"""Bytes/s between a node and the storage, where nothing is said: an assumption, half of the 8 GB/s that vendors'
reference designs give a node for reading."""
COMMUNICATOR_S, COMMUNICATOR_RANK_S = 2.0, 0.01
"""Seconds that NCCL takes to make a communicator, and for each of its ranks. An order of magnitude: 8 communicators of
8 ranks took 16.3 s (github.com/NVIDIA/nccl/issues/534), and thousands of ranks 2.5 minutes (issues/1156)."""
COMMUNICATOR = 500_000_000
"""Bytes that it takes for one, beside what torch allocates. It depends on links and versions, and nothing here has
measured it: others have seen 0.54 to 0.69 GB on an A100 with NVLink (github.com/NVIDIA/nccl/issues/964)."""
FEW = 2.0
"""A save is written by too few where it takes so many times as long as if all nodes wrote."""


@dataclass(frozen=True)
class Storage:
    """The storage of checkpoints: bytes/s for all together, and for each node."""

    total: float
    per_node: float

    @classmethod
    def of(cls, world: int, total: float | None, per_node: float | None) -> Storage:
        """Return the storage as it is given; else as the assumptions above have it, for one node at least."""
        per_node = per_node or STORAGE_OF_A_NODE
        return cls(total or max(world * STORAGE_OF_A_DEVICE, per_node), per_node)

    def seconds(self, everything: float, busiest_node: float) -> float:
        return max(everything / self.total, busiest_node / self.per_node)


@dataclass(frozen=True)
class StartUp:
    """The groups of the rank that has most: the calls that make them, those it talks in, NCCL's communicators for them
    (a pair of stages has one for each direction), the ranks of the largest, and the seconds until all are connected,
    which are known of NCCL's alone."""

    calls: int
    groups: int
    communicators: int
    largest: int
    seconds: float | None


@dataclass(frozen=True)
class Save:
    """One checkpoint: bytes of its tensors, its files, the ranks that write some and their nodes, the bytes of the rank
    that writes most, which keeps as many in host memory, and of the node that does, the seconds until all is written,
    and the seconds of training from one to the next; None where none is."""

    size: int
    files: int
    writers: int
    nodes: int
    busiest: int
    busiest_node: int
    seconds: float
    interval: float | None


@dataclass(frozen=True)
class Resume:
    """Going on from it on the same layout: bytes of the states that are loaded, each element once, those that all ranks
    read, one rank and one node at the most, those that the fullest rank gets from others, and the seconds until all
    have everything: reading and sending go on side by side."""

    size: int
    read: int
    busiest: int
    busiest_node: int
    received: int
    seconds: float


@dataclass(frozen=True)
class Data:
    """Bytes of host memory that the data takes in each rank, whatever the corpus: ``order`` for the order of samples,
    ``batches`` for what is prepared ahead."""

    order: int
    batches: int


@dataclass(frozen=True)
class Connections:
    """The connections of the rank that has most: sockets to others, files that are open at once at the most, and the
    soft and the hard limit of that on this machine."""

    sockets: int
    files: int
    soft: int
    hard: int


@dataclass(frozen=True)
class Overheads:
    """All of it. ``data`` is None where it is of examples, whose number is known when they are prepared; ``in_memory``
    has the bytes of memory that a node needs for checkpoints in memory, None where there are none: the newest of its
    own ranks and of its partner's, and a copy of the state that they are written from."""

    ranks: int
    nodes: int
    storage: Storage
    start: StartUp
    save: Save
    in_memory: int | None
    resume: Resume
    data: Data | None
    connections: Connections

    @classmethod
    def of(cls, config: Config, setting: Setting, cluster: Cluster, step_s: float, storage: Storage) -> Overheads:
        """Return the costs of a recipe, a step of which takes so many seconds."""
        world, per_node = setting.layout.mesh.world, cluster.device.per_node
        every, nodes = config.checkpoint.every, -(-world // per_node)
        save = save_of(setting, per_node, storage, every * step_s if every else None)
        copies = 1 + KEPT_IN_MEMORY * (1 if nodes == 1 else 2)
        of_examples = bool(config.data.train) and config.data.train[0].has_examples
        return cls(
            world,
            nodes,
            storage,
            start_up(setting, per_node),
            save,
            copies * save.busiest_node if config.recovery.memory else None,
            _resume(setting, cluster, storage),
            None if of_examples else _data(config, setting),
            _connections(setting, per_node),
        )

    def warnings(self) -> Iterator[str]:
        """Yield warnings of what will fail or take long, each with a way out."""
        save, storage = self.save, self.storage
        if save.interval is not None and save.seconds > save.interval:
            yield (
                f"a save takes {save.seconds:,.0f} s, and the next is due after {save.interval:,.0f} s of training: "
                f"raise checkpoint.every, or give it faster storage than {storage.total / 1e9:,.0f} GB/s in all and "
                f"{storage.per_node / 1e9:,.0f} GB/s for a node"
            )
        by_all = storage.seconds(save.size, save.size / self.nodes)
        if save.seconds > FEW * by_all:
            yield (
                f"few write: {save.writers:,} of {self.ranks:,} ranks, on {save.nodes:,} of {self.nodes:,} nodes; a "
                f"save takes {save.seconds:,.1f} s where it would take {by_all:,.1f} s if all nodes wrote alike: "
                "choose more data parallel ranks and less tp x pp"
            )
        yield from open_files.problems(self.connections.files)


# -- who does what


def _states(setting: Setting) -> dict[str, int]:
    """Return {state of a checkpoint: bytes of an element}."""
    widths = setting.widths
    others = {MASTER: widths.master, **dict.fromkeys(MOMENTS, widths.moments // len(MOMENTS)), EMA: widths.average}
    others |= dict.fromkeys(ROUND_STATES, widths.outer // 2)
    others[RESIDUAL] = widths.gradient * (setting.compress == "int8")
    return {WEIGHTS: widths.parameter, **{state: width for state, width in others.items() if width}}


def _lacking(setting: Setting) -> Mapping[str, frozenset[str]]:
    """Return {state: the tensors that have none}."""
    frozen = setting.frozen
    whole = frozenset(names.matrices(setting.model.schema)) if setting.muon_steps else frozenset[str]()
    _, second = MOMENTS
    return {**dict.fromkeys(KINDS, frozen), WEIGHTS: frozenset(), second: frozen | whole}


def _writes(state: str, replica: int) -> bool:
    """Return whether a replica that takes steps alone has a state to write: the first has those of all too."""
    return not replica or state not in (WEIGHTS, MASTER, OUTER)


def _busiest(by_rank: Mapping[int, int], per_node: int) -> tuple[int, int, int, int]:
    """Return how many ranks and nodes have some bytes, and the most that one rank and one node has."""
    by_node = Counter[int]()
    for rank, size in by_rank.items():
        by_node[rank // per_node] += size
    writers, nodes = (sum(size > 0 for size in each.values()) for each in (by_rank, by_node))
    return writers, nodes, max(by_rank.values()), max(by_node.values())


def save_of(setting: Setting, per_node: int, storage: Storage, interval: float | None) -> Save:
    """Return the costs of a save as `megacore.training.save` does it: weights of everything, other states of what is
    trained."""
    layout = replace(setting.layout, schema=setting.tuning.kept(setting.model.schema))
    disk, states, lacking = on_disk(layout), _states(setting), _lacking(setting)
    by_rank, files = Counter[int](), 0
    own_width = states.pop(RESIDUAL, 0)
    for replica, ranks in _together(setting):
        stored = list(native(disk, [disk.mesh.rank(replace(layout.mesh.place(ranks[0]), dp=0, cp=0))]))
        held = {
            state: own
            for state, width in states.items()
            if _writes(state, replica)
            and (own := [(each, width) for each in stored if each.name not in lacking[state]])
        }
        for rank, share in zip(ranks, share_out(disk, held, len(ranks)), strict=True):
            files += len(share)
            by_rank[rank] += sum(states[own.state] * math.prod(each.shape) for own in share for each in own.tensors)
            if left := own_width * sum(math.prod(each.shape) for each in stored if each.name not in lacking[RESIDUAL]):
                files, by_rank[rank] = files + 1, by_rank[rank] + left
    writers, nodes, busiest, busiest_node = _busiest(by_rank, per_node)
    seconds = storage.seconds(by_rank.total(), busiest_node)
    return Save(by_rank.total(), files, writers, nodes, busiest, busiest_node, seconds, interval)


def _resume(setting: Setting, cluster: Cluster, storage: Storage) -> Resume:
    """Return the costs of a resume as `megacore.training.initial_state` does it: masters of what is trained, other
    weights, then moments."""
    layout, states, lacking = setting.layout, _states(setting), _lacking(setting)
    by_rank, held, residuals = Counter[int](), Counter[int](), Counter[int]()
    sizes, part = layout.schema.sizes, _of_replica(layout.mesh, setting.alone)
    parts, first = parts_of_dp(layout.mesh, setting.alone), MASTER if MASTER in states else WEIGHTS

    def loaded(stored: Sequence[Stored]) -> Iterator[tuple[str, list[Stored]]]:
        """Yield what is loaded of each state."""
        yield first, [each for each in stored if each.name not in lacking[MASTER]]
        yield WEIGHTS, [each for each in stored if each.name in lacking[MASTER]]
        for state in (*STATES[2:], *ROUND_STATES):
            if state in states:
                yield state, [each for each in stored if each.name not in lacking[state]]

    for replica, ranks in _together(setting):
        stored, place = list(native(layout, [ranks[0]])), parts[replica].index(ranks[0])
        for state, tensors in loaded(stored):
            held.update(dict.fromkeys(ranks, states[state] * sum(_unpadded(each, sizes) for each in tensors)))
            by_dims = dict[tuple[str, ...], list[Stored]]()
            for each in tensors:
                by_dims.setdefault(copy_dims(layout.schema[each.param], layout.split), []).append(each)
            for dims, copied in by_dims.items():
                sharing = part.along(place, *dims)
                for _, slices in share_reads(copied, len(sharing)) if place == sharing[0] else ():
                    for each, reader in slices:
                        by_rank[parts[replica][sharing[reader]]] += states[state] * _unpadded(each, sizes)
        own = [each for each in stored if each.name not in lacking[RESIDUAL]]
        residuals.update(dict.fromkeys(ranks, states.get(RESIDUAL, 0) * sum(_unpadded(each, sizes) for each in own)))
    received = max(held[rank] - by_rank[rank] for rank in held)
    by_rank += residuals  # each reads its own
    once = list(native(replace(layout, mesh=MeshShape(), layers=(sum(layout.layers),), placement="loop"), [0]))
    size = residuals.total() + sum(
        states[state] * sum(math.prod(each.shape) for each in tensors)
        for replica in range(setting.alone)
        for state, tensors in loaded(once)
        if _writes(state, replica)
    )
    _, _, busiest, busiest_node = _busiest(by_rank, cluster.device.per_node)
    reading = storage.seconds(by_rank.total(), busiest_node)
    slowest = min(cluster.bandwidth(layout.mesh, " x ".join(dims)) for dims in (("dp", "cp"), TOKENS))
    seconds = max(reading, received / slowest)
    return Resume(size, by_rank.total(), busiest, busiest_node, received, seconds)


def _together(setting: Setting) -> Iterator[tuple[int, RankSet]]:
    """Yield (a replica, ranks of it) of ranks along dp and cp, which write together."""
    mesh = setting.layout.mesh
    for replica, part in enumerate(parts_of_dp(mesh, setting.alone)):
        for ranks in _of_replica(mesh, setting.alone).all_along("dp", "cp"):
            yield replica, tuple(part[rank] for rank in ranks)


def _of_replica(mesh: MeshShape, alone: int) -> MeshShape:
    """Return the mesh of one of the replicas that take steps alone."""
    return replace(mesh, dp=mesh.dp // alone)


def _unpadded(stored: Stored, sizes: Sizes) -> int:
    """Return the number of elements that there are: a box may run past its axis."""
    elements = math.prod(stored.shape)
    for axis, (start, stop) in stored.box.items():
        elements = elements * (min(stop, max(start, sizes[axis])) - start) // (stop - start)
    return elements


# -- who talks to whom


def _rounds(setting: Setting) -> list[list[RankSet]]:
    """Return the sets that get groups of the device's kind, in the calls that make them: of the mesh, of those that
    share gradients and state, and of those that read copies together."""
    mesh, alone, rounds = setting.layout.mesh, setting.alone, Rounds()
    layout = replace(setting.layout, mesh=_of_replica(mesh, alone))
    shared = divided(layout, None if setting.shard == "none" else setting.replicas // alone)
    inner = of_context(layout.mesh, setting.context.heads)
    whole = of_matrices(layout) if setting.muon_steps else ()
    batches = [*of_mesh(layout.mesh, setting.has_experts), inner, shared, *whole, *of_copies(layout)]
    if alone > 1:
        parts = parts_of_dp(mesh, alone)
        batches = [[tuple(part[rank] for rank in ranks) for ranks in sets for part in parts] for sets in batches]
        batches = [*of_mesh(mesh), *batches, across(parts)]
    return [each for sets in batches for each in rounds.new(sets)]


def _on_hosts(setting: Setting, per_node: int) -> list[list[RankSet]]:
    """Return the levels of :class:`megacore.control.Control`; on one machine of CPUs the world's own group does."""
    world = setting.layout.mesh.world
    return [] if setting.device == "cpu" and world <= per_node else list(levels.by_level(world, per_node))


def start_up(setting: Setting, per_node: int) -> StartUp:
    """Return what making the groups of a run takes, on nodes of so many devices."""
    mesh, rounds = setting.layout.mesh, _rounds(setting)
    most = max(Counter(rank for sets in rounds for ranks in sets for rank in ranks).values(), default=0)
    on_hosts, channels = len(_on_hosts(setting, per_node)), 2 * channel_kinds(mesh.pp)
    made = [sets for sets in rounds if len(sets[0]) < mesh.world]  # the world has its group already
    largest = [max(map(len, sets)) for sets in rounds] + [mesh.pp] * channels
    seconds = sum(COMMUNICATOR_S + COMMUNICATOR_RANK_S * ranks for ranks in largest)
    return StartUp(
        len(made) + channels + on_hosts,
        most + channels + on_hosts,
        most + 4 * (mesh.pp > 1),
        max(largest, default=1),
        seconds if setting.device == "cuda" else None,
    )


def _connections(setting: Setting, per_node: int) -> Connections:
    """Return the sockets of hosts: NCCL opens its own few, which `open_files` counts among the rank's own files."""
    mesh, own = setting.layout.mesh, Counter[int]()
    groups = [ranks for sets in _on_hosts(setting, per_node) for ranks in sets]
    if setting.device == "cpu":
        groups += [ranks for sets in _rounds(setting) for ranks in sets]
        groups += mesh.all_along("pp") * (2 * channel_kinds(mesh.pp))
    for ranks in groups:
        for rank in ranks:
            own[rank] += len(ranks) - 1
    nodes = -(-mesh.world // per_node)
    soft, hard = open_files.limits()
    return Connections(max(own.values(), default=0), open_files.needed(mesh, setting.device, nodes), soft, hard)


# -- data


class _VirtualDataset(IndexedDataset):
    """Stands for a token file that need not be here: so many documents that more would take no more memory."""

    def __init__(self, length: int) -> None:
        self.documents, self.scattered, self._length = 2 * BLOCKS, "", length

    def start(self, document: int) -> int:
        return document * self._length

    def starts_within(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        return np.arange(-(-start // self._length) * self._length + self._length, stop, self._length)

    def tokens(self, start: int, stop: int) -> Integers:
        return np.zeros(stop - start, np.uint16)


def _data(config: Config, setting: Setting) -> Data:
    """Measure, with a stand-in for each corpus, the memory that Python and numpy take while its order is made and a
    microbatch is drawn, and that of the batches that are held at once."""
    data, length = config.data, setting.sequence_length
    corpora = (*data.train, *data.validation) or (None,)
    fraction = 0.0 if data.validation else data.validation_fraction
    stands_for = [_VirtualDataset(length) for _ in corpora]
    tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    made = [parts(dataset, length, data.seed, fraction, "corpus")[0] for dataset in stands_for]
    own: list[Source] = [*made[: max(1, len(data.train))]]
    source = own[0] if len(own) == 1 else Blend(own, [corpus.weight for corpus in data.train])
    micro = setting.micro_size
    (batch,) = Batches(source, micro, micro, 0, 1, data.within_documents).microbatches_from(0)
    _, peak = tracemalloc.get_traced_memory()
    if not tracing:
        tracemalloc.stop()
    size = sum(array.nbytes for array in (batch.tokens, batch.labels, batch.positions))
    return Data(peak - before - size, HELD * setting.microbatches * size)
