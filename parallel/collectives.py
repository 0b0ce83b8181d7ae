"""Collectives in adjoint pairs.

The backward of every collective is its true adjoint: ``<A x, y> == <x, A' y>``, summed over the ranks, where a value
that is replicated counts once.

    forward            x           -> y                             backward
    all_gather         split       -> copies for different uses     reduce_scatter
    reduce_scatter     partial     -> split                         all_gather
    replicate          replicated  -> copies for different uses     all-reduce
    reduce             partial     -> replicated                    identity
    all_to_all         split       -> split otherwise               all_to_all
    gather             split       -> replicated                    own slice
    split              replicated  -> split                         gather

The first two are what sequence parallelism is made of; the others serve layers whose surroundings are replicated.
``start_*`` are asynchronous, return a :class:`Pending` and have no backward. The adjoint of :func:`start_all_to_all` is
itself, with the two counts changed over. Over a group of one everything is the identity.

Under torch.compile they are torch's functional collectives, which are nodes of the graph: started where they stand, and
waited for where their result is used. Layers whose counts of rows are not known when the graph is made are left out of
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.parallel.mesh import Group

# torch 2.13 renamed these two.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_functional = torch.ops._c10d_functional


@dataclass
class Pending:
    """The result of a collective that may still be under way.

    Args:
        works: What is to be waited for.
        finish: Makes the result of what has come.
        kind: The name of the collective.
        group: The group of its ranks; None where nothing is waited for.
    """

    works: list[dist.Work]
    finish: Callable[[], Tensor]
    kind: str = ""
    group: Group | None = None

    def wait(self) -> Tensor:
        if self.works and self.group is not None:  # a compiled graph has none, nor may it depend on who records
            with self.group.recorder.over(self.kind, *self.group.ranks):
                for work in self.works:
                    work.wait()
        return self.finish()

    def then(self, finish: Callable[[], Tensor]) -> Pending:
        """Return the same, of which something else is made."""
        return Pending(self.works, finish, self.kind, self.group)


def start_all_gather(x: Tensor, group: Group, after: Tensor | None = None) -> Pending:
    """x: [t/n, ...] of each rank -> [t, ...], concatenated in the order of ranks.

    Args:
        x: This rank's.
        group: The group of the ranks.
        after: A tensor that must be there before the compiler gathers. It takes a gather in a backward that needs
            nothing of the backward for the forward's, and keeps what that has given.
    """
    if group.size == 1:
        return Pending([], lambda: x)
    x = x.contiguous()
    if torch.compiler.is_compiling():
        if after is None:
            return _node(_functional.all_gather_into_tensor(x, group.size, group.name))
        return _node(_gather_after(x, group.size, group.name, after))
    out = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    if not group.pairwise:
        return Pending(
            _works(_all_gather_single(out, x, group=group.process_group, async_op=True)),
            lambda: out,
            "all_gather",
            group,
        )
    parts = out.chunk(group.size)
    works = _exchange(group, send=lambda _: x, receive=lambda peer: parts[peer])
    parts[group.index].copy_(x)
    return Pending(works, lambda: out, "all_gather", group)


def start_all_gather_(x: Tensor, group: Group) -> Pending:
    """x: [t, ...], contiguous, of which this rank's part counts -> the parts of all ranks, in place."""
    if group.size == 1:
        return Pending([], lambda: x)
    slices = x.chunk(group.size)
    own = slices[group.index]
    if not group.pairwise:
        return Pending(
            _works(_all_gather_single(x, own, group=group.process_group, async_op=True)), lambda: x, "all_gather", group
        )
    return Pending(
        _exchange(group, send=lambda _: own, receive=lambda peer: slices[peer]), lambda: x, "all_gather", group
    )


