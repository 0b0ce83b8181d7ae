"""The work of `finetune.py`: whose chats, in which rows. Its scripts read it from a file, in any environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LR = 2e-5
LORA: Mapping[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0}


@dataclass(frozen=True)
class Work:
    """A step trains on `accumulation` microbatches of `rows` rows of `length` tokens, or as much text otherwise.

    Args:
        model: A Hugging Face folder.
        chats: As JSON lines.
        prepared: The same chats as tokens and masks of what counts, for those who are not to tokenize.
        length, rows, accumulation: Of the batches.
    """

    model: Path
    chats: Path
    prepared: Path
    length: int
    rows: int
    accumulation: int

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), default=str, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Work:
        tree = json.loads(path.read_text())
        paths = {key: Path(tree[key]) for key in ("model", "chats", "prepared")}
        return cls(**tree | paths)
