"""The metrics of a run: metrics.jsonl always, a progress bar, TensorBoard and W&B if asked for, a picture; and of a
model with experts experts.jsonl."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megacore import pictures
from megacore.config import Config
from megacore.progress_bar import EVERY_S
from megacore.say import err, say
from megacore.store.io.files import append, ends_within_a_line, open_file
from megacore.store.io.strict_json import read_file
from megacore.store.tensor_files.publish import replace_file
from megacore.store.tensor_files.tensors import os_errors

METRICS, PICTURE = "metrics.jsonl", "loss.png"
EXPERTS, PICTURE_OF_EXPERTS = "experts.jsonl", "experts.png"
FEW = 50
"""Points of a curve that are drawn as they are, without a running mean."""
_PANELS = 12
"""Layers that are drawn, of those that have experts."""
_HISTORY = 32 << 20
"""Bytes of records that are looked at for the goodput of a run that goes on: some 50,000 records."""

Record = Mapping[str, float | int | None]


class JsonLines:
    """One line of JSON for each record, added at once. JSON has no NaN: a number that is not finite is null.

    A full disk does not end a run: what it does not take of the lines is kept, and written as soon as it does.
    """

    def __init__(self, path: Path, tell: Callable[[str], object] = err) -> None:
        self._path, self._tell, self._told = path, tell, False
        self._kept = b""
        with os_errors(path):
            cut = path.exists() and ends_within_a_line(path)
            self._file = append(path).detach()
        if cut:
            self._kept = b"\n"

    def write(self, step: int, record: Record) -> None:
        plain = {key: value if value is not None and math.isfinite(value) else None for key, value in record.items()}
        self.add({"step": step, **plain})

    def add(self, line: Mapping[str, Any]) -> None:
        self._kept += json.dumps(line, allow_nan=False).encode() + b"\n"
        if (why := self._flush()) and not self._told:
            self._tell(f"{self._path}: {why}: its lines are kept until they can be written; make room")
        self._told = bool(why)

    def close(self) -> None:
        if why := self._flush():
            self._tell(f"{self._path}: {why}: the last {len(self._kept):,} bytes are lost")
        self._file.close()

    def _flush(self) -> str:
        """Write what is kept -> why that cannot be done; nothing where it is."""
        try:
            while self._kept:
                self._kept = self._kept[self._file.write(self._kept) :]
        except OSError as error:
            return error.strerror or str(error)
        return ""


class TensorBoard:
    def __init__(self, folder: Path, after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=after + 1 if after else None)

    def write(self, step: int, record: Record) -> None:
        for key, value in record.items():
            if value is not None:
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
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

    def write(self, step: int, record: Record) -> None:
        self._run.log({key: value for key, value in record.items() if value is not None}, step=step)

    def close(self) -> None:
        self._run.finish()


class ProgressBar:
    """One line that is redrawn, what must stay being printed above it; where stderr is no terminal, a line of the first
    record and every 30 s."""

    def __init__(self, total: int, first: int = 0) -> None:
        drawn = sys.stderr.isatty()
        self._bar = tqdm(
            initial=first, total=total, unit="step", dynamic_ncols=True, mininterval=0.5, disable=not drawn
        )
        self._due = -math.inf if not drawn else math.inf

    def write(self, step: int, record: Record) -> None:
        self._bar.update(step - self._bar.n)
        if "validation_loss" in record:
            perplexity = record.get("validation_perplexity")
            said = "" if perplexity is None else f", perplexity {perplexity:.4g}"
            said += "".join(f", {key[6:]} {value:.4g}" for key, value in record.items() if key.startswith("tasks/"))
            with self._bar.external_write_mode():
                say(f"step {step}: validation loss {record['validation_loss']:.4f}{said}")
            return
        shown = {"loss": f"{record['loss']:.4f}", "tokens/s": f"{record['tokens_per_second']:,.0f}"}
        shown |= {"skipped": f"{record['skipped_steps']:,}"} if record["skipped_steps"] else {}
        self._bar.set_postfix(shown, refresh=False)
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + EVERY_S
            err(f"step {step} of {self._bar.total}: {', '.join(f'{name} {value}' for name, value in shown.items())}")

    def close(self) -> None:
        self._bar.close()


@dataclass
class WallClock:
    """The wall clock of a run over all of its launches, and the part of it that went into steps that count: whose
    updates the run still has. Start-up, evaluation, saves that are waited for, recovery and steps that had to be done
    again are the rest; the time between a launch's last record and the next launch is not counted."""

    useful: float
    """Seconds that went into steps that count, until ``step``."""
    before: float
    """Seconds of wall clock until ``since``, in seconds since 1970."""
    since: float
    step: int
    counted: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=1 << 12))
    """(step, useful) at the last records, to go back to."""

    _began_at: float = field(init=False, compare=False)
    """The same time as ``since`` by a clock that nobody sets while the run goes on."""

    def __post_init__(self) -> None:
        self.counted.append((self.step, self.useful))
        self._began_at = time.monotonic() - max(0.0, time.time() - self.since)

    @classmethod
    def of(cls, records: Sequence[Record], after: int, began: float) -> WallClock:
        """Return the clock of a run that goes on after a step, by all records that it has written so far: the time of
        later steps has passed too."""
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
        self.step = step
        self.counted.append((step, self.useful))
        wall = self.before + time.monotonic() - self._began_at
        goodput = max(0.0, min(1.0, self.useful / wall)) if wall else 1.0
        return {"time": time.time(), "wall_seconds": wall, "goodput": goodput}

    def go_back(self, step: int) -> None:
        """Do not count steps after this one, which are to be done again."""
        while len(self.counted) > 1 and self.counted[-1][0] > step:
            self.counted.pop()
        self.step, self.useful = self.counted[-1]


