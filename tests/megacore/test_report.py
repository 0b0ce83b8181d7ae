"""The end of a run in a few lines: what stands there is there, and what is strange is explained."""

import json
import math
from pathlib import Path

from engine import write_recipe

from megacore.recipe import load
from megacore.training.callbacks.report import report


def lines(folder: Path, losses: list[float | None], vocabulary: int = 300) -> list[str]:
    config = load(write_recipe(folder), [f"out={folder / 'run'}"])
    (folder / "run").mkdir(exist_ok=True)
    records = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (folder / "run" / "metrics.jsonl").write_text("\n".join(records) + "\n")
    return report(config, len(losses), vocabulary).splitlines()


def test_files_that_are_gone_are_not_named_as_if_they_were_there(tmp_path: Path) -> None:
    out, said = tmp_path / "run", lines(tmp_path, [2.0])
    assert f"  metrics          {out / 'metrics.jsonl'}" in said
    assert f"  resolved config  {out / 'config.yaml'} (is gone)" in said
    (out / "metrics.jsonl").unlink()
    (out / "config.yaml").write_text("")
    said = report(load(write_recipe(tmp_path), [f"out={out}"]), 5, 300).splitlines()
    assert f"  metrics          {out / 'metrics.jsonl'} (is gone)" in said
    assert f"  resolved config  {out / 'config.yaml'}" in said
    assert f"  loss curve       {out / 'loss.png'}" in said and (out / "loss.png").is_file()


def test_a_loss_above_that_of_a_guess_is_explained(tmp_path: Path) -> None:
    guess = math.log(300)
    (said,) = [line for line in lines(tmp_path, [guess, 14.2, None, 3.0]) if "ln 300" in line]
    assert "highest loss     14.2000, at step 2: above ln 300 = 5.7038" in said
    assert not any("ln 300" in line for line in lines(tmp_path, [1.05 * guess, 3.0]))
    assert not any("ln 300" in line for line in lines(tmp_path, []))
