"""Bad steps are done again on the same data: the same bits are the data's fault, whose samples are then left out, other
bits are the hardware's.

Nothing has to be undone for it: from a bad step on, the weights do not change any more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megacore import checkpoints, exits, incidents
from megacore.control import Control
from megacore.data.skipped import SampleRange, in_recipe
from megacore.incidents import ACTIONS, KINDS, Action, Incident, Kind
from megacore.say import say
from megacore.store.io.objects import place
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.audit import DamageError
from megacore.training.callbacks.bad_steps import WINDOW, BadSteps, NonFinite, bounds
from megacore.training.callbacks.data_states import resume_streams
from megacore.training.initial_state import load_initial_state
from megacore.training.resume import Damaged, Start, find, newest_whole, remarks
from megacore.training.trainer import Trainer

if TYPE_CHECKING:
    from megacore.training.callbacks.checkpoints import Checkpoints
    from megacore.training.callbacks.spikes import TellSpikes
    from megacore.training.step import Stats

TRIES = 3
"""A step that is bad with so many different samples is not bad for its samples."""
LEFT_OUT = "left_out_at"
"""The key of ``trainer.json`` that says at which steps samples were left out; it is there where some were."""


class UnsoundHardware(NonFinite):
    """A bad step was bad again, with other numbers."""

    status = exits.EVICT


Bits = tuple[str, str]
"""Two numbers by their bits: all that are none are alike."""


@dataclass(frozen=True)
class StepResult:
    """The numbers that a step has come to, which all ranks know: in all the loss and the gradient norm, and each rank's
    own part of the loss and of the squares of the gradient."""

    total: Bits
    parts: tuple[Bits, ...]

    @classmethod
    def of(cls, values: Tensor, control: Control) -> StepResult:
        """Ask all ranks for what they have, [4] or more; all of them call this."""
        loss, norm, *own = (value.hex() for value in values.tolist()[:4])
        return cls((loss, norm), tuple((own_loss, squares) for own_loss, squares in control.exchange(own)))

    def __str__(self) -> str:
        loss, norm = map(float.fromhex, self.total)
        return f"loss {loss:.6g}, gradient norm {norm:.6g}"

    def differing(self, other: StepResult) -> list[int]:
        """Return the ranks whose part of the loss is another; where there is none, those whose gradient is."""
        pairs = list(enumerate(zip(self.parts, other.parts, strict=True)))
        losses = [rank for rank, (one, two) in pairs if one[0] != two[0]]
        return losses or [rank for rank, (one, two) in pairs if one != two]


class RepeatSteps(BadSteps):
    """Repeats each bad step once, and each that spikes if ``recovery.spikes`` says so; ``spikes`` knows the limits."""

    def __init__(self, checkpoints: Checkpoints, spikes: TellSpikes | None) -> None:
        super().__init__(allowed=0)
        self._checkpoints, self._spikes = checkpoints, spikes
        self._bad: tuple[int, StepResult] | None = None
        """The step that is to be done again, or is being done, and what it has come to."""
        self._left_out = list[int]()
        """The steps whose samples were left out."""

    def on_resume(self, run: Trainer, document: Mapping[str, Any]) -> None:
        """Know of the steps that were left out before, but for those that a run has ended for: somebody has read it."""

        def ended() -> int:
            found = incidents.read(Path(run.config.out)) if run.mesh.rank == 0 else []
            return max((each.step or 0 for each in found if (each.kind, each.action) == ("bad_data", "end")), default=0)

        if held := document.get(LEFT_OUT, []):
            last = run.control.tell(run.control.attempt(ended))
            self._left_out = [step for step in held if step >= last]

    def on_save(self, run: Trainer, document: dict[str, Any]) -> None:
        if self._left_out:
            document[LEFT_OUT] = self._left_out

    def _begin(self, run: Trainer, skipped: int) -> None:
        super()._begin(run, skipped)
        self._outcome = torch.zeros(5, dtype=torch.float64, device=run.mesh.device)
        self._set_limits(run)

    def _set_limits(self, run: Trainer) -> None:
        limits = self._spikes.seen.limits if self._spikes is not None else {}
        most = [limits.get("loss", math.inf), limits.get("grad_norm", math.inf)]
        self._limits = torch.tensor(most, dtype=torch.float64, device=run.mesh.device)

    def on_log(self, run: Trainer, record: dict[str, Any]) -> None:
        super().on_log(run, record)
        if self._spikes is not None and "loss" in record:
            self._set_limits(run)

    def _halts(self, stats: Stats) -> Tensor:
        if self._spikes is None:
            return super()._halts(stats)
        return super()._halts(stats) | ((stats.outcome[:2] > self._limits).any() & stats.finite)

    def _note(self, now: Tensor, stats: Stats) -> None:
        before = self._skipped - (~stats.finite).to(self._skipped.dtype)
        self._outcome = torch.where(now, torch.cat([stats.outcome, before[None]]), self._outcome)

    def on_step(self, run: Trainer, stats: Stats) -> None:
        self._stats = stats

    def ask(self, run: Trainer) -> Mapping[str, float]:
        return {"look": self._is_repeated(run)}

    def _is_repeated(self, run: Trainer) -> bool:
        return self._bad is not None and self._bad[0] == run.step

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        if self._is_repeated(run):
            self._compare(run)
        else:
            super().on_answers(run, largest)

    def _found(self, run: Trainer, step: int) -> None:
        """Have a step done again that is bad for the first time."""
        result = StepResult.of(self._outcome, run.control)
        is_finite = all(math.isfinite(float.fromhex(each)) for each in result.total)
        self._tell(run, "spike" if is_finite else "non_finite", "repeat", step, str(result))
        self._bad = step, result
        self._again(run, step)

    def _again(self, run: Trainer, step: int, samples: SampleRange | None = None) -> None:
        """Go back to before a step, whose weights are there, and leave these samples out."""
        start = run.start
        if samples is not None:
            start = replace(start, skipped_samples=start.skipped_samples | [samples])
        self._begin(run, int(self._outcome[-1]))
        run.rewind(step - 1, start)

    def _compare(self, run: Trainer) -> None:
        """Compare a step that was done again with what it came to before."""
        assert self._bad is not None
        (step, before), self._bad = self._bad, None
        now, is_bad = StepResult.of(self._stats.outcome, run.control), bool(int(self._first))
        if now == before:
            if is_bad:
                self._leave_out(run, step, now)
            return
        ranks = now.differing(before)
        # In a pipeline what is wrong on one stage is seen on others.
        rank = ranks[0] if len(ranks) == 1 and run.mesh.shape.pp == 1 else None
        who = ", ".join(map(run.control.who, ranks)) or "no rank's own part, but their sum"
        detail = f"{before}; then {now}; differed: {who}"
        self._tell(run, "unrepeatable", "end" if is_bad else "tell", step, detail, rank)
        if is_bad:
            said = (
                f"step {step} was bad twice, with other numbers on the same data ({detail}): the hardware is at fault. "
                "The weights are those before this step"
            )
            run.fail(UnsoundHardware(said))

    def _leave_out(self, run: Trainer, step: int, result: StepResult) -> None:
        """Leave the samples of a step out that its data make bad, or end the run where that is of no use."""
        most, reason = run.config.optimizer.max_skipped, ""
        recent = sum(abs(each - step) < WINDOW for each in self._left_out)
        if self._left_out.count(step) >= TRIES - 1:
            reason = f"step {step} was bad with other samples too: it is not the data"
        elif most is not None and recent >= most:
            reason = f"{most} of {WINDOW} steps are left out already"
        back = run.config.recovery.go_back
        self._tell(run, "bad_data", "end" if reason else "go_back" if back else "skip", step, str(result))
        if reason:
            left_out = in_recipe(run.start.skipped_samples) or "none"
            way_out = f"or leave out others ({reason}; left out: {left_out})"
            run.fail(NonFinite(self._in_words(run, step, way_out)))
            return
        self._left_out.append(step)
        if back:
            self._go_back(run, step)
        else:
            self._again(run, step, bounds(run, step))

    def _where(self, run: Trainer) -> str:
        if bool(torch.isfinite(self._outcome[:2]).all()):
            return "loss or gradient norm are far above those before it"
        return super()._where(run)

    def _tell(self, run: Trainer, kind: Kind, action: Action, step: int, detail: str, rank: int | None = None) -> None:
        at, of = run.control.tell(time.time()), bounds(run, step)
        run.report(Incident(kind, action, detail, rank=rank, step=step, samples=of, at=at))
        answer = f"{ACTIONS[action][:1].upper()}{ACTIONS[action][1:]}"
        run.tell(f"step {step} (samples {in_recipe([of])}): {KINDS[kind]}: {detail}. {answer}")

    # -- recovery.go_back

    def _go_back(self, run: Trainer, step: int) -> None:
        """Go back to the newest checkpoint before a bad step, without the samples from there to its end."""
        self._checkpoints.finish(run)
        stop, damaged = bounds(run, step)[1], tuple[Damaged, ...]()
        while True:
            start = _before(run, step, stop, damaged)
            try:
                restore(run, start)
            except DamageError as error:
                damaged = (*start.damaged, Damaged(error.path, str(error)))
                continue
            break
        if run.mesh.rank == 0:
            for each in start.damaged:
                say(f"Set aside as {checkpoints.set_aside(each.path).name}: {each.reason}")
            say("\n".join(remarks(start, run.config, run.model.config, run.mesh.shape)))
        self._begin(run, start.progress.skipped)


def restore(run: Trainer, start: Start) -> None:
    """Fill the weights and the optimizer of a run from a checkpoint, and go on from there; all ranks do so. Raises
    DamageError, StoreError: it cannot be used; the state is neither the one nor the other."""
    optimizer = run.train_step.optimizer
    optimizer.forget()
    load_initial_state(start, run.model.parameters, optimizer, run.config.train.seed, run.control)
    run.train_step.gradients.updated()
    run.train_step.scaler.load(start.progress.scaler)
    resume_streams(run, start.trainer or {})
    run.rewind(start.progress.step, start.progress)


def _before(run: Trainer, step: int, stop: int, damaged: Sequence[Damaged]) -> Start:
    """Return the newest checkpoint before a bad step that is not known to be damaged, or where there is none what the
    run started from, without the samples from there to ``stop``. Raises StoreError: what the run started from is
    damaged."""
    config, origin, control = run.config, run.origin, run.control
    folder = checkpoints.folder_of(config.out, config.checkpoint.folder)

    def newest() -> tuple[str | None, list[tuple[str, str]]]:
        if control.mesh.rank:  # rank 0 looks for all
            return None, []
        checkpoint, found = newest_whole(folder, tuple(damaged), steps=range(origin.progress.step, step))
        return None if checkpoint is None else str(checkpoint.path), [(str(each.path), each.reason) for each in found]

    path, told = control.tell(control.attempt(newest))
    known = tuple(Damaged(place(at), reason) for at, reason in told)

    def opened() -> Start:
        if path is not None:
            section = replace(config.checkpoint, resume=path)
            return find(replace(config, checkpoint=section), checked=control.mesh.rank > 0)
        used = {source.path for source in (origin.adapters, origin.source) if source is not None}
        if reasons := [each.reason for each in known if each.path in used]:
            raise StoreError(reasons[0])
        return origin

    found, skipped = control.attempt(opened), run.start.skipped_samples
    first = skipped.sample(found.progress.samples)
    return replace(found, progress=found.progress.without([*skipped, (first, stop)]), damaged=known)
