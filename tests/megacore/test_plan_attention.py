"""Windows, softcaps, sinks and norms in the plan, for a GPU: what blocks keep and compute, held against counts by
hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from extended_family import extended
from operations import Flops
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.devices import DEVICES
from megacore.models.config import flops_per_token
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.parallel.kernels import bands, documents
from megacore.parallel.kernels.scoring import PLAIN
from megacore.parallel.weights.layout import MeshShape
from megacore.planning.activations import ActivationMemory
from megacore.planning.setting import Setting, Widths
from megacore.planning.step_time import Cluster, estimate
from megacore.planning.trace import measure

EMBED, MLP, LAYERS, HEADS, KV, HEAD, VOCAB = 64, 96, 4, 4, 2, 16, 512
LENGTH, SEQUENCES, WINDOW = 256, 2, 100
TOKENS = LENGTH * SEQUENCES
MIXED = (0, WINDOW, 0, WINDOW)
ALL_BEFORE = 256 * 257 // 2
IN_WINDOW = 100 * 101 // 2 + 156 * 100
"""Pairs of tokens of a sequence that look at each other: 100 tokens see less than the window, and 156 see 100."""
PRODUCTS = (HEADS * HEAD * EMBED * 2 + 2 * KV * HEAD * EMBED + 3 * EMBED * MLP) * LAYERS + EMBED * VOCAB
"""Elements of all matrices that multiply: queries and what ends the attention, keys, values, the feed-forward's."""
H100 = Cluster(DEVICES["h100-80"], DEVICES["h100-80"].tflops("bf16"))


@pytest.mark.parametrize(
    ("dtype", "masked", "kernel"),
    [
        (torch.bfloat16, False, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, True, "_scaled_dot_product_efficient_attention"),
        (torch.float32, False, "_scaled_dot_product_efficient_attention"),
        (torch.float64, False, "_safe_softmax"),
        (torch.float64, True, "_safe_softmax"),
    ],
)
def test_grouped_heads_are_measured_by_the_kernel_that_runs(dtype: torch.dtype, masked: bool, kernel: str) -> None:
    """No fused kernel takes eight bytes, nor a mask and groups; for the last keys are repeated before, as on a GPU."""
    q, k, v = (torch.empty(1, heads, 8, 16, dtype=dtype, device="meta", requires_grad=True) for heads in (4, 2, 2))
    mask = torch.empty(1, 1, 8, 8, dtype=torch.bool, device="meta") if masked else None
    with measure._fused(), Operators() as seen:
        documents.scaled_dot_product(q, k, v, PLAIN, mask)
    found = {name for name in seen.names if "scaled_dot" in name or "softmax" in name}
    assert found == {kernel}


class Operators(TorchDispatchMode):
    """Notes which operators of torch are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def there_is_that_family() -> Iterator[None]:
    with extended():
        yield


def setting(mesh: MeshShape = MeshShape(), length: int = LENGTH, **fields: Any) -> Setting:  # noqa: B008
    section = {
        "family": "extended",
        "vocab_size": VOCAB,
        "hidden_size": EMBED,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": HEAD,
        "max_position_embeddings": 4096,
    }
    config = configure(section | fields)
    return Setting(config, layout_of(config, mesh), Widths.of("bf16"), length, SEQUENCES, 1)


def of(**fields: Any) -> ActivationMemory:
    return ActivationMemory.of(setting(**fields))


# -- work


def test_the_operations_are_those_of_the_pairs_that_look_at_each_other() -> None:
    """Two products of two operations for each pair and feature of a head, three times with the backward."""
    for windows, pairs in (((), 4 * ALL_BEFORE), (MIXED, 2 * (ALL_BEFORE + IN_WINDOW)), (4 * (1000,), 4 * ALL_BEFORE)):
        made = setting(windows=windows)
        found = Flops(ActivationMemory.of(made), 0)
        wanted = 2 * PRODUCTS * TOKENS + 4 * HEADS * HEAD * SEQUENCES * pairs
        assert (found.forward, found.backward, found.again) == (wanted, 2 * wanted, 0)
        assert flops_per_token(made.model, LENGTH) == 6 * PRODUCTS + 12 * HEADS * HEAD * pairs // LENGTH


def test_a_softcap_s_products_are_those_of_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel for CUDA knows it: blocks of queries see all keys from the first one's window on. Two products in the
    forward, and five in the backward, for scores are made again."""
    monkeypatch.setattr(bands, "_BLOCK_ON_GPU", 64)
    plain, capped = (of(windows=4 * (WINDOW,), softcap=cap).chunks[0][0] for cap in (None, 30.0))
    keys = 64, 128, 99 + 64, 99 + 64
    scores = HEADS * SEQUENCES * 64 * sum(keys)
    without = plain.forward.flops - 4 * HEADS * HEAD * SEQUENCES * IN_WINDOW
    assert capped.forward.flops - without == 2 * 2 * HEAD * scores
    assert capped.backward.flops - 2 * without == 2 * 5 * HEAD * scores
    # In fp8 they are as fast as ever.
    assert sum(product.attention for product in capped.forward.products) == len(set(keys)) * 2


