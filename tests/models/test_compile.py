"""Blocks of tensor parallel ranks under torch.compile: one graph, in which communication still runs beside products."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.testing._internal.distributed.fake_pg import FakeStore

from megacore.models.assemble import Model
from megacore.models.decoder import Microbatch
from megacore.models.lora import Lora
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.models.tuning import Tuning
from megacore.parallel import kernels
from megacore.parallel.context_split import ContextParallel
from megacore.parallel.kernels.activation import FUNCTIONS
from megacore.parallel.layers.fp8 import Fp8
from megacore.parallel.layers.linear import multiply_by
from megacore.parallel.layers.norm import LayerNorm, RMSNorm, SplitRMSNorm
from megacore.parallel.memory.recompute import Activations, Recompute
from megacore.parallel.mesh import Mesh
from megacore.parallel.parameters import WeightGradient
from megacore.parallel.weights.layout import MeshShape

TOKENS, EMBED = 64, 64


@dataclass(frozen=True)
class Case:
    """What blocks are made of, and how far numbers may be from those that are not compiled."""

    name: str
    tuning: Tuning = field(default_factory=Tuning)
    fp8: bool = False
    documents: tuple[int, ...] | None = None
    recompute: Recompute = "none"
    tolerance: float = 1e-12
    preset: str = "llama-tiny"
    layers: int = 2
    mlp_chunk: int | None = None
    offload: bool = False


EXPERTS = Case("experts", preset="mixtral-tiny")
CHUNKED = Case("chunked", mlp_chunk=20)
OFFLOADED = Case("offloaded", recompute="full", offload=True)
# Its latents are made by linears that every rank holds.
LATENT = Case("latent", preset="deepseek_v3-tiny", layers=1)
BLOCKS = Case("blocks", preset="deepseek_v4-tiny", layers=4, tolerance=1e-11)
UNLIKE = Case("unlike", preset="deepseek_v3-tiny", layers=3, recompute="full")
LATENT_FP8 = Case("latent-fp8", preset="deepseek_v3-tiny", layers=1, fp8=True, tolerance=0.1)
CASES = [
    Case("plain"),
    Case("selective", documents=(20, 12, 32), recompute="selective"),
    # Where sums are rounded otherwise, so are some of the numbers in fp8.
    Case("lora-fp8", Tuning(lora=Lora(4, 8.0, ("*",))), True, (5, 27, 32), "full", tolerance=0.1),
]


@dataclass
class Graphs:
    """What the compiler is given, run as it is."""

    forward: list[fx.Graph] = field(default_factory=list)
    backward: list[fx.Graph] = field(default_factory=list)

    @property
    def backend(self) -> Callable[..., Any]:
        def taken(graphs: list[fx.Graph]) -> Callable[..., Any]:
            def compiler(module: fx.GraphModule, inputs: Any) -> Any:
                graphs.append(module.graph)
                return make_boxed_func(module.forward)

            return compiler

        backend: Callable[..., Any] = aot_autograd(
            fw_compiler=taken(self.forward),
            bw_compiler=taken(self.backward),
            partition_fn=min_cut_rematerialization_partition,  # the real compiler's
        )
        return backend


@contextmanager
def compiling_with(backend: Callable[..., Any]) -> Iterator[None]:
    real = torch.compile
    torch.compiler.reset()
    counters.clear()
    with patch.object(torch, "compile", lambda forward, options: real(forward, backend=backend)):
        yield
    torch.compiler.reset()


def gradients(case: Case, mesh: Mesh, dtype: torch.dtype, compiled: bool, handed: bool = False) -> list[Tensor]:
    """Of the input of some blocks, and of what is trained; linears hand theirs on where ``handed``."""
    config = configure({"preset": case.preset, "num_hidden_layers": case.layers})
    layout = layout_of(config, mesh.shape, tuning=case.tuning)
    activations = Activations(case.recompute, case.offload, case.mlp_chunk)
    model = Model.create(config, layout, mesh, dtype, activations=activations, tuning=case.tuning)
    model.parameters.initialise(0)
    for name, parameter in model.parameters.items():
        if name.endswith("lora_b"):  # they start as zeros, and no gradient would reach their As
            nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(1))
    (chunk,) = model.chunks
    if case.fp8:
        multiply_by(Fp8.on(mesh.device), chunk.layers.modules())
    if compiled:
        model.compile()
    if handed:
        model.hand_weight_gradients(_take)
    tokens, positions = torch.zeros(TOKENS, dtype=torch.int64), torch.arange(TOKENS // 2).repeat(2)
    drawn = torch.randn(TOKENS // mesh.shape.tp, config.width, generator=torch.Generator().manual_seed(2))
    x = drawn.to(dtype).requires_grad_()
    microbatch = Microbatch(tokens, tokens, positions, 2, tuple(x.shape), documents=case.documents)
    chunk.run(chunk.layers.values(), x, chunk.context(microbatch)).square().sum().backward()
    return [leaf.grad for leaf in (x, *chunk.parameters()) if leaf.grad is not None]


def _take(parameter: nn.Parameter, gradient: WeightGradient | Tensor) -> None:
    parameter.grad = gradient if isinstance(gradient, Tensor) else gradient.make()


@pytest.fixture
def fake_mesh() -> Iterator[Mesh]:
    """Of rank 0 of two that tensors are split over; the other one answers nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield Mesh.create(MeshShape(tp=2))
    dist.destroy_process_group()


