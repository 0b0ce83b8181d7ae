"""Activation checkpointing: what of the blocks is kept for the backward, and what is computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megacore.parallel.enum_errors import Recompute, check_choice
from megacore.parallel.memory.compress import Rounding
from megacore.parallel.memory.offload import Back, HostMemory, Keep, Key, View, keep, keeping, key
from megacore.parallel.recorder import IDLE, RECOMPUTE, Recorder


@dataclass(frozen=True)
class Activations:
    """The activations of the blocks that are kept, and their place.

    Args:
        recompute: ``"none"`` keeps all. ``"selective"`` keeps what matrix products, attention and collectives have
            made; the outputs of norms and activation functions are computed again, and nothing is communicated again.
            ``"full"`` keeps a block's input alone and runs its forward again, collectives and all.
        offload: Whether what is kept goes to host memory.
        mlp_chunk: The number of tokens whose feed-forward activations are there at a time; None for all. Of a
            feed-forward network its input is kept then, and ``"full"`` computes it no more often than without.
        compress: Whether what is kept is rounded to 8 bits where modules say that it may be; with ``"full"`` a forward
            that runs again would not be that which was, and it is not for what is on the host.

    Raises:
        ValueError: ``recompute`` is another word, or something is compressed that may not be.
    """

    recompute: Recompute = "none"
    offload: bool = False
    mlp_chunk: int | None = None
    compress: bool = False

    def __post_init__(self) -> None:
        check_choice("recompute", self.recompute, get_args(Recompute))
        if self.compress and (self.recompute == "full" or self.offload):
            raise ValueError(
                f"compress is for what is kept on the device, not with recompute={self.recompute!r}"
                f" and offload={self.offload}: choose one of them"
            )

    def mlp_tokens(self, tp: int) -> int | None:
        """Return the share of ``mlp_chunk`` that one of tp ranks has."""
        return None if self.mlp_chunk is None else max(1, self.mlp_chunk // tp)


@dataclass(frozen=True)
class Runner:
    """Runs blocks in turn: (blocks, x, what every block is given beside it) -> x.

    Args:
        step: Runs one block.
        saving: The context of a forward that a backward will follow.
    """

    step: Callable[..., Tensor]
    saving: Callable[[], AbstractContextManager[object]] = nullcontext

    def __call__(self, blocks: Iterable[nn.Module], x: Tensor, *others: object) -> Tensor:
        with self.saving() if torch.is_grad_enabled() else nullcontext():
            for block in blocks:
                x = self.step(block, x, *others)
        return x


def runner(
    activations: Activations,
    blocks: Iterable[nn.Module],
    cheap: tuple[type[nn.Module], ...],
    device: torch.device,
    recorder: Recorder = IDLE,
    may_round: Callable[[Iterable[nn.Module]], Iterable[nn.Module]] = lambda blocks: (),
) -> Runner:
    """Return the runner of these blocks.

    Args:
        activations: The activations that are kept.
        blocks: All blocks that will be run.
        cheap: Modules whose outputs take less to compute than to keep; each is a function of its inputs and weights.
        device: The device of the blocks.
        recorder: Is told of what is computed again.
        may_round: Returns the modules of blocks whose first input, and whose output if they are cheap, may be rounded.
    """
    blocks = list(blocks)
    start: Callable[[], Keep] = HostMemory(device).start if activations.offload else lambda: keep
    if activations.compress:
        start = Rounding(may_round(blocks), cheap).start
    if activations.recompute == "selective":
        return Runner(_call, Selective(blocks, cheap, start, recorder).saving)
    step = _call
    if activations.recompute == "full":
        drops = any(isinstance(m, nn.Dropout) and m.p > 0 for block in blocks for m in block.modules())
        # The state of the generator is that which this microbatch's seed has led to: the same masks are drawn again.
        step = partial(
            checkpoint,
            use_reentrant=False,
            preserve_rng_state=drops,
            context_fn=lambda: (nullcontext(), recorder.over(RECOMPUTE)),
        )
    moved = activations.offload or activations.compress
    return Runner(step, lambda: keeping(start())) if moved else Runner(step)


def _call(block: nn.Module, *arguments: object) -> Tensor:
    return block(*arguments)


PLAIN = Runner(_call)
"""Leaves it to autograd."""


class Selective:
    """Forgets the outputs of cheap modules; whoever has saved one has it computed again when it is asked for."""

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        cheap: tuple[type[nn.Module], ...],
        start: Callable[[], Keep],
        recorder: Recorder = IDLE,
    ) -> None:
        self._start, self._recorder = start, recorder
        self._now: _Forgetting | None = None
        for block in blocks:
            for module in block.modules():
                if isinstance(module, cheap):
                    module.register_forward_hook(self._note)

    @contextmanager
    def saving(self) -> Iterator[None]:
        now = self._now = _Forgetting(self._start(), self._recorder)
        try:
            with keeping(now):
                yield
        finally:
            now.made.clear()  # every node of the graph holds on to it, and the inputs of all would stay as long
            self._now = None

    def _note(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        # The compiler decides for itself what it keeps of a block, and by the same reasoning.
        # What no gradient reaches is not asked for again, and its inputs need not be kept.
        if self._now is not None and output.requires_grad and not torch.compiler.is_compiling():
            self._now.note(module, inputs, output)


@dataclass
class _Forgetting:
    """The Keep of one forward.

    Args:
        kept: The Keep that the inputs, and everything else, are given to.
        recorder: Is told of what is made again.
        made: The outputs of cheap modules, and how they were made.
    """

    kept: Keep
    recorder: Recorder
    made: dict[Key, tuple[StorageWeakRef, Back]] = field(default_factory=dict)

    def note(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        backs = [self(x) for x in inputs]
        again = partial(_again, self.recorder, module, backs)
        self.made[key(output)] = StorageWeakRef(output.untyped_storage()), again

    def __call__(self, tensor: Tensor) -> Back:
        if key(tensor) not in self.made:
            return self.kept(tensor)
        view, (_, again) = View.of(tensor), self.made[key(tensor)]
        return lambda: view.on(again())


def _again(recorder: Recorder, module: nn.Module, backs: list[Back]) -> Tensor:
    with torch.no_grad(), recorder.over(RECOMPUTE):
        y: Tensor = module.forward(*(back() for back in backs))
    return y