def test_the_time_of_scores_that_pass_through_memory() -> None:
    """Of a softcap they do: some passes over fp32 numbers of each pair, in the forward and more in the backward."""
    plain, capped = (setting(length=1024, softcap=cap) for cap in (None, 30.0))
    block = ActivationMemory.of(capped).chunks[0][0]
    assert ActivationMemory.of(plain).chunks[0][0].forward.passes == 0
    scores = 4 * HEADS * SEQUENCES * 1024 * 1024
    assert 8 * scores < block.forward.passes < block.backward.passes < 50 * scores
    one, other = (estimate(made, H100) for made in (plain, capped))
    passes = block.forward.passes + block.backward.passes
    assert other.compute - one.compute > LAYERS * passes / H100.device.bandwidth
    full, narrow = (estimate(replace(capped, recompute=each), H100) for each in ("full", "none"))
    assert full.recompute > LAYERS * block.forward.passes / H100.device.bandwidth > narrow.recompute == 0


# -- memory


def kept(features: int, numbers: int) -> int:
    """Bytes of a block's activations in bf16, and of fp32 numbers beside them, a token."""
    return TOKENS * (2 * features + 4 * numbers)


NORM = 2
"""Statistics of a norm: what it keeps on a GPU."""
BLOCK = kept(5 * EMBED + (HEADS + 2 * KV) * HEAD + 3 * MLP, HEADS + 2 * NORM)
"""Inputs of two norms, of the products after them and after the attention, queries, keys, values, both halves of the
feed-forward network and what they become; a number of each head's softmax."""


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, BLOCK),
        ({"windows": MIXED}, BLOCK),
        ({"sinks": True}, BLOCK),
        ({"softcap": 30.0}, BLOCK),
        ({"windows": MIXED, "softcap": 30.0, "sinks": True}, BLOCK),
        ({"offset": 1.0}, BLOCK),
        # What the norms are given: one buffer with the values, beside the turned queries and keys.
        ({"norms": True}, BLOCK + kept((HEADS + 2 * KV) * HEAD - KV * HEAD, 2 * NORM)),
        # One norm of one input for both branches, which keep its output once.
        ({"parallel": True}, BLOCK - kept(2 * EMBED, NORM)),
    ],
    ids=str,
)
def test_what_a_block_keeps(fields: dict[str, Any], wanted: int) -> None:
    block = of(**fields).chunks[0][-1]
    dropped = 16 if not {"windows", "sinks", "softcap"} & fields.keys() else 0  # the state of torch's dropout
    assert block.kept == wanted + dropped


def test_scores_are_there_a_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, of no more keys than the block sees."""
    monkeypatch.setattr(bands, "_BLOCK_ON_GPU", 512)
    short, long = (of(length=length, windows=4 * (WINDOW,), softcap=30.0).chunks[0][0].peak for length in (1024, 2048))
    scores = 4 * HEADS * SEQUENCES * 512 * (99 + 512)
    assert scores < short < long < 1.3 * short
