"""Pictures of how a model uses its context."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megacore import pictures


def draw_positions(buckets: Sequence[tuple[int, float]], picture: Path) -> None:
    """Draw the loss by position in the document.

    Args:
        buckets: The end of each and its mean loss.
        picture: The PNG to write.
    """
    figure, axes = pictures.pyplot().subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(*zip(*buckets, strict=True), marker="o", markersize=3, linewidth=1)
    axes.set(xlabel="tokens before, up to", ylabel="loss in nats per token")
    axes.grid(alpha=0.3)
    pictures.save(figure, picture)


def draw_needles(
    lengths: Sequence[int], depths: Sequence[float], shares: Sequence[Sequence[float]], picture: Path
) -> None:
    """Draw the share of needles that were found, depths over lengths.

    Args:
        lengths, depths: Those of the prompts.
        shares: The share that was found, of each length and depth.
        picture: The PNG to write.
    """
    pyplot = pictures.pyplot()
    figure, axes = pyplot.subplots(figsize=(1.2 * len(lengths) + 2.5, 0.45 * len(depths) + 1.5), layout="constrained")
    drawn = axes.imshow(np.array(shares).T, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set(xlabel="tokens of the prompt", ylabel="depth of the fact")
    figure.colorbar(drawn, label="found")
    pictures.save(figure, picture)
