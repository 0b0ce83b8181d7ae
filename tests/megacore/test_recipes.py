"""Every recipe that comes along fits its model and the machines that it is meant for."""

from pathlib import Path

import pytest

from megacore.checks.rules import problems
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.recipe import load

RECIPES = Path(__file__).parents[2] / "launch" / "recipes"
# recipe: processes, GPUs of a node, bytes of weights, gradients, masters and moments on the fullest rank as its comment
# says (18 a parameter); None where it says nothing.
MACHINES = {
    "quickstart": (4, 0, None),
    "llama-3.2-1b": (8, 8, 22.2e9),
    "llama-3.1-8b": (8, 8, 18.1e9),
    "llama-3.1-70b": (256, 8, 40.9e9),
    "experts": (2, 0, None),
    "finetune": (2, 0, None),
    "finetune_lora": (2, 0, None),
    "finetune_preferences": (2, 0, None),
    "long": (2, 0, None),
}
FINETUNED = "llama-3.2-1b"
"""A model that recipes which start from one are tried with."""


def test_every_recipe_is_listed() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} == set(MACHINES)


@pytest.mark.quick
@pytest.mark.parametrize("name", MACHINES)
def test_recipe_fits(name: str) -> None:
    processes, gpus, state = MACHINES[name]
    starts = name.startswith(("finetune", "long"))
    config = load(RECIPES / f"{name}.yaml", ["data.train=chats.jsonl", "checkpoint.init=hf"] if starts else [])
    model = configure(({"preset": FINETUNED} if starts else {}) | config.model)
    assert problems(config, processes, model, gpus=gpus, local_ranks=gpus or processes) == []
    layout = layout_of(model, config.mesh.shape(processes), config.pipeline.chunks, config.pipeline.layers_per_stage)
    if state is not None:
        stages = (layout.mesh.place(rank) for rank in layout.mesh.ranks(dp=(0,), tp=(0,)))
        fullest = max(sum(shard.numel for shard in layout.shards(place)) for place in stages)
        share = layout.mesh.dp if config.zero.shard == "parameters" else 1
        assert 18 * fullest / share == pytest.approx(state, rel=5e-3)
