"""Steps under torch's own sanitizer of streams, which knows nothing of ours: it raises where two streams use a tensor
without an order between them."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu import correctness
from benchmarks.gpu.rows import Machine, Row, failed, skipped

WAYS = ("bf16", "bf16, activations on host", "bf16, selective, activations on host", "bf16, states on host")


def sanitizer(machine: Machine) -> Iterator[Row]:
    if not machine.gpu:
        yield skipped("torch's sanitizer of streams", "there are no streams on a CPU")
        return
    from torch.cuda import _sanitizer

    _sanitizer.enable_cuda_sanitizer()  # for the rest of this process
    for name in WAYS:
        try:
            correctness.train(correctness.RUNS[name], machine.device)
            yield Row(f"{name}: races", 0.0, 0.0, "", True)
        except Exception as error:  # its errors are many, in one that has no name
            yield failed(f"{name}: races", error)
