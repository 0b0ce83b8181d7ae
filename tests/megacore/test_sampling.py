"""Choosing tokens: the filters beside transformers', what is drawn beside the probabilities, and what it depends on."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megacore.inference.sampling import Greedy, Sampling

VOCABULARY = 23


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


@pytest.mark.quick
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 5, 100])
@pytest.mark.parametrize("top_p", [0.05, 0.7, 1.0])
def test_probabilities_are_those_of_transformers(temperature: float, top_k: int | None, top_p: float) -> None:
    given = logits(50).double()
    wanted = TemperatureLogitsWarper(temperature)(None, given)
    if top_k is not None:
        wanted = TopKLogitsWarper(top_k)(None, wanted)
    if top_p < 1:
        wanted = TopPLogitsWarper(top_p)(None, wanted)
    p, order = Sampling(temperature, top_k, top_p).probabilities(given)
    found = torch.zeros_like(p).scatter(-1, order, p)
    torch.testing.assert_close(found, wanted.softmax(-1), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "sampling", [Sampling(seed=1), Sampling(0.7, top_k=6, seed=2), Sampling(1.5, top_p=0.8, seed=3)]
)
def test_tokens_are_drawn_by_their_probabilities(sampling: Sampling) -> None:
    """Each count lies within five standard deviations of what it should be."""
    draws, row = 20_000, logits(1)
    p, order = sampling.probabilities(row)
    wanted = torch.zeros_like(p).scatter(-1, order, p)[0]
    drawn = sampling(row.expand(draws, -1), [(number % 7, number // 7) for number in range(draws)])
    counts = torch.bincount(drawn, minlength=VOCABULARY)
    assert not counts[wanted == 0].any()
    spread = (draws * wanted * (1 - wanted)).sqrt()
    assert ((counts - draws * wanted).abs() <= 5 * spread + 1).all()


@pytest.mark.quick
def test_a_draw_depends_on_seed_prompt_and_token_alone() -> None:
    which = [(prompt, token) for prompt in range(8) for token in range(8)]
    row = logits(1).expand(len(which), -1)
    drawn = Sampling(2.0, seed=5)(row, which)
    assert drawn.unique().numel() > 5
    backwards = Sampling(2.0, seed=5)(row, which[::-1])
    assert torch.equal(backwards.flip(0), drawn)
    assert torch.equal(Sampling(2.0, seed=5)(row[:1], which[:1]), drawn[:1])
    assert not torch.equal(Sampling(2.0, seed=6)(row, which), drawn)


@pytest.mark.quick
def test_greedy_takes_the_first_of_the_most_likely() -> None:
    given = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]])
    assert Greedy()(given, [(0, 0), (1, 0)]).tolist() == [1, 0]
    assert Sampling(1e-3, seed=9)(logits(5), [(n, 0) for n in range(5)]).tolist() == logits(5).argmax(-1).tolist()
