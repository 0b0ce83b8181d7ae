"""`megacore status`: where a run stands, running or not: who holds it, its steps and rate, its checkpoints, what befell
it. It only reads, and needs no torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megacore import checkpoints, exits, incidents, run_lock
from megacore.config import Config
from megacore.incidents import Incident
from megacore.recipe import ConfigError, load
from megacore.recovery.hang_report import standing
from megacore.say import brief, err, say, say_data
from megacore.store.io.strict_json import StoreError
from megacore.tools.options import command_parser
from megacore.training import metrics

RECIPE = "config.yaml"
_SHOWN = 5
"""Incidents that are listed, the newest."""


@dataclass(frozen=True)
class RunState:
    """The state of a run, as its folder tells it.

    Args:
        holder: The process that holds it; None where no process of this machine does.
        named: The one that its lock names all the same: it has died, or is on a machine whose locks do not reach here.
        steps: The number of its steps in all, where its recipe can be read.
        patience: The evaluations without a lower loss that end it, where some do.
        best: The checkpoint with the lowest validation loss, where the run keeps that.
        unlisted: Why it is not known which checkpoints there are; nothing where it is.
        age_s: Seconds since the newest record.
        stands: The sentence of each node on which ranks stand, where no step was done since.
    """

    out: Path
    holder: str | None
    named: str | None
    steps: int | None
    patience: int | None
    best: Path | None
    training: Mapping[str, Any] | None
    evaluation: Mapping[str, Any] | None
    checkpoint: Path | None
    unlisted: str
    age_s: float | None
    stands: tuple[str, ...]
    incidents: tuple[Incident, ...]

    @classmethod
    def of(cls, out: Path) -> RunState:
        """Read the state of a run from its folder. Raises StoreError: there is no run, or one of its files on a disk
        cannot be read."""
        path, recipe = out / metrics.METRICS, _recipe(out)
        saved, unlisted = dict[int, Path](), ""
        try:
            saved = checkpoints.complete(checkpoints.folder_of(out, recipe.checkpoint.folder if recipe else None))
        except StoreError as error:  # an object store's, which says nothing of the steps that are done
            unlisted = str(error)
        befell = tuple(incidents.read(out))
        if not (path.exists() or saved or befell or (out / RECIPE).exists()):
            raise StoreError(f"{out} is not the folder of a run: it has neither {RECIPE} nor {path.name}")
        records = metrics.newest(path)
        kinds = ([each for each in records if key in each] for key in ("loss", "validation_loss"))
        training, evaluation = (each[-1] if each else None for each in kinds)
        written, now = path.stat().st_mtime if records else 0.0, time.time()
        newest = saved[max(saved)] if saved else None
        named, steps = run_lock.read(out / run_lock.LOCK), recipe.train.steps if recipe else None
        best = checkpoints.best(saved) if recipe and recipe.checkpoint.best else None
        return cls(
            out=out,
            holder=run_lock.holder(out),
            named=str(named) if named else None,
            steps=steps,
            patience=recipe.evaluate.patience if recipe else None,
            best=None if best is None else saved[best],
            training=training,
            evaluation=evaluation,
            checkpoint=newest,
            unlisted=unlisted,
            age_s=max(0.0, now - written) if records else None,
            stands=tuple(f"{text} ({_ago(now - at)} ago)" for at, text in standing(out) if at > written),
            incidents=befell,
        )

    @property
    def is_done(self) -> bool:
        """Whether all steps are done, or evaluations have ended it, as far as its files tell."""
        since = self.evaluation.get("evaluations_since_best", 0) if self.evaluation else 0
        if self.patience is not None and since >= self.patience:
            return True
        return self.steps is not None and self.training is not None and self.training["step"] >= self.steps

    def lines(self) -> Iterator[str]:
        """Yield it in lines for people."""
        yield f"run          {self.out}"
        named = f"; {self.named} has died, or runs elsewhere" if self.named else ""
        yield f"held by      {self.holder or f'nobody on this machine{named}'}"
        yield f"step         {self._step()}"
        yield from (f"stands       {each}" for each in self.stands)
        if self.training is not None:
            yield f"loss         {_number(self.training.get('loss'), '.4f')}{self._held_out()}"
            yield f"rate         {_number(self.training.get('tokens_per_second'), ',.0f')} tokens/s"
            if left := self._left():
                yield f"left         {left}"
            yield f"goodput      {_number(self.training.get('goodput'), '.1%')} of the wall clock"
        yield f"checkpoint   {self.checkpoint or self.unlisted or 'none'}"
        if self.best is not None:
            yield f"best         {self.best}"
        yield f"incidents    {incidents.summary(self.incidents) if self.incidents else 'none'}"
        yield from (f"  {line}" for line in map(_line, self.incidents[-_SHOWN:]))

    def _step(self) -> str:
        if self.training is None:
            return "none is recorded"
        of = f" of {self.steps:,}" if self.steps is not None else ""
        return f"{self.training['step']:,}{of}, {_ago(self.age_s or 0.0)} ago"

    def _left(self) -> str:
        """Return how long it still takes at its newest rate, where it is not done and that is known."""
        assert self.training is not None
        each = self.training.get("seconds_per_step")
        if self.is_done or self.steps is None or not isinstance(each, int | float):
            return ""
        return f"{_ago((self.steps - self.training['step']) * each)} at this rate"

    def _held_out(self) -> str:
        if (record := self.evaluation) is None:
            return ""
        return f", {_number(record['validation_loss'], '.4f')} on validation data at step {record['step']:,}"


def _recipe(out: Path) -> Config | None:
    try:
        return load(out / RECIPE)
    except ConfigError:  # of another version, or being written
        return None


def _number(value: object, spelled: str) -> str:
    return format(value, spelled) if isinstance(value, int | float) else "unknown"


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _line(incident: Incident) -> str:
    """Return an incident in a line."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(incident.at))
    who = ", ".join(
        f"{name} {value}"
        for name, value in (("rank", incident.rank), ("node", incident.node), ("step", incident.step))
        if value is not None
    )
    steps, seconds = incident.steps_lost, incident.seconds_lost
    cost = "" if seconds is None else f"; {seconds:.1f} s and {incidents.counted(steps or 0, 'step')} lost"
    detail = f" ({brief(incident.detail)})" if incident.detail else ""
    reason = f": {brief(incident.reason)}" if incident.reason else ""
    return f"{when} UTC  {incident.kind}{detail}, {who or 'unknown'} -> {incident.action}{reason}{cost}"


def main(argv: Sequence[str]) -> int:
    parser = command_parser("status", __doc__)
    parser.add_argument("out", type=Path, help="the folder of a run, its out")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--done", action="store_true", help=f"end with {exits.RETRY} where steps are left to do")
    given = parser.parse_args(argv)
    try:
        state = RunState.of(given.out)
    except StoreError as error:
        err(error)
        return exits.FAILED
    if given.json:
        say_data({key: str(value) if isinstance(value, Path) else value for key, value in asdict(state).items()})
    else:
        say("\n".join(state.lines()))
    return exits.RETRY if given.done and not state.is_done else exits.DONE
