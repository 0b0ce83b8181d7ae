"""What benchmarks tell of what they have measured."""

from functools import partial

import pytest

from benchmarks.results import Bar, in_turns, judged, over, table


@pytest.mark.quick
def test_a_bar_is_judged_by_the_fastest_of_both_sides() -> None:
    bars = [Bar(("a", "b"), ("x", "y"), 1.5), Bar(("a",), ("x", "y"), 1.5), Bar(("c",), ("x",), 1.0)]
    assert judged(bars, {"a": 2.0, "b": 4.0, "x": 1.0, "y": 2.0}).splitlines() == [
        "- met: b is 2.00 times as fast as y (bar: 1.5)",
        "- MISSED: a is 1.00 times as fast as y (bar: 1.5)",
        "- not judged: c against x",
    ]


@pytest.mark.quick
def test_ways_take_turns_and_are_compared_round_by_round() -> None:
    began = list[str]()

    def run(way: str) -> float:
        began.append(way)
        return len(began) * (2.0 if way == "a" else 1.0)

    found = in_turns({way: partial(run, way) for way in "ab"}, 2)
    assert "".join(began) == "ababab" and found == {"a": [6.0, 10.0], "b": [4.0, 6.0]}
    assert over(found["a"], found["b"]) == (6 / 4 + 10 / 6) / 2
    assert table(("", "s:"), [("a", "6")]).splitlines() == ["|  | s |", "| --- | ---: |", "| a | 6 |"]
