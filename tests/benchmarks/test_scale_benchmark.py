"""The benchmark of what a cluster's size costs: small cases of it, with rows that say whether a bar is met."""

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
