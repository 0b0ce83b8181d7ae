"""The loads of experts as numbers of a run's metrics."""

from __future__ import annotations

import math

from torch import Tensor

from megacore.training.metrics import Record
from parallel.balance import Coefficients, Loads


def record(loads: Loads, coefficients: Coefficients) -> Record:
    """Return the metrics of a step: means over the layers, and of the worst layer; see docs/metrics.md."""
    counts = loads.counts.double()
    shares = counts / counts.sum(1, keepdim=True)
    entropy = -(shares * shares.clamp(min=1e-300).log()).sum(1) / math.log(max(counts.shape[1], 2))
    made = {
        "load_max": (counts.amax(1) / counts.mean(1), Tensor.max),
        "load_idle": ((counts == 0).double().mean(1), Tensor.max),
        "load_entropy": (entropy, Tensor.min),
    }
    numbers = {name: values.mean().item() for name, (values, _) in made.items()}
    numbers |= {f"{name}_worst": worst(values).item() for name, (values, worst) in made.items()}
    if coefficients.balance:
        numbers["balance"] = loads.balance.mean().item()
    if coefficients.z_loss:
        numbers["router_z_loss"] = loads.z_loss.mean().item()
    if loads.biases is not None:
        numbers |= {"bias_min": loads.biases[:, 0].min().item(), "bias_max": loads.biases[:, 1].max().item()}
    return numbers
