"""The training loop: batches in, steps; all else is a :class:`Callback`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from tqdm import tqdm

from megacore.config import Config
from megacore.control import Control
from megacore.data.batches import Batches, Prefetch
from megacore.incidents import Incident
from megacore.parallel.import_path import imported
from megacore.recipe import ConfigError
from megacore.say import harmless
from megacore.training.lr import learning_rate

if TYPE_CHECKING:  # the loop calls what it is given
    from megacore.models.assemble import Model
    from megacore.parallel.mesh import Mesh
    from megacore.training.microbatches import Uploader
    from megacore.training.progress import Progress
    from megacore.training.resume import Setup, Start
    from megacore.training.save import Contents
    from megacore.training.step import Phase, Stats, TrainStep
    from megacore.training.weight_stream import WeightStream


class Callback:
    """Something that happens beside the steps of a run; the methods here do nothing.

    Every rank has the same callbacks in the same order and calls each method at the same step, so that a method may
    talk to all ranks. The order is meaning: what decides whether a step stands comes before what keeps or shows it.
    """

    def on_find(self, setup: Setup, start: Start, control: Control) -> Start:
        """Return what the run goes on from: ``start``, or a newer state of it. Nothing is loaded yet; this is called
        again where that state turns out to be damaged, which ``start.damaged`` then names."""
        return start

    def on_start(self, run: Trainer) -> None:
        """Begin: the state is loaded, and this process has done no step yet."""

    def on_step_begin(self, run: Trainer) -> None:
        """Step ``run.step`` begins."""

    def on_gradients(self, run: Trainer, stats: Stats) -> None:
        """Look at gradients that are summed, before anything is updated: ``run.veto(flag)`` leaves the update out."""

    def on_step(self, run: Trainer, stats: Stats) -> None:
        """Look at updated weights. ``stats`` are on the device: to read them is to wait for it."""

    def ask(self, run: Trainer) -> Mapping[str, float]:
        """Return numbers of this rank after a step, always under the same keys. Those of all callbacks travel in one
        message. Some keys are the trainer's own: a 1 from any rank under ``stop`` ends the run after this step; under
        ``pause`` it ends this launch of its ranks, which others follow; ``look`` says that somebody is about to show
        what the steps have come to, so that bad ones are looked for first, and ``keep`` that somebody is about to keep
        it, so that it is compared first."""
        return {}

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        """Act on a step that is over; ``largest`` has the largest of each number that any rank has asked, the same on
        all. Callbacks behind one that calls ``run.rewind`` or ``run.fail`` do not hear of the step."""

    def on_log(self, run: Trainer, record: dict[str, Any]) -> None:
        """Add to a record of step ``run.step`` that is about to be written, or look at it."""

    def on_incident(self, run: Trainer, incident: Incident) -> None:
        """Take note of something that has befallen the run."""

    def on_save(self, run: Trainer, document: dict[str, Any]) -> None:
        """Add what is to be found when the run goes on from the checkpoint that is about to be taken."""

    def on_resume(self, run: Trainer, document: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, to whose ``trainer.json`` :meth:`on_save` has added."""

    def on_rewind(self, run: Trainer) -> None:
        """Go on after the earlier step ``run.step``: what was kept of later ones does not count."""

    def on_phase(self, run: Trainer, phase: Phase) -> None:
        """Take note of the phase that this rank enters."""

    def on_error(self, run: Trainer, error: BaseException) -> None:
        """Let go of what is held: the loop of this rank ends with an error. Other ranks may be gone: talk to nobody."""

    def on_end(self, run: Trainer) -> None:
        """End: the last step is done, on all ranks."""


def callbacks_of(config: Config) -> list[Callback]:
    """Return the callbacks of a config's import paths: what is there, or what a class or function there makes, which is
    given the config if it takes something. Raises ConfigError: one is none, or has a method that cannot be called."""
    made, problems = list[Callback](), list[str]()
    for path in config.callbacks:
        try:
            found: Any = imported(path)
            if not isinstance(found, Callback):
                found = found(config) if inspect.signature(found).parameters else found()
            if not isinstance(found, Callback):
                raise TypeError(f"{type(found).__name__} is no megacore.Callback")
            check_methods([found])
            made.append(found)
        except Exception as error:  # of code that is not ours
            problems.append(f"callbacks: {path}: {type(error).__name__}: {error}")
    if problems:
        raise ConfigError(problems)
    return made


