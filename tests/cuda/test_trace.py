"""Whole training steps on fake CUDA tensors: nothing is on the wrong device, the host waits for nothing that is not
named, and no step launches more than ``launches.txt`` says."""

from __future__ import annotations

import importlib
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import Mock, patch

import pytest
import steps
import torch
from pool import TIMEOUT_S, forkserver
from steps import CASES, HOW, Case, Launches, excess, read
from torch import Tensor, nn

from megacore.parallel.kernels import grouped
from megacore.parallel.kernels.choice import has_triton
from megacore.training.trainer import Trainer

NAMES = list(CASES)
DRAWN = 5
"""Of the cases in the suite, and one that is compiled, which takes longer; all are on the grid."""
PARTS = 4

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or sys.platform != "linux",
    reason="made for Linux without a GPU; with one, benchmarks/gpu_first.py tells more",
)


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of this module gives in a process that believes in a GPU."""
    context = forkserver()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, function, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(TIMEOUT_S), f"no answer in {TIMEOUT_S} s"
        return ours.recv()
    finally:
        process.kill()
        process.join()


def _serve(answers: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    from megacore.planning.trace import fake_cuda

    torch.set_num_threads(1)
    fake_cuda.pretend()
    answers.send(function(*arguments))


def traced(names: Sequence[str]) -> dict[str, Launches | str]:
    """{case: what it launches, or what is wrong}."""
    return {name: _launches(CASES[name]) for name in names}


def _launches(case: Case) -> Launches | str:
    try:
        return steps.launches(case)
    except Exception:
        return traceback.format_exc()


def check(names: Sequence[str]) -> None:
    version, allowed = read()
    found: dict[str, Launches | str] = in_a_process(traced, names)
    wrong = [f"{name}: {error}" for name, error in found.items() if isinstance(error, str)]
    assert not wrong, "\n".join(wrong)
    if torch.__version__.partition("+")[0] != version:
        pytest.skip(f"launches.txt was counted with torch {version}")
    if not has_triton():
        pytest.skip("launches.txt was counted with triton")
    rows = {name: row for name, row in found.items() if isinstance(row, Launches)}
    more = [line for name, row in rows.items() for line in excess(name, row, allowed[name])]
    assert not more, "\n".join([*more, f"where that is worth it, say so by: {HOW}"])


@pytest.mark.in_turn(2, 0)
def test_drawn_steps() -> None:
    plain = [name for name, case in CASES.items() if "compile" not in case.overrides]
    check([*random.Random(12).sample(plain, DRAWN), "cp, ring, documents", "compiled"])


@pytest.mark.grid
@pytest.mark.parametrize("part", range(PARTS))
def test_all_steps(part: int) -> None:
    check(NAMES[part::PARTS])


def test_the_table_has_the_cases() -> None:
    assert list(read()[1]) == NAMES
    assert len(NAMES) >= 45


# -- experts


def waits(names: Sequence[str]) -> list[int]:
    """How often the host asks for counts of rows in a step of each case."""

    asked, found = Mock(side_effect=grouped.start_counts), list[int]()
    with patch.object(grouped, "start_counts", asked):
        for name in names:
            asked.reset_mock()
            steps.trace(CASES[name], 1)
            found.append(asked.call_count)
    return found


def test_the_host_waits_once_for_a_layer_whose_rows_travel() -> None:
    """For each of two microbatches, and not again where the layer is computed again."""
    assert in_a_process(waits, ["experts", "experts, ep", "experts, ep, full"]) == [0, 2, 2]


# -- that it can fail


def _item(y: Tensor) -> Tensor:
    return y * y.sum().item()


def _truth(y: Tensor) -> Tensor:
    return y if y.any() else -y


def _nonzero(y: Tensor) -> Tensor:
    return y + y.nonzero().shape[0]


def _chosen(y: Tensor) -> Tensor:
    return y + y[y > 0].sum()


def _cpu(y: Tensor) -> Tensor:
    return y + y.cpu().shape[0]


def _cpu_asynchronously(y: Tensor) -> Tensor:
    return y + y.to("cpu", non_blocking=True).shape[0]


def _cpu_mask(y: Tensor) -> Tensor:
    return torch.where(torch.ones(len(y), 1, dtype=torch.bool), y, 0)


def _cpu_index(y: Tensor) -> Tensor:
    return y[torch.arange(len(y))]


def _cpu_constant(y: Tensor) -> Tensor:
    return y * torch.tensor([1.0, 2.0], device=y.device, dtype=y.dtype)[0]


def _cpu_weight(y: Tensor) -> Tensor:
    rms_norm = importlib.import_module("megacore.parallel.kernels.fused.norm").rms_norm
    normal: Tensor = rms_norm(y, torch.ones(y.shape[1], dtype=y.dtype), 1e-5)
    return normal


FAULTS = {
    _item: "asks the device for a number",
    _truth: "asks the device for a number",
    _nonzero: "waits for aten.nonzero",
    _chosen: "waits for aten.nonzero",
    _cpu: "to the host",
    _cpu_asynchronously: "to the host",
    _cpu_mask: "same device",
    _cpu_index: "tensor of the host beside one of the device",
    _cpu_constant: "without non_blocking",
}
if has_triton():
    FAULTS[_cpu_weight] = "gives norm_forward a tensor of the host"


def caught() -> dict[str, str]:
    """{fault: what is said of it}, each in the forward of a block."""
    return {fault.__name__: _said(fault) for fault in FAULTS}


def _said(fault: Callable[[Tensor], Tensor]) -> str:
    try:
        steps.trace(CASES["bf16"], 1, _planted(fault))
    except Exception as error:
        return str(error)
    return ""


def _planted(fault: Callable[[Tensor], Tensor]) -> Callable[[Trainer], None]:
    def faulty(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return fault(output)

    def plant(trainer: Trainer) -> None:
        trainer.model.chunks[0].layers["0"].register_forward_hook(faulty)

    return plant


def test_faults_are_caught() -> None:
    found = in_a_process(caught)
    for fault, said in FAULTS.items():
        assert said in found[fault.__name__], f"{fault.__name__}: {found[fault.__name__] or 'nothing is said'}"
    # Which function it was.
    assert "test_trace.py:_item" in found["_item"]


def more() -> tuple[int, int]:
    """Launches of a step, and of one with one product more in each forward of its block."""
    (watch,), _ = steps.trace(CASES["bf16"], 1)
    (with_more,), _ = steps.trace(CASES["bf16"], 1, _planted(lambda y: y * 2))
    return watch.launches.total(), with_more.launches.total()


def test_a_launch_more_is_counted_and_said() -> None:
    before, after = in_a_process(more)
    assert after == before + 2 * 2  # forward and backward of two microbatches
    allowed = read()[1]["bf16"]
    assert excess("bf16", allowed, allowed) == []
    assert excess("bf16", replace(allowed, step=allowed.step - 1), allowed) == []
    assert excess("bf16", replace(allowed, block=allowed.block + 1), allowed) == [
        f"bf16: block {allowed.block + 1}, {allowed.block} in launches.txt"
    ]
