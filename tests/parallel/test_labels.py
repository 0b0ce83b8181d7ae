"""Which tokens the head computes."""

import numpy as np
import pytest

from megacore.parallel.labels import IGNORE, with_labels


@pytest.mark.parametrize("multiple", [1, 2, 3, 8])
@pytest.mark.parametrize("counted", [(), (0,), (4, 5, 23), (1, 3, 5, 7, 9, 11, 13), tuple(range(20)), tuple(range(24))])
def test_all_that_count_are_taken_once_and_few_others(counted: tuple[int, ...], multiple: int) -> None:
    labels = np.full(24, IGNORE)
    labels[list(counted)] = 7
    rows = with_labels(labels, multiple)
    if rows is None:
        assert len(counted) > 24 - multiple
        return
    assert set(counted) <= set(rows.tolist())
    assert rows.tolist() == sorted(set(rows.tolist())) and rows.max() < 24
    assert len(rows) % multiple == 0 and multiple <= len(rows) < len(counted) + multiple + (not counted)
