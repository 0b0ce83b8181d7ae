"""Checkpoints on disk: at intervals, at the end, and when somebody asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from megacore.incidents import Incident
from megacore.training import progress
from megacore.training.callbacks.evaluation import Evaluation
from megacore.training.save import SaveError, Saver
from megacore.training.trainer import Callback, Trainer

AGAIN_S = 30
"""Seconds between two tries to save the end of a run."""


class Checkpoints(Callback):
    """Saves in the background: each rank says after every step how far it is, and all hear of a failure.

    ``data`` are the identities of the corpora to train on; ``evaluation`` finds the best steps, which are saved too
    where the config asks for that.
    """

    def __init__(self, saver: Saver, data: Sequence[str], evaluation: Evaluation | None = None) -> None:
        self._saver, self._data, self._evaluation = saver, data, evaluation
        self._unsaved = False
        self._failing_since: float | None = None

    def ask(self, run: Trainer) -> Mapping[str, float]:
        busy, failed = self._saver.news()
        due = self._is_due(run)
        evaluated = self._evaluation is not None and run.config.checkpoint.best and self._evaluation.is_due(run)
        return {"look": due, "keep": due or evaluated, "save.busy": busy, "save.failed": failed}

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        busy, failed = bool(largest["save.busy"]), bool(largest["save.failed"])
        if failed:  # to tell it waits for disks
            run.enter("save")
        self._tolerate(run, lambda: self._saver.advance(busy, failed))
        # What a pause has come to is lost where nothing else keeps it.
        lost = run.pausing and run.config.checkpoint.on and run.kept_step != run.step
        best = run.config.checkpoint.best and self._evaluation is not None and self._evaluation.best_step == run.step
        if run.failure is None and (self._is_due(run) or best or lost or largest.get("save.wanted")):
            self._save(run)
            self._unsaved = run.is_last and not run.pausing

    def on_end(self, run: Trainer) -> None:
        self.finish(run)
        while self._unsaved and run.failure is None and self._failing_since is not None:
            self._wait(run)
            self._save(run)
            self.finish(run)

    def finish(self, run: Trainer) -> None:
        """Wait until the save in the background is published, if there is one; all ranks do so."""
        run.enter("save")
        self._tolerate(run, self._saver.finish)

    def _is_due(self, run: Trainer) -> bool:
        section = run.config.checkpoint
        end = run.step == run.last and section.at_end
        return end or (run.stopping and section.on) or (section.every > 0 and run.step % section.every == 0)

    def _save(self, run: Trainer) -> None:
        run.enter("save")
        document = progress.document(run.progress, run.lr, run.config, run.mesh.shape, self._data)
        run.call("on_save", document)
        self._tolerate(run, self._saver.finish)
        if run.failure is None:
            self._tolerate(run, lambda: self._saver.save(run.step, document))
        if run.stopping or not run.config.checkpoint.background:  # nobody who asks for the end waits for more than this
            self._tolerate(run, self._saver.finish)

    def _tolerate(self, run: Trainer, save: Callable[[], None]) -> None:
        """Save, or say why not: the disk may have room again when the next save is due."""
        try:
            save()
            if self._saver.published is not None and not self._saver.is_saving:
                self._failing_since = None
        except SaveError as error:  # on every rank
            self._failing_since = self._failing_since or time.monotonic()
            # By the clock of each rank: all know that saves fail, but not quite since when.
            hours = run.control.largest((time.monotonic() - self._failing_since) / 3600)[0]
            patience = run.config.checkpoint.patience
            if hours >= patience:
                said = f"Saves have failed for {hours:.2g} h (checkpoint.patience={patience:g}): the run ends"
                run.fail(SaveError(f"{error}\n{said}" if patience else str(error)))
                return
            run.report(Incident("save_failed", detail=str(error), step=run.step, at=time.time()))
            run.tell(f"{error}\nThe next save tries again, for {patience - hours:.2g} h (checkpoint.patience)")

    def _wait(self, run: Trainer) -> None:
        """Wait for the next try to save what the run has come to, which nobody else has."""
        for _ in range(AGAIN_S):
            time.sleep(1)
            run.enter("save")
            asked = [callback.ask(run).get("stop", 0.0) for callback in run.callbacks]
            if run.control.largest(max(asked))[0]:
                reason = f"step {run.step} could not be saved before the run was ended; the reason stands above"
                run.fail(SaveError(reason))
                return
