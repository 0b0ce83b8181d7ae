"""The commit of a step, the sum of the gradient norm, is no other message's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine import RECIPE, trainer, write_recipe
from torch import Tensor

from parallel.gradients import reduce


def test_a_message_of_another_sum_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo fills the beginning of a sum with a shorter message; the rest is what the memory held before, of the sum of
    the last step at worst."""
    made = trainer(write_recipe(tmp_path, RECIPE), [f"out={tmp_path / 'run'}"])
    before: list[Tensor] = []

    def all_reduce_(x: Tensor, *_: object) -> Tensor:
        before.append(x.clone())
        return x if len(before) < 3 else torch.stack([x[0] + 0.5, before[-2][1]])

    monkeypatch.setattr(reduce, "all_reduce_", all_reduce_)
    squares = torch.tensor(4.0, dtype=torch.float64)
    assert [made.step.gradients.norm(squares).item() for _ in range(2)] == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="another rank was at another message"):
        made.step.gradients.norm(squares)
    assert squares == 4.0
