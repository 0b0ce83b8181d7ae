"""Cross entropy over a vocabulary that is split over tp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.parallel import kernels
from megacore.parallel.collectives import all_reduce_, start_all_gather
from megacore.parallel.labels import IGNORE
from megacore.parallel.mesh import Group

# Elements of the logits that are held in fp32 at a time: what stays in cache on a CPU, what fills a GPU.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 26}


@dataclass(frozen=True)
class Finish:
    """The last products become logits by this, element by element: softcap * tanh(scale * x / softcap).

    Args:
        scale: Factor of the products.
        softcap: Bound of the logits (Bello et al. 2016, arXiv 1611.09940); None for no bound, and no tanh.
    """

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [...] -> the logits: [...], which are computed in fp32 at least and rounded once."""
        return x if self == PLAIN else self.apply_(x.to(_wide(x.dtype), copy=True)).to(x.dtype)

    def apply_(self, x: Tensor) -> Tensor:
        """x: [...], in fp32 at least -> the logits, in its memory."""
        if self.scale != 1:
            x.mul_(self.scale)
        return x if self.softcap is None else x.div_(self.softcap).tanh_().mul_(self.softcap)

    def differentiable(self, x: Tensor) -> Tensor:
        """x: [...] -> the logits: [...], in fp32 at least, for autograd."""
        x = x.to(_wide(x.dtype))
        x = x if self.scale == 1 else x * self.scale
        return x if self.softcap is None else torch.tanh(x / self.softcap) * self.softcap

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of :meth:`apply_` at what has become of it."""
        if self.softcap is None:
            return self.scale
        return logits.div(self.softcap).square_().neg_().add_(1).mul_(self.scale)


PLAIN = Finish()


@dataclass(frozen=True)
class Objective:
    """Cross entropy and what may be added to it, of logits whose columns are split: [t, padded vocab/tp].

    Args:
        group: The tensor parallel group.
        vocab: Number of tokens of the vocabulary, without padding.
        label_smoothing: Probability that is spread evenly over the vocabulary.
        z_loss: Weight of the squared log-partition (Chowdhery et al. 2022, arXiv 2204.02311).
        finish: The change of the products that makes them logits.
    """

    group: Group
    vocab: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    finish: Finish = PLAIN

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute :func:`cross_entropy`."""
        return _CrossEntropy.apply(logits, labels, self)

    def losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """-> the losses: [t], zero where the label is ignored, and ``log sum exp``: [t]; the same on every rank."""
        if fused := kernels.cross_entropy(logits.device):
            how = self.label_smoothing > 0, self.finish.scale, self.finish.softcap
            own = fused.statistics(logits, labels, *self.own_columns(logits), *how)
            found = start_all_gather(own, self.group).wait().view(self.group.size, *own.shape)
            return fused.finish(found, labels, logits.shape[1], self.vocab, self.label_smoothing, self.z_loss)
        valid, mine, local = self._columns(logits, labels)
        # Each rank sums exp(logits - its own maximum), so that one pass over its logits is enough.
        top = torch.full(labels.shape, -torch.inf, dtype=_wide(logits.dtype), device=logits.device)
        # Three sums in one message: exp, the label's logit, and, for smoothing, all logits; each less the maximum.
        sums = top.new_zeros(3 if self.label_smoothing else 2, len(labels))
        for rows in _chunks(logits) if valid else ():
            z = self.finish.apply_(logits[rows, :valid].to(top.dtype, copy=True))
            top[rows] = z.amax(1)
            z.sub_(top[rows, None])
            if self.label_smoothing:
                sums[2, rows] = z.sum(1)
            sums[0, rows] = z.exp_().sum(1)
        highest = all_reduce_(top.clone(), self.group, dist.ReduceOp.MAX)
        if valid:
            below = top - highest
            sums[0] *= below.exp()
            on_label = self.finish.apply_(logits.gather(1, local[:, None])[:, 0].to(top.dtype))
            sums[1] = (on_label - highest) * mine
            if self.label_smoothing:
                sums[2] += valid * below
        all_reduce_(sums, self.group)
        log_sum = sums[0].log_()
        loss = log_sum - (1 - self.label_smoothing) * sums[1]
        if self.label_smoothing:
            loss -= self.label_smoothing / self.vocab * sums[2]
        log_sum = log_sum + highest
        if self.z_loss:
            loss += self.z_loss * log_sum.square()
        return torch.where(labels != IGNORE, loss, 0.0), log_sum

    def gradient_(self, logits: Tensor, labels: Tensor, log_sum: Tensor, dy: Tensor) -> Tensor:
        """Return the gradient of the logits, of losses whose gradient is dy: [t]; it is written into the logits'
        memory."""
        if fused := kernels.cross_entropy(logits.device):
            how = self.vocab, self.label_smoothing, self.z_loss, self.finish.scale, self.finish.softcap
            return fused.gradient_(logits, labels, log_sum, dy, *self.own_columns(logits), *how)
        valid, mine, local = self._columns(logits, labels)
        dy = dy * (labels != IGNORE)
        scale = dy * (1 + 2 * self.z_loss * log_sum) if self.z_loss else dy
        on_label = dy * mine * (1 - self.label_smoothing)
        for rows in _chunks(logits):
            z = logits[rows, :valid]
            p = self.finish.apply_(z.to(log_sum.dtype, copy=True))
            slope = self.finish.slope(p)
            p.sub_(log_sum[rows, None]).exp_().mul_(scale[rows, None])
            if valid:
                p.scatter_add_(1, local[rows, None], -on_label[rows, None])
            if self.label_smoothing:
                p.sub_(dy[rows, None] * (self.label_smoothing / self.vocab))
            z.copy_(p if self.finish == PLAIN else p.mul_(slope))
        logits[:, valid:] = 0
        return logits

    def own(self, losses: Tensor) -> Tensor:
        """losses: [t] -> [t/tp], those of this rank's tokens.

        Raises:
            ValueError: t does not divide over the group.
        """
        share, rest = divmod(len(losses), self.group.size)
        if rest:
            raise ValueError(
                f"cannot split the losses of {len(losses)} tokens over {self.group.size} ranks: "
                f"choose a multiple of {self.group.size}"
            )
        return losses[self.group.index * share : (self.group.index + 1) * share]

    def own_columns(self, logits: Tensor) -> tuple[int, int]:
        """Return the first of this rank's columns, and how many are no padding."""
        start = self.group.index * logits.shape[1]
        return start, max(0, min(logits.shape[1], self.vocab - start))

    def _columns(self, logits: Tensor, labels: Tensor) -> tuple[int, Tensor, Tensor]:
        """Return how many columns are no padding; which labels are among them: [t], and where: [t], 0 for the
        others."""
        start, valid = self.own_columns(logits)
        mine = (labels >= start) & (labels < start + valid)
        return valid, mine, (labels - start) * mine


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, objective: Objective) -> Tensor:
        losses, log_sum = objective.losses(logits, labels)
        ctx.save_for_backward(logits, labels, log_sum)
        ctx.objective = objective
        return objective.own(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, log_sum = ctx.saved_tensors
        dy = start_all_gather(dy, ctx.objective.group).wait()
        # The logits have no reader after this: their memory takes the gradient, so that no second copy of them exists.
        return ctx.objective.gradient_(logits.detach(), labels, log_sum, dy), None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks(logits: Tensor) -> Iterator[slice]:
    step = max(1, _CHUNK.get(logits.device.type, _CHUNK["cuda"]) // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], step):
        yield slice(start, start + step)


def cross_entropy(
    logits: Tensor, labels: Tensor, group: Group, vocab: int, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """logits: [t, padded vocab/tp], labels: [t] -> the loss of this rank's tokens: [t/tp], in fp32 at least.

    ``log sum exp`` and all sums are taken in fp32 (fp64 for fp64) over a few rows at a time; a wide copy of all logits
    is never made, and the backward writes the gradient into the memory of the logits. Padded columns count as -inf.

    Args:
        logits: This rank's columns.
        labels: Those of all tokens; :data:`IGNORE` for those that do not count (their loss is zero).
        group: The tensor parallel group.
        vocab: Number of tokens of the vocabulary, without padding.
        label_smoothing: That of :class:`Objective`.
        z_loss: That of :class:`Objective`.

    Raises:
        ValueError: t does not divide over the group.
    """
    return Objective(group, vocab, label_smoothing, z_loss)(logits, labels)