class Log:
    """All sinks of a run; only rank 0 has one. Records are added: of a step that stands twice, for a run has gone back,
    the last one counts (:func:`standing`). ``began`` is when the launch did, in seconds since 1970; None for now."""

    def __init__(
        self, config: Config, after: int = 0, began: float | None = None, tell: Callable[[str], object] = err
    ) -> None:
        self._out, self._tell = Path(config.out), tell
        so_far = newest(self._out / METRICS, _HISTORY)
        self._clock = WallClock.of(so_far, after, time.time() if began is None else began)
        self._sinks: list[JsonLines | ProgressBar | TensorBoard | WeightsAndBiases]
        self._sinks = [JsonLines(self._out / METRICS, tell), ProgressBar(config.train.steps, after)]
        self._loads: JsonLines | None = None
        if config.log.tensorboard:
            self._sinks.append(TensorBoard(self._out / "tensorboard", after))
        if config.log.wandb is not None:
            self._sinks.append(WeightsAndBiases(config.log.wandb, config, after))

    def write(self, step: int, record: Record) -> None:
        if (seconds := record.get("seconds_per_step")) is not None:
            record = {**record, **self._clock.count(step, seconds)}
        for sink in self._sinks:
            sink.write(step, record)

    def write_loads(self, step: int, layers: Sequence[int], counts: Sequence[Sequence[int]]) -> None:
        """Write how many tokens of a step each expert of these layers was sent: counts [layers, experts]."""
        if self._loads is None:
            self._loads = JsonLines(self._out / EXPERTS, self._tell)
        self._loads.add({"step": step, "layers": list(layers), "counts": [list(each) for each in counts]})

    def go_back(self, step: int) -> None:
        """Do not count the time of steps after this one, which are to be done again."""
        self._clock.go_back(step)

    def close(self) -> None:
        with ExitStack() as stack:
            for sink in (*self._sinks, *([self._loads] if self._loads else [])):
                stack.callback(sink.close)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines that stand of a metrics.jsonl or an experts.jsonl; none where there is no file."""
    return standing(filter(None, map(_line, path.read_bytes().splitlines()))) if path.exists() else []


def standing(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of the steps that a run has done at last: where it has gone back, those of the steps that were
    done again go, and of later ones."""
    kept = list[dict[str, Any]]()
    for line in lines:
        before, at = line["step"], len(kept)
        while at and kept[at - 1]["step"] >= before:
            at -= 1
            if kept[at]["step"] > before or ("loss" in kept[at]) == ("loss" in line):
                del kept[at:]
        kept.append(line)
    return kept


