"""The training loop: batches in, steps, evaluation and checkpoints at intervals, metrics out."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megacore.config import Config
from megacore.control import Control
from megacore.data.batches import Batch, Batches, prefetch
from megacore.data.skipped import SampleRange, in_recipe, in_words
from megacore.hardware import peak_memory_gib
from megacore.recovery.events import KINDS, Event
from megacore.recovery.incidents import counted
from megacore.recovery.policy import ACTIONS, Budgets, Decision, decide
from megacore.recovery.spikes import Spikes
from megacore.training import loads, progress
from megacore.training.copies import Copies
from megacore.training.interrupt import Interrupt
from megacore.training.lr import learning_rate
from megacore.training.meter import Meter
from megacore.training.metrics import Log, Record
from megacore.training.progress import Progress
from megacore.training.save import SaveError, Saver
from megacore.training.step import Stats, TrainStep, evaluate
from megacore.training.trouble import (
    WINDOW,
    Again,
    BadStep,
    GoBack,
    NonFinite,
    Repetition,
    StepResult,
    Trouble,
    UnsoundHardware,
)
from models.assemble import Model
from models.decoder import Microbatch
from parallel.collectives import all_reduce_
from parallel.labels import with_labels
from parallel.mesh import Mesh
from parallel.random import key


def perplexity(loss: float) -> float:
    """Return the perplexity of a loss in nats per token; infinite where it has no float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


_TOGETHER = 64
"""The head computes tokens with a label alone, in multiples of so many on each rank, which suit products."""


_AGAIN_S = 30
"""Between two tries to save the end of a run."""

COLLECT_EVERY = 50
"""Steps between collections of Python's garbage."""


