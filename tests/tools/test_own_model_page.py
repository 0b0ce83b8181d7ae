"""The code of docs/own_model.md runs as it stands, and has the numbers of the plain model in one process."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pool import Pool

PAGE = (Path(__file__).parents[2] / "docs/own_model.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def run(blocks: list[str], folder: Path) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    before = Path.cwd()
    os.chdir(folder)
    try:
        for number, block in enumerate(blocks):
            exec(compile(block, f"docs/own_model.md, example {number}", "exec"), names)
    finally:
        os.chdir(before)
    return names


def of_a_rank(folder: Path) -> tuple[list[float], dict[str, int]]:
    names = run(BLOCKS, folder)
    held = {name: parameter.numel() for name, parameter in names["training"].parameters.items()}
    return names["losses"], held


def test_the_page_trains_saves_and_reshards_as_one_process_would(pool: Pool, tmp_path: Path) -> None:
    page = run(BLOCKS[:1], tmp_path)
    torch.manual_seed(0)
    plain = page["Plain"]().double()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0)
    wanted = []
    for step in range(6):
        tokens, labels = page["batch"](step)
        loss = plain(tokens, labels) / labels.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    found = pool.run(4, of_a_rank, tmp_path)
    for losses, held in found:
        np.testing.assert_allclose(losses, wanted, rtol=1e-9)
        assert held["layers.0.qkv.weight"] * 2 == plain.layers[0].qkv.weight.numel()
    names = sorted(each.name for each in (tmp_path / "saved").iterdir())
    assert names == [f"tp-{part}-of-2.safetensors" for part in range(2)]
