"""Layers behind a model that each predict a token further ahead (multi-token prediction, DeepSeek-AI 2024, arXiv
2412.19437, section 2.2): their config and their rows of the weights table. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megacore.models.anatomy import Anatomy
from megacore.models.config import Shapes
from megacore.models.decoder_config import DecoderConfig
from megacore.models.weight_rows import Rows
from megacore.parallel.weights.schema import Param, Schema

FIELD = "num_nextn_predict_layers"
MOST = 16
"""The most layers of a model that predict further tokens: published ones have one to three."""
_LAYER, _IN_TABLE = "model.layers.{layer}.", "layers.{layer}."


@dataclass(frozen=True)
class MtpNames:
    """Hugging Face's names of the parts of such a layer: ``{depth}`` is its number, and ``{layer}`` that number counted
    on from the model's layers.

    Args:
        every: The beginning of the names of all of them.
        block: The beginning of those of its block.
        embed_norm, hidden_norm: The norms of the embeddings and of the hidden states that it is given.
        proj: The linear that makes one of both, the embeddings first.
        norm: The norm in front of the head.
        embed, head: Where it stores the model's embedding and head again; empty: nowhere.
    """

    every: str
    block: str
    embed_norm: str
    hidden_norm: str
    proj: str
    norm: str
    embed: str = ""
    head: str = ""


DEEPSEEK = MtpNames(
    _LAYER,
    _LAYER,
    f"{_LAYER}enorm",
    f"{_LAYER}hnorm",
    f"{_LAYER}eh_proj",
    f"{_LAYER}shared_head.norm",
    f"{_LAYER}embed_tokens",
    f"{_LAYER}shared_head.head",
)
QWEN = MtpNames(
    "mtp.", "mtp.layers.{depth}.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"
)
MIMO = MtpNames(
    "model.mtp.",
    _MIMO := "model.mtp.layers.{depth}.",
    f"{_MIMO}enorm",
    f"{_MIMO}hnorm",
    f"{_MIMO}eh_proj",
    f"{_MIMO}final_layernorm",
)


@dataclass(frozen=True, kw_only=True)
class MtpConfig(DecoderConfig):
    mtp_names: ClassVar[MtpNames] = DEEPSEEK

    num_nextn_predict_layers: int = 0

    @property
    def mtp_layers(self) -> int:
        return 0 if self.labels else self.num_nextn_predict_layers  # transformers' classes with scores have none

    @property
    def mtp_block(self) -> int:
        """The layer of the model whose block those that predict further tokens have."""
        return self.num_hidden_layers - 1

    def mtp_rows(self, rows: Rows) -> Rows:
        """Return the rows of the block of such a layer, by the names of a block of the model whose rows are given."""
        rows = tuple(row for row in rows if row.name.startswith(_IN_TABLE))
        return tuple(row for row in rows if row.layers is None or self.mtp_block in row.layers)

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, **({"mtp_embed": self.hidden_size} if self.mtp_layers else {})}

    @property
    def anatomy(self) -> Anatomy:
        made = super().anatomy
        further = [made.layers[self.mtp_block] for _ in range(self.mtp_layers)]
        return replace(made, layers=(*made.layers, *further))

    @property
    def schema(self) -> Schema:
        whole = super().schema
        rows = whole.params
        for depth in range(self.mtp_layers):
            rows = self._predicting(rows, self.mtp_rows(whole.params), depth)
        return Schema(rows, whole.sizes) if self.mtp_layers else whole

    @property
    def left_out(self) -> tuple[str, ...]:
        """Those of a folder whose config says that there are no such layers."""
        return () if self.mtp_layers else self.further or (_of(self.mtp_names.every, 0, self.num_hidden_layers),)

    @classmethod
    def as_held(cls, raw: Mapping[str, Any], shapes: Shapes) -> tuple[dict[str, Any], str | None]:
        name, first = cls.saved.get(FIELD, FIELD), raw.get("num_hidden_layers")
        asked = raw.get(name, raw.get(FIELD))
        if asked == 0 or not isinstance(first, int):
            return {**raw}, None
        marks = dict.fromkeys(f"{_of(cls.mtp_names.proj, depth, first + depth)}.weight" for depth in range(MOST))
        found = next((depth for depth, mark in enumerate(marks) if mark not in shapes), len(marks))
        if asked is None:
            return {**raw, **({name: found} if found else {})}, None
        if found:  # if they are not as many, some are missing or too many
            return {**raw}, None
        none = {**raw, **{each: 0 for each in (name, FIELD) if each in raw}}
        return none, f"{name} is {asked}, and no tensor is of such a layer: it is read as 0"

    def problems(self) -> list[str]:
        found, names = super().problems(), self.mtp_names
        most = MOST if _of(names.proj, 0, 0) != names.proj else 1  # each has a name of its own, or there is one
        if not 0 <= self.mtp_layers <= most:
            found.append(f"{self.saved.get(FIELD, FIELD)} is {self.mtp_layers}: it must be from 0 to {most}")
        return found

    def _predicting(self, rows: Rows, block: Rows, depth: int) -> Rows:
        """Return the rows of a model with those of one more such layer, of this block."""
        names, number, table = self.mtp_names, self.num_hidden_layers + depth, {row.name: row for row in rows}

        def of(template: str, ending: str = "weight") -> str:
            return f"{_of(template, depth, number)}{ending}"

        def norm(name: str, hf: str) -> Param:
            return replace(table["norm.weight"], name=f"mtp.{depth}.{name}.weight", hf=of(f"{hf}."))

        block = tuple(
            replace(
                row,
                name=row.name.replace(_IN_TABLE, f"mtp.{depth}."),
                hf=row.hf.replace(_LAYER, of(names.block, "")),
                hf_held=row.hf_held.replace(_LAYER, of(names.block, "")),
                at="last",
                layers=None,
            )
            for row in block
        )
        made = (
            norm("embed_norm", names.embed_norm),
            norm("hidden_norm", names.hidden_norm),
            Param(
                f"mtp.{depth}.proj.weight",
                "embed (embeddings: mtp_embed + hidden: mtp_embed)",
                of(f"{names.proj}."),
                at="last",
                std=self.initializer_range,
            ),
            *block,
            norm("norm", names.norm),
        )
        again = {"embed.weight": [names.embed]}
        again.setdefault("head.weight" if "head.weight" in table else "embed.weight", []).append(names.head)

        def shared(row: Param) -> Param:
            copies = tuple(of(f"{hf}.") for hf in again.get(row.name, ()) if hf)
            at = "first last" if row.name == "embed.weight" else row.at
            return replace(row, at=at, hf_copies=row.hf_copies + copies)

        return (*map(shared, rows), *made)


def _of(template: str, depth: int, layer: int) -> str:
    return template.replace("{depth}", str(depth)).replace("{layer}", str(layer))
