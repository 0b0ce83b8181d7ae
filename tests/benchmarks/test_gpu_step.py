"""The GPU benchmark runs; how fast, only a GPU can tell."""

import math

import pytest
import torch

from benchmarks import gpu_step

CPU = torch.device("cpu")


@pytest.mark.parametrize("mode", ["megacore", "Hugging Face"])
def test_a_tiny_step_is_measured(mode: str) -> None:
    result = gpu_step.measure(mode, "tiny", CPU, warm_up=2, steps=3, all_layers=False)
    assert result.tokens_per_second == pytest.approx(2 * 64 / result.seconds_per_step)
    assert result.mfu is not None and 0 < result.mfu < 1
    # A model that knows nothing, then one that has seen these tokens five times.
    assert result.first_loss == pytest.approx(math.log(512), rel=0.02)
    assert result.last_loss < result.first_loss


def test_the_8b_shape_keeps_some_layers_unless_told_otherwise() -> None:
    shape = gpu_step.SHAPES["8b"]
    assert shape.config(all_layers=False).sizes["layer"] == 8
    assert shape.config(all_layers=True).sizes["layer"] == 32


def test_the_table_says_what_did_not_run() -> None:
    good = gpu_step.Result(0.5, 1000.0, 0.5, 10.0, 11.0, 10.0)
    half = gpu_step.Result(1.0, 500.0, None, 20.0, 11.0, 10.0)
    shown = gpu_step.table(
        "1b", {"megacore": [good], "Hugging Face": [half], "Hugging Face compiled": ["out of memory"]}
    )
    assert "1,000   50.0%       10.0   2.00" in shown
    assert "Hugging Face compiled        did not run: out of memory" in shown
