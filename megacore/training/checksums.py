"""Checksums of tensors on their device."""

from __future__ import annotations

import torch
from torch import Tensor

_ROW = 1024
"""Words that are summed with one weight."""


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of the bits of a tensor, an int64 scalar on its device, which nobody waits for.

    Each row of 64-bit words has an odd weight: one word that is changed always changes it.
    """
    flat = tensor.detach().reshape(-1)
    if flat.nbytes % 8 or flat.storage_offset() * flat.itemsize % 8:
        padded = flat.new_zeros(-(-flat.nbytes // 8) * 8 // flat.itemsize)
        padded[: len(flat)] = flat
        flat = padded
    words = flat.view(torch.int64)
    whole = len(words) - len(words) % _ROW
    rows = torch.cat([words[:whole].view(-1, _ROW).sum(1), words[whole:].sum(0, keepdim=True)])
    return (rows * (2 * torch.arange(len(rows), device=rows.device) + 1)).sum()
