"""The metrics of a run: metrics.jsonl always, a progress bar, TensorBoard and W&B if asked for, a picture; and of a
model with experts experts.jsonl."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from megacore import pictures
from megacore.config import Config
from megacore.recovery.events import Event
from megacore.recovery.incidents import IncidentWriter
from megacore.recovery.policy import Decision
from megacore.say import err, harmless, say
from megacore.store.files import append, open_file
from megacore.store.publish import replace_file
from megacore.store.strict_json import read_file
from megacore.store.tensors import os_errors

METRICS, PICTURE = "metrics.jsonl", "loss.png"
EXPERTS, PICTURE_OF_EXPERTS = "experts.jsonl", "experts.png"
_PANELS = 12
"""Layers that are drawn, of those that have experts."""
_HISTORY = 32 << 20
"""Bytes of records that are looked at for the goodput of a run that goes on: some 50,000 records."""

Record = Mapping[str, float | int | None]


def _are_numbers(values: Collection[object]) -> bool:
    return all(isinstance(value, int | float | None) for value in values)


def _are_loads(values: Collection[object]) -> bool:
    """Return whether a line says of a step which layers have experts, and how many tokens each was sent."""
    match list(values):
        case [int(), list(layers), list(counts)]:
            rows = [layers, *counts]
            return len(layers) == len(counts) and all(
                isinstance(row, list) and all(isinstance(number, int) for number in row) for row in rows
            )
    return False


class Sink(Protocol):
    def go_on(self, after: int, covered: int) -> None:
        """Take what follows a step, which comes before anything is written.

        Args:
            after: The step.
            covered: The last step whose records stay, where there are later ones already.
        """

    def write(self, step: int, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One line of JSON for each record, written at once. JSON has no NaN: a number that is not finite is null.

    A full disk does not end a run: the lines that it does not take are kept, and written as soon as it does.

    Args:
        path: The file.
        tell: Says that the disk does not take them.
        are: Whether these are the values of a record.
    """

    def __init__(
        self,
        path: Path,
        tell: Callable[[str], object] = err,
        are: Callable[[Collection[object]], bool] = _are_numbers,
    ) -> None:
        self._path, self._tell, self._are, self._told = path, tell, are, False
        self._kept = list[bytes]()
        self._begun = 0
        """Bytes of the first of them that are in the file already."""
        self._there = set[tuple[int, frozenset[str]]]()
        """Step and keys of the lines that are not written again."""
        self._file = _added_to(path)

    def go_on(self, after: int, covered: int) -> None:
        if dropped := drop_after(self._path, covered, self._are):
            say(f"{self._path}: {dropped} lines were no records and are dropped.")
        self._file.close()
        self._file = _added_to(self._path)
        self._kept = [line for line in self._kept if json.loads(line)["step"] <= covered]
        self._begun = 0  # what was begun was cut, and is dropped
        self._there = {_kind(line) for line in [*read(self._path), *self.kept] if line["step"] > after}

    def write(self, step: int, record: Record) -> None:
        plain = {key: value if value is not None and math.isfinite(value) else None for key, value in record.items()}
        self.add({"step": step, **plain})

    def add(self, line: Mapping[str, Any]) -> None:
        if _kind(line) in self._there:
            return
        self._kept.append(json.dumps(line, allow_nan=False).encode() + b"\n")
        if (why := self._flush()) and not self._told:
            self._tell(f"{self._path}: {why}: its lines are kept until they can be written; make room")
        self._told = bool(why)

    @property
    def kept(self) -> list[dict[str, Any]]:
        """The lines that the disk has not taken."""
        return [json.loads(line) for line in self._kept]

    def close(self) -> None:
        if why := self._flush():
            lost = sum(map(len, self._kept)) - self._begun
            self._tell(f"{self._path}: {why}: the last {lost:,} bytes are lost")
        self._file.close()

    def _flush(self) -> str:
        """Write what is kept -> why that cannot be done; nothing where it is."""
        try:
            while self._kept:
                self._begun += self._file.write(self._kept[0][self._begun :])
                if self._begun == len(self._kept[0]):
                    del self._kept[0]
                    self._begun = 0
        except OSError as error:
            return error.strerror or str(error)
        return ""


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def go_on(self, after: int, covered: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        later = covered + 1 if covered or self._writer else None
        self._writer = SummaryWriter(str(self._folder), purge_step=later)

    def write(self, step: int, record: Record) -> None:
        for key, value in record.items():
            if value is not None:
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A run there, which goes on where the run that it shows does; its name is kept in the folder."""

    def __init__(self, project: str, config: Config, after: int) -> None:
        import wandb
        import yaml

        kept = Path(config.out) / "wandb" / "run-id"
        found = read_file(kept, kept.parent).decode("ascii", "replace") if after and kept.exists() else ""
        name = found or uuid.uuid4().hex[:8]
        told = yaml.safe_load(config.to_yaml())
        self._run = wandb.init(project=project, dir=config.out, config=told, id=name, resume="allow")
        if not found:
            with os_errors(kept):
                kept.parent.mkdir(exist_ok=True)
            replace_file(kept, name.encode())

    def go_on(self, after: int, covered: int) -> None:
        """Do nothing: it takes no step twice."""

    def write(self, step: int, record: Record) -> None:
        self._run.log({key: value for key, value in record.items() if value is not None}, step=step)

    def close(self) -> None:
        self._run.finish()


class ProgressBar:
    """One line that is redrawn; what must stay is printed above it."""

    def __init__(self, total: int, first: int = 0) -> None:
        self._bar = tqdm(initial=first, total=total, unit="step", dynamic_ncols=True, mininterval=0.5)

    def go_on(self, after: int, covered: int) -> None:
        if after != self._bar.n:
            self._bar.initial = self._bar.n = self._bar.last_print_n = after
            self._bar.start_t = self._bar.last_print_t = time.time()

    def write(self, step: int, record: Record) -> None:
        self._bar.update(step - self._bar.n)
        if "validation_loss" in record:
            loss, perplexity = record["validation_loss"], record["validation_perplexity"]
            self._bar.write(f"step {step}: validation loss {loss:.4f}, perplexity {perplexity:.4g}")
        else:
            shown = {"loss": f"{record['loss']:.4f}", "tokens/s": f"{record['tokens_per_second']:,.0f}"}
            shown |= {"skipped": f"{record['skipped_steps']:,}"} if record["skipped_steps"] else {}
            self._bar.set_postfix(shown, refresh=False)

    def tell(self, text: str) -> None:
        self._bar.write(harmless(text), file=sys.stderr)

    def close(self) -> None:
        self._bar.close()


@dataclass
class WallClock:
    """The wall clock of a run over all of its launches, and the part of it that went into steps that count: whose
    updates the run still has. Start-up, evaluation, saves that are waited for, recovery and steps that had to be done
    again are the rest; the time between a launch's last record and the next launch is not counted.

    Args:
        useful: Seconds that went into steps that count.
        before: Seconds of wall clock until ``since``.
        since: The time, in seconds since 1970.
        step: The last step that was counted.
    """

    useful: float
    before: float
    since: float
    step: int

    @classmethod
    def of(cls, records: Sequence[Record], after: int, began: float) -> WallClock:
        """Return the clock of a run that goes on after a step.

        Args:
            records: All that it has written so far, those of later steps too: their time has passed.
            after: The step.
            began: The time when this launch began.
        """
        useful, before, since, step = 0.0, 0.0, began, after
        for record in records:
            at, wall, goodput, passed = (record.get(key) for key in ("step", "wall_seconds", "goodput", "time"))
            if at is None or wall is None or goodput is None or passed is None:  # an evaluation's, say
                continue
            before, since = wall, max(passed, began)
            if at <= after:
                useful, step = goodput * wall, int(at)
        return cls(useful, before, since, step)

    def count(self, step: int, seconds_per_step: float) -> Record:
        """Count the steps until this one -> what is recorded of it."""
        self.useful += (step - self.step) * seconds_per_step
        self.step, now = step, time.time()
        wall = self.before + max(0.0, now - self.since)
        goodput = max(0.0, min(1.0, self.useful / wall)) if wall else 1.0
        return {"time": now, "wall_seconds": wall, "goodput": goodput}


class Log:
    """All sinks of a run; only rank 0 has one. A context manager.

    Args:
        config: The config of the run.
        after: The step after which it goes on; lines of later ones are dropped.
        began: The time when the launch of the run began, in seconds since 1970; None for now.
        saved: The step of a checkpoint that it has already, and would go on from if it ended now: where that is a later
            one, the lines up to there stay, and are not written again.
    """

    def __init__(self, config: Config, after: int = 0, began: float | None = None, saved: int = 0) -> None:
        self._out, self._began = Path(config.out), time.time() if began is None else began
        self._written = dict[tuple[str, ...], int]()
        self._bar = ProgressBar(config.train.steps, after)
        self._incidents = IncidentWriter(self._out, self.tell)
        self._metrics = JsonLines(self._out / METRICS, self.tell)
        self._loads: JsonLines | None = None
        self._sinks: list[Sink] = [self._metrics, self._bar]
        if config.log.tensorboard:
            self._sinks.append(TensorBoard(self._out / "tensorboard"))
        if config.log.wandb is not None:
            self._sinks.append(WeightsAndBiases(config.log.wandb, config, after))
        self.go_on(after, saved)

    def go_on(self, after: int, saved: int = 0) -> None:
        """Write what follows a step from now on, with what the disk has not taken yet of what stays; arguments as
        above."""
        self._after, self._goes_on, covered = after, False, max(after, saved)
        so_far = [*newest(self._out / METRICS, _HISTORY), *self._metrics.kept]
        self._clock = WallClock.of(so_far, after, self._began)
        self._written.clear()
        if self._loads is None and (self._out / EXPERTS).exists():
            self._loads = self._experts()
        for sink in self._all():
            sink.go_on(after, covered)

    def _experts(self) -> JsonLines:
        return JsonLines(self._out / EXPERTS, self.tell, _are_loads)

    def _all(self) -> list[Sink]:
        return [*self._sinks, *([self._loads] if self._loads else [])]

    def write(self, step: int, record: Record) -> None:
        """Write a record, once: what follows a step may be done again after a fault."""
        if self._written.get(tuple(record)) == step:
            return
        self._written[tuple(record)] = step
        if (seconds := record.get("seconds_per_step")) is not None:
            record = {**record, **self._clock.count(step, seconds)}
            self._go_on()
        for sink in self._sinks:
            sink.write(step, record)

    def _go_on(self) -> None:
        """Add to the incidents of the run, once, that it goes on, and what the disk has not taken before."""
        if not self._goes_on:
            self._goes_on = True
            self._incidents.went_on(self._after, time.time())
        self._incidents.catch_up()

    def write_loads(self, step: int, layers: Sequence[int], counts: Sequence[Sequence[int]]) -> None:
        """Write how many tokens of a step each expert of these layers was sent: counts [layers, experts]."""
        if self._loads is None:
            self._loads = self._experts()
        self._loads.add({"step": step, "layers": list(layers), "counts": [list(each) for each in counts]})

    def report(self, event: Event, decision: Decision) -> None:
        """Add an event that the ranks have answered by themselves to the incidents of the run."""
        self._incidents.write(event, decision)
        if decision.action != "tell" and event.step is not None:
            self._after, self._goes_on = event.step - 1, False

    def tell(self, text: str) -> None:
        """Say something that must not be overlooked, above the progress bar."""
        self._bar.tell(text)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            stack.callback(self._incidents.catch_up)
            for sink in self._all():
                stack.callback(sink.close)


def _kind(line: Mapping[str, Any]) -> tuple[int, frozenset[str]]:
    """Return what tells a line from others: its step, and of what it speaks."""
    return line["step"], frozenset(line)


def set_aside(out: Path) -> str:
    """Rename the records of a run, so that another begins there and nothing is lost -> their new names.

    Raises:
        StoreError: they cannot be renamed.
    """
    number = next(
        n for n in itertools.count(1) if not any((out / f"{name}.{n}").exists() for name in (METRICS, EXPERTS))
    )
    made = list[str]()
    for name in METRICS, EXPERTS:
        if (out / name).exists():
            with os_errors(out / name):
                (out / name).rename(out / f"{name}.{number}")
            made.append(f"{name}.{number}")
    return " and ".join(made)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, or the lines of an experts.jsonl; none where there is no file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def newest(path: Path, most: int = 1 << 16) -> list[dict[str, Any]]:
    """Return the records in the last bytes of a metrics.jsonl, which may be cut; none where there is no file.

    Raises:
        StoreError: it cannot be read.
    """
    if not path.exists():
        return []
    with os_errors(path), open_file(path, path.parent) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        lines = file.read().splitlines()
    return [json.loads(line) for line in lines if _step(line, _are_numbers) is not None]


def drop_after(path: Path, step: int, are: Callable[[Collection[object]], bool] = _are_numbers) -> int:
    """Drop the records of later steps from a file of lines of JSON, and lines that are no records.

    Args:
        path: The file.
        step: The last step that stays.
        are: Whether these are the values of a record.

    Returns:
        How many lines were no records; a last one that was not written to its end does not count.
    """
    if not path.exists():
        return 0
    with os_errors(path), open_file(path, path.parent) as file:
        lines = file.read().splitlines(keepends=True)
    steps = [_step(line, are) if line.endswith(b"\n") else None for line in lines]
    kept = [line for line, at in zip(lines, steps, strict=True) if at is not None and at <= step]
    if kept != lines[: len(kept)]:
        replace_file(path, b"".join(kept))
    elif kept != lines:  # in place, for which a full disk needs no room
        with os_errors(path), append(path) as file:
            file.truncate(sum(map(len, kept)))
    return sum(at is None for line, at in zip(lines, steps, strict=True) if line.endswith(b"\n"))


def _added_to(path: Path) -> RawIOBase:
    with os_errors(path):
        return append(path).detach()


def _step(line: bytes, are: Callable[[Collection[object]], bool]) -> int | None:
    """Return the step of a line's record; None if the line is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) and are(record.values()) else None
    return step if isinstance(step, int) else None


def curve(records: Sequence[Record], key: str) -> list[tuple[float, float]]:
    """Return (step, value) of every record that has the value."""
    points = ((record["step"], record.get(key)) for record in records)
    return [(step, value) for step, value in points if step is not None and value is not None]


def draw(records: Sequence[Record], picture: Path, reference: float | None = None) -> None:
    """Draw the loss curve of a run.

    Args:
        records: The records of its metrics.jsonl.
        picture: The PNG to write.
        reference: The unigram entropy of the corpus, a level to compare with.
    """
    pyplot = pictures.pyplot()
    train, held_out = curve(records, "loss"), curve(records, "validation_loss")
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    if train:
        axes.plot(*zip(*train, strict=True), label="training", linewidth=1)
    if held_out:
        axes.plot(*zip(*held_out, strict=True), label="validation", marker="o")
    if reference is not None:
        axes.axhline(reference, color="gray", linestyle="--", label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss in nats per token")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    pictures.save(figure, picture)


def draw_loads(lines: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draw which experts a run's tokens were sent to: experts over steps, layer by layer.

    Args:
        lines: Those of its experts.jsonl, at least one.
        picture: The PNG to write.
    """
    pyplot = pictures.pyplot()
    layers, steps = lines[0]["layers"], [line["step"] for line in lines]
    chosen = sorted({round(n * (len(layers) - 1) / (_PANELS - 1)) for n in range(_PANELS)})
    columns = min(4, len(chosen))
    shape = -(-len(chosen) // columns), columns
    figure, panels = pyplot.subplots(
        *shape, figsize=(2.6 * columns + 1, 2 * shape[0] + 0.6), layout="constrained", squeeze=False, sharex=True
    )
    drawn = None
    for place, axes in enumerate(panels.flat):
        if place >= len(chosen):
            axes.axis("off")
            continue
        counts = np.array([line["counts"][chosen[place]] for line in lines], float).T
        loads = counts / np.maximum(counts.mean(0), 1)
        edges = [*steps, 2 * steps[-1] - steps[-2] if len(steps) > 1 else steps[-1] + 1], np.arange(len(counts) + 1)
        drawn = axes.pcolormesh(*edges, loads, cmap="RdBu_r", vmin=0, vmax=2)
        axes.set_title(f"layer {layers[chosen[place]]}", fontsize=9)
    figure.colorbar(drawn, ax=panels, extend="max", label="tokens, over the mean")
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("expert", fontsize=9)
    pictures.save(figure, picture)
