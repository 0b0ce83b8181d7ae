"""Runs of models with layers that predict further tokens: what is logged, goes on after a checkpoint, or is refused."""

from pathlib import Path

import engine
import pytest
from engine import LENGTH, VOCAB
from families import drawn

from megacore.models.config import flops_per_token
from megacore.models.mtp import FIELD
from megacore.models.registry import configure
from megacore.models.stages import default_layers
from megacore.models.tuning import Tuning

SECTION = drawn("glm4_moe", 3, layers=3, vocab=VOCAB, positions=LENGTH, tp=1, **{FIELD: 1}) | {"initializer_range": 0.2}
RECIPE_CHANGES = {"model": SECTION}
STILL = ["train.freeze=[mtp]"]


@pytest.mark.in_turn(2, 0)
def test_the_loss_of_further_tokens_is_logged_and_a_run_goes_on(recipe: str, tmp_path: Path) -> None:
    """Evaluations say the loss of the next token alone, as the runs of models without such layers do."""
    overrides = ["train.steps=4", "evaluate.every=2"]
    whole = engine.train(recipe, [f"out={tmp_path / 'whole'}", *overrides])
    plain, further = whole.values("loss"), whole.values("mtp_loss")
    assert len(plain) == len(further) == 4 and 0 < min(further) < further[0]
    engine.stopped(recipe, [f"out={tmp_path / 'again'}", *overrides], 2)
    again = engine.train(recipe, [f"out={tmp_path / 'again'}", "checkpoint.resume=auto", *overrides])
    assert engine.same(whole.weights, again.weights)
    assert whole.values("validation_loss") == again.values("validation_loss")


def test_what_is_frozen_predicts_nothing(recipe: str, tmp_path: Path) -> None:
    """The rest learns as a model without such layers does, and they are as they were drawn."""
    short = ["train.steps=2", "schedule.warmup_steps=0", "evaluate.every=2"]
    still = engine.train(recipe, [f"out={tmp_path / 'still'}", *short, *STILL])
    none = engine.train(recipe, [f"out={tmp_path / 'none'}", *short, f"model.{FIELD}=0"])
    assert not still.values("mtp_loss") and still.values("loss") == none.values("loss")
    assert still.values("validation_loss") == none.values("validation_loss")
    further = {name: weight for name, weight in still.weights.items() if name.startswith("mtp.")}
    drawn_so = engine.weights(engine.trainer(recipe, [f"out={tmp_path / 'drawn'}", *short]))
    assert further and engine.same(further, drawn_so)
    assert engine.same(none.weights, still.weights)


def test_their_work_counts_where_they_are_trained() -> None:
    """A block as the last, another head, and the linear of twice the width; frozen, they are none of a step's work."""
    plain, one, two = (configure(SECTION | {FIELD: depth}) for depth in range(3))
    work = [flops_per_token(config, LENGTH) for config in (plain, one, two)]
    longer = configure(SECTION | {"num_hidden_layers": 4, FIELD: 0})
    embed, vocab = plain.sizes["embed"], plain.sizes["vocab"]
    block = flops_per_token(longer, LENGTH) - work[0]
    assert work[1] - work[0] == work[2] - work[1] == block + 6 * (vocab * embed + 2 * embed * embed)
    assert flops_per_token(one, LENGTH, Tuning(freeze=("mtp",))) == work[0]
    assert one.schema.parameters == longer.schema.parameters + 2 * embed * embed + 3 * embed
    wide = SECTION | {"num_hidden_layers": 12}
    assert default_layers(configure(wide | {FIELD: 2}), 3)[-1] < default_layers(configure(wide | {FIELD: 0}), 3)[-1]
