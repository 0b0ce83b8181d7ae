"""`OUT/report.html` in a browser: it draws what was recorded, asks for nothing, and has nothing to complain of."""

import json
import math
from pathlib import Path
from typing import Any

import browser
import pytest

from megacore import incidents
from megacore.incidents import Incident
from megacore.tools.report import main
from megacore.training.run_report import CHARTS

pytest.importorskip("vl_convert")
CHROMIUM = browser.found()
LOOKS = {"light": ("light", 1200), "dark": ("dark", 1200), "narrow": ("light", 390)}
DRAWN = """[...document.querySelectorAll("#charts > div")].length > 0 &&
[...document.querySelectorAll("#charts > div")].every(chart => chart.querySelector("svg"))"""
LAST = """[...document.querySelectorAll("#charts > div:has(.mark-line)")].map(chart => [
  chart.querySelector(".role-title-text text").textContent,
  [...chart.querySelectorAll(".mark-line path")].map(line => line.__data__.mark.items.at(-1).datum),
])"""
"""[title of a chart, what the last point of each of its lines stands for]: Vega keeps it with what it draws."""


def recorded(folder: Path, steps: int) -> dict[str, float]:
    """A run -> {key: its last value}."""
    records = list[dict[str, Any]]()
    for step in range(1, steps + 1):
        record = {key: math.sin(step * (at + 1)) + 2 for at, key in enumerate(CHARTS) if "validation" not in key}
        records.append({"step": step, "tokens": 64 * step, **record})
        if step % 100 == 0:
            records.append({"step": step, **{key: 9 / step for key in CHARTS if "validation" in key}})
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.yaml").write_text(f"out: {folder}\nmodel: {{preset: llama-tiny}}\nmesh: {{pp: 2}}\n")
    incidents.write(folder, Incident("spike", detail="<img>", step=70))
    return {key: value for record in records for key, value in record.items()}


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on PATH, and MEGACORE_CHROMIUM names none")
@pytest.mark.parametrize("look", LOOKS)
def test_a_browser_draws_it(look: str, tmp_path: Path) -> None:
    scheme, width = LOOKS[look]
    known = {name: recorded(tmp_path / name, steps) for name, steps in (("a", 5000), ("b", 230))}
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    (tmp_path / "browser").mkdir()
    file = tmp_path / "a/report.html"
    with browser.page(str(CHROMIUM), tmp_path / "browser") as page:
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        page.open(file, DRAWN)
        drawn = {title: {line["run"]: line["value"] for line in lines} for title, lines in page.value(LAST)}
        fill = page.value("getComputedStyle(document.querySelector('.role-title-text text')).fill")
        wide = page.value("document.documentElement.scrollWidth")
        page.value("axis.value = 'tokens'; axis.dispatchEvent(new Event('change'))")
        page.wait(DRAWN)
        assert page.value(LAST)[0][1][0]["tokens"] == 64 * 5000
    assert drawn == {
        chart.title: {name: pytest.approx(values[key], rel=1e-12) for name, values in known.items()}
        for key, chart in CHARTS.items()
    }
    assert wide <= width and fill == ("rgb(255, 255, 255)" if scheme == "dark" else "rgb(0, 0, 0)")
    asked = [each["params"]["request"]["url"] for each in page.told("Network.requestWillBeSent")]
    assert asked == [file.as_uri()]
    assert not page.told("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
