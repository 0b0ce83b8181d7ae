"""Losses of preferences: of pairs of documents, by the log-probabilities of their answers or by scores, on any layout.

A pair is a chosen and a rejected document, both in one row, so that each data-parallel rank has its pairs whole. Over
cp and tp its tokens are spread: what is found of them is summed to the ranks, each of which has some of the pairs,
and counts their losses alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.parallel.collectives import reduce_scatter
from megacore.parallel.enum_errors import PreferenceLoss
from megacore.parallel.mesh import Group

TOLD = 4
"""Numbers that a preference says of some pairs: sums of the losses, of the rewards of what was chosen and of what was
rejected, and how often the former is higher."""


@dataclass(frozen=True)
class MicrobatchPairs:
    """The pairs of a microbatch, as many as the ranks of cp x tp divide. [pairs, 2]: of the chosen one, of the rejected
    one.

    Args:
        places: [t], the document of each token's label: its place in [pairs, 2], flattened.
        counted: [pairs, 2], numbers of the labels; a pair of none only fills up.
        reference: [pairs, 2], the log-probabilities of the answers by the reference.
    """

    places: Tensor
    counted: Tensor
    reference: Tensor

    @property
    def real(self) -> Tensor:
        """[pairs], bool, whether it is one: whether both documents have labels."""
        return are_real(self.counted)


PairFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log-probabilities or scores, log-probabilities of the reference, numbers of labels: [pairs, 2] each) -> [TOLD], sums
over the pairs."""


@dataclass(frozen=True)
class PairLoss:
    """What a function says of the pairs of a microbatch; each pair counts on one rank.

    Args:
        function: What gives their losses.
        group: The ranks among which the tokens of the microbatch are divided: cp x tp.
        scores: Whether they are of scores of last tokens, and not of log-probabilities.
    """

    function: PairFunction
    group: Group
    scores: bool = False

    def __call__(self, values: Tensor, places: Tensor, pairs: MicrobatchPairs) -> Tensor:
        """values: [n], the log-probabilities or scores of some tokens of this rank, 0 where nothing counts; places:
        [n], those of the same tokens -> [TOLD]."""
        # No scattered sum: on GPUs that adds in another order each time, and a run is to repeat bitwise.
        documents = torch.arange(pairs.counted.numel(), device=places.device)
        sums = torch.where(places == documents[:, None], values, 0).sum(1)
        own = reduce_scatter(sums, self.group).unflatten(0, (-1, 2))
        reference, counted = (
            each.chunk(self.group.size)[self.group.index] for each in (pairs.reference, pairs.counted)
        )
        return self.function(own, reference, counted)


@dataclass(frozen=True)
class Preference:
    """A loss of :data:`LOSSES` and its coefficients: a :data:`PairFunction`.

    Args:
        loss: The name of the loss.
        beta: Factor of the log-probabilities in rewards (dpo, simpo), of the regularisation (ipo), of the odds ratio
            (orpo).
        gamma: The margin between rewards (simpo).
        label_smoothing: The probability that chosen and rejected were mixed up (dpo, simpo).
    """

    loss: PreferenceLoss
    beta: float
    gamma: float = 0.0
    label_smoothing: float = 0.0

    def __call__(self, found: Tensor, reference: Tensor, counted: Tensor) -> Tensor:
        real = are_real(counted)
        found = found.where(real[:, None], -1)  # so that nothing is infinite that does not count
        losses, rewards = LOSSES[self.loss](found, reference.to(found.dtype), counted.clamp(min=1), self)
        rewards = rewards.detach()
        told = torch.stack([losses, *rewards.unbind(1), (margin(rewards) > 0).to(losses.dtype)])
        return torch.where(real, told, 0).sum(1)

    def of_margin(self, margin: Tensor) -> Tensor:
        """margin: [pairs] between rewards -> the losses: [pairs] (Bradley and Terry 1952, with smoothed labels)."""
        loss = -F.logsigmoid(margin)
        return loss.lerp(-F.logsigmoid(-margin), self.label_smoothing) if self.label_smoothing else loss


def are_real(counted: Tensor) -> Tensor:
    """counted: [pairs, 2], the numbers of their labels -> [pairs], whether they are more than what fills up."""
    return (counted > 0).all(1)


def margin(values: Tensor) -> Tensor:
    """values: [pairs, 2] -> [pairs], the chosen one's less the rejected one's."""
    return values[:, 0] - values[:, 1]


_Loss = Callable[[Tensor, Tensor, Tensor, Preference], tuple[Tensor, Tensor]]


def dpo(found: Tensor, reference: Tensor, counted: Tensor, by: Preference) -> tuple[Tensor, Tensor]:
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290)."""
    rewards = by.beta * (found - reference)
    return by.of_margin(margin(rewards)), rewards


def ipo(found: Tensor, reference: Tensor, counted: Tensor, by: Preference) -> tuple[Tensor, Tensor]:
    """Identity preference optimization (Azar et al. 2023, arXiv 2310.12036), of means over the tokens."""
    ratios = found - reference
    return (margin(ratios / counted) - 1 / (2 * by.beta)).square(), by.beta * ratios


def simpo(found: Tensor, reference: Tensor, counted: Tensor, by: Preference) -> tuple[Tensor, Tensor]:
    """Simple preference optimization (Meng et al. 2024, arXiv 2405.14734), without a reference."""
    rewards = by.beta * found / counted
    return by.of_margin(margin(rewards) - by.gamma), rewards


def orpo(found: Tensor, reference: Tensor, counted: Tensor, by: Preference) -> tuple[Tensor, Tensor]:
    """Odds ratio preference optimization (Hong et al. 2024, arXiv 2403.07691), without a reference: the cross entropy
    of the chosen answer, and the odds ratio."""
    means = found / counted
    below_0 = means.clamp(max=-torch.finfo(means.dtype).eps)  # the odds of a certain answer are infinite
    odds = below_0 - torch.log(-torch.expm1(below_0))
    return -means[:, 0] - by.beta * F.logsigmoid(margin(odds)), by.beta * means


def bradley_terry(found: Tensor, reference: Tensor, counted: Tensor, by: Preference) -> tuple[Tensor, Tensor]:
    """The loss of a reward model (Ouyang et al. 2022, arXiv 2203.02155, section 3.5), whose rewards are its scores."""
    return by.of_margin(margin(found)), found


LOSSES: Mapping[PreferenceLoss, _Loss] = {
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
    "bradley_terry": bradley_terry,
}
"""(log-probabilities or scores, log-probabilities of the reference, numbers of labels: [pairs, 2] each, coefficients)
-> the losses, [pairs], and the rewards, [pairs, 2]."""
