"""Drawing with matplotlib, into files that are replaced whole."""

from __future__ import annotations

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


def save(figure: Any, picture: Path) -> None:
    """Write a figure in the format that the name ends in, a PNG by default, and close it."""
    drawn = BytesIO()
    figure.savefig(drawn, format=picture.suffix[1:] if picture.suffix in FORMATS else "png", dpi=120)
    pyplot().close(figure)
    replace_file(picture, drawn.getvalue())