@contextmanager
def _collecting_together() -> Iterator[None]:
    """Let Python collect no garbage by itself: a host stands still for it, each at another time, and all wait."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class Paused(Exception):  # no error: the run goes on
    """The ranks end a generation after a step that all of them have done; what follows the step is still to be done."""


@dataclass
class Trainer:
    """A run on this rank.

    Args:
        config: The config of the run.
        mesh: The live mesh.
        model: This rank's part of the model.
        step: The training step over it.
        batches: This rank's training batches.
        held_out: Its validation batches, if there are any.
        meter: Measures its throughput.
        control: The messages between the ranks.
        saver: Writes checkpoints.
        start: The progress of the run so far.
        log: The log that metrics go to, on rank 0.
        data: The identity of each corpus to train on.
    """

    config: Config
    mesh: Mesh
    model: Model
    step: TrainStep
    batches: Batches
    held_out: Batches | None
    meter: Meter
    control: Control
    saver: Saver
    start: Progress
    log: Log | None
    data: Sequence[str] = ()
    interrupt: Interrupt = field(default_factory=Interrupt)
    at: int = field(default=0, init=False)
    """The step that is being done."""
    done: int = field(default=0, init=False)
    """The last step whose update is in the state."""
    stats: Stats | None = field(default=None, init=False)
    """Those of that step, where it was done here."""
    followed: int = field(default=0, init=False)
    """The last step that all is done for that follows one: records, saves, evaluations."""
    trouble: Trouble = field(init=False)
    spikes: Spikes = field(default_factory=Spikes, init=False)
    left_out: int = field(init=False)
    """The steps that were left out until the last record."""
    repetition: Repetition | None = field(default=None, init=False)
    """The steps that are done again, where some are."""
    generation: int = field(default=0, init=False)
    """The generation of the groups that its messages go through."""
    formed_in: int = field(default=0, init=False)
    """The generation in which the world of its ranks was formed; 0: that in which the run began."""
    committed_in: int = field(default=0, init=False)
    """The generation in which the last step was done."""
    rewound: bool = field(default=False, init=False)
    """Whether the run has gone back after a fault, and no step has been done since."""
    copies: Copies = field(default_factory=Copies, init=False)
    pausing: Callable[[], bool] = field(default_factory=lambda: lambda: False, init=False)
    """Says whether the generation is to end after a step, as far as it is known here."""
    compare: Callable[[], None] = field(default_factory=lambda: lambda: None, init=False)
    """Compares the state with that of its replicas, on all ranks."""
    recompute: Callable[[int], None] = field(default_factory=lambda: lambda step: None, init=False)
    """Compares what is computed for a step that is to come with what replicas compute, on all ranks."""

    def __post_init__(self) -> None:
        config = self.config
        if config.optimizer.non_finite == "repeat":
            budgets = Budgets(max_skipped=config.optimizer.max_skipped, go_back=config.recovery.go_back)
            self.repetition = Repetition(self.control, budgets)
        self.trouble = self._no_trouble(self.start.skipped)
        self.at = self.done = self.followed = self.start.step
        self.left_out = self.start.skipped
        self._unsaved: int | None = None

    def run(self) -> int:
        """Train -> the last step that was done.

        Raises:
            NonFinite: with ``optimizer.non_finite=stop``, once a step has a loss or gradient that is not finite; with
                ``skip``, once more than ``optimizer.max_skipped`` of the last ``WINDOW`` steps have; with ``repeat``,
                once there is nothing left to leave out. The weights are those before that step.
            SaveError: no checkpoint could be written for ``checkpoint.patience`` hours, or none before a signal ended
                the run.
            GoBack: the run is to go on from an earlier checkpoint.
            Paused: the generation is to end.
        """
        with self.interrupt.listening():
            try:
                return self._steps()
            except (NonFinite, GoBack):  # on every rank
                self._tolerate(self.saver.finish)
                raise
            except RuntimeError as error:
                error.add_note(f"at step {self.at}")  # where a rank that waits in vain says so
                raise
            finally:
                self.step.beat.enter("end")

    def _steps(self) -> int:
        self.meter.begin()
        while True:
            try:
                self._steps_after(self.done)
                break
            except Again:  # on every rank
                self.go_back()
        self.step.beat.enter("save")
        self._tolerate(self.saver.finish)
        if self._unsaved is not None and self.saver.failing_s is not None:
            self._save_at_last(self._unsaved)
        return self.done

    def _steps_after(self, first: int) -> None:
        """Do the steps after one, once all that follows that one is done."""
        beat = self.step.beat
        stopping = first >= self.config.train.steps
        if self.stats is not None and self.followed < first:
            stopping = self._follow(first, self.stats)
        elif stopping and self._listen().save:  # a fault has cut the save of the last step
            self._save(first, self.lr(first))
            self._unsaved = first
        if stopping:
            return
        samples = self.start.at(first, self.config).samples
        with prefetch(self.batches.steps(samples)) as ahead, _collecting_together():
            beat.enter("data", first + 1)
            for step, batch in enumerate(ahead, start=first + 1):
                beat.enter("forward")
                self.at = step
                if (every := self.config.recovery.recompute_every) and step % every == 0:
                    self.recompute(step)
                began = time.monotonic()
                stats = self.step.backward(self._microbatches(batch, step))
                self.update(step, stats)
                self.step.gradients.updated()
                self.copies.stepped(time.monotonic() - began)
                if self._follow(step, stats):
                    break
                beat.enter("data", step + 1)

    def microbatch_of(self, replica: int, step: int, number: int) -> Microbatch:
        """Return a microbatch of a step as the rank of this place, but of another number along dp, has it; ``number``
        goes around."""
        shape = self.mesh.shape
        batches = self.batches.of(replica * shape.ep + self.mesh.place.ep)
        made = batches.microbatches_from(self.start.at(step - 1, self.config).samples)
        at = number % len(made)
        (found,) = self._microbatches(made[at : at + 1], step, at)
        return replace(found, replica=replica)

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        return learning_rate(step, self.config.schedule, self.config.optimizer.lr, self.config.train.steps)

    def update(self, step: int, stats: Stats) -> None:
        """Do the second half of a step, which needs no other rank: all or nothing of it is done."""
        self.trouble.note(step, stats)  # before it: a step that spikes, finite as it is, changes nothing
        self.step.update(stats, self.lr(step), self.trouble.halted)
        self.done, self.stats, self.committed_in, self.rewound = step, stats, self.generation, False

    @property
    def is_halted(self) -> bool:
        """Whether a bad step has halted the run that is to be done again; reading it waits for the device."""
        return self.repetition is not None and bool(self.trouble.halted)

    def knows(self, spikes: Spikes) -> None:
        """Go on with what a run knew of spikes after the last step that all is done for."""
        self.spikes = spikes.until(self.followed)
        self.trouble.limits = self._limits()

    def go_back(self) -> None:
        """Go back to before the bad step that has halted the run, if one has that is to be done again.

        The weights have not changed since, so this is where the run stands: after a fault, too, when ranks differ in
        how many steps they have done in vain, and in whether they know of it.
        """
        if not self.is_halted:
            return
        assert self.trouble.outcome is not None
        self.at = self.done = self.followed = int(self.trouble.first) - 1
        self.stats = self.step.pending = None
        self.trouble = self._no_trouble(int(self.trouble.outcome[-1]))

    def _follow(self, step: int, stats: Stats) -> bool:
        """Do what follows a step -> whether it was the last one."""
        config, trouble, lr = self.config, self.trouble, self.lr(step)
        asked = self._listen()
        stopping = step == config.train.steps or asked.stop
        if asked.pause and not stopping:
            raise Paused
        saving, evaluating = self._saves(step, asked.stop, asked.save), self._evaluates(step)
        writing = step % config.log.every == 0 or stopping
        if writing or saving or evaluating or self._repeats(step):
            self.step.beat.enter("log")
            self._check(trouble, stats)
        if writing:
            record = self._record(step, lr, stats, trouble)
            self._write(step, record)
            trouble.limits = self._look(step, lr, record)
        if (every := config.recovery.compare_every) and (saving or step % every == 0):
            self.compare()
        if saving:
            self._save(step, lr)
        if saving and evaluating and asked.stop:  # whoever has asked for the end may not wait for an evaluation
            self._tolerate(self.saver.finish)
        if evaluating:
            with self.meter.paused():
                loss = self.validation_loss()
                self._write(step, {"validation_loss": loss, "validation_perplexity": perplexity(loss)})
        if step % COLLECT_EVERY == 0:
            gc.collect(1)
        self._unsaved = step if saving and stopping else None
        self.meter.advance()
        self.followed = step
        return stopping

    def validation_loss(self) -> float:
        """Return the mean loss over the first ``evaluate.batches`` global batches held out; the same on every rank."""
        assert self.held_out is not None
        self.model.train(False)
        losses, counts = [], []
        for i in range(self.config.evaluate.batches):
            self.step.beat.enter("evaluate")
            loss, tokens = evaluate(self.mesh, self.step.pipeline, self._microbatches(self.held_out.microbatches(i), 0))
            losses.append(loss * tokens)
            counts.append(tokens)
        self.model.train()
        return (torch.stack(losses).sum() / torch.stack(counts).sum()).item()

    def _evaluates(self, step: int) -> bool:
        """Return whether an evaluation follows a step: at intervals and at the end, not when a signal interrupts."""
        every = self.config.evaluate.every
        return self.held_out is not None and bool(every) and (step % every == 0 or step == self.config.train.steps)

    def _saves(self, step: int, stop: bool, asked: bool) -> bool:
        """Return whether a step is saved: at intervals, at the end, before a signal ends the run, and when asked to."""
        section = self.config.checkpoint
        end = step == self.config.train.steps and section.at_end
        return asked or end or (stop and section.on) or (section.every > 0 and step % section.every == 0)

    def _save(self, step: int, lr: float) -> None:
        self.step.beat.enter("save")
        done = self.start.at(step, self.config, self.step.optimizer.updates, self.step.scaler.state())
        self._tolerate(self.saver.finish)
        self._tolerate(
            lambda: self.saver.save(step, progress.document(done, lr, self.config, self.mesh.shape, self.data))
        )
        self.interrupt.save = False  # not before: after a fault it is asked for still
        if not self.config.checkpoint.background:
            self._tolerate(self.saver.finish)

    def _tolerate(self, save: Callable[[], None]) -> None:
        """Save, or say why not: the disk may have room again when the next save is due.

        Raises:
            SaveError: saves have failed for ``checkpoint.patience`` hours.
        """
        try:
            save()
        except SaveError as error:  # on every rank
            hours = self.control.largest((self.saver.failing_s or 0.0) / 3600)[0]
            patience = self.config.checkpoint.patience
            if hours >= patience:
                said = f"Saves have failed for {hours:.2g} h (checkpoint.patience={patience:g}): the run ends"
                raise SaveError(f"{error}\n{said}" if patience else str(error)) from error
            event = Event("save_failed", step=self.done, detail=str(error), at=time.time())
            self._report(event, decide(event, (), Budgets()))
            self._say(f"{error}\nThe next save tries again, for {patience - hours:.2g} h (checkpoint.patience)")

    def _save_at_last(self, step: int) -> None:
        """Save what a run has come to, again and again: nobody else has it.

        Raises:
            SaveError: as of :meth:`_tolerate`, or a signal ends the run.
        """
        while self.saver.failing_s is not None:
            for _ in range(_AGAIN_S):
                time.sleep(1)
                self.step.beat.enter("save")
                if self.control.largest(self.interrupt.asked)[0]:
                    raise SaveError(f"step {step} could not be saved before the run was ended; the reason stands above")
            self._save(step, self.lr(step))
            self._tolerate(self.saver.finish)

    def _listen(self) -> Asked:
        """Return what any rank is asked for: all must do it after the same step.

        With it goes what the ranks must know of a save in the background, and of copies.
        """
        here, copies = Asked(self.interrupt.asked, self.interrupt.save, self.pausing()), self.copies
        told = self.control.largest(*here, *self.saver.news(), copies.due(self.done), -copies.whole)
        asked, news = Asked(*map(bool, told[:3])), tuple(map(bool, told[3:5]))
        if news[-1]:  # it waits for disks
            self.step.beat.enter("save")
        self._tolerate(lambda: self.saver.advance(*news))
        copies.settle(-int(told[6]))
        if self.done >= told[5] and not asked.pause:
            copies.begin(self.done)
        return asked

    def _microbatches(self, batches: Sequence[Batch], step: int, first: int = 0) -> list[Microbatch]:
        """Make the microbatches of a step on the device, from its ``first`` on."""
        shape, embed = self.mesh.shape, self.model.config.sizes["embed"]
        made = []
        for number, batch in enumerate(batches, first):
            tokens, labels, positions = map(self._upload, (batch.tokens, batch.labels, batch.positions))
            activation = (len(tokens) // shape.tp, embed)
            seed = key(self.config.train.seed, step, number)
            counted = with_labels(batch.labels.ravel(), _TOGETHER * shape.tp)
            wanted = None if counted is None else self._upload(counted)
            counts = self.model.balance is not None and batch.padding is not None
            padding = self._upload(batch.padding) if counts else None
            rows = self._upload(batch.rows) if batch.rows is not None and self.model.balance is not None else None
            made.append(
                Microbatch(
                    tokens,
                    labels,
                    positions,
                    self.config.batch.micro_size,
                    activation,
                    batch.documents,
                    seed,
                    wanted=wanted,
                    padding=padding,
                    split=batch.split,
                    rows=rows,
                    blank=batch.blank,
                )
            )
        return made

    def _upload(self, array: object) -> Tensor:
        tensor = torch.as_tensor(array).flatten()
        if self.mesh.device.type == "cuda":
            tensor = tensor.pin_memory()  # a copy from pageable memory would wait for the device
        return tensor.to(self.mesh.device, non_blocking=True)

    # -- bad steps

    def _no_trouble(self, skipped: int) -> Trouble:
        section = self.config.optimizer
        allowed = section.max_skipped if section.non_finite == "skip" else 0
        trouble = Trouble.none(self.mesh.device, allowed, skipped, self.repetition is not None)
        trouble.limits = self._limits()
        return trouble

    def _limits(self) -> Tensor | None:
        """Return what a spike is above, [2], on the device, where such steps are repeated: not any more once there are
        no means for it."""
        history = [] if self.repetition is None else self.repetition.history
        given_up = any(each.event.kind == "spike" and each.decision.action != "repeat" for each in history)
        if given_up or not self.config.recovery.spikes:
            return None
        limits = self.spikes.limits
        return torch.tensor([limits["loss"], limits["grad_norm"]], dtype=torch.float64, device=self.mesh.device)

    def _look(self, step: int, lr: float, record: Record) -> Tensor | None:
        """Note what was recorded of a step, and tell a spike where it begins; return the limits from here on."""
        seen = {name: float(record[name] or 0) for name in ("loss", "grad_norm")}
        if (found := self.spikes.found(seen)) and not self.spikes.spiking:
            event = Event("spike", step=step, detail=", ".join(map(str, found)), at=time.time())
            self._tell(event, decide(event, (), Budgets(repeats=False)))
        if left_out := int(record["skipped_steps"] or 0) - self.left_out:
            if not self.step.scaling.moves:  # else it may be the scale that was too large
                said = f"{counted(left_out, 'step')} up to this one, which changed nothing"
                event = Event("non_finite", step=step, detail=said, at=time.time())
                self._report(event, Decision("skip", "optimizer.non_finite=skip"))
            self.left_out += left_out
        self.spikes = self.spikes.after(step, lr, seen)
        return self._limits()

    def _repeats(self, step: int) -> bool:
        """Return whether a step is being done again, to be compared with what it came to before."""
        return self.repetition is not None and self.repetition.bad is not None and self.repetition.bad.step == step

    def _check(self, trouble: Trouble, stats: Stats) -> None:
        """Look whether a step since the last look was bad.

        Raises:
            NonFinite: it ends the run.
            Again: it, and those after it, are to be done again.
            GoBack: so are those since the newest checkpoint before it.
        """
        step, repetition = int(trouble.first), self.repetition
        if repetition is None:
            if step:
                event = Event("non_finite", step=step, samples=self._bounds(step), at=time.time())
                self._report(event, decide(event, (), Budgets(repeats=False)))
                raise NonFinite(self._in_words(step, trouble, self._way_out(trouble)))
        elif self._repeats(self.at):
            event, decision = repetition.compared(self._bad_step(self.at, stats.outcome))
            self._tell(event, decision)
            if not step:
                return  # it is sound this time, and stands
            if event.kind == "unrepeatable":
                raise UnsoundHardware(
                    f"step {step} was bad twice, with other numbers on the same data ({event.detail}): the hardware is "
                    "at fault. The weights are those before this step"
                )
            if decision.samples is None:
                left_out = in_recipe(self.start.skipped_samples) or "none"
                raise NonFinite(
                    self._in_words(step, trouble, f"or leave out others ({decision.reason}; left out: {left_out})")
                )
            if decision.action == "go_back":
                raise GoBack(step, decision.samples[1], self.start.skipped_samples, repetition.history)
            self._leave_out(decision.samples)
            raise Again
        elif step:
            assert trouble.outcome is not None
            event, decision = repetition.found(self._bad_step(step, trouble.outcome))
            self._tell(event, decision)
            if decision.action == "end":
                raise NonFinite(self._in_words(step, trouble, f"or start again ({decision.reason})"))
            raise Again

    def _leave_out(self, samples: SampleRange) -> None:
        """Cut samples from the order of the run, from the step on that is to be done again."""
        skipped = self.start.skipped_samples | [samples]
        self.start, self.batches = replace(self.start, skipped_samples=skipped), self.batches.without(skipped)

    def _bad_step(self, step: int, outcome: Tensor) -> BadStep:
        return BadStep(step, self._bounds(step), StepResult.of(outcome, self.control))

    def _bounds(self, step: int) -> SampleRange:
        """Return the first sample of a step and the one after its last."""
        samples = self._samples(step)
        return samples[0][0], samples[-1][1]

    def _samples(self, step: int) -> list[SampleRange]:
        first = self.start.at(step - 1, self.config).samples
        return self.start.skipped_samples.samples(first, self.config.batch.global_size)

    def _tell(self, event: Event, decision: Decision) -> None:
        self._report(event, decision)
        samples = f" (samples {in_recipe([event.samples])})" if event.samples else ""
        said = f"{KINDS[event.kind]}: {event.detail}. {ACTIONS[decision.action].capitalize()}"
        self._say(f"step {event.step}{samples}: {said}")

    def _report(self, event: Event, decision: Decision) -> None:
        if self.log is not None:
            self.log.report(event, decision)

    def _in_words(self, step: int, trouble: Trouble, way_out: str) -> str:
        ranks = torch.zeros(self.mesh.shape.world, dtype=torch.int64, device=self.mesh.device)
        ranks[self.mesh.rank] = trouble.here
        found = all_reduce_(ranks, self.mesh.world).nonzero().flatten().tolist()
        where = (
            "the loss is not finite on " + ", ".join(f"rank {rank} ({self.mesh.shape.place(rank)})" for rank in found)
            if found
            else "loss or gradient norm are far above those before it"
            if trouble.spiked
            else "the loss is finite on every rank, the gradient is not" + self._at_the_smallest_scale()
        )
        return (
            f"step {step}, samples {in_words(self._samples(step))} of the training data: {where}. The weights "
            f"are those before this step. Lower optimizer.lr, look at these samples, {way_out}"
        )

    def _way_out(self, trouble: Trouble) -> str:
        if not (allowed := trouble.allowed):
            return "or go on without such steps by optimizer.non_finite=skip"
        return (
            f"or raise optimizer.max_skipped ({allowed}): with this one {allowed + 1} of the last {WINDOW} steps "
            "were not finite, and left out"
        )

    def _at_the_smallest_scale(self) -> str:
        scaling = self.step.scaling
        return f" even at loss_scale.minimum ({scaling.minimum:g})" if scaling.moves else ""

    # -- metrics

    def _record(self, step: int, lr: float, stats: Stats, trouble: Trouble) -> Record:
        loss, norm = stats.loss.item(), stats.grad_norm.item()  # waits for the step: only then is the clock right
        return {
            "loss": loss,
            "grad_norm": norm,
            "lr": lr,
            "tokens": self.start.at(step, self.config).tokens,
            **self.meter.record(step, self._say),
            "peak_memory_gib": self.control.largest(peak_memory_gib(self.mesh.device))[0],
            "skipped_steps": int(trouble.skipped),
            **({"loss_scale": stats.scale.item()} if self.step.scaling.moves else {}),
            **self._loads(step),
        }

    def _loads(self, step: int) -> Record:
        """Return the loads of the experts of a step, if there are some, and write how many tokens each was sent."""
        balance = self.step.balance
        if balance is None:
            return {}
        found = balance.read(self.model.config.sizes["layer"])
        if not found.layers:  # the step was done in groups that are gone
            return {}
        if self.log is not None:
            self.log.write_loads(step, found.layers, found.counts.tolist())
        return loads.record(found, balance.coefficients)

    def _say(self, text: str) -> None:
        if self.log is not None:
            self.log.tell(text)

    def _write(self, step: int, record: Record) -> None:
        if self.log is not None:
            self.log.write(step, record)


class Asked(NamedTuple):
    """The things that ranks are asked for after a step: to end, to save, to leave their groups."""

    stop: bool
    save: bool
    pause: bool
