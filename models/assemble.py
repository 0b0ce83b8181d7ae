"""The live parts of one rank are assembled from a model's configuration and a mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megacore.models.adapt import adapt, multiply_quantised
from megacore.models.attention import Attention
from megacore.models.blocks import CHEAP, Block, may_round
from megacore.models.compressed_attention import CompressedAttention, Compressor
from megacore.models.config import ModelConfig
from megacore.models.decoder import Decoder, Head, Losses, Microbatch
from megacore.models.latent_attention import LatentAttention
from megacore.models.moe import MixtureOfExperts
from megacore.models.tuning import EVERYTHING, Tuning
from megacore.parallel import kernels
from megacore.parallel.alignment import Alignment
from megacore.parallel.balance import NONE, Balance, Coefficients
from megacore.parallel.collectives import all_gather, gather
from megacore.parallel.context_split import ContextParallel
from megacore.parallel.layers.experts import Experts
from megacore.parallel.layers.fp8 import Fp8, Fp8Weight
from megacore.parallel.layers.fp8_experts import multiply_by_fp8
from megacore.parallel.layers.linear import hand_to, multiply_by
from megacore.parallel.layers.product import SymmetricMemory
from megacore.parallel.memory.recompute import Activations, runner
from megacore.parallel.mesh import Mesh
from megacore.parallel.parameters import CastWeight, Parameters, WeightGradient
from megacore.parallel.pipeline.run import forward
from megacore.parallel.rank_sets import of_context
from megacore.parallel.weights.layout import Coordinates, Layout


@dataclass(frozen=True)
class Model:
    """The part of a model that one rank holds.

    Args:
        chunks: This rank's modules, one for each pipeline chunk.
        balance: That of the experts of all layers that have some here.
        alignment: What the indexers of all layers that have some here learn from.
        context: The way cp shares out microbatches.
    """

    config: ModelConfig
    parameters: Parameters
    chunks: tuple[Decoder, ...]
    balance: Balance | None = None
    alignment: Alignment | None = None
    context: ContextParallel = field(default_factory=ContextParallel)

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        layout: Layout,
        mesh: Mesh,
        dtype: torch.dtype,
        losses: Losses | None = None,
        activations: Activations | None = None,
        hollow: bool = False,
        tuning: Tuning = EVERYTHING,
        coefficients: Coefficients = NONE,
        context: ContextParallel | None = None,
        index: float = 0.0,
    ) -> Model:
        """Uninitialised: ``model.parameters.initialise(seed)``, or fill it by a transfer.

        ``hollow`` leaves the memory to a sharing of ``parameters``, so that the rank never holds all of them. The
        layout is that of the model with its adapters, where ``tuning`` has some. ``index`` is the coefficient of what
        indexers learn from.

        Raises:
            ValueError: this rank holds a parameter that none of its modules uses.
        """
        context = context or ContextParallel(mesh.shape.cp)
        mesh.make_groups(of_context(mesh.shape, context.heads))
        activations = activations or Activations()
        parameters = Parameters(layout, mesh, dtype, hollow, tuning.quantised(config.schema))
        parameters.freeze(tuning.frozen(config.schema))
        chunks = tuple(config.build(parameters, chunk) for chunk in range(layout.chunks))
        for chunk in chunks:
            if tuning.lora is not None:
                adapt(chunk, parameters, tuning.lora)
            multiply_quantised(chunk, parameters)
            chunk.run = runner(activations, chunk.blocks, CHEAP, mesh.device, mesh.recorder, may_round)
            for module in chunk.modules():
                if isinstance(module, Block):
                    module.mlp_tokens = activations.mlp_tokens(mesh.shape.tp)
            chunk.context_parallel = context
            if losses and chunk.head is not None:
                chunk.head.losses = losses
        _check_used(config.family, parameters, chunks)
        balance, alignment = _balance(config, chunks, mesh, coefficients), _alignment(config, chunks, mesh, index)
        return cls(config, parameters, chunks, balance, alignment, context)

    @property
    def drops_attention(self) -> bool:
        """Whether attention weights are dropped in training."""
        modules = (module for chunk in self.chunks for module in chunk.modules())
        return any(isinstance(module, Attention) and module.dropout.p > 0 for module in modules)

    def train(self, mode: bool = True) -> None:
        """Switch dropout on or off."""
        for chunk in self.chunks:
            chunk.train(mode)

    @property
    def end(self) -> int:
        """The first rank of the last stage."""
        layout = self.parameters.layout
        return self.parameters.mesh.shape.rank(Coordinates(pp=layout.last_stage))

    @torch.no_grad()
    def logits(self, microbatch: Microbatch) -> Tensor | None:
        """Return the logits, [tokens, vocab or labels], on all ranks of the last stage, None on the others.

        Of a microbatch that is split over cp they are those of all tokens, or of this rank's own ``wanted`` ones.
        """
        parameters = self.parameters
        mesh, placement = parameters.mesh, parameters.layout.placement
        own = forward(mesh, [chunk.logits for chunk in self.chunks], microbatch, parameters.dtype, placement)
        if own is None:
            return None
        own = gather(own, mesh.tp)[:, : self.config.labels or self.config.vocab_size]
        if microbatch.split is None or microbatch.wanted is not None:
            return own
        tokens = [torch.from_numpy(microbatch.split.indices(rank)) for rank in range(mesh.shape.cp)]
        return all_gather(own, mesh.cp)[torch.cat(tokens).argsort().to(mesh.device)]

    @torch.no_grad()
    def hidden(self, microbatch: Microbatch) -> Tensor | None:
        """Return the activations of this rank's wanted tokens, normalised for the head, [n, embed], on all ranks of the
        last stage, None on the others."""
        parameters = self.parameters
        chunks, placement = [chunk.normed for chunk in self.chunks], parameters.layout.placement
        return forward(parameters.mesh, chunks, microbatch, parameters.dtype, placement)

    @torch.no_grad()
    def logits_of(self, hidden: Tensor) -> Tensor:
        """Return the logits of such activations, [n, vocab], on all ranks of the last stage, which all call this."""
        return gather(self.head.logits_of(hidden), self.parameters.mesh.tp)[:, : self.config.vocab_size]

    @property
    def head(self) -> Head:
        """The head, on a rank of the last stage."""
        return next(chunk.head for chunk in self.chunks if chunk.head is not None)

    def use_fp8(self) -> None:
        """Multiply in fp8 in all layers but the first and the last, whose errors count most, and those that predict
        further tokens behind it: linears and experts, not routers."""
        mesh, ends = self.parameters.mesh, {"0", str(self.config.sizes["layer"] - 1)}
        product = Fp8.on(mesh.device, mesh.along("cp", "tp"))
        blocks = [block for chunk in self.chunks for layer, block in chunk.layers.items() if layer not in ends]
        modules = [module for block in blocks for module in block.modules()]
        casts: dict[Tensor, CastWeight] = {each.weight: Fp8Weight(each) for each in multiply_by(product, modules)}
        for experts in modules:
            casts |= multiply_by_fp8(experts) if isinstance(experts, Experts) else {}
        uses = Counter[Tensor](
            p for chunk in self.chunks for each in chunk.modules() for p in each.parameters(recurse=False)
        )
        self.parameters.casts = {weight: cast for weight, cast in casts.items() if uses[weight] == 1}

    def use_async_tp(self) -> None:
        """Overlap what tensor parallel linears send with their products.

        Raises:
            ValueError: a GPU cannot reach the memory of another of its tensor parallel group.
        """
        mesh = self.parameters.mesh
        product = SymmetricMemory.on(mesh.device, mesh.tp)
        for chunk in self.chunks:
            multiply_by(product, chunk.modules())

    def hand_weight_gradients(
        self,
        accept: Callable[[nn.Parameter, WeightGradient | Tensor], None],
        late: bool = False,
        beside: Callable[[], None] | None = None,
    ) -> None:
        """Have linears and experts hand their weights' gradients to whoever sums them, who gets no more of them from
        autograd.

        Where they are ``late``, computed when the schedule says so, the head does too. The others are small and stay
        with the input gradients: norms, biases, routers, adapters, the embedding. ``beside`` is called while a message
        travels that a gradient was held for, which may be where it is given.
        """
        for chunk in self.chunks:
            hand_to(accept, chunk.modules(), late, beside)
            chunk.hand_weight_gradients(accept, late)

    def compile(self) -> None:
        """Compile every block with torch.compile; layers of one shape share the code.

        Experts are left out, as which rows go where depends on the data, and so is what runs on some tokens at a time.
        """
        # Of several graphs that fit, the last one used would be taken first, and a block that is computed again would
        # keep other tensors than it did (pytorch #166926): they are taken in the order in which they were made.
        # Layers of each kind have some of their own, to train, to evaluate, and of documents: beyond the compiler's
        # limit of 8 they would run as they are, and only its log would say so.
        torch._dynamo.config.recompile_limit = max(_GRAPHS, torch._dynamo.config.recompile_limit)
        torch._C._dynamo.eval_frame._set_lru_cache(False)  # type: ignore[attr-defined]
        if self.parameters.mesh.device.type == "cpu":
            kernels.cpu_has_bf16()  # the compiler finds the answer, and cannot look for it
        for chunk in self.chunks:
            for block in chunk.blocks:
                if "forward" in vars(block):  # it is compiled
                    continue
                # Of these alone: a decorator would import the compiler, and reach models that are not compiled.
                for module in block.modules():
                    if isinstance(module, MixtureOfExperts | Compressor):
                        module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
                    if isinstance(module, CompressedAttention):
                        module.attend_blocks = torch.compiler.disable(module.attend_blocks)  # type: ignore[method-assign]
                    if isinstance(module, Attention) and module.chooses:
                        module.attend = torch.compiler.disable(module.attend)  # type: ignore[method-assign]
                    if isinstance(module, Block) and module.mlp_tokens is not None:
                        module.by_tokens = torch.compiler.disable(module.by_tokens)  # type: ignore[method-assign]
                # Not the call: hooks that gather its parameters run outside of it.
                block.forward = torch.compile(block.forward, options=_OPTIONS)


_GRAPHS = 32

_OPTIONS: dict[str, Any] = {
    # Collectives start as early and are waited for as late as the graph allows. The compiler's own order goes by memory
    # and by what it has fused: it waits for some of them where they start.
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
    # To hand weight gradients on is an effect, whose graphs the compiler would not find again on disk. It may: what
    # they are handed to is looked up when they run.
    "unsafe_marked_cacheable_functions": {"torch.ops.higher_order.with_effects": torch.__version__},
}


def _balance(config: ModelConfig, chunks: Sequence[Decoder], mesh: Mesh, coefficients: Coefficients) -> Balance | None:
    """Return the balance of the experts of these chunks; None where the model has none. All ranks of the mesh call
    this."""
    routing = config.anatomy.routing
    if routing is None:
        return None
    mesh.make_groups(mesh.shape.all_along(*Balance.ACROSS))
    mixtures = [module for module in _running(chunks) if isinstance(module, MixtureOfExperts)]
    mixtures = [each for each in mixtures if each.router.table is None]  # what is listed, nothing balances
    found = ((mixture.layer, mixture.router.correction) for mixture in mixtures)
    corrections = {layer: correction for layer, correction in found if correction is not None}
    balance = Balance(sorted(mixture.layer for mixture in mixtures), routing, mesh, coefficients, corrections)
    for mixture in mixtures:
        mixture.balance = balance
    return balance


def _alignment(config: ModelConfig, chunks: Sequence[Decoder], mesh: Mesh, coefficient: float) -> Alignment | None:
    """Return what the indexers of these chunks learn from; None where they learn nothing or the model has none."""
    if not coefficient or all(layer.top is None for layer in config.anatomy.layers):
        return None
    running = (module for module in _running(chunks) if isinstance(module, LatentAttention | CompressedAttention))
    indexed = {module.layer: module for module in running if module.indexer is not None}
    alignment = Alignment([*indexed], mesh, coefficient)
    for module in indexed.values():
        module.alignment = alignment
    return alignment


def _running(chunks: Sequence[Decoder]) -> Iterator[nn.Module]:
    """Yield the modules that steps run: those that predict further tokens only where their loss counts."""
    heads = [chunk.head for chunk in chunks if chunk.head is not None]
    still = {module for head in heads if not head.losses.mtp for module in head.predictions.modules()}
    return (module for chunk in chunks for module in chunk.modules() if module not in still)


def _check_used(family: str, parameters: Parameters, chunks: Iterable[nn.Module]) -> None:
    """Refuse a parameter that is declared, and so saved and exported, but has no part in what the chunks compute."""
    used = {parameter for chunk in chunks for parameter in chunk.parameters()}
    unused = dict.fromkeys(parameters.shards[name].param.name for name, held in parameters.items() if held not in used)
    if unused:
        rank, place = parameters.mesh.rank, parameters.mesh.place
        raise ValueError(
            f"{family}: no module of rank {rank} ({place}) uses {', '.join(unused)}: "
            "use them in the family's build(), or do not declare them in its params()"
        )
