"""The operations of a stage as the plan sees them, to hold against those of the model."""

from __future__ import annotations

from megacore.planning.activations import ActivationMemory
from megacore.planning.step_time import Products, work


class Flops:
    """Of a rank for one microbatch: of a forward, its backward, and what recomputation repeats."""

    def __init__(self, act: ActivationMemory, virtual: int) -> None:
        self.forward = self.backward = self.again = 0
        for each, number in work(act, virtual):
            self.forward += number * flops(each.forward)
            self.backward += number * flops(each.backward)
            self.again += number * flops(each.again)


def flops(products: Products) -> int:
    return sum(product.flops * count for product, count in products.items())
