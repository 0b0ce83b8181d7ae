"""Drawing with matplotlib, into files that are replaced whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from megacore.store.tensor_files.publish import replace_file

FORMATS = (".png", ".svg")
"""The endings of pictures that can be made."""


def pyplot() -> Any:
    """Return matplotlib's pyplot, which needs no screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def bars(axes: Any, names: Sequence[str], terms: Mapping[str, Sequence[float]], unit: float = 1.0) -> None:
    """Draw a bar for each name, the first one on top, of the terms that are not 0 everywhere; a term has a value for
    each name."""
    before = [0.0] * len(names)
    for term, values in terms.items():
        if any(values):
            sizes = [value / unit for value in values]
            axes.barh(names, sizes, left=before, label=term)
            before = [a + b for a, b in zip(before, sizes, strict=True)]
    axes.invert_yaxis()


def save(figure: Any, picture: Path) -> None:
    """Write a figure in the format that the name ends in, a PNG by default, and close it."""
    drawn = BytesIO()
    figure.savefig(drawn, format=picture.suffix[1:] if picture.suffix in FORMATS else "png", dpi=120)
    pyplot().close(figure)
    replace_file(picture, drawn.getvalue())
