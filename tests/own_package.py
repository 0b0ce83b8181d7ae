"""A package of a user's own, in a folder of its own: a family with a block, a loss, data sets and a callback."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FAMILY = """
from dataclasses import dataclass
from typing import ClassVar

from megacore.models.decoder_config import DecoderConfig
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class OwnConfig(DecoderConfig):
    family: ClassVar[str] = "own"
    architecture: ClassVar[str] = "OwnForCausalLM"

    rms_norm_eps: float = 1e-6

    def params(self):
        t = self.table()
        damp = Param("layers.{layer}.damp.weight", "embed", "model.layers.{layer}.damp", vector=True, mean=1, std=0.2)
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.attention(),
            t.norm("mlp_norm", "post_attention_layernorm"),
            t.gated_mlp(),
            (damp,),
            tied=self.tie_word_embeddings,
        )

    def build(self, parameters, chunk):
        from acme.block import Damped

        made = super().build(parameters, chunk)
        for layer, block in made.layers.items():
            made.layers[layer] = Damped(block, parameters[f"layers.{layer}.damp.weight"])
        return made


PRESETS = {"own-tiny": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
                        "num_key_value_heads": 2, "initializer_range": 0.2, "vocab_size": 61}}
"""
BLOCK = """
from torch import nn


class Damped(nn.Module):
    def __init__(self, block, weight):
        super().__init__()
        self.block, self.weight = block, weight

    def forward(self, x, context):
        return x + self.weight * (self.block(x, context) - x)
"""
REST = '''
import megacore


def focal(logits, batch):
    p = logits.log_softmax(-1).gather(1, batch.labels[:, None])[:, 0]
    return -((1 - p.exp()) ** 2) * p * (1 + batch.positions / 8) * (1 + batch.tokens % 3)


def mean(logits, batch):
    return focal(logits, batch).mean()


def row(number, length):
    ids = [(number * 7 + 3 * i * (1 + number % 5)) % 61 for i in range(length + 1 - number % 3)]
    return {"input_ids": ids, "labels": [-100 if i % 4 == number % 4 else each for i, each in enumerate(ids)]}


class Rows:
    def __init__(self, config):
        self.length = config.data.sequence_length

    def __len__(self):
        return 23

    def __getitem__(self, number):
        return row(number, self.length)


class Stream:
    """Eleven rows, over and over, whose next one hangs on all those before it."""

    pulled = []

    def __init__(self, config):
        self.length, self.at, self.sum = config.data.sequence_length, 0, 1

    def __iter__(self):
        while self.at < 11:
            self.at += 1
            self.sum = (self.sum * 5 + self.at) % 97
            self.pulled.append(self.at)
            yield row(self.sum, self.length)
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "sum": self.sum}

    def load_state_dict(self, state):
        self.at, self.sum = state["at"], state["sum"]


class Notes(megacore.Callback):
    def __init__(self, config):
        self.factor = config.train.steps

    def on_log(self, run, record):
        if "loss" in record:
            record["noted"] = float(self.factor * run.step)


broken = Rows.__len__
'''


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """For as long as this lasts there is the package in a folder, which is written."""
    package = folder / "acme"
    package.mkdir(parents=True, exist_ok=True)
    for name, text in (("__init__", ""), ("family", FAMILY), ("block", BLOCK), ("rest", REST)):
        if not (package / f"{name}.py").exists():
            (package / f"{name}.py").write_text(text)
    declared = folder / "acme-1.0.dist-info"
    declared.mkdir(exist_ok=True)
    (declared / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (declared / "entry_points.txt").write_text("[megacore.families]\nown = acme.family:OwnConfig\n")
    with found_in(folder):
        yield


@contextmanager
def found_in(folder: Path) -> Iterator[None]:
    """For as long as this lasts modules are looked for in a folder too, and nothing of the package is left after it."""
    from megacore.models import registry

    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        registry._OWN.clear()
        for name in [each for each in sys.modules if each.partition(".")[0] == "acme"]:
            del sys.modules[name]


OWN: dict[str, Any] = {
    "model": {"family": "acme.family:OwnConfig", "preset": "own-tiny", "max_position_embeddings": 8},
    "data": {"train": "acme.rest:Rows", "validation_fraction": 0.2},
    "loss": {"function": "acme.rest:focal"},
    "callbacks": ["acme.rest:Notes"],
}
