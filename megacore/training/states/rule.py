"""The rule of updates, and what is kept for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megacore.config import MuonConfig
from megacore.store.weight_folders.index import EMA, MASTER, MOMENTS


@dataclass(frozen=True)
class Rule:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), and in which numbers.

    Args:
        lr, betas, eps, weight_decay: The paper's; each step has a learning rate of its own.
        master_weights: Whether parameters narrower than fp32 are updated through an fp32 copy.
        moments: dtype of the moments; None for that of what is updated.
        muon: The rule of matrices of blocks, if it is another.
        ema: The share of an average of the weights that an update keeps; None where there is none. The first update
            sets it to the weights, as torch.optim.swa_utils does.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    master_weights: bool
    moments: torch.dtype | None
    muon: MuonConfig | None = None
    ema: float | None = None

    def value(self, parameter: torch.dtype) -> torch.dtype:
        """Return the dtype of what is updated for a parameter of this one."""
        return torch.float32 if self.master_weights and parameter.itemsize < 4 else parameter

    def kept(self, parameter: torch.dtype) -> Mapping[str, torch.dtype]:
        """Return {state: dtype} of what is kept beside a parameter of this dtype: a wider master, moments, averages."""
        value = self.value(parameter)
        master = {} if value == parameter else {MASTER: value}
        averages = {} if self.ema is None else {EMA: value}
        return {**master, **dict.fromkeys(MOMENTS, self.moments or value), **averages}
