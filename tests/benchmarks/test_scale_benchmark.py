"""The benchmark of what a cluster's size costs: small cases of it, with rows that say whether a bar is met."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks import scale


@pytest.mark.in_turn(6, 1)
def test_a_corpus_of_any_size_has_a_whole_index_and_no_blocks(tmp_path: Path) -> None:
    with patch.object(scale, "SMALL", 4 * 10**6), patch.object(scale, "LARGE", 4 * 10**7):
        rows = {row.what: row for row in scale.data(tmp_path)}
    assert rows["data: memory of a rank"].met and rows["data: open, each rank"].met
    assert (tmp_path / "large.bin").stat().st_size > 4 * 10**7 > (tmp_path / "large.bin").stat().st_blocks * 512


@pytest.mark.in_turn(6, 3)
def test_groups_do_not_grow_with_the_ranks(tmp_path: Path) -> None:
    calls = next(scale.groups(tmp_path))
    assert calls.small == calls.large and calls.met


def test_rows_say_what_is_missed() -> None:
    assert scale.Row("", "", 1, 3, 2).met is False and scale.Row("", "", 1, 3, 2, least=True).met is True
    assert scale.Row("", "", 1, 3).met is None and "MISSED" in scale.table([scale.Row("x", "s", 1, 3, 2)])
    # Around a ring and back, and down by halves: 2 x 7 and 2 x 15, and 3 to reach 8.
    assert scale.rounds([8, 16]) == 14 + 30 + 3
