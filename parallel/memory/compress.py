"""Activations that wait for the backward in 8 bits (as in ActNN, Chen et al. 2021, arXiv 2104.14129): integers of up
to 127 and a scale for each block of 64 neighbours along the features, or of all where there are fewer, after the
largest of them.

A block of normal numbers loses 0.6 % of its norm, and none loses more than sqrt(64)/127 = 6.3 %; float8 (e4m3) would
lose 2.6 % of any. Only what modules are known to be given is rounded (:class:`Rounding`): never integers, masks,
weights, statistics, nor what attention keeps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megacore.parallel.budgets import BLOCK
from megacore.parallel.memory.offload import Back, Key, keep, key


def quantise(flat: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """flat: [n] -> codes: [ceil(n / block), block] of int8, and scales: [ceil(n / block), 1], of its dtype, or fp32
    for fp16.

    What is not zero keeps its sign, by which activation functions have another slope. A block with something that is
    no number, or infinite, comes back without finite numbers.
    """
    whole = F.pad(flat, (0, -len(flat) % block)) if len(flat) % block else flat
    blocks = whole.view(-1, block)
    wide = torch.promote_types(flat.dtype, torch.bfloat16)  # of fp16 the scales would leave its range
    scales = blocks.abs().amax(1, keepdim=True).to(wide).div_(127).clamp_(min=torch.finfo(wide).tiny)
    codes = blocks / scales  # above 127 where a scale was rounded down
    return codes.abs().clamp_(1, 127).mul_(codes.sign_()).round_().to(torch.int8), scales


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """codes, scales: of :func:`quantise` -> [block ceil(n / block)]."""
    return codes.to(scales.dtype).mul_(scales).view(-1).to(dtype)


class Rounding:
    """Keeps in 8 bits what some modules are given, unless somebody has kept it as it is before.

    Args:
        modules: Those whose first input may be rounded.
        cheap: Types of those whose output may be, too.
    """

    def __init__(self, modules: Iterable[nn.Module], cheap: tuple[type[nn.Module], ...]) -> None:
        self._now = _Rounded()
        for module in modules:
            module.register_forward_pre_hook(lambda _, inputs: self._note(inputs[0]))
            if isinstance(module, cheap):
                module.register_forward_hook(lambda _, inputs, output: self._note(output))

    def start(self) -> _Rounded:
        """Return the Keep of one forward."""
        self._now = _Rounded()
        return self._now

    def _note(self, tensor: Tensor) -> None:
        if torch.is_grad_enabled():
            self._now.note(tensor)


class _Codes:
    """The numbers of 8 bits of flat: [n]."""

    def __init__(self, flat: Tensor, block: int) -> None:
        self._n, self._dtype, (self._codes, self._scales) = len(flat), flat.dtype, quantise(flat, block)

    def __call__(self) -> Tensor:
        return dequantise(self._codes, self._scales, self._dtype)[: self._n]


class _Rounded:
    """The Keep of one forward: a memory is rounded once, however many views of it are saved."""

    def __init__(self) -> None:
        self._noted: dict[Key, tuple[StorageWeakRef, int]] = {}
        self._exact: dict[Key, StorageWeakRef] = {}
        self._codes: dict[tuple[Key, int, int], weakref.ref[_Codes]] = {}

    def note(self, tensor: Tensor) -> None:
        """Round what will be kept of a tensor's storage, if it has not been yet, nor holds anything else."""
        if key(tensor) not in self._exact and tensor.nbytes == tensor.untyped_storage().nbytes():
            # Tokens, one of which may be a millionth of another, share no scale.
            block = min(BLOCK, tensor.shape[-1])
            self._noted.setdefault(key(tensor), (StorageWeakRef(tensor.untyped_storage()), block))

    def __call__(self, tensor: Tensor) -> Back:
        owner = tensor if tensor._base is None else tensor._base
        expanded = tensor.nbytes > tensor.untyped_storage().nbytes()
        # Somebody holds a leaf who asks for its gradient, or trains it: rounded it would be there twice.
        leaf = owner.is_leaf and owner.requires_grad
        if key(tensor) in self._noted and tensor.is_floating_point() and tensor.itemsize > 1 and not (expanded or leaf):
            return self.rounded(tensor)
        self._exact[key(tensor)] = StorageWeakRef(tensor.untyped_storage())
        return keep(tensor)

    def rounded(self, tensor: Tensor) -> Back:
        """Round a tensor -> the way back to it, with its strides where it has all of a memory."""
        # In the order of memory: neighbours are of the same features, and views of the same elements are alike.
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
        turned = tensor.detach().permute(order)
        place = key(tensor), int(tensor.storage_offset()), tensor.numel()
        codes = self._codes[place]() if place in self._codes and turned.is_contiguous() else None
        if codes is None:
            codes = _Codes(turned.reshape(-1), self._noted[key(tensor)][1])
            if turned.is_contiguous():
                self._codes[place] = weakref.ref(codes)
        shape, back = turned.shape, [order.index(dim) for dim in range(tensor.dim())]
        return lambda: codes().view(shape).permute(back)
