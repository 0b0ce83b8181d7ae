"""The labels that data and loss agree on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IGNORE = -100
"""The label of a token that is not counted, as everywhere in the field."""


def with_labels(labels: npt.NDArray[np.int64], multiple: int) -> npt.NDArray[np.int64] | None:
    """labels: [t] -> [n], ascending: the tokens that count, and some others so that n divides by ``multiple``.

    At least one multiple; None where it would be all t tokens.
    """
    counted = labels != IGNORE
    wanted = max(1, -(-int(counted.sum()) // multiple)) * multiple
    return np.sort(np.argsort(~counted, kind="stable")[:wanted]) if wanted < len(labels) else None
