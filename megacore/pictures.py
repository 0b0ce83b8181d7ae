"""Drawing with matplotlib, into files that are replaced whole."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from megacore.store.tensor_files.publish import replace_file


def pyplot() -> Any:
    """Return matplotlib's pyplot, which needs no screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, picture: Path) -> None:
    """Write a figure as a PNG, and close it."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    pyplot().close(figure)
    replace_file(picture, drawn.getvalue())
