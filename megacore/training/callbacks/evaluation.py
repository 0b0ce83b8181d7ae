"""The loss on held-out data, at intervals and at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from megacore.data.batches import Batches
from megacore.training.step import evaluate
from megacore.training.trainer import Callback, Trainer


def perplexity(loss: float) -> float:
    """Return the perplexity of a loss in nats per token; infinite where it has no float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class Evaluation(Callback):
    """Evaluates after every ``evaluate.every`` steps and after the last one, not when a signal interrupts."""

    def __init__(self, held_out: Batches) -> None:
        self._held_out = held_out

    def ask(self, run: Trainer) -> Mapping[str, float]:
        return {"look": self._is_due(run)}

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        if self._is_due(run):
            loss = self.loss(run)
            run.enter("log")
            run.call("on_log", {"validation_loss": loss, "validation_perplexity": perplexity(loss)})

    def loss(self, run: Trainer) -> float:
        """Return the mean loss over the first ``evaluate.batches`` global batches held out; the same on every rank."""
        run.model.train(False)
        losses, counts = [], []
        for i in range(run.config.evaluate.batches):
            run.enter("evaluate")
            microbatches = run.upload(self._held_out.microbatches(i), 0)
            loss, tokens = evaluate(run.mesh, run.train_step.pipeline, microbatches)
            losses.append(loss * tokens)
            counts.append(tokens)
        run.model.train()
        return (torch.stack(losses).sum() / torch.stack(counts).sum()).item()

    @staticmethod
    def _is_due(run: Trainer) -> bool:
        every = run.config.evaluate.every
        return bool(every) and (run.step % every == 0 or run.step == run.config.train.steps)
