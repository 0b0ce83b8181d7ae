"""`megacore report`: every series ends in what was recorded, Vega-Lite takes the specs, and texts stay texts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from traced import traced

from megacore import incidents
from megacore.incidents import Incident
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.parallel.weights.layout import MeshShape
from megacore.planning.peak_memory import memory
from megacore.planning.recipe_setting import setting_of
from megacore.recipe import load
from megacore.tools.report import main
from megacore.training import run_report
from megacore.training.run_report import CHARTS, POINTS, RunRecords

vl_convert = pytest.importorskip("vl_convert")


def run(folder: Path, steps: int, lr: float) -> list[dict[str, Any]]:
    records = list[dict[str, Any]]()
    for step in range(1, steps + 1):
        numbers = {"loss": 8.0 / step, "grad_norm": 0.5 + step % 7, "lr": lr, "tokens_per_second": 1e4 + step}
        records.append({"step": step, "tokens": 64 * step, "mfu": None, **numbers})
        if step % 100 == 0:
            records.append({"step": step, "validation_loss": 9.0 / step})
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.yaml").write_text(f"optimizer: {{lr: {lr}}}\nlog: {{wandb: '</script><b>'}}\n")
    incidents.write(folder, Incident("spike", detail="<img>", step=70))
    return records


@pytest.mark.in_turn(2, 0)
def test_a_page_has_all_that_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = {name: run(tmp_path / name, steps, lr) for name, steps, lr in (("a", 5000, 0.125), ("b", 230, 0.25))}
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    page = (tmp_path / "a" / "report.html").read_text()
    assert f"{tmp_path}/a/report.html: a report of" in capsys.readouterr().out
    markup = re.sub("<script.*?</script>", "", page, flags=re.DOTALL)
    assert len(page) < 5_000_000 and page.count("</script") == 2 and not re.search("<b>|<img|(src|href)=", markup)
    assert re.search(r"<code>optimizer.lr</code></td><td><code>0.125</code></td><td><code>0.25</code>", page)
    assert page.count("<code>spike: &lt;img&gt;</code>") == 2 and '"value": "spike"' in page
    charts = json.loads(re.search(r"const charts = (.*);\n", page)[1])  # type: ignore[index]
    assert [x["title"] for x in charts] == ["Loss", "Validation loss", "Learning rate", "Gradient norm", "Speed"]
    keys = {title: key for key, (title, *_) in CHARTS.items()}
    for chart in charts:
        for name, records in known.items():
            shown = [each for each in chart["data"]["values"] if each["run"] == name]
            values = [each[keys[chart["title"]]] for each in records if keys[chart["title"]] in each]
            assert shown[-1]["value"] == values[-1] and shown[-1]["step"] == len(values) * (
                100 if len(values) < 60 else 1
            )
            assert (min(each["value"] for each in shown), len(shown) <= POINTS + 1) == (min(values), True)
            assert max(each["value"] for each in shown) == max(values)
        chart["encoding"]["x"] = {"field": "tokens", "type": "quantitative"}
        assert "NaN" not in vl_convert.vegalite_to_svg(chart | {"width": 300})


def test_who_holds_what_is_shown() -> None:
    model = configure({"preset": "llama-tiny", "num_hidden_layers": 6})
    layout = layout_of(model, MeshShape(pp=2, dp=4, tp=2), chunks=2, layers=(1, 2, 2, 1))
    made = RunRecords("a", Path("a"), load({"zero": {"shard": "optimizer", "replicas": 2}}), layout, [], [])
    (picture,) = run_report._stages([made])
    held = [(each["stage"], each["chunk"], each["layer"]) for each in picture["data"]["values"]]
    first, second = "ranks 0-7", "ranks 8-15"
    assert held == [(first, 0, 0), (first, 1, 3), (first, 1, 4), (second, 0, 1), (second, 0, 2), (second, 1, 5)]
    heads, vocabulary = model.sizes["heads"], model.sizes["vocab"]
    rows = [*run_report._splits([made])]
    assert rows[0] == ("a", f"heads, {heads}", "tp=2", f"{heads // 2}")
    assert rows[-2:] == [
        ("a", f"vocab, {vocabulary}", "tp=2", f"{vocabulary // 2}"),
        ("a", "states up to optimizer (zero.shard)", "groups of 2 ranks", "1/2"),
    ]
    assert "NaN" not in vl_convert.vegalite_to_svg(picture | {"width": 300})


def test_the_stages_of_a_traced_step_are_shown() -> None:
    """Of 1F1B on two stages, each action where the trace has it, without what it waited for the other stage."""
    step = traced("1f1b", 2, 3, lambda stage, action: {"F": 0.01, "B": 0.02}[action.kind])
    made = RunRecords("a", Path("a"), None, None, [], [], step)
    (picture,) = run_report._timelines([made])
    values = sorted(((*each.values(),) for each in picture["data"]["values"]), key=lambda each: (each[4], each[0]))
    assert values[:2] == [("stage 0, rank 0", "F", 0, 0, 0, 10), ("stage 0, rank 0", "F", 0, 1, 10, 20)]
    assert values[2:4] == [("stage 1, rank 1", "F", 0, 0, 10, 20), ("stage 1, rank 1", "B", 0, 0, 20, 40)]
    assert len(values) == 12 and max(each[-1] for each in values) == 120
    assert picture["title"] == "Step 50 of a: bubble 33.3%, as planned 33.3%"
    assert "NaN" not in vl_convert.vegalite_to_svg(picture | {"width": 300})


@pytest.mark.in_turn(4)
def test_memory_is_that_of_the_plan_and_what_was_measured() -> None:
    recipe: dict[str, Any] = {
        "model": {"preset": "llama-tiny"},
        "mesh": {"pp": 2},
        "train": {"device": "cpu", "precision": "fp32"},
    }
    records = [{"step": 1, "peak_memory_gib": 0.25}, {"step": 2, "peak_memory_gib": 0.5}]
    layout = layout_of(configure(recipe["model"]), MeshShape(pp=2))
    rows = [*run_report._memory(RunRecords("a", Path("a"), load(recipe), layout, records, []))]
    *terms, whole, measured = (float(row[2].replace(",", "")) for row in rows)
    peak = max(each.peak for each in memory(setting_of(load(recipe), configure(recipe["model"]), 2, "cpu")))
    assert whole == pytest.approx(peak / 2**20, abs=0.06) == pytest.approx(sum(terms), abs=0.5)
    assert measured == 512 and "resident" in rows[-1][1] and "backward" in rows[-2][1]


@pytest.mark.in_turn(2, 1)
def test_the_running_mean_is_that_of_the_records_so_far(tmp_path: Path) -> None:
    run(tmp_path / "a", 120, 0.125)
    assert main([str(tmp_path / "a"), "--to", str(tmp_path / "r.html")]) == 0
    charts = json.loads(re.search(r"const charts = (.*);\n", (tmp_path / "r.html").read_text())[1])  # type: ignore[index]
    means = [each["mean"] for each in charts[0]["data"]["values"]]
    kept = [(2 / 3) ** n for n in range(120)]  # of 3, a fortieth of the records
    wanted = [sum(kept[n] * 8.0 / (step - n) for n in range(step)) / sum(kept[:step]) for step in range(1, 121)]
    assert means == pytest.approx(wanted, rel=1e-5)


def test_what_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1 and "is not the folder of a run" in capsys.readouterr().err
    run(tmp_path / "a", 3, 0.125)
    assert main([str(tmp_path / "a")] * 2) == 1 and "is named twice" in capsys.readouterr().err
