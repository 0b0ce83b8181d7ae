"""A report of runs: one file of HTML that asks for nothing, with their curves, configs and incidents.

Vega-Lite draws, which vl-convert brings along as one bundle (the extra `report`). Of long runs each curve has as many
points as a screen shows, the lowest and the highest of each stretch among them, and the last.
"""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from megacore import checkpoints, incidents
from megacore.config import Config
from megacore.incidents import Incident
from megacore.models.registry import configure
from megacore.parallel.pipeline.schedules import ScheduleError
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.places import listed
from megacore.planning.peak_memory import memory
from megacore.planning.recipe_setting import setting_of
from megacore.recipe import ConfigError, load
from megacore.recipe_yaml import flat
from megacore.resources import gpus
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.publish import replace_file
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.training import metrics, traces
from megacore.training.schedule_gaps import ComparedSchedule
from megacore.training.traces import TracedStep

PAGE = "report.html"
"""The file in the folder of a run."""
POINTS = 1200
"""Points of a curve, at the most."""
ACTIONS = 5000
"""Actions of a step that a page shows, at the most: the first of each stage."""


class Chart(NamedTuple):
    """A picture of one key of metrics.jsonl; ``noisy``: it is shown with its running mean."""

    title: str
    unit: str = ""
    logarithmic: bool = False
    noisy: bool = False


CHARTS: Mapping[str, Chart] = {
    "loss": Chart("Loss", "nats per token, or of a pair", noisy=True),
    "validation_loss": Chart("Validation loss", "nats per token, or of a pair"),
    "ema_validation_loss": Chart("Validation loss of averages", "nats per token, or of a pair"),
    "lr": Chart("Learning rate"),
    "grad_norm": Chart("Gradient norm", "before clipping", logarithmic=True, noisy=True),
    "tokens_per_second": Chart("Speed", "tokens per second", noisy=True),
    "mfu": Chart("MFU", "share of the peak", noisy=True),
    "peak_memory_gib": Chart("Memory", "GiB of the fullest rank"),
    "goodput": Chart("Goodput", "share of the wall clock"),
    "loss_scale": Chart("Loss scale", logarithmic=True),
    "load_max": Chart("Fullest expert", "over a mean one", noisy=True),
    "reward_margin": Chart("Margin of rewards", "chosen less rejected", noisy=True),
    "reward_accuracy": Chart("Pairs told right", "share", noisy=True),
    "validation_reward_accuracy": Chart("Held-out pairs told right", "share"),
}
"""{key of metrics.jsonl: its picture}."""
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


@dataclass(frozen=True)
class RunRecords:
    """What the folder of a run tells: ``name`` is the last part of its path, or more where several runs are called so,
    ``traced`` the newest step that all ranks have recorded."""

    name: str
    out: Path
    config: Config | None
    layout: Layout | None
    records: Sequence[Mapping[str, Any]]
    incidents: Sequence[Incident]
    traced: TracedStep | None = None

    @classmethod
    def of(cls, out: Path, name: str) -> RunRecords:
        """Read a run. Raises StoreError: there is none, or it cannot be read."""
        records = metrics.read(out / metrics.METRICS)
        try:
            config = load(out / "config.yaml")
        except ConfigError:  # of another version
            config = None
        if not records and config is None:
            raise StoreError(f"{out} is not the folder of a run: it has neither config.yaml nor {metrics.METRICS}")
        layout = None if config is None else _layout(out, config)
        return cls(name, out, config, layout, records, tuple(incidents.read(out)), _traced(out))

    def curve(self, key: str) -> list[tuple[float, float, float]]:
        """Return (step, tokens, value) of each record that has a number; an evaluation has the tokens before it."""
        found, tokens = list[tuple[float, float, float]](), 0.0
        for record in self.records:
            tokens = record.get("tokens") or tokens
            if (value := record.get(key)) is not None:
                found.append((record["step"], tokens, value))
        return found


def write(folders: Sequence[Path], target: Path) -> int:
    """Write a report of the runs of these folders -> its bytes. Raises StoreError: one is none, it cannot be written,
    or vl-convert is not installed."""
    made = _page(folders).encode()
    replace_file(target, made)
    return len(made)