def calls(graph: fx.Graph) -> list[str]:
    return [node.target.__name__.partition(".")[0] for node in graph.nodes if node.op == "call_function"]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blocks_are_one_graph(fake_mesh: Mesh, case: Case) -> None:
    graphs = Graphs()
    with compiling_with(graphs.backend):
        gradients(case, fake_mesh, torch.bfloat16, compiled=True)
        assert not counters["graph_break"], dict(counters["graph_break"])
    (there,), (back,) = graphs.forward, graphs.backward
    # What column-parallel products have gathered is not kept: for the gradients of two weights it is gathered again.
    assert calls(back).count("all_gather_after") == 2
    assert calls(there).count("all_gather_into_tensor") == (4 if case.tuning.lora else 2)


@pytest.mark.in_turn(3, 1)
def test_a_matrix_that_is_quantised_is_not_kept() -> None:
    """The backward dequantises it once more."""
    graphs, tuning = Graphs(), Tuning(lora=Lora(4, 8.0, ("attn",), base_dtype="nf4"))
    with compiling_with(graphs.backend):
        gradients(Case("nf4", tuning, preset="opt-tiny", layers=1), Mesh.single(), torch.bfloat16, compiled=True)
    assert [calls(graph).count("dequantise_after") for graph in (*graphs.forward, *graphs.backward)] == [4, 4]


@pytest.mark.in_turn(4, 3)
def test_experts_are_left_out_of_the_graphs() -> None:
    """But attention is in them, and the norms."""
    graphs = Graphs()
    with compiling_with(graphs.backend):
        gradients(EXPERTS, Mesh.single(), torch.bfloat16, compiled=True)
    there = [name for graph in graphs.forward for name in calls(graph)]
    assert there.count("mm") == 2 and not {"sort", "topk", "_embedding_bag", "_grouped_mm"} & set(there)


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("handed", [False, True])
def test_collectives_of_the_backward_run_beside_products(fake_mesh: Mesh, handed: bool) -> None:
    """As they are written: each gather of an input, and each scatter of its gradient, has a product to hide behind,
    one in the graph or one that is handed on."""
    graphs = Graphs()
    with compiling_with(graphs.backend):
        gradients(CASES[0], fake_mesh, torch.bfloat16, True, handed)
    (graph,) = graphs.backward
    names, nodes = calls(graph), [node for node in graph.nodes if node.op == "call_function"]
    beside = []
    for start, (name, node) in enumerate(zip(names, nodes, strict=True)):
        if name in ("all_gather_after", "reduce_scatter_tensor"):
            (wait,) = node.users
            between = Counter(names[start : nodes.index(wait)])
            beside.append(between["mm"] + between["with_effects"])
    assert beside == [1, 1] * 2 and names.count("with_effects") == 4 * handed


def compared(case: Case) -> float:
    """The largest distance between gradients with the compiler and without, relative to their sizes."""
    mesh, dtype = Mesh.create(MeshShape(tp=2)), torch.float32 if case.fp8 else torch.float64
    with compiling_with(Graphs().backend):
        pairs = zip(gradients(case, mesh, dtype, True, handed=True), gradients(case, mesh, dtype, False), strict=True)
        return max(float((mine - want).norm() / want.norm()) for mine, want in pairs)


@pytest.mark.in_turn(16)
@pytest.mark.parametrize(
    "case", [*CASES, EXPERTS, CHUNKED, OFFLOADED, LATENT, LATENT_FP8, BLOCKS], ids=lambda case: case.name
)
def test_compiled_ranks_compute_the_same(pool: Pool, case: Case) -> None:
    assert max(pool.run(2, compared, case)) < case.tolerance


