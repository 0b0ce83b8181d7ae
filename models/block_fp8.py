"""Weights that a folder keeps in fp8, a scale for each block: what its ``config.json`` says of them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.config import ModelConfigError

QUANTIZATION = "quantization_config"
_READ: Mapping[str, tuple[object, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn", None),
    # Whoever multiplies in fp8 rounds inputs anew; scales of inputs that are kept would be tensors of no weight.
    "activation_scheme": ("dynamic", None),
}
"""{a field: its values that are read}."""
_ANY = {"weight_block_size", "modules_to_not_convert", "ignored_layers", "scale_fmt", "dequantize"}
"""Fields that say what the files show: which weights have scales, and how many."""
_DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class BlockFp8:
    """How weights lie: as e4m3, a scale for each block of ``rows`` x ``columns``; ``dtype``: torch's name of what they
    are read as, which is that of the model's other weights."""

    rows: int
    columns: int
    dtype: str


def dequantised(config: Mapping[str, Any]) -> tuple[dict[str, Any], BlockFp8 | None]:
    """Return (the ``config.json`` without what it says of how weights lie, that); None where it says nothing.

    Raises:
        ModelConfigError: they lie in a way that is not read.
    """
    said, rest = config.get(QUANTIZATION), {name: value for name, value in config.items() if name != QUANTIZATION}
    if not said:
        return rest, None
    fields = said if isinstance(said, Mapping) else {"quant_method": said}
    block, dtype = fields.get("weight_block_size"), rest.get("dtype") or rest.get("torch_dtype") or "bfloat16"
    wrong = [
        f"{name}={value!r}"
        for name, value in {"quant_method": None, **fields}.items()
        if name not in _ANY and value not in _READ.get(name, ())
    ]
    sizes = block if isinstance(block, list) and all(type(n) is int and n > 0 for n in block) else []
    if len(sizes) != 2:
        wrong.append(f"weight_block_size={block!r}")
    if wrong:
        raise ModelConfigError(
            str(config.get("model_type")),
            [
                f"{QUANTIZATION} has {', '.join(wrong)}: of quantised weights only those in fp8 with a scale for each "
                "block are read (quant_method=fp8 and weight_block_size, as DeepSeek-V3 and Qwen3 have them). Let "
                "transformers load it with dequantize=True, and save that in bf16"
            ],
        )
    if dtype not in _DTYPES:
        raise ModelConfigError(
            str(config.get("model_type")), [f"dtype is {dtype!r}: it must be one of {', '.join(_DTYPES)}"]
        )
    return rest, BlockFp8(sizes[0], sizes[1], dtype)
