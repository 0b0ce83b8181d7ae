"""`megacore schedule`: the numbers of the formulas, pictures, and what cannot be."""

from pathlib import Path

import pytest

from megacore.parallel.pipeline.schedules import SCHEDULES, draw
from megacore.tools.schedule import main

SIZES = ["--stages", "4", "--microbatches", "8"]


def test_all_that_fit_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """By (p-1) / (v m), a third of it where the backward is split, and the chunks that each holds."""
    assert main([*SIZES, "--chunks", "2"]) == 0
    said = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in said.splitlines()[1:5]}
    assert rows == {
        "gpipe": ["28.50", "18.8%", "8.00", "8.00", "0.00"],
        "interleaved": ["28.50", "18.8%", "5.50", "2.50", "0.00"],
        "zb-interleaved": ["25.50", "6.2%", "5.50", "4.00", "2.00"],
        "zb-v": ["25.50", "6.2%", "4.00", "4.00", "3.50"],
    }
    assert "1f1b runs one chunk per stage, not chunks=2" in said


def test_one_is_drawn_and_times_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "a.svg"
    assert main(["zb-h1", *SIZES, "--picture", str(picture)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(draw(SCHEDULES["zb-h1"](4, 1, 8))) and str(picture) in said.err
    assert "<svg" in picture.read_text() and "zb-h1: bubble 12.5 %" in picture.read_text()
    assert main(["1f1b", "zb-h1", *SIZES, "--times", "1,2,1"]) == 0  # with full recomputation a half is left
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()[1:]] == ["37.5%", "18.8%"]
    assert main(["1f1b", "--stages", "2", "--microbatches", "1", "--send", "0.5"]) == 0
    assert "1f1b      7.00" in capsys.readouterr().out  # F, a message, F, B, a message, B


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["zbh"], "there is no schedule zbh: choose from gpipe, 1f1b"),
        (["zb-h1", "--chunks", "2"], "zb-h1 runs one chunk per stage, not chunks=2: choose zb-interleaved"),
        (["--times", "1,0,1"], "'1,0,1' is not F,I,W, three numbers above 0"),
        (["--send", "x"], "'x' is no number from 0 on"),
        (["--picture", "a.gif"], "'a.gif' is no name that ends in .png or .svg"),
    ],
)
def test_what_cannot_be_is_said(capsys: pytest.CaptureFixture[str], given: list[str], says: str) -> None:
    try:
        assert main([*given, *SIZES]) == 2
    except SystemExit as ended:  # of argparse
        assert ended.code == 2
    assert says in capsys.readouterr().err
