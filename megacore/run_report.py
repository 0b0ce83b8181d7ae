"""A report of runs: one file of HTML that asks for nothing, with their curves, configs and incidents.

Vega-Lite draws, which vl-convert brings along as one bundle (the extra `report`). Of long runs each curve has as many
points as a screen shows, the lowest and the highest of each stretch among them, and the last.
"""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import Any

from megacore import incidents
from megacore.config import Config
from megacore.incidents import Incident
from megacore.recipe import ConfigError, load
from megacore.recipe_yaml import flat
from megacore.store.io.strict_json import StoreError
from megacore.training import metrics

POINTS = 1200
"""Points of a curve, at the most."""
SMOOTH = 0.95
"""What a running mean keeps of itself with each record."""
CHARTS: Mapping[str, tuple[str, str, bool]] = {
    "loss": ("Loss", "nats per token, or of a pair", False),
    "validation_loss": ("Validation loss", "nats per token, or of a pair", False),
    "ema_validation_loss": ("Validation loss of averages", "nats per token, or of a pair", False),
    "lr": ("Learning rate", "", False),
    "grad_norm": ("Gradient norm", "before clipping", True),
    "tokens_per_second": ("Speed", "tokens per second", False),
    "mfu": ("MFU", "share of the peak", False),
    "peak_memory_gib": ("Memory", "GiB of the fullest rank", False),
    "goodput": ("Goodput", "share of the wall clock", False),
    "loss_scale": ("Loss scale", "", True),
    "load_max": ("Fullest expert", "over a mean one", False),
    "reward_margin": ("Margin of rewards", "chosen less rejected", False),
    "reward_accuracy": ("Pairs told right", "share", False),
    "validation_reward_accuracy": ("Held-out pairs told right", "share", False),
}
"""{key of metrics.jsonl: (title, unit, whether its axis is logarithmic)}."""
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


@dataclass(frozen=True)
class RunRecords:
    """What the folder of a run tells.

    Args:
        name: The last part of the folder's path, or more of it where several runs are called so.
    """

    name: str
    out: Path
    config: Config | None
    records: Sequence[Mapping[str, Any]]
    incidents: Sequence[Incident]

    @classmethod
    def of(cls, out: Path, name: str) -> RunRecords:
        """Read a run.

        Raises:
            StoreError: there is none, or it cannot be read.
        """
        records = metrics.read(out / metrics.METRICS)
        try:
            config = load(out / "config.yaml")
        except ConfigError:  # of another version
            config = None
        if not records and config is None:
            raise StoreError(f"{out} is not the folder of a run: it has neither config.yaml nor {metrics.METRICS}")
        return cls(name, out, config, records, tuple(incidents.read(out)))

    def curve(self, key: str) -> list[tuple[float, float, float]]:
        """Return (step, tokens, value) of each record that has a number; an evaluation has the tokens before it."""
        found, tokens = list[tuple[float, float, float]](), 0.0
        for record in self.records:
            tokens = record.get("tokens") or tokens
            if (value := record.get(key)) is not None:
                found.append((record["step"], tokens, value))
        return found


def report(folders: Sequence[Path]) -> str:
    """Return a report of the runs of these folders.

    Raises:
        StoreError: one is none, or vl-convert is not installed.
    """
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
        charts=json.dumps([*_charts(runs)]).replace("<", "\\u003c"),
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """Return as few of the last parts of each path as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len({*names}) == len(names):
            return names
    raise StoreError(f"{folders[0]} is named twice")


def _charts(runs: Sequence[RunRecords]) -> Iterator[dict[str, Any]]:
    for key, (title, unit, logarithmic) in CHARTS.items():
        curves = {run.name: run.curve(key) for run in runs}
        values = [point for name, curve in curves.items() for point in _points(name, curve)]
        if not values:
            continue
        scale = {"type": "log"} if logarithmic and min(each["value"] for each in values) > 0 else {"zero": False}
        y = {"field": "value", "type": "quantitative", "title": unit, "scale": scale}
        legend = {"orient": "bottom", "symbolOpacity": 1}
        color = {"field": "run", "title": None, "legend": legend if len(runs) > 1 else None}
        many = max(map(len, curves.values())) > 50
        zoom = [{"name": "zoom", "select": "interval", "bind": "scales"}]
        raw = {"mark": {"type": "line", "opacity": 0.35, "strokeWidth": 1}, "params": zoom, "encoding": {"y": y}}
        if not many:
            raw["mark"] = {"type": "line", "point": True, "tooltip": True}
        mean = {"mark": {"type": "line", "tooltip": True}, "encoding": {"y": {**y, "field": "mean"}}}
        marks = [{"step": each.step, "tokens": _tokens(run, each.step), "value": each.kind} for run in runs
                 for each in run.incidents if each.step is not None and key == "loss"]  # fmt: skip
        befell = {
            "data": {"values": marks},
            "mark": {"type": "rule", "strokeDash": [3, 3], "tooltip": {"content": "data"}},
            "encoding": {"color": {"value": "#d62728"}},
        }
        yield {
            "$schema": _SCHEMA,
            "title": title,
            "width": "container",
            "height": 240,
            "data": {"values": values},
            "encoding": {"color": color},
            "layer": [raw, *([mean] if many else []), *([befell] if marks else [])],
        }


def _points(name: str, curve: Sequence[tuple[float, float, float]]) -> Iterator[dict[str, Any]]:
    """Yield the points of a curve that are shown, each with the running mean until there."""
    mean, weight, means = 0.0, 0.0, list[float]()
    for _, _, value in curve:
        mean, weight = SMOOTH * mean + (1 - SMOOTH) * value, SMOOTH * weight + 1 - SMOOTH
        means.append(mean / weight)
    stretch = max(1, -(-2 * len(curve) // POINTS))
    for first in range(0, len(curve), stretch):
        part = range(first, min(first + stretch, len(curve)))
        chosen = {min(part, key=lambda at: curve[at][2]), max(part, key=lambda at: curve[at][2])}
        for at in sorted(chosen | ({part[-1]} if part.stop == len(curve) else set())):
            step, tokens, value = curve[at]
            yield {"run": name, "step": step, "tokens": tokens, "value": value, "mean": means[at]}


def _tokens(run: RunRecords, step: int) -> float:
    return max((record.get("tokens") or 0 for record in run.records if record["step"] <= step), default=0)


def _row(run: RunRecords) -> tuple[str, ...]:
    def last(key: str, spelled: str) -> str:
        found = run.curve(key)
        return format(found[-1][2], spelled) if found else "-"

    of = "" if run.config is None else f" of {run.config.train.steps:,}"
    step = f"{run.records[-1]['step']:,}{of}" if run.records else "-"
    told = (
        last("loss", ".4f"),
        last("validation_loss", ".4f"),
        last("tokens", ",.0f"),
        last("tokens_per_second", ",.0f"),
    )
    return run.name, step, *told, last("mfu", ".1%"), str(run.out)


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
