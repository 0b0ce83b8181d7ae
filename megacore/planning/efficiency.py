"""The speed of a device at the products of a model and at what lies between them, and the time of a message: a few
numbers, which published runs agree with (`benchmarks/published_runs.py`)."""

from __future__ import annotations

import math

from megacore.planning.costs import MatMul

PASSES = 8.5
"""The number of times that what a block keeps of its forward passes through the device's memory, in a forward and a
backward: norms, activation functions, rope and residual adds."""
CAST_BYTES, CAST_SLICE_BYTES, TURN_BYTES = 3, 5, 2
"""The bytes moved for each element of a factor of a product in fp8, of which bf16 is read for its largest magnitude and
for two copies; of a slice of a weight, which has one; and of a copy that is transposed by itself."""
COMPRESS_PASSES = 17.5, 3.5
"""The number of times that what is rounded to 8 bits passes through the memory, in a forward and in a backward,
where each of torch's operators reads and writes it."""
MEMORY = 0.85
"""Share of the memory's bandwidth that a kernel of one pass reaches: an assumption; plain copies are generally known to
reach about 90 % on an H100, and norms and reductions less."""
KERNEL_S = 2e-6
"""Seconds that a kernel takes however little it does: an assumption."""
LAUNCH_S = 7e-6
"""Seconds of the host for each launch of eager Python, with its share of autograd and of the modules around it: an
assumption; a bare launch is generally known to take about 4 us, an operator of torch 5 to 10."""
LINKS = 0.8
"""Share of a link's bandwidth that a ring reaches."""
START_S, HOP_S, NODE_HOP_S = 8.4e-6, 3.4e-6, 14e-6
"""Seconds of any collective, and of each step of its ring within a node and to the next one: NCCL's own model of its
simple protocol (NVIDIA/nccl, src/graph/tuning.cc)."""


def reached(product: MatMul, half: float) -> float:
    """Return the share of what large products reach; a side as long as ``half`` would cost a product half of it."""
    return math.prod(side / (side + half) for side in (product.m, product.n, product.k))


def ring_s(steps: int, node_steps: int) -> float:
    """Return the seconds that an empty message takes around a ring, some of whose steps go to another node."""
    return START_S + (steps - node_steps) * HOP_S + node_steps * NODE_HOP_S