def _page(folders: Sequence[Path]) -> str:
    try:
        import vl_convert
    except ImportError as error:
        raise StoreError("a report takes vl-convert: pip install 'megacore[report]'") from error
    runs = [RunRecords.of(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    page = Template((Path(__file__).with_suffix(".html")).read_text())
    return page.substitute(
        title=html.escape(", ".join(run.name for run in runs)),
        runs=_table(("run", "step", "loss", "validation", "tokens", "tokens/s", "MFU", "folder"), map(_row, runs)),
        config=_table(("key", *(run.name for run in runs)), _differing(runs)),
        incidents=_table(("run", "when (UTC)", "step", "what", "what was done"), _befell(runs)),
        # Within a script, nothing but its end means anything to HTML.
        bundle=vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script"),
        layout=_table(("run", "what", "split over", "each rank"), _splits(runs)),
        memory=_table(("run", "what", "MiB"), chain.from_iterable(map(_memory, runs))),
        charts=json.dumps([*_charts(runs), *_stages(runs), *_timelines(runs)]).replace("<", "\\u003c"),
    )


def _layout(out: Path, config: Config) -> Layout | None:
    """Return the layout of a run that has saved, with the mesh that it ran on."""
    try:
        if not (found := checkpoints.complete(checkpoints.folder_of(out, config.checkpoint.folder))):
            return None
        checkpoint = Checkpoint.open(found[max(found)], checked=True)
        mesh = (checkpoint.trainer or {})["recipe"]["mesh"]
        return replace(checkpoint.index.layout, mesh=MeshShape(**{dim: mesh[dim] for dim in MeshShape.DIMS}))
    except (StoreError, KeyError):  # damaged, or of another version
        return None


def _traced(out: Path) -> TracedStep | None:
    """Return the newest step of a run that all ranks have recorded."""
    try:
        return traces.read_trace(traces.files(out)[-1])
    except (StoreError, IndexError):  # damaged, or none
        return None


def _names(folders: Sequence[Path]) -> list[str]:
    """Return as few of the last parts of each path as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len({*names}) == len(names):
            return names
    raise StoreError(f"{folders[0]} is named twice")


def _charts(runs: Sequence[RunRecords]) -> Iterator[dict[str, Any]]:
    legend = {"orient": "bottom", "symbolOpacity": 1} if len(runs) > 1 else None
    tasks = sorted({key for run in runs for record in run.records for key in record if "tasks/" in key})
    for key, chart in {**CHARTS, **{key: Chart(key) for key in tasks}}.items():
        curves = {run.name: run.curve(key) for run in runs}
        values = [point for name, curve in curves.items() for point in _points(name, curve)]
        if not values:
            continue
        least, most = (choose(each["value"] for each in values) for choose in (min, max))
        scale: dict[str, Any] = {"type": "log"} if chart.logarithmic and least > 0 else {"zero": False}
        if least == most:  # an axis of one value rounds what it writes beside it
            scale = {"domain": [least - abs(least) / 10, most + abs(most) / 10] if most else [-1, 1]}
        y = {"type": "quantitative", "title": chart.unit, "scale": scale}
        many = max(map(len, curves.values())) > metrics.FEW
        smoothed = chart.noisy and many
        shown = {"type": "line", "point": not many, "tooltip": True}
        thin = {"type": "line", "opacity": 0.35, "strokeWidth": 1}
        zoom = [{"name": "zoom", "select": "interval", "bind": "scales"}]
        raw = {"mark": thin if smoothed else shown, "params": zoom, "encoding": {"y": {**y, "field": "value"}}}
        mean = {"mark": shown, "encoding": {"y": {**y, "field": "mean"}}}
        marks = [{"step": each.step, "tokens": _tokens(run, each.step), "value": each.kind} for run in runs
                 for each in run.incidents if each.step is not None and key == "loss"]  # fmt: skip
        befell = {
            "data": {"values": marks},
            "mark": {"type": "rule", "strokeDash": [3, 3], "tooltip": {"content": "data"}},
            "encoding": {"color": {"value": "#d62728"}},
        }
        yield {
            "$schema": _SCHEMA,
            "title": chart.title,
            "width": "container",
            "height": 240,
            "data": {"values": values},
            "encoding": {"color": {"field": "run", "title": None, "legend": legend}},
            "layer": [raw, *([mean] if smoothed else []), *([befell] if marks else [])],
        }


def _stages(runs: Sequence[RunRecords]) -> Iterator[dict[str, Any]]:
    """Yield a picture of the layers that the stages of each run hold."""
    for run in runs:
        if (layout := run.layout) is None or layout.mesh.pp == 1:
            continue
        values = [
            {"stage": listed(layout.mesh.ranks(pp=[stage])), "layer": layer, "end": layer + 1, "chunk": chunk}
            for stage in range(layout.mesh.pp)
            for chunk in range(layout.chunks)
            for layer in layout.chunk_layers(stage, chunk)
        ]
        x = {"field": "layer", "title": "layer", "axis": {"tickMinStep": 1}}
        color = {"field": "chunk"} | ({} if layout.chunks > 1 else {"legend": None})
        yield _bars(f"Layers of {run.name}", layout.mesh.pp, values, x, color)


def _timelines(runs: Sequence[RunRecords]) -> Iterator[dict[str, Any]]:
    """Yield a picture of what the stages of each run have done in its newest traced step."""
    for run in runs:
        if run.traced is None or run.traced.mesh.pp == 1:
            continue
        try:
            found = ComparedSchedule.last(run.traced)
        except ScheduleError:  # a damaged file
            continue
        values = [
            {"stage": f"stage {stage}, rank {rank}", "action": action.kind, "chunk": action.chunk,
             "microbatch": action.microbatch, "ms": round(1e3 * start, 3), "end": round(1e3 * end, 3)}
            for stage, (rank, row) in enumerate(zip(found.ranks, found.real.spans, strict=True))
            for action, start, end in row[: ACTIONS // len(found.ranks)]
        ]  # fmt: skip
        bubbles = f"bubble {found.real.bubble:.1%}, as planned {found.planned.bubble:.1%}"
        title = f"Step {run.traced.step} of {run.name}: {bubbles}"
        x = {"field": "ms", "title": "ms from the first action"}
        yield _bars(title, run.traced.mesh.pp, values, x, {"field": "action"})


def _bars(
    title: str, stages: int, values: Sequence[Mapping[str, Any]], x: dict[str, Any], color: dict[str, Any]
) -> dict[str, Any]:
    """Return a picture of bars in a row for each stage, each from what ``x`` names to its ``end``."""
    return {
        "$schema": _SCHEMA,
        "title": title,
        "width": "container",
        "height": 26 * stages,
        "data": {"values": values},
        "mark": {"type": "rect", "stroke": "#fff", "strokeWidth": 0.5, "tooltip": {"content": "data"}},
        "params": [{"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}],
        "encoding": {
            "x": {"type": "quantitative", **x},
            "x2": {"field": "end"},
            "y": {"field": "stage", "type": "nominal", "title": None, "sort": None},
            "color": {"type": "nominal", "legend": {"orient": "bottom"}, **color},
        },
    }


def _memory(run: RunRecords) -> Iterator[tuple[str, ...]]:
    """Yield what the plan says of the memory of the fullest rank of a run, and what was measured."""
    held = run.layout or run.traced
    if run.config is None or held is None or not (measured := run.curve("peak_memory_gib")):
        return
    kind = run.config.train.device_type(gpus())
    try:
        setting = setting_of(run.config, configure(run.config.model), held.mesh.world, kind)
        fullest = max(memory(setting), key=lambda each: each.peak)
    except (ValueError, ArithmeticError):  # of another version, or from a checkpoint that names no family
        return
    for term, size in fullest.terms.items():
        if size:
            yield run.name, f"{term}, by the plan", f"{size / 2**20:,.1f}"
    what = f"all of them, of a rank of stage {fullest.stage}, at the {fullest.peak_at}"
    yield run.name, what, f"{fullest.peak / 2**20:,.1f}"
    where = "allocated on its GPU" if kind == "cuda" else "resident, with Python and its libraries"
    yield run.name, f"measured, of the fullest rank: {where}", f"{1024 * measured[-1][2]:,.1f}"


def _splits(runs: Sequence[RunRecords]) -> Iterator[tuple[str, ...]]:
    """Yield the axes of the parameters that ranks split, and the states that replicas do."""
    for run in runs:
        if (layout := run.layout) is None or run.config is None:
            continue
        mesh, sizes = layout.mesh, layout.schema.sizes
        for axis, dims in layout.split.items():
            if (parts := mesh.size(dims)) > 1 and sizes.get(axis, 0) > 1 and axis != "layer":
                over = " x ".join(f"{dim}={mesh[dim]}" for dim in dims if mesh[dim] > 1)
                yield run.name, f"{axis}, {sizes[axis]:,}", over, f"{max(1, sizes[axis] // parts):,}"
        if mesh.data > 1 and run.config.zero.shard != "none":
            ranks = mesh.data // run.config.zero.replicas
            states = f"states up to {run.config.zero.shard} (zero.shard)"
            yield run.name, states, f"groups of {ranks} ranks", f"1/{ranks}"


def _points(name: str, curve: Sequence[tuple[float, float, float]]) -> Iterator[dict[str, Any]]:
    """Yield the points of a curve that are shown, each with the running mean until there."""
    means = metrics.smoothed([value for _, _, value in curve])
    stretch = max(1, -(-2 * len(curve) // POINTS))
    for first in range(0, len(curve), stretch):
        part = range(first, min(first + stretch, len(curve)))
        chosen = {min(part, key=lambda at: curve[at][2]), max(part, key=lambda at: curve[at][2])}
        for at in sorted(chosen | ({part[-1]} if part.stop == len(curve) else set())):
            step, tokens, value = curve[at]
            yield {"run": name, "step": step, "tokens": tokens, "value": value, "mean": float(f"{means[at]:.6g}")}


def _tokens(run: RunRecords, step: int) -> float:
    return max((record.get("tokens") or 0 for record in run.records if record["step"] <= step), default=0)


def _row(run: RunRecords) -> tuple[str, ...]:
    def last(key: str, spelled: str) -> str:
        found = run.curve(key)
        return format(found[-1][2], spelled) if found else "-"

    of = "" if run.config is None else f" of {run.config.train.steps:,}"
    step = f"{run.records[-1]['step']:,}{of}" if run.records else "-"
    spelled = {"loss": ".4f", "validation_loss": ".4f", "tokens": ",.0f", "tokens_per_second": ",.0f", "mfu": ".1%"}
    return run.name, step, *(last(*each) for each in spelled.items()), str(run.out)


def _differing(runs: Sequence[RunRecords]) -> Iterator[tuple[str, ...]]:
    """Yield the keys that one of the runs has from elsewhere than their defaults, with their values in all runs."""
    usual = flat(asdict(Config()))
    theirs = [{} if run.config is None else flat(asdict(run.config)) for run in runs]
    for key in dict.fromkeys(key for each in theirs for key in each):
        values = [each.get(key, usual.get(key)) for each in theirs]
        if any(value != usual.get(key) for value in values):
            yield key, *(json.dumps(value, ensure_ascii=False) for value in values)


def _befell(runs: Sequence[RunRecords]) -> Iterator[tuple[str, ...]]:
    for run in runs:
        for each in run.incidents:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(each.at))
            step = "-" if each.step is None else f"{each.step:,}"
            what, done = ((f"{a}: {b}" if b else a) for a, b in ((each.kind, each.detail), (each.action, each.reason)))
            yield run.name, when, step, what, done


def _table(head: Sequence[str], rows: Iterator[tuple[str, ...]]) -> str:
    body = [f"<tr>{''.join(f'<td><code>{html.escape(cell)}</code></td>' for cell in row)}</tr>" for row in rows]
    if not body:
        return "<p>None.</p>"
    return f"<table><tr>{''.join(f'<th>{html.escape(each)}</th>' for each in head)}</tr>{''.join(body)}</table>"
