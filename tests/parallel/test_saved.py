"""Ways to keep a tensor for the backward: what is copied, when it comes back, and what is noticed."""

import gc
from collections.abc import Callable
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megacore.parallel.memory import compress
from megacore.parallel.memory.compress import Rounding, dequantise, quantise
from megacore.parallel.memory.offload import HostMemory, keep, keeping
from megacore.parallel.memory.recompute import Activations, Runner, runner

CPU = torch.device("cpu")


class Counting(HostMemory):
    """Notes what leaves and what comes back, in bytes."""

    def __init__(self, ahead: int = 1 << 20) -> None:
        super().__init__(CPU, ahead)
        self.sent: list[int] = []
        self.fetched: list[int] = []

    def send(self, flat: Tensor) -> tuple[Tensor, object]:
        self.sent.append(flat.nbytes)
        return super().send(flat)

    def fetch(self, host: Tensor, left: object) -> tuple[Tensor, object]:
        self.fetched.append(host.nbytes)
        return super().fetch(host, left)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def through(kept: Callable[[Tensor], Callable[[], Tensor]], function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with keeping(kept):
        y = function(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    return gradient


def test_views_of_one_storage_travel_once() -> None:
    def product(x: Tensor) -> Tensor:
        a, b = (x * 2).chunk(2, -1)
        return a * b * b

    memory = Counting()
    x = numbers(64, 32)
    assert torch.equal(through(memory.start(), product, x), torch.autograd.grad(product(x).sum(), x)[0])
    # The storage of both halves, and the product of the first with the second.
    assert memory.sent == [64 * 32 * 4, 64 * 16 * 4]
    assert sorted(memory.fetched) == sorted(memory.sent)


def test_parameters_and_small_tensors_stay() -> None:
    memory = Counting()
    weight, small = nn.Parameter(torch.ones(64, 64)), torch.ones(16, requires_grad=True)
    through(memory.start(), lambda x: x @ weight + x @ weight.t() + (x[0, :16] * small).sum(), numbers(32, 64))
    assert memory.sent == [32 * 64 * 4]


def test_what_is_written_to_after_it_was_copied_is_copied_again() -> None:
    """The square of x, and then of x + 1 in the same memory."""
    memory = Counting()
    x = numbers(64, 32)
    with keeping(memory.start()):
        y = x * 1
        one = y * y
        y.add_(1)
        two = y * y
    assert len(memory.sent) == 2
    # A write in place joins the graph: one's own saved value is the copy that was made before.
    assert torch.allclose(torch.autograd.grad((one + two).sum(), x)[0], 2 * x + 2 * (x + 1))


@pytest.mark.parametrize(("ahead", "first"), [(1, 2), (3 << 12, 4), (1 << 20, 6)])
def test_tensors_come_back_before_they_are_asked_for(ahead: int, first: int) -> None:
    """Six tensors of 4 KiB: the last one asked for brings as many before it as may be ahead."""
    memory = Counting(ahead)
    kept = memory.start()
    backs = [kept(numbers(32, 32) + i) for i in range(6)]
    assert torch.equal(backs[-1](), numbers(32, 32) + 5)
    assert len(memory.fetched) == first
    for i, back in reversed(list(enumerate(backs))):
        assert torch.equal(back(), numbers(32, 32) + i)
    assert len(memory.fetched) == 6


def test_what_nobody_needs_any_more_does_not_come_back() -> None:
    memory = Counting()
    kept = memory.start()
    backs = [kept(numbers(32, 32) + i) for i in range(4)]
    del backs[1]
    backs[-1]()
    assert len(memory.fetched) == 3


def test_a_kept_tensor_that_is_written_to_is_noticed() -> None:
    x = numbers(8, 8)
    with keeping(keep):
        y = x * 1
        z = y * y
        y.add_(1)
    with pytest.raises(RuntimeError, match=r"a tensor \(8, 8\) that the backward needs was written to in place"):
        z.sum().backward()


def test_a_tensor_that_its_own_node_keeps_is_freed_with_it() -> None:
    """Without the collector of cycles: it might come late."""
    with keeping(keep):
        y = numbers(8, 8).exp()
    storage = StorageWeakRef(y.untyped_storage())
    gc.disable()
    try:
        del y
        assert storage.expired()
    finally:
        gc.enable()


def test_without_a_backward_to_come_nothing_is_kept() -> None:
    run = Runner(lambda block, x: block(x), Mock(side_effect=AssertionError))
    with torch.no_grad():
        assert torch.equal(run([Twice()], torch.ones(2)), 2 * torch.ones(2))
    with pytest.raises(AssertionError):
        run([Twice()], torch.ones(2))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


class Block(nn.Module):
    """Changes what the cheap module has made, or not."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.cheap, self.changes = Twice(), changes

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cheap(x)
        if self.changes:
            y.add_(1)
        return y * y


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("changes", [False, True])
def test_what_a_cheap_module_has_made_is_made_again_unless_it_was_changed(changes: bool, offload: bool) -> None:
    block, x = Block(changes), numbers(32, 32)
    run: Runner = runner(Activations("selective", offload), [block], (Twice,), CPU)
    y = run([block], x)
    assert block.cheap.calls == 1
    y.sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, 4 * (2 * x + changes))
    assert (block.cheap.calls > 1) is not changes


def test_what_makes_it_again_goes_block_by_block_in_the_backward() -> None:
    """A node of the first block must not hold on to what the last one was given."""
    blocks, inputs, gone = [Block(False) for _ in range(3)], list[StorageWeakRef](), list[bool]()

    def given(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs.append(StorageWeakRef(arguments[0].untyped_storage()))

    def left(module: nn.Module, arguments: tuple[Tensor, ...], y: Tensor) -> None:
        y.register_hook(lambda _: gone.append(inputs[0].expired()))

    blocks[2].register_forward_pre_hook(given)
    blocks[0].register_forward_hook(left)
    runner(Activations("selective"), blocks, (Twice,), CPU)(blocks, numbers(32, 32)).sum().backward()
    assert gone == [True]


def test_full_recomputation_draws_the_same_masks_and_leaves_the_generator_alone() -> None:
    block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5))
    gradients, states = [], []
    for recompute in ("none", "full"):
        x = numbers(64, 16)
        torch.manual_seed(3)
        y = runner(Activations(recompute), [block, block], (), CPU)([block, block], x)
        states.append(torch.get_rng_state())
        y.square().sum().backward()
        states.append(torch.get_rng_state())
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert all(torch.equal(state, states[0]) for state in states)


# -- in 8 bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_block_loses_little_whatever_is_in_it(dtype: torch.dtype) -> None:
    drawn = torch.randn(100, 64, generator=torch.Generator().manual_seed(1))
    sizes = torch.arange(-3.0, 2.0)[torch.arange(64) % 5]
    for x, most in ((drawn, 0.02), (drawn * 10**sizes, 0.063), (drawn * 1e-3, 0.02), (drawn.relu(), 0.02)):
        wide = x.to(dtype).double()
        found = dequantise(*quantise(x.to(dtype).flatten()), dtype).view_as(x).double()
        assert ((found - wide).norm(dim=1) <= most * wide.norm(dim=1)).all()
        assert torch.equal(found.sign(), wide.sign())
    spoilt = dequantise(*quantise(torch.tensor([1.0, torch.nan] + [2.0] * 62 + [4.0]).to(dtype)), dtype)
    assert spoilt[:64].isnan().all() and spoilt[64].item() == pytest.approx(4, rel=0.01)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


def test_what_a_module_is_given_is_rounded_once_unless_it_is_kept_before() -> None:
    square, x = Square(), numbers(4, 16)
    rounding = Rounding([square], ())
    with patch.object(compress, "quantise", wraps=quantise) as made, keeping(rounding.start()):
        e = x.exp()  # keeps it before it is given
        a = x * 3
        y = square(e) + square(a) + (square(a.t()) + a.t().sin()).t()
    found = dequantise(*quantise(a.detach().flatten(), 16), a.dtype).view_as(a)
    assert not torch.equal(found, a) and made.call_count == 1
    want = 2 * e * e + 3 * (4 * found + found.cos())
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], want)
