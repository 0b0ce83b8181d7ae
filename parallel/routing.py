"""The table of a router of experts, by which it chooses and weighs them: one for all families."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The way from one logit for each expert to the experts of a token and their weights.

    Where scores are equal, the expert of the lower number is chosen, on every device.

    Args:
        experts: The number of experts of a layer.
        idle: The last of them, which do nothing: they give what they are given (LongCat-Flash, arXiv 2509.01322).
        top_k: The number of them that a token is sent to.
        score: The function that makes scores of logits, over all experts.
        choose: Whether experts are chosen by their scores or by their logits, which a correction changes otherwise.
        weigh: Whether weights are the scores of ``all`` experts at those that are chosen, or the softmax of the logits
            of the ``chosen`` ones alone, or of each one among those not chosen before it that are ``close`` to it (Liu
            et al. 2024, arXiv 2409.12136); then logits choose, too.
        reach: How far the logits of those may be from its own, as a part of the larger of their sizes.
        normalised: Whether the weights of a token are divided by their sum.
        epsilon: Added to that sum.
        factor: The factor of the weights, after that.
        scales_inputs: Whether weights multiply what experts are given, and not what they give.
        groups: Groups of successive experts, of which only some are kept.
        kept_groups: The number of those that a token's experts are chosen from.
        group_score: The score of a group: its largest, or the sum of its two largest.
    """

    experts: int
    top_k: int
    idle: int = 0
    logit_factor: float = 1.0
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    choose: Literal["scores", "logits"] = "scores"
    weigh: Literal["all", "chosen", "close"] = "all"
    reach: float = 0.0
    normalised: bool = False
    epsilon: float = 0.0
    factor: float = 1.0
    scales_inputs: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_score: Literal["max", "top2"] = "max"

    def problems(self) -> Iterator[str]:
        """Yield everything that is wrong with the numbers, each with the way out."""
        if not 1 <= self.top_k <= self.experts:
            yield f"top_k is {self.top_k}: choose from 1 to {self.experts}, the number of experts"
        if not 0 <= self.idle < self.experts:
            yield f"{self.idle} of {self.experts} experts do nothing: some must do something"
        if self.groups < 1 or self.experts % self.groups:
            yield f"{self.experts} experts do not divide into {self.groups} groups"
        elif not 1 <= self.kept_groups <= self.groups:
            yield f"{self.kept_groups} groups are kept of {self.groups}: choose from 1 to {self.groups}"
        elif self.kept_groups * (self.experts // self.groups) < self.top_k:
            each = self.experts // self.groups
            yield f"the {self.kept_groups} groups that are kept have {each} experts each, fewer than top_k={self.top_k}"
        elif self.groups > 1 and self.group_score == "top2" and self.experts // self.groups < 2:
            yield f"groups are scored by their two best experts, and {self.groups} groups have one each"
