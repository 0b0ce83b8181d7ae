"""The loss on held-out data, at intervals and at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from operator import itemgetter
from typing import Any

import torch

from megacore.checkpoints import EVALUATIONS
from megacore.config import Config
from megacore.data.batches import Batches
from megacore.store.io.errors import StoreError
from megacore.store.weight_folders.checkpoint import TRAINER
from megacore.training.metrics import rewards
from megacore.training.step import evaluate
from megacore.training.trainer import Callback, Trainer


def perplexity(loss: float) -> float:
    """Return the perplexity of a loss in nats per token; infinite where it has no float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def decides(config: Config) -> bool:
    """Return whether evaluations decide what is saved, or when the run ends: a checkpoint has that of its step then."""
    return config.checkpoint.best or config.evaluate.patience is not None


class Evaluation(Callback):
    """Evaluates after every ``evaluate.every`` steps and after the last one, not when a signal interrupts; ends the run
    where ``evaluate.patience`` is at its end. Where that comes before the save, a signal does not wait for it.
    ``tasks``: asks the model those of ``evaluate.tasks`` -> what is recorded of them, the same on every rank."""

    def __init__(self, held_out: Batches, tasks: Callable[[], Mapping[str, float]] | None = None) -> None:
        self._held_out, self._tasks = held_out, tasks
        self._known: list[tuple[int, float]] = []
        """(step, loss) of the evaluations that count, from the best of those before this process on."""

    @property
    def best_step(self) -> int | None:
        """The step with the lowest loss, the first of several; None where no loss was finite."""
        step, loss = min(self._known, key=itemgetter(1), default=(0, math.inf))
        return step if loss < math.inf else None

    def on_resume(self, run: Trainer, document: Mapping[str, Any]) -> None:
        try:
            known = [(int(step), math.inf if loss is None else float(loss)) for step, loss in document[EVALUATIONS]]
        except KeyError:  # there was none
            known = []
        except (TypeError, ValueError) as error:
            raise StoreError(f"{TRAINER}: {EVALUATIONS} are no pairs of a step and a loss ({error})") from None
        self._known += known
        self._end_without_better(run)

    def on_rewind(self, run: Trainer) -> None:
        self._known = [(step, loss) for step, loss in self._known if step <= run.step]

    def on_save(self, run: Trainer, document: dict[str, Any]) -> None:
        if since := self._since_best():
            document[EVALUATIONS] = [[step, loss if loss < math.inf else None] for step, loss in since]

    def ask(self, run: Trainer) -> Mapping[str, float]:
        return {"look": self.is_due(run)}

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        if self.is_due(run) and not (run.stopping and decides(run.config)):
            loss, *told = self.losses(run)
            told = told if run.config.preference else []
            self._known.append((run.step, loss if math.isfinite(loss) else math.inf))
            beside = self._asked(run)
            if run.config.ema.evaluate:
                with run.train_step.optimizer.averaged():
                    beside |= {"ema_validation_loss": self.losses(run)[0]}
                    beside |= {f"ema_{key}": value for key, value in self._asked(run).items()}
            run.enter("log")
            record: dict[str, Any] = {"validation_loss": loss, "evaluations_since_best": len(self._since_best()) - 1}
            if run.config.has_cross_entropy:  # another loss has no perplexity
                record["validation_perplexity"] = perplexity(loss)
            run.call("on_log", record | beside | rewards(told, "validation_"))
            self._end_without_better(run)

    def losses(self, run: Trainer) -> list[float]:
        """Return the mean loss over the first ``evaluate.batches`` global batches held out, and what else it says of
        pairs; the same on every rank."""
        losses, counts = [], []
        with self._evaluating(run):
            for i in range(run.config.evaluate.batches):
                run.enter("evaluate")
                microbatches = run.upload(self._held_out.microbatches(i), 0)
                loss, tokens = evaluate(run.mesh, run.train_step.pipeline, microbatches)
                losses.append(loss * tokens)
                counts.append(tokens)
        mean = torch.stack(losses).sum(0) / torch.stack(counts).sum()
        return mean.reshape(-1).tolist()

    def _asked(self, run: Trainer) -> dict[str, float]:
        """Return what the tasks come to, if there are some."""
        if self._tasks is None:
            return {}
        # Their lengths are many: compiled for each of them, blocks would have no room left for those of training.
        plain = torch.compiler.set_stance("force_eager") if run.config.train.compile else nullcontext()
        run.enter("evaluate")
        with self._evaluating(run), plain:
            return {**self._tasks()}

    @contextmanager
    def _evaluating(self, run: Trainer) -> Iterator[None]:
        run.model.train(False)
        with run.train_step.optimizer.common():
            yield
        run.model.train()

    @staticmethod
    def is_due(run: Trainer) -> bool:
        """Return whether step ``run.step`` is followed by an evaluation."""
        every = run.config.evaluate.every
        return bool(every) and (run.step % every == 0 or run.step == run.config.train.steps)

    def _since_best(self) -> list[tuple[int, float]]:
        """Return the best evaluation, and those after it."""
        losses = [loss for _, loss in self._known]
        return self._known[losses.index(min(losses)) :] if losses else []

    def _end_without_better(self, run: Trainer) -> None:
        patience, since = run.config.evaluate.patience, self._since_best()
        if patience is not None and len(since) > patience and run.step < run.last:
            run.last = run.step
            step, loss = since[0]
            run.tell(
                f"No validation loss below {loss:.4f}, of step {step:,}, in {len(since) - 1} evaluations "
                "(evaluate.patience): the run is done"
            )