@pytest.mark.in_turn(4, 2)
def test_layers_that_differ_are_computed_again_as_they_were() -> None:
    """What is compiled of a block of experts, up to them, runs for a dense one too."""
    with compiling_with(Graphs().backend):
        mine, want = (gradients(UNLIKE, Mesh.single(), torch.float64, compiled) for compiled in (True, False))
        assert len(mine) == len(want)
        pairs = zip(mine, want, strict=True)
        assert all((one - other).norm() <= UNLIKE.tolerance * other.norm() for one, other in pairs)


# -- a context over many ranks

PACKINGS = [(64, 64), (20, 44, 64), (1, 2, 3, 58, 30, 34), (5, 59, 32, 32)]


def over_cp(context: ContextParallel, mesh: Mesh, dtype: torch.dtype, compiled: bool) -> list[Tensor]:
    """The gradients of the input of a block, of each packing, and the sums of its parameters' ones."""
    config = configure({"preset": "llama-tiny", "num_hidden_layers": 1})
    model = Model.create(config, layout_of(config, mesh.shape), mesh, dtype, context=context)
    model.parameters.initialise(0)
    (chunk,), found = model.chunks, list[Tensor]()
    if compiled:
        model.compile()
    for documents in PACKINGS:
        split = context.split(documents, TOKENS)
        own = torch.from_numpy(split.indices(mesh.place.cp))
        x = torch.randn(len(own), EMBED, generator=torch.Generator().manual_seed(4)).to(dtype).requires_grad_()
        microbatch = Microbatch(own, own, own % TOKENS, 2, tuple(x.shape), documents=documents, split=split)
        chunk.run(chunk.layers.values(), x, chunk.context(microbatch)).square().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    return [*found, *(leaf.grad for leaf in chunk.parameters() if leaf.grad is not None)]


@pytest.mark.in_turn(2, 0)
def test_an_exchange_is_in_one_graph_for_all_packings() -> None:
    """The second graph is for any number of documents, and the last."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    graphs = Graphs()
    try:
        with compiling_with(graphs.backend):
            over_cp(ContextParallel(4, "ring", "documents", 2), Mesh.create(MeshShape(cp=4)), torch.bfloat16, True)
            assert not counters["graph_break"], dict(counters["graph_break"])
    finally:
        dist.destroy_process_group()
    assert len(graphs.forward) == len(graphs.backward) == 2
    for there, back in zip(graphs.forward, graphs.backward, strict=True):
        assert (calls(there).count("context_attention"), calls(there).count("all_to_all_single")) == (1, 2)
        assert (calls(back).count("context_attention_backward"), calls(back).count("all_to_all_single")) == (1, 2)


def compared_over_cp() -> list[float]:
    """As :func:`compared`."""
    mesh, found = Mesh.create(MeshShape(cp=2)), []
    for context in (ContextParallel(2, "ring", "documents"), ContextParallel(2, "heads", "rows", 2)):
        with compiling_with(Graphs().backend):
            pairs = zip(*(over_cp(context, mesh, torch.float64, compiled) for compiled in (True, False)), strict=True)
            found.append(max(float((mine - want).norm() / want.norm()) for mine, want in pairs))
    return found


@pytest.mark.in_turn(4, 0)
def test_compiled_exchanges_compute_the_same(pool: Pool) -> None:
    assert max(map(max, pool.run(2, compared_over_cp))) < 1e-12


def test_importing_experts_does_not_import_the_compiler() -> None:
    """It takes longer than all the rest."""
    program = "import sys, models.moe; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def pieces() -> float:
    """As :func:`compared`, of norms and activation functions that LLaMA does not have."""
    mesh, generator = Mesh.create(MeshShape(tp=2)), torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

    norms = (
        RMSNorm.of(drawn(6), 1e-3, mesh, offset=1.0),
        LayerNorm.of(drawn(6), None, 1e-3, mesh, offset=1.0),
        LayerNorm.of(drawn(4, 6), drawn(4, 6), 1e-3, mesh),
        SplitRMSNorm(drawn(24), 1e-3, mesh),
    )

    def run(x: Tensor) -> Tensor:
        for norm in norms:
            x = norm(x) + x
        return kernels.gated("gelu_tanh", mesh.device)(FUNCTIONS["relu2"].of(x))

    x, found = drawn(8, 4, 6), []
    torch.compiler.reset()
    for function in (run, torch.compile(run, backend=Graphs().backend, fullgraph=True)):
        leaves = [x, *(weight for norm in norms for weight in norm.parameters())]
        found.append(torch.autograd.grad(function(x).square().sum(), leaves))
    return max(float((mine - want).norm() / want.norm()) for mine, want in zip(*found, strict=True))


@pytest.mark.in_turn(2, 0)
def test_compiled_norms_and_activations_compute_the_same(pool: Pool) -> None:
    assert max(pool.run(2, pieces)) < 1e-12
