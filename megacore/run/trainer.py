"""The training loop: batches in, steps, evaluation and checkpoints at intervals, metrics out."""

from __future__ import annotations

import gc
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import torch
from torch import Tensor

from megacore.config import Config
from megacore.control import Control
from megacore.data.batches import Batch, Batches, prefetch
from megacore.data.skipped import in_words
from megacore.hardware import peak_memory_gib
from megacore.run import loads, progress
from megacore.run.lr import learning_rate
from megacore.run.metrics import Log, Record
from megacore.run.progress import Progress
from megacore.run.save import SaveError, Saver
from megacore.run.step import Stats, TrainStep, evaluate
from models.assemble import Model
from models.config import flops_per_token
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

WINDOW = 100
"""Steps among which at most ``optimizer.max_skipped`` may be left out."""


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


class NonFinite(RuntimeError):
    """The loss or the gradient norm is not a number any more, or too often."""


@dataclass
class Interrupt:
    """SIGINT and SIGTERM ask for an end after the current step, SIGUSR1 for a checkpoint after it.

    Another SIGINT, ``patience_s`` later, ends at once: under torchrun one Ctrl-C arrives twice, from the terminal and
    from torchrun, which passes it on. Our own launcher lets no SIGINT through.
    """

    asked: bool = False
    save: bool = False
    patience_s: float = 2.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        first: list[float] = []

        def ask(number: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            if number == signal.SIGINT and first and now - first[0] > self.patience_s:
                raise KeyboardInterrupt
            first.append(now)
            self.asked = True

        def ask_to_save(number: int, frame: FrameType | None) -> None:
            self.save = True

        handlers = {signal.SIGINT: ask, signal.SIGTERM: ask, signal.SIGUSR1: ask_to_save}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        # The launcher has blocked it, so that none was lost until now.
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass
class Trouble:
    """Non-finite steps, counted on the device so that nobody waits for it.

    Args:
        first: The step from which on the weights do not change any more, 0 if there is none: the one that is not finite
            and one more than ``allowed`` among the last ``WINDOW``. Those that overflowed for their loss scale do not
            count.
        here: Whether this rank's own part of the loss was not finite at that step.
        skipped: The number of steps that were left out.
        halted: Whether there is such a step.
        recent: The last ``WINDOW`` steps that were left out and count.
        allowed: The number of them that may be; None for any.
    """

    first: Tensor
    here: Tensor
    skipped: Tensor
    halted: Tensor
    recent: Tensor
    allowed: int | None

    @classmethod
    def none(cls, device: torch.device, allowed: int | None, skipped_before: int = 0) -> Trouble:
        first, skipped = torch.tensor([0, skipped_before], device=device).unbind()
        here, halted = torch.zeros(2, dtype=torch.bool, device=device).unbind()
        return cls(first, here, skipped, halted, torch.zeros(WINDOW, dtype=torch.bool, device=device), allowed)

    def note(self, step: int, stats: Stats) -> None:
        bad = ~stats.finite
        self.skipped += bad
        bad &= ~stats.overflow
        self.recent[step % WINDOW] = bad
        if self.allowed is None:
            return
        now = ~self.halted & (self.recent.sum() > self.allowed)
        self.halted |= now
        self.first = torch.where(now, step, self.first)
        self.here |= now & ~torch.isfinite(stats.own_loss)


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
        peak_tflops: The peak of the device, for the utilisation; None if unknown.
        control: The messages between the ranks.
        saver: Writes checkpoints.
        start: The progress of the run so far.
        log: The log that metrics go to, on rank 0.
    """

    config: Config
    mesh: Mesh
    model: Model
    step: TrainStep
    batches: Batches
    held_out: Batches | None
    peak_tflops: float | None
    control: Control
    saver: Saver
    start: Progress
    log: Log | None
    interrupt: Interrupt = field(default_factory=Interrupt)
    at: int = field(default=0, init=False)
    """The step that is being done."""

    def run(self) -> int:
        """Train -> the last step that was done.

        Raises:
            NonFinite: with ``optimizer.non_finite=stop``, once a step has a loss or gradient that is not finite; with
                ``skip``, once more than ``optimizer.max_skipped`` of the last ``WINDOW`` steps have. The weights are
                those before that step.
            SaveError: no checkpoint could be written for ``checkpoint.patience`` hours, or none before a signal ended
                the run.
        """
        with self.interrupt.listening():
            try:
                return self._steps()
            except NonFinite:  # on every rank
                self._tolerate(self.saver.finish)
                raise
            except RuntimeError as error:
                error.add_note(f"at step {self.at}")  # where a rank that waits in vain says so
                raise

    def _steps(self) -> int:
        config, total = self.config, self.config.train.steps
        meter = _Meter(self)
        section = config.optimizer
        allowed = 0 if section.non_finite == "stop" else section.max_skipped
        trouble = Trouble.none(self.mesh.device, allowed, self.start.skipped)
        step = first = self.start.step
        if first >= total:
            return first
        with prefetch(self.batches.steps(self.start.samples)) as ahead, _collecting_together():
            for step, batch in enumerate(ahead, start=first + 1):
                self.at = step
                lr = learning_rate(step, config.schedule, config.optimizer.lr, total)
                stats = self.step(self._microbatches(batch, step), lr, trouble.halted)
                trouble.note(step, stats)
                stop, save = self._listen()
                stopping = step == total or stop
                saving = self._saves(step, stop, save)
                if step % config.log.every == 0 or stopping or saving:
                    self._check(trouble)
                if step % config.log.every == 0 or stopping:
                    self._write(step, meter.record(step, lr, stats, trouble))
                if saving:
                    self._save(step, lr)
                if self._evaluates(step):
                    with meter.paused():
                        loss = self.validation_loss()
                        self._write(step, {"validation_loss": loss, "validation_perplexity": perplexity(loss)})
                if step % COLLECT_EVERY == 0:
                    gc.collect(1)
                if stopping:
                    break
        self._tolerate(self.saver.finish)
        if saving and self.saver.failing_s is not None:
            self._save_at_last(step, lr, stop)
        return step

    def validation_loss(self) -> float:
        """Return the mean loss over the first ``evaluate.batches`` global batches held out; the same on every rank."""
        assert self.held_out is not None
        self.model.train(False)
        losses, counts = [], []
        for i in range(self.config.evaluate.batches):
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
        done = self.start.at(step, self.config, self.step.optimizer.updates, self.step.scaler.state())
        self._tolerate(self.saver.finish)
        self._tolerate(lambda: self.saver.save(step, progress.document(done, lr, self.config, self.mesh.shape)))
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
            if self.log is not None:
                self.log.tell(f"{error}\nThe next save tries again, for {patience - hours:.2g} h (checkpoint.patience)")

    def _save_at_last(self, step: int, lr: float, stop: bool) -> None:
        """Save what a run has come to, again and again: nobody else has it.

        Raises:
            SaveError: as of :meth:`_tolerate`, or a signal ends the run.
        """
        while self.saver.failing_s is not None:
            for _ in range(_AGAIN_S):
                time.sleep(1)
                stop = stop or bool(self.control.largest(self.interrupt.asked)[0])
                if stop:
                    raise SaveError(f"step {step} could not be saved before the run was ended; the reason stands above")
            self._save(step, lr)
            self._tolerate(self.saver.finish)

    def _listen(self) -> tuple[bool, bool]:
        """Return (whether any rank is asked to end, whether any is asked to save): all must do so after the same step.

        With it goes what the ranks must know of a save in the background.
        """
        save, self.interrupt.save = self.interrupt.save, False
        stop, save, *news = map(bool, self.control.largest(self.interrupt.asked, save, *self.saver.news()))
        self._tolerate(lambda: self.saver.advance(*news))
        return stop, save

    def _microbatches(self, batches: Sequence[Batch], step: int) -> list[Microbatch]:
        shape, embed = self.mesh.shape, self.model.config.sizes["embed"]
        made = []
        for number, batch in enumerate(batches):
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
                    batch.sequences or len(batch.tokens),
                    activation,
                    batch.documents,
                    seed,
                    wanted=wanted,
                    padding=padding,
                    split=batch.split,
                    rows=rows,
                )
            )
        return made

    def _upload(self, array: object) -> Tensor:
        tensor = torch.as_tensor(array).flatten()
        if self.mesh.device.type == "cuda":
            tensor = tensor.pin_memory()  # a copy from pageable memory would wait for the device
        return tensor.to(self.mesh.device, non_blocking=True)

    def _check(self, trouble: Trouble) -> None:
        step = int(trouble.first)
        if not step:
            return
        ranks = torch.zeros(self.mesh.shape.world, dtype=torch.int64, device=self.mesh.device)
        ranks[self.mesh.rank] = trouble.here
        found = all_reduce_(ranks, self.mesh.world).nonzero().flatten().tolist()
        first = self.start.at(step - 1, self.config).samples
        samples = self.start.skipped_samples.samples(first, self.config.batch.global_size)
        where = (
            "the loss is not finite on " + ", ".join(f"rank {rank} ({self.mesh.shape.place(rank)})" for rank in found)
            if found
            else "the loss is finite on every rank, the gradient is not" + self._at_the_smallest_scale()
        )
        way_out = "or go on without such steps by optimizer.non_finite=skip"
        if allowed := trouble.allowed:
            way_out = (
                f"or raise optimizer.max_skipped ({allowed}): with this one {allowed + 1} of the last {WINDOW} steps "
                "were not finite, and left out"
            )
        raise NonFinite(
            f"step {step}, samples {in_words(samples)} of the training data: {where}. The weights "
            f"are those before this step. Lower optimizer.lr, look at these samples, {way_out}"
        )

    def _at_the_smallest_scale(self) -> str:
        scaling = self.step.scaling
        return f" even at loss_scale.minimum ({scaling.minimum:g})" if scaling.moves else ""

    def _write(self, step: int, record: Record) -> None:
        if self.log is not None:
            self.log.write(step, record)


class _Meter:
    """Throughput between two records, evaluation left out."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        config = trainer.config
        self._tokens_per_step = config.batch.global_size * config.data.sequence_length
        self._flops = flops_per_token(trainer.model.config, config.data.sequence_length, config.tuning)
        self._since, self._last_step = time.perf_counter(), trainer.start.step

    def record(self, step: int, lr: float, stats: Stats, trouble: Trouble) -> Record:
        # Reading the loss waits for the step: only then is the clock right.
        loss, norm = stats.loss.item(), stats.grad_norm.item()
        now = time.perf_counter()
        steps, seconds = step - self._last_step, now - self._since
        self._since, self._last_step = now, step
        speed = steps * self._tokens_per_step / seconds
        tflops = speed * self._flops / self._trainer.mesh.shape.world / 1e12
        peak = self._peak_above(tflops, step)
        return {
            "loss": loss,
            "grad_norm": norm,
            "lr": lr,
            "tokens": self._trainer.start.at(step, self._trainer.config).tokens,
            "seconds_per_step": seconds / steps,
            "tokens_per_second": speed,
            "tflops_per_device": tflops,
            "mfu": tflops / peak if peak else None,
            "peak_memory_gib": self._peak_memory(),
            "skipped_steps": int(trouble.skipped),
            **({"loss_scale": stats.scale.item()} if self._trainer.step.scaling.moves else {}),
            **self._loads(step),
        }

    def _loads(self, step: int) -> Record:
        """Return the loads of the experts of the step, if there are some, and write how many tokens each was sent."""
        trainer, balance = self._trainer, self._trainer.step.balance
        if balance is None:
            return {}
        found = balance.read(trainer.model.config.sizes["layer"])
        if trainer.log is not None:
            trainer.log.write_loads(step, found.layers, found.counts.tolist())
        return loads.record(found, balance.coefficients)

    def _peak_above(self, tflops: float, step: int) -> float | None:
        """Return the device's peak, as long as it has not been exceeded: then it was none, which is said once."""
        peak, trainer = self._trainer.peak_tflops, self._trainer
        if peak is None or tflops <= peak:
            return peak
        trainer.peak_tflops = None
        of = (
            "log.peak_tflops"
            if trainer.config.log.peak_tflops
            else "measured at the start, while the machine was busy"
            if trainer.mesh.device.type == "cpu"
            else "of the table of devices"
        )
        if trainer.log is not None:
            trainer.log.tell(
                f"step {step}: {tflops:.3g} TFLOP/s on each device are above its peak of {peak:.3g} ({of}): mfu is "
                "null from here on, and was too high before; log.peak_tflops sets the peak"
            )
        return None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time that passes inside uncounted."""
        if self._trainer.mesh.device.type == "cuda":
            torch.cuda.synchronize(self._trainer.mesh.device)  # the steps before it are
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - before

    def _peak_memory(self) -> float:
        """Return the peak memory of the rank that has held most."""
        return self._trainer.control.largest(peak_memory_gib(self._trainer.mesh.device))[0]
