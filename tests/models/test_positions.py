"""What positions do to queries and keys beside rotating them, against formulas by hand."""

import math

import pytest
import torch

from megacore.models.anatomy import Alibi, Temperature
from megacore.models.positions import Distances, Tempered, slopes


@pytest.mark.parametrize("of_power", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 8, 12, 112])
def test_slopes_are_those_of_the_paper(heads: int, of_power: bool) -> None:
    below = 2 ** int(math.log2(heads))
    want = [2 ** (-8 * i / below) for i in range(1, below + 1)]
    want += [2 ** (-4 * i / below) for i in range(1, 2 * (heads - below), 2)]
    assert slopes(Alibi(8.0, of_power), heads).tolist() == pytest.approx(want, rel=1e-6)


def test_scores_are_less_by_the_distance() -> None:
    """Beyond 128 and 256, too; and bf16 has the keys' positions exactly, up to 32,768."""
    heads, at, scale = 3, torch.tensor([0, 5, 127, 128, 300, 2047, 32767]), 0.25
    q, k = (torch.randn(len(at), heads, 6, dtype=torch.float64) for _ in range(2))
    own = slopes(Alibi(), heads).double()
    extended_q, extended_k = Distances(own / scale)(q, k, at)
    scores = torch.einsum("ihd,jhd->hij", extended_q, extended_k) * scale
    plain = torch.einsum("ihd,jhd->hij", q, k) * scale - own[:, None, None] * (at[:, None] - at).abs()
    seen = torch.ones(len(at), len(at), dtype=torch.bool).tril()
    wanted, found = (each.masked_fill(~seen, -torch.inf).softmax(-1) for each in (plain, scores))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    narrow = Distances(own / scale)(q.bfloat16(), k.bfloat16(), at)[1][..., 6:8]
    assert torch.equal(narrow.double().sum(-1), at[:, None].expand(-1, heads).double())


def test_queries_count_more_the_later_they_stand() -> None:
    q, k = torch.ones(4, 1, 2, dtype=torch.float64), torch.ones(4, 1, 2)
    tempered, kept = Tempered(Temperature(0.1, 8192, 1))(q, k, torch.tensor([0, 8190, 8191, 100_000]))
    want = [1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(13)]
    assert tempered[:, 0, 0].tolist() == pytest.approx(want, rel=1e-7) and kept is k
