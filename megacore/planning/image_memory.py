"""What images take beside the weights of their tower: upper estimates, of the tower's config. No torch."""

from __future__ import annotations

from math import ceil
from typing import Any

_WIDE = 4
"""Bytes of a number of a tower: what is of bf16 is cast where it is normalised and where it turns."""
_MERGED = ("spatial_merge_size", "scale_factor", "pooling_kernel_size")
"""Fields that say how many patches along each side become one token."""


def tower_forward(whole: Any, tokens: int, masked: bool) -> int:
    """Return the most bytes that a tower takes while it looks at an image, without gradients: of one layer.

    Args:
        whole: The config of a model that also sees, as transformers makes it.
        tokens: Those that stand for the image.
        masked: Whether the patches of an image in parts, or of another shape, see each other by a mask.
    """
    vision = whole.vision_config
    hidden = int(_first(vision, "embed_dim", "hidden_size", default=0))
    mlp = int(_first(vision, "intermediate_size", default=hidden * _first(vision, "mlp_ratio", default=4)))
    patches, part = _patches(whole, tokens)
    # The residual stream and its norm, beside the attention, or the network with its gates.
    values = patches * (2 * hidden + max(10 * hidden, 4 * mlp))
    patch = _side(_first(vision, "patch_size", default=14))
    pixels = patches * 3 * int(_first(vision, "temporal_patch_size", default=1)) * patch**2
    return _WIDE * (values + 3 * pixels + 3 * patches * part * masked)


def image_scores(scores: int, heads: int, layers: int, masks: int, softcap: bool) -> int:
    """Return the most bytes of attention with masks, at the last of some layers, which keep theirs for the backward.

    Args:
        scores: Those of a head, of the rows of a microbatch.
        heads: Those of a rank, which matter where there is a softcap: the formula makes all of their scores.
        layers: Those that look both ways.
        masks: Those that they share: of each microbatch that waits for its backward, and of each window.
        softcap: Whether they have one.
    """
    each, made = (11 * heads, 17 * heads) if softcap else (0, 16)
    return scores * (each * max(layers - 1, 0) + made * bool(layers) + 4 * max(masks - 1, 0))


def _patches(whole: Any, tokens: int) -> tuple[int, int]:
    """Return the most patches that an image of so many tokens has, and those of one of its parts."""
    vision = whole.vision_config
    size, patch = (_side(_first(vision, key, default=0)) for key in ("image_size", "patch_size"))
    square = (size // patch) ** 2 + 1 if size and patch else 0
    merged = max(_first(of, key, default=1) for of in (whole, vision) for key in _MERGED)
    each = max(merged, 1 / _first(whole, "downsample_ratio", default=1)) ** 2
    each = max(each, square / _first(whole, "mm_tokens_per_image", default=square or 1))
    queries = _first(whole, "projector_patch_to_query_dict", default={})
    each = max([each, *(int(of) / n for of, n in queries.items())])
    grids = [(height * width) // size**2 for height, width in _first(whole, "image_grid_pinpoints", default=[]) if size]
    most = max(ceil(tokens * each), square * (1 + max(grids)) if grids else square)
    return most, min(most, square) if square and grids else most


def _first(of: Any, *names: str, default: Any) -> Any:
    return next((found for name in names if (found := getattr(of, name, None)) is not None), default)


def _side(found: Any) -> int:
    return int(max(found) if isinstance(found, list | tuple) else found)
