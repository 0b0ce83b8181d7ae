"""The operations of a stage as the plan sees them, to hold against those of the model."""

from megacore.planning.activations import ActivationMemory
from megacore.planning.step_time import parts


class Flops:
    """Of a rank for one microbatch: of a forward, its backward, and what recomputation repeats."""

    def __init__(self, act: ActivationMemory, virtual: int) -> None:
        self.forward = self.backward = self.again = 0
        for part, plain, _, number in parts(act, virtual):
            self.forward += number * part.forward.flops
            self.backward += number * (plain.backward.flops + plain.weights.flops)
            self.again += number * (part.backward.flops - plain.backward.flops)