def newest(path: Path, most: int = 1 << 16) -> list[dict[str, Any]]:
    """Return the records in the last bytes of a metrics.jsonl, which may be cut, those that do not stand among them;
    none where there is no file. Raises StoreError: it cannot be read."""
    if not path.exists():
        return []
    with os_errors(path), open_file(path, path.parent) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        lines = file.read().splitlines()
    return list(filter(None, map(_line, lines)))


def _line(line: bytes) -> dict[str, Any] | None:
    """Return what a line says; None where it is cut, or no line of ours."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    values = record.values()
    return record if all(isinstance(value, int | float | None) for value in values) or _are_loads(values) else None


def _are_loads(values: Iterable[object]) -> bool:
    """Return whether these are the values of a line of :meth:`Log.write_loads`."""
    match list(values):
        case [int(), list(layers), list(counts)]:
            rows = [layers, *counts]
            return len(layers) == len(counts) and all(
                isinstance(row, list) and row and all(isinstance(number, int) for number in row) for row in rows
            )
    return False


def curve(records: Sequence[Record], key: str) -> list[tuple[float, float]]:
    """Return (step, value) of every record that has the value."""
    points = ((record["step"], record.get(key)) for record in records)
    return [(step, value) for step, value in points if step is not None and value is not None]


def rewards(told: Sequence[float], prefix: str = "") -> dict[str, float]:
    """Return the metrics of what the loss of pairs says beside the loss, of a mean pair; of no pairs none."""
    if not told:
        return {}
    chosen, rejected, accuracy = told
    found = {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected, "accuracy": accuracy}
    return {f"{prefix}reward_{name}": value for name, value in found.items()}


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the exponential mean of values up to each of them: of about a fortieth of them all, and at most 50."""
    share = 1 / min(max(len(values) / 40, 1), 50)
    mean, weight, means = 0.0, 0.0, list[float]()
    for value in values:
        mean, weight = (1 - share) * mean + share * value, (1 - share) * weight + share
        means.append(mean / weight)
    return means


def draw(
    records: Sequence[Record], picture: Path, reference: float | None = None, unit: str = " in nats per token"
) -> None:
    """Draw the loss curve of a run of the records of its metrics.jsonl; ``reference`` is a level to compare with, the
    unigram entropy of the corpus; ``unit`` is of the loss."""
    pyplot = pictures.pyplot()
    from matplotlib.ticker import EngFormatter, MaxNLocator

    train, held_out = curve(records, "loss"), curve(records, "validation_loss")
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    if train:
        steps, losses = zip(*train, strict=True)
        many = len(losses) > FEW
        (line,) = axes.plot(steps, losses, label=None if many else "training", linewidth=1, alpha=0.3 if many else 1)
        if many:
            axes.plot(steps, smoothed(losses), label="training, running mean", color=line.get_color())
    if held_out:
        axes.plot(*zip(*held_out, strict=True), label="validation", marker="o")
    if reference is not None:
        axes.axhline(reference, color="gray", linestyle="--", label="unigram entropy")
    axes.set(xlabel="step", ylabel=f"loss{unit}")
    axes.grid(alpha=0.3)
    seen = curve(records, "tokens")
    if seen and seen[0][1] < seen[-1][1]:
        steps, tokens = np.array(seen).T
        both = partial(np.interp, xp=steps, fp=tokens), partial(np.interp, xp=tokens, fp=steps)
        counts = axes.secondary_xaxis("top", functions=both)
        counts.set(xlabel="tokens")
        known = MaxNLocator(7).tick_values(tokens[0], tokens[-1])
        counts.set_ticks([count for count in known if tokens[0] <= count <= tokens[-1]])
        counts.xaxis.set_major_formatter(EngFormatter(sep=""))
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    pictures.save(figure, picture)


def draw_loads(lines: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draw which experts a run's tokens were sent to, of the lines of its experts.jsonl, at least one: experts over
    steps, layer by layer."""
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