def check_methods(callbacks: Sequence[Callback]) -> None:
    """Raise a TypeError for what is no callback, and for one with a method that cannot be called as :class:`Callback`
    says."""
    hooks = {name: method for name, method in vars(Callback).items() if not name.startswith("_")}
    for callback in callbacks:
        if isinstance(callback, type):
            name = callback.__name__
            raise TypeError(f"callbacks: {name} is a class: give what it makes, {name}()")
        if not isinstance(callback, Callback):
            raise TypeError(f"callbacks: {callback!r} is no megacore.Callback: derive its class from that")
        for name, method in hooks.items():
            given = list(inspect.signature(method).parameters)[1:]
            try:
                inspect.signature(getattr(callback, name)).bind(*given)
            except TypeError as error:
                who = f"{type(callback).__name__}.{name}"
                raise TypeError(f"{who} is called with ({', '.join(given)}): {error}") from error


@dataclass
class Trainer:
    """A run on this rank. ``control`` has the messages between the ranks in host memory, ``origin`` is the start of the
    run in this process."""

    config: Config
    mesh: Mesh
    model: Model
    train_step: TrainStep
    batches: Batches
    upload: Uploader
    control: Control
    contents: Contents
    origin: Start
    callbacks: Sequence[Callback] = ()
    start: Progress = field(init=False)
    """The progress that samples and tokens are counted from."""
    step: int = field(init=False)
    """The step that is being done, or was done last."""
    last: int = field(init=False)
    """The step that ends the run; a callback on all ranks may say that it is this one."""
    stopping: bool = field(default=False, init=False)
    pausing: bool = field(default=False, init=False)
    kept_step: int | None = field(default=None, init=False)
    """The step whose state a callback has kept elsewhere than on disk; a pause goes on from there."""
    failure: Exception | None = field(default=None, init=False)
    """The error that all ranks have found, which ends the run."""
    vetoed: Tensor | None = field(default=None, init=False)
    """Whether the update of this step is left out, a bool on the device; None: nobody has said so."""
    halted: Tensor | None = field(default=None, init=False)
    """Whether all stays as it was before this step, as ``vetoed``: of replicas that take steps alone the outer step is
    left out too."""
    _back_to: tuple[int, Progress] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.start = self.origin.progress
        self.step, self.last = self.start.step, self.config.train.steps

    def fit(self) -> int:
        """Train -> the last step that was done.

        Raises:
            Exception: what a callback has called :meth:`fail` with, on all ranks; anything else on this one.
        """
        try:
            self._check_callbacks()
            if self.origin.trainer is not None:
                self.call("on_resume", self.origin.trainer)
            self.call("on_start")
            while not self.is_last:
                self._steps()
                if self._back_to is not None:
                    (self.step, self.start), self._back_to = self._back_to, None
                    self.batches = replace(self.batches, skipped=self.start.skipped_samples)
                    self.call("on_rewind")
            self.call("on_end")
            if self.failure is not None:
                raise self.failure
        except BaseException as error:
            error.add_note(f"at step {self.step}")
            self.call("on_error", error)
            raise
        finally:
            self.enter("end")
        return self.step

    def _steps(self) -> None:
        """Do steps until the last one, or until the run goes back."""
        with Prefetch(self.batches.steps(self.position.samples)) as ahead:
            self.enter("data")
            for batch in ahead:
                self.step += 1
                self.call("on_step_begin")
                self.enter("forward")
                stats = self.train_step.backward(self.upload(batch, self.step), self.enter)
                self._commit(stats)
                self._agree()
                if self._back_to is not None or self.is_last:
                    return
                self.enter("data")

    def _commit(self, stats: Stats) -> None:
        """Do the second half of a step: no rank needs another for it, but for whole matrices, and to gather split
        parameters afterwards."""
        self.vetoed = self.halted = None
        self.call("on_gradients", stats)
        self.enter("update")
        self.train_step.update(stats, self.lr, _either(self.vetoed, self.halted))
        self.train_step.gradients.updated()
        self.call("on_step", stats)

    def _agree(self) -> None:
        """Ask all callbacks what this rank has to say, in one message to all ranks, and tell them what comes of it."""
        asked = {"stop": 0.0, "pause": 0.0, "look": 0.0, "keep": 0.0}
        for callback in self.callbacks:
            for key, value in callback.ask(self).items():
                asked[key] = max(value, asked.get(key, value))
        largest = dict(zip(asked, self.control.largest(*asked.values()), strict=True))
        self.stopping |= bool(largest["stop"])
        self.pausing |= bool(largest["pause"])
        for callback in self.callbacks:
            callback.on_answers(self, largest)
            if self._back_to is not None or self.failure is not None:
                return

    def _check_callbacks(self) -> None:
        """Raise where ranks have other callbacks than rank 0: they would wait for other messages."""
        names = [type(callback).__name__ for callback in self.callbacks]
        for rank, theirs in enumerate(self.control.exchange(names)):
            if theirs != names:
                who = self.control.who(rank)
                raise ValueError(f"{who} has the callbacks {theirs}, and this rank {names}: give all ranks the same")

    # -- for callbacks

    def veto(self, flag: Tensor) -> None:
        """Leave the update of this step out where a bool on the device is true, the same on all ranks; a round of steps
        that replicas take alone (``sync``) ends all the same."""
        self.vetoed = _either(self.vetoed, flag)

    def halt(self, flag: Tensor) -> None:
        """Let all be as it was before this step where a bool on the device is true, for a run that :meth:`rewind` or
        :meth:`fail` is about to be called for: what :meth:`veto` leaves out, and no round ends either."""
        self.halted = _either(self.halted, flag)

    def rewind(self, step: int, start: Progress | None = None) -> None:
        """Go on after an earlier step, whose state is that of now; all ranks say so after the same step. ``start`` is
        the progress that samples are counted from, where some are left out from here on."""
        self._back_to = step, start or self.start

    def fail(self, error: Exception) -> None:
        """End the run with an error that all ranks have found after the same step."""
        self.failure = error

    def call(self, hook: str, *arguments: object) -> None:
        """Call a method of all callbacks."""
        for callback in self.callbacks:
            getattr(callback, hook)(self, *arguments)

    def enter(self, phase: Phase) -> None:
        """Tell all callbacks what this rank does from now on."""
        self.call("on_phase", phase)

    def tell(self, text: str) -> None:
        """Say something that must not be overlooked, once and above the progress bar; rank 0 does so."""
        if self.mesh.rank == 0:
            tqdm.write(harmless(text), file=sys.stderr)

    def report(self, incident: Incident) -> None:
        """Add an incident to those of the run; all ranks do so."""
        self.call("on_incident", incident)

    def weights(self, merged: bool = False, everywhere: bool = False) -> WeightStream:
        """Return the weights as they now are, whole and by their Hugging Face names; arguments as of
        :class:`~megacore.training.weight_stream.WeightStream`. All ranks iterate over it, to its end."""
        from megacore.training.weight_stream import WeightStream

        return WeightStream(self.contents, merged, everywhere)

    @property
    def is_last(self) -> bool:
        """Whether no step follows this one."""
        return self.stopping or self.pausing or self.failure is not None or self.step >= self.last

    @property
    def lr(self) -> float:
        """The learning rate of this step."""
        config = self.config
        return learning_rate(self.step, config.schedule, config.optimizer.lr, config.train.steps)

    @property
    def position(self) -> Progress:
        """The samples and tokens until this step."""
        return self.start.at(self.step, self.config)

    @property
    def progress(self) -> Progress:
        """The progress until this step, for a checkpoint: this waits for the device."""
        step = self.train_step
        return self.start.at(self.step, self.config, step.optimizer.updates, step.scaler.state())


def _either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return whether one of two flags is true that somebody has set."""
    return other if one is None else one if other is None else one | other
