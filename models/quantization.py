"""Weights that a folder keeps in few bits: what its ``config.json`` says of how they lie. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.config import ModelConfigError

QUANTIZATION = "quantization_config"
_DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class BlockFp8:
    """How weights lie: as e4m3, a scale for each block of ``rows`` x ``columns``; ``dtype``: torch's name of what they
    are read as, which is that of the model's other weights."""

    rows: int
    columns: int
    dtype: str

    @property
    def remark(self) -> str:
        return (
            f"its weights in fp8, with a scale for each {self.rows} x {self.columns} of them, are read as {self.dtype}"
        )


@dataclass(frozen=True)
class Bitsandbytes:
    """How weights lie: as bitsandbytes keeps them, in 4 ``bits`` (nf4 or fp4, a scale for each few of them, itself
    perhaps in 8 bits) or in 8 (a scale for each row); ``dtype``: as in :class:`BlockFp8`."""

    bits: int
    dtype: str

    @property
    def remark(self) -> str:
        return f"its weights in {self.bits} bits, of bitsandbytes, are read as {self.dtype}"


@dataclass(frozen=True)
class Mxfp4:
    """How the experts of gpt-oss lie: as e2m1, an exponent for each 32 of them (OCP Microscaling Formats 1.0);
    ``dtype``: as in :class:`BlockFp8`."""

    dtype: str

    @property
    def remark(self) -> str:
        return f"its experts in mxfp4 are read as {self.dtype}"


Quantization = BlockFp8 | Bitsandbytes | Mxfp4

_READ: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "fp8": {
        "fmt": ("e4m3", "float8_e4m3fn", None),
        # Whoever multiplies in fp8 rounds inputs anew; scales of inputs that are kept would be tensors of no weight.
        "activation_scheme": ("dynamic", None),
    },
    "bitsandbytes": {"llm_int8_has_fp16_weight": (False, None)},
    "mxfp4": {},
}
"""{how weights lie: {a field: its values that are read}}."""
_ANY: Mapping[str, tuple[str, ...]] = {
    "fp8": ("weight_block_size", "modules_to_not_convert", "ignored_layers", "scale_fmt", "dequantize"),
    "bitsandbytes": ("load_in_", "_load_in_", "bnb_4bit_", "llm_int8_"),
    "mxfp4": ("modules_to_not_convert", "dequantize"),
}
"""{how weights lie: how fields begin that say what the files show, or how to compute}."""


def dequantised(config: Mapping[str, Any]) -> tuple[dict[str, Any], Quantization | None]:
    """Return (the ``config.json`` without what it says of how weights lie, that); None where it says nothing.

    Raises:
        ModelConfigError: they lie in a way that is not read.
    """
    said, rest = config.get(QUANTIZATION), {name: value for name, value in config.items() if name != QUANTIZATION}
    if not said:
        return rest, None
    fields = said if isinstance(said, Mapping) else {"quant_method": said}
    method, dtype = fields.get("quant_method"), rest.get("dtype") or rest.get("torch_dtype") or "bfloat16"
    wrong = [] if method in _READ else [f"quant_method={method!r}"]
    read, any_value = _fields(method if method in _READ else None)
    wrong += [
        f"{name}={value!r}"
        for name, value in fields.items()
        if name != "quant_method" and (value not in read[name] if name in read else not str(name).startswith(any_value))
    ]
    made, problem = _lying(method, fields, dtype)
    wrong += problem
    if wrong:
        raise ModelConfigError(
            str(config.get("model_type")),
            [
                f"{QUANTIZATION} has {', '.join(wrong)}: of quantised weights those are read that lie in fp8 with a "
                "scale for each block (quant_method=fp8 and weight_block_size, as DeepSeek-V3 and Qwen3 have them), in "
                "4 or 8 bits of bitsandbytes, or in mxfp4 (gpt-oss). Let transformers load it with dequantize=True, "
                "and save that in bf16"
            ],
        )
    if dtype not in _DTYPES:
        raise ModelConfigError(
            str(config.get("model_type")), [f"dtype is {dtype!r}: it must be one of {', '.join(_DTYPES)}"]
        )
    return rest, made


def _fields(method: str | None) -> tuple[dict[str, tuple[object, ...]], tuple[str, ...]]:
    """Return (the fields that are looked at, with the values that are read, how others begin) of how weights lie; of
    all ways for None."""
    methods = _READ if method is None else (method,)
    return (
        {name: values for each in methods for name, values in _READ[each].items()},
        tuple(begin for each in methods for begin in _ANY[each]),
    )


def _lying(method: object, fields: Mapping[str, Any], dtype: Any) -> tuple[Quantization | None, list[str]]:
    """Return (how weights lie, what is wrong with what says so)."""
    if method == "fp8":
        block = fields.get("weight_block_size")
        sizes = block if isinstance(block, list) and all(type(n) is int and n > 0 for n in block) else []
        return (
            (BlockFp8(sizes[0], sizes[1], dtype), []) if len(sizes) == 2 else (None, [f"weight_block_size={block!r}"])
        )
    if method == "bitsandbytes":
        found = [bits for bits in (4, 8) if fields.get(f"load_in_{bits}bit", fields.get(f"_load_in_{bits}bit"))]
        return (
            (Bitsandbytes(found[0], dtype), [])
            if len(found) == 1
            else (None, ["neither or both of load_in_4bit, load_in_8bit"])
        )
    return (Mxfp4(dtype), []) if method == "mxfp4" else (None, [])
