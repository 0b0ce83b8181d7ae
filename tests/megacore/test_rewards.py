"""Reward models, end to end: beside transformers' class with a head of scores, on layouts, from a language model, to a
folder that transformers loads; and what is wrong with such a run before it starts."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from engine import Result, assert_near, checked, path_of, problems, train
from pool import Pool
from test_preferences import COUNT, LAYOUTS, STEPS, chats, folder, ranks, records_of, rows_of, run, token_ids
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM, LlamaForSequenceClassification

from megacore.inference.loaded_model import generate, load_model
from megacore.store.conversions.convert import convert
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.training.resume import remarks

__all__ = ["folder"]
OURS = ("preference.loss=bradley_terry",)


@pytest.fixture(scope="module")
def scored(folder: Path) -> Path:
    """The folder of the recipe, with a model in `scored` whose head scores."""
    torch.manual_seed(1)
    whole = LlamaForCausalLM.from_pretrained(folder / "model")
    whole.config.num_labels = 1
    model = LlamaForSequenceClassification(whole.config)
    model.model.load_state_dict(whole.model.state_dict())
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder / "scored")
    for file in (folder / "model").iterdir():
        if not (folder / "scored" / file.name).exists():
            (folder / "scored" / file.name).write_bytes(file.read_bytes())
    return folder


def started(folder: Path) -> tuple[str, ...]:
    return (*OURS, f"checkpoint.init={folder / 'scored'}")


def scores_of(model: LlamaForSequenceClassification, pairs: list[tuple[list[int], ...]]) -> Tensor:
    """[pairs, 2], one text after the other, without a mask or padding."""
    texts = [[prompt + end for end in ends] for prompt, *ends in pairs]
    return torch.stack([torch.stack([model(torch.tensor([t])).logits[0, 0] for t in both]) for both in texts])


def test_a_run_computes_what_transformers_computes(scored: Path) -> None:
    """Losses, rewards, gradients and updates, by the formula of TRL's RewardTrainer."""
    model = LlamaForSequenceClassification.from_pretrained(scored / "scored", dtype=torch.float64)
    pairs, want = token_ids(scored / "scored", chats()), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), 1e-8, 0.0)
    for step in range(STEPS + 1):
        rewards = scores_of(model, pairs)
        loss = -logsigmoid(rewards[:, 0] - rewards[:, 1]).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        optimizer.step()
        chosen, rejected = rewards.detach().mean(0).tolist()
        record = {"loss": loss.item(), "reward_chosen": chosen, "reward_rejected": rejected}
        record |= {"reward_accuracy": (rewards[:, 0] > rewards[:, 1]).double().mean().item()}
        record |= {"reward_margin": chosen - rejected} | ({"grad_norm": norm.item()} if step < STEPS else {})
        want.append(record)
    rows = rows_of(scored, *started(scored))
    assert 1 < rows < COUNT
    got = records_of(run(scored, "scores", *started(scored), f"batch.global_size={rows}"))
    for mine, theirs in zip(got, want, strict=True):
        print(mine, theirs)
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-7)
    assert got[0]["reward_margin"] != got[1]["reward_margin"]
