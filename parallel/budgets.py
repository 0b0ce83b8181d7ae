"""The memory that may be taken by what goes on beside the computation. The plan counts with these; no torch."""

BUCKET_BYTES = 32 << 20
"""Largest bucket of gradients of more than one parameter: its message takes much longer than the latency of one."""

REDUCE_SCATTERS = 2
"""Reduce-scatters under way at once; each of them holds a bucket."""

OFFLOAD_AHEAD = 256 << 20
"""Bytes of offloaded activations on their way in each direction, beside what the computation itself holds."""

ROUNDING_BLOCK = 256
"""Elements of a gradient that have one scale where they are sent in 8 bits: 1/256 of the bytes is scales."""

NORM_BLOCK = 1 << 18
"""Elements of a gradient that a core widens at a time for the norm: they stay in its cache."""

BLOCK = 64
"""Elements that share a scale where numbers are rounded to 8 bits."""

MATRIX_ELEMENTS = 1 << 28
"""Elements of matrices that a rank has on their way at once, in 2 bytes each."""
