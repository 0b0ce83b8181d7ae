"""What a process keeps of copies of images: what counts as whole, what is dropped, and what is damaged."""

from __future__ import annotations

import pytest
import torch

from megacore.training.copies import CopiedImage, Copies, checksum_of
from parallel.mesh import ALONE


def image(step: int) -> CopiedImage:
    flat = torch.full((16,), step, dtype=torch.uint8)
    return CopiedImage(flat, checksum_of(flat), {"step": step})


@pytest.fixture
def copies() -> Copies:
    """Those of rank 0, which holds what rank 1 has too."""
    made = Copies()
    made.join(0, {1: 0, 0: 1}, ALONE, lambda: None)
    made.images = {0: {4: image(4), 8: image(8)}, 1: {4: image(4)}}
    return made


def test_a_step_is_whole_once_all_that_is_held_is_of_it(copies: Copies) -> None:
    assert copies.whole == 4
    copies.images[1][8] = image(8)
    assert copies.whole == 8
    del copies.images[1]
    assert copies.whole == -1


def steps(copies: Copies) -> dict[int, list[int]]:
    return {rank: sorted(versions) for rank, versions in copies.images.items()}


def test_older_ones_go_once_all_ranks_have_newer(copies: Copies) -> None:
    copies.settle(8)
    assert steps(copies) == {0: [8], 1: []}


def test_what_is_undone_goes(copies: Copies) -> None:
    copies.drop_after(4)
    assert steps(copies) == {0: [4], 1: [4]}


def test_a_flipped_bit_is_no_copy(copies: Copies) -> None:
    copies.images[0][8].bytes[3] ^= 1
    copies.leave()
    assert steps(copies) == {0: [4], 1: [4]}


def test_nothing_is_copied_while_the_run_is_halted(copies: Copies) -> None:
    copies.begin(9)
    assert 9 not in copies.images[0] and copies.due(9) == 0