def start_reduce_scatter(x: Tensor, group: Group) -> Pending:
    """x: [t, ...] partial sums -> [t/n, ...], this rank's part of the sum (bf16 is summed in fp32 where we sum).

    Raises:
        ValueError: t does not divide over the group.
    """
    if group.size == 1:
        return Pending([], lambda: x)
    if x.shape[0] % group.size:
        raise ValueError(
            f"cannot scatter {x.shape[0]} tokens over {group.size} ranks: choose a multiple of {group.size}"
        )
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return _node(_functional.reduce_scatter_tensor(x, "sum", group.size, group.name))
    shape = (x.shape[0] // group.size, *x.shape[1:])
    if not group.pairwise:
        out = x.new_empty(shape)
        return Pending(
            _works(_reduce_scatter_single(out, x, group=group.process_group, async_op=True)),
            lambda: out,
            "reduce_scatter",
            group,
        )
    works, received = _swap(x, group)
    return Pending(
        works, lambda: received.sum(0) if group.size > 2 else received[0].add_(received[1]), "reduce_scatter", group
    )


def start_reduce_scatter_(x: Tensor, group: Group) -> Pending:
    """x: [t, ...] partial sums, contiguous -> [t/n, ...], this rank's part of x, which holds the sum; the rest does not
    count any more."""
    own = x.chunk(group.size)[group.index]
    if group.size == 1:
        return Pending([], lambda: own)
    if not group.pairwise:
        return Pending(
            _works(_reduce_scatter_single(own, x, group=group.process_group, async_op=True)),
            lambda: own,
            "reduce_scatter",
            group,
        )
    works, received = _swap(x, group)
    if group.size == 2:
        return Pending(works, lambda: torch.add(received[0], received[1], out=own), "reduce_scatter", group)
    return Pending(works, lambda: torch.sum(received, 0, out=own), "reduce_scatter", group)


def start_all_to_all(x: Tensor, group: Group, sent: Sequence[int], got: Sequence[int]) -> Pending:
    """x: [sum of sent, ...], successive rows for each rank -> [sum of got, ...], successive rows of each.

    Args:
        x: This rank's.
        group: The group of the ranks.
        sent: The numbers of rows that go to each of them.
        got: The numbers of rows that come from each of them.
    """
    if group.size == 1:
        return Pending([], lambda: x)
    if torch.compiler.is_compiling():
        return _node(_functional.all_to_all_single(x.contiguous(), list(got), list(sent), group.name))
    x, out = x.contiguous(), x.new_empty(sum(got), *x.shape[1:])
    if not group.pairwise:
        work = dist.all_to_all_single(out, x, list(got), list(sent), group=group.process_group, async_op=True)
        return Pending(_works(work), lambda: out, "all_to_all", group)
    theirs, ours = x.split(list(sent)), out.split(list(got))
    works = _exchange(group, send=lambda peer: theirs[peer], receive=lambda peer: ours[peer])
    ours[group.index].copy_(theirs[group.index])
    return Pending(works, lambda: out, "all_to_all", group)


def start_messages(
    sent: Sequence[tuple[int, Tensor]], got: Sequence[tuple[int, Tensor]], group: Group
) -> list[dist.Work]:
    """Send to some ranks, receive of some, all at once.

    Args:
        sent: (place of a rank in the group, contiguous tensor) of each that is sent to.
        got: The same of each that is received from, into the tensor.
        group: The group of the ranks.
    """
    messages = [
        dist.P2POp(way, x, group.ranks[place], group.process_group)
        for way, each in ((dist.isend, sent), (dist.irecv, got))
        for place, x in each
    ]
    return list(dist.batch_isend_irecv(messages)) if messages else []


def start_all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
    """x: [...] partial -> [...], the sum (or ``op``) over the group, in place."""
    if group.size == 1:
        return Pending([], lambda: x)
    if torch.compiler.is_compiling():
        there = _node(_functional.all_reduce(x, op.name.lower(), group.name))
        return Pending([], lambda: x.copy_(there.wait()))
    return Pending(
        _works(dist.all_reduce(x, op, group=group.process_group, async_op=True)), lambda: x, "all_reduce", group
    )


def all_reduce_(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Sum (or ``op``) in place over the group, outside of autograd."""
    return start_all_reduce(x, group, op).wait()


def broadcast_(x: Tensor, group: Group, source: int) -> Tensor:
    """x: [...] of the rank that is at ``source`` in the group -> the same on all of them, in place."""
    if group.size > 1:
        dist.broadcast(x, group.ranks[source], group=group.process_group)
    return x


def _node(started: Tensor) -> Pending:
    return Pending([], lambda: _functional.wait_tensor(started))


@torch.library.custom_op("megacore::all_gather_after", mutates_args=())
def _gather_after(x: Tensor, size: int, name: str, after: Tensor) -> Tensor:
    return _functional.all_gather_into_tensor(x, size, name)


@_gather_after.register_fake
def _(x: Tensor, size: int, name: str, after: Tensor) -> Tensor:
    return x.new_empty(size * x.shape[0], *x.shape[1:])


def _works(work: dist.Work | None) -> list[dist.Work]:
    return [] if work is None else [work]


def _exchange(group: Group, send: Callable[[int], Tensor], receive: Callable[[int], Tensor]) -> list[dist.Work]:
    works: list[dist.Work] = []
    for distance in range(1, group.size):
        to, source = (group.index + distance) % group.size, (group.index - distance) % group.size
        works += _works(dist.isend(send(to), group.ranks[to], group=group.process_group))
        works += _works(dist.irecv(receive(source), group.ranks[source], group=group.process_group))
    return works


def _swap(x: Tensor, group: Group) -> tuple[list[dist.Work], Tensor]:
    """Send everyone's part of x to its owner -> what each rank has of this rank's part: [n, t/n, ...]."""
    parts = x.chunk(group.size)
    received = x.new_empty(group.size, *parts[0].shape)
    works = _exchange(group, send=lambda peer: parts[peer], receive=lambda peer: received[peer])
    received[group.index].copy_(parts[group.index])
    return works, received


def _own(x: Tensor, group: Group, dim: int) -> Tensor:
    size, rest = divmod(x.shape[dim], group.size)
    if rest:
        raise ValueError(
            f"cannot split dimension {dim} of size {x.shape[dim]} over {group.size} ranks: "
            f"choose a multiple of {group.size}"
        )
    return x.narrow(dim, group.index * size, size)


def _concatenate(x: Tensor, group: Group, dim: int) -> Tensor:
    if group.size == 1:
        return x
    return start_all_gather(x.movedim(dim, 0), group).wait().movedim(0, dim)


class _CollectiveAndAdjoint(torch.autograd.Function):
    """A collective and its adjoint; both are functions of (tensor, group, dim)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, there: _Move, back: _Move) -> Tensor:
        ctx.back, ctx.group, ctx.dim = back, group, dim
        return there(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(dy, ctx.group, ctx.dim), None, None, None, None


_Move = Callable[[Tensor, Group, int], Tensor]


def _gather_tokens(x: Tensor, group: Group, dim: int) -> Tensor:
    return start_all_gather(x, group).wait()


def _scatter_tokens(x: Tensor, group: Group, dim: int) -> Tensor:
    return start_reduce_scatter(x, group).wait()


def _exchange_rows(x: Tensor, group: Group, dim: int) -> Tensor:
    each = [x.shape[0] // group.size] * group.size
    return start_all_to_all(x, group, each, each).wait()


def _sum(x: Tensor, group: Group, dim: int) -> Tensor:
    return all_reduce_(x.clone(), group)


def _same(x: Tensor, group: Group, dim: int) -> Tensor:
    return x.view_as(x)


def _apply(x: Tensor, group: Group, dim: int, there: _Move, back: _Move) -> Tensor:
    if group.size == 1:
        return x
    return _CollectiveAndAdjoint.apply(x, group, dim, there, back)


def all_gather(x: Tensor, group: Group) -> Tensor:
    """x: [t/n, ...] -> [t, ...]; backward: reduce-scatter."""
    return _apply(x, group, 0, _gather_tokens, _scatter_tokens)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """x: [t, ...] partial -> [t/n, ...]; backward: all-gather."""
    return _apply(x, group, 0, _scatter_tokens, _gather_tokens)


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """x: [n * t, ...], t rows for each of n ranks -> [n * t, ...], t of each; backward: the same."""
    return _apply(x, group, 0, _exchange_rows, _exchange_rows)


def replicate(x: Tensor, group: Group) -> Tensor:
    """x: [...] replicated -> the same, about to be used for different parts; backward: all-reduce."""
    return _apply(x, group, 0, _same, _sum)


def reduce(x: Tensor, group: Group) -> Tensor:
    """x: [...] partial -> [...] replicated; backward: identity."""
    return _apply(x, group, 0, _sum, _same)


def gather(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """x: [..., f/n] -> [..., f] replicated; backward: own slice."""
    return _apply(x, group, dim, _concatenate, _own)


def split(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """x: [..., f] replicated -> [..., f/n]; backward: gather."""
    return _apply(x, group, dim, _own, _concatenate)
