"""`megacore context`: what it shows is what ranks do, and it needs no torch."""

import re
from pathlib import Path

import pytest

from megacore.data.indexed import IndexedWriter
from megacore.parallel.context_split import ContextParallel
from megacore.tools import context


def shown(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    assert context.main(given) == 0
    return capsys.readouterr().out


def rows(text: str) -> list[list[str]]:
    """The cells of the tables that begin with a number or a policy."""
    return [line.split() for line in text.splitlines() if re.match(r" +(?:\d+|auto|rows|documents)  ", line)]


def test_each_part_s_work_and_keys_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--documents", "41,3,20", "--cp", "4", "--balance", "documents", "--kv", "2", "--head", "500")
    assert text.startswith("64 tokens, in 3 documents, over cp=4")
    split = ContextParallel(4, balance="documents").split((41, 3, 20), 64)
    for part, row in enumerate(rows(text)[:4]):
        taken, given = map(sum, split.travel(part))
        assert row[:3] == [str(part), str(part), "16"] and row[5] == f"{split.pairs(part):,}"
        assert row[7:] == [str(taken), str(given), f"{taken * 2 * 2 * 500 * 2 / 1e6:.2f}"]
    each = [line for line in text.splitlines() if line.startswith("part ")]
    assert len(each) == 4 and all(len(line) == 11 + 64 for line in each)


def test_policies_stand_side_by_side_and_are_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "split.png"
    documents = ",".join(["60", *["4"] * 15])
    given = ("--documents", documents, "--length", "60", "--cp", "2", "--compare", "--picture", str(picture))
    assert context.main(given) == 0
    text, told = capsys.readouterr()
    assert told == f"{picture}: a picture, {picture.stat().st_size:,} bytes\n"
    found = {row[0]: row for row in rows(text)}
    assert list(found) == ["auto", "documents", "rows"] and picture.read_bytes()[1:4] == b"PNG"
    assert int(found["auto"][2]) < int(found["documents"][2]) and float(found["auto"][1]) <= 1.05


def test_a_window_and_heads_need_fewer_keys(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--documents", "64", "--cp", "4", "--balance", "rows")
    far, near, by_heads = (rows(shown(capsys, *given, *more)) for more in ((), ("--window", "4"), ("--heads", "2")))
    assert sum(int(row[7]) for row in near[:4]) < sum(int(row[7]) for row in far[:4])
    assert [row[:3] for row in by_heads[:2]] == [["0", "0-1", "32"], ["1", "2-3", "32"]]


def test_documents_of_a_corpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "corpus", 100) as writer:
        for length in (5, 9, 30, 20):
            writer.write([1] * length)
    text = shown(capsys, "--corpus", str(tmp_path / "corpus"), "--length", "16", "--rows", "3", "--cp", "2")
    assert text.startswith("48 tokens, in 6 documents, over cp=2")  # 5, 9, 2 | 16 | 12, 4
    assert context.main(["--corpus", str(tmp_path / "corpus"), "--length", "16", "--rows", "5", "--cp", "2"]) == 2
    assert "has 64 tokens, and 5 rows of 16 are more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--documents", "8", "--cp", "4", "--heads", "3"), "over 3 ranks of cp=4: choose from 1, 2, 4"),
        (("--documents", "8", "--cp", "4", "--length", "3"), "8 tokens are no whole rows of 3"),
    ],
)
def test_what_cannot_be_split_is_told(capsys: pytest.CaptureFixture[str], given: tuple[str, ...], said: str) -> None:
    assert context.main(given) == 2 and said in capsys.readouterr().err
