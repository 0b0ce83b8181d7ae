"""A process with everything but a model: `python baseline.py MODULE`, to know how much of a peak is a model's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import steps

MODULES: Mapping[str, tuple[str, ...]] = {
    "ours": ("benchmarks.ours",),
    "hf": ("benchmarks.hugging_face",),
    "deepspeed": ("deepspeed", "transformers.models.llama.modeling_llama"),
}
"""{environment: what its scripts import}."""


def main() -> None:
    arguments = steps.parser(__doc__, MODULES).parse_args()
    torch.set_num_threads(arguments.threads)
    for name in MODULES[arguments.mode]:
        importlib.import_module(name)
    weight = torch.zeros(64, 64, dtype=steps.DTYPES[arguments.dtype], requires_grad=True)

    def step() -> float:
        """The libraries of products load at their first."""
        loss = torch.nn.functional.linear(weight, weight).sum()
        loss.backward()
        return loss.item()

    with steps.process_group():
        steps.count(step, arguments.warm_up, arguments.steps)


if __name__ == "__main__":
    main()
