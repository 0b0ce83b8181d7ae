"""From a configuration to the parts of one rank: how layers are spread, what each chunk has, what compile reaches."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from deep_family import deep

from megacore.models.assemble import Model
from megacore.models.decoder import Losses
from megacore.models.families.llama import LlamaConfig
from megacore.models.lora import Lora
from megacore.models.registry import configure
from megacore.models.stages import default_layers, layout_of
from megacore.models.tuning import EVERYTHING, Tuning
from megacore.parallel.kernels.documents import Documents
from megacore.parallel.layers.compressed import CompressedTokens
from megacore.parallel.layers.indexed import Indexed
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape, balanced_layers
from megacore.parallel.weights.schema import Param

TINY = {"preset": "llama-tiny"}
EIGHT_B = {"preset": "llama-3.1-8b"}


def test_the_head_and_the_embedding_count_as_layers() -> None:
    """A head of 128256 x 4096 weighs 2.4 layers of 218 M parameters; the embedding a quarter of it."""
    assert default_layers(configure(EIGHT_B), 1) == (32,)
    assert default_layers(configure(EIGHT_B), 4) == (8, 9, 9, 6)
    assert default_layers(configure(EIGHT_B), 2) == (17, 15)
    assert balanced_layers(32, 4) == (8, 8, 8, 8)
    # A small vocabulary changes nothing.
    assert default_layers(configure(EIGHT_B | {"vocab_size": 100}), 4) == (8, 8, 8, 8)


def test_layers_with_experts_weigh_what_a_token_meets_of_them() -> None:
    """As in DeepSeek-V3, 8 experts and a shared one of 2048 are as much work as a dense layer of 18432, while all 256
    weigh 28 times that; the head is 1.4 layers."""
    config = deep()
    assert default_layers(config, 4) == (15, 16, 16, 14)
    assert default_layers(config, 16) == (3, *(4,) * 14, 2)
    assert default_layers(deep(num_experts_per_tok=248), 4) == (17, 15, 15, 14)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_stage_has_a_layer_whatever_the_head_weighs(stages: int) -> None:
    counts = default_layers(configure(TINY | {"vocab_size": 1_000_000}), stages)
    assert len(counts) == stages and sum(counts) == 4 and min(counts) >= 1
    # The head is on the last stage, which has no more than it must.
    assert counts[-1] == 1 or stages == 1


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot spread 4 layers over 5 virtual stages"):
        default_layers(configure(TINY), 5)


def test_the_layout_takes_given_layers_or_balances_them_over_virtual_stages() -> None:
    config = configure(EIGHT_B)
    mesh = MeshShape(pp=2, tp=2)
    assert layout_of(config, mesh).layers == default_layers(config, 2)
    interleaved = layout_of(config, mesh, chunks=2)
    assert interleaved.layers == default_layers(config, 4) and interleaved.chunks == 2
    given = layout_of(config, mesh, 2, (5, 9, 9, 9))
    assert given.layers == (5, 9, 9, 9)
    assert list(given.chunk_layers(stage=1, chunk=0)) == list(range(5, 14))
    with pytest.raises(ValueError, match="sum to 31"):
        layout_of(config, mesh, 1, (16, 15))


def tiny(chunks: int = 1, losses: Losses | None = None, **fields: float) -> Model:
    config = configure(TINY | {"num_hidden_layers": 3} | fields)
    return Model.create(config, layout_of(config, MeshShape(), chunks), Mesh.single(), torch.float32, losses)


def test_each_chunk_has_its_part_and_all_are_switched_together() -> None:
    model = tiny(chunks=3)
    assert [chunk.embedding is not None for chunk in model.chunks] == [True, False, False]
    assert [chunk.head is not None for chunk in model.chunks] == [False, False, True]
    assert [list(chunk.layers) for chunk in model.chunks] == [["0"], ["1"], ["2"]]
    assert sum(p.numel() for p in model.parameters.values()) == model.config.schema.parameters
    assert {id(p) for chunk in model.chunks for p in chunk.parameters()} == {id(p) for p in model.parameters.values()}
    for mode in (False, True):
        model.train(mode)
        assert {module.training for chunk in model.chunks for module in chunk.modules()} == {mode}


def test_losses_arrive_at_the_head() -> None:
    losses = Losses(label_smoothing=0.1, z_loss=1e-4)
    head = tiny(chunks=2, losses=losses).chunks[-1].head
    assert head is not None and head.losses == losses
    plain = tiny().chunks[0].head
    assert plain is not None and plain.losses == Losses()


@pytest.mark.parametrize("preset", ["deepseek_v32-tiny", "deepseek_v4-tiny", "llama4_text-tiny", "mixtral-tiny"])
def test_what_is_left_out_of_graphs_is_of_one_model(preset: str) -> None:
    """Of models with what data decides: others in the process run as they are written."""

    def left_out(*owners: object) -> list[object]:
        return [x for owner in owners for x in vars(owner).values() if hasattr(x, "_torchdynamo_disable")]

    config = configure({"preset": preset})
    first, other = (Model.create(config, layout_of(config, MeshShape()), Mesh.single(), torch.float32) for _ in "ab")
    mine, others = ([each for chunk in model.chunks for each in chunk.modules()] for model in (first, other))
    first.compile()
    there = left_out(*mine)
    first.compile()
    assert there and all(x is y for x, y in zip(there, left_out(*mine), strict=True))
    assert not left_out(*others, *map(type, others), Documents, Indexed, CompressedTokens)


@dataclass(frozen=True, kw_only=True)
class Normed(LlamaConfig):
    """Weights beside those of queries and keys are declared, which nothing is made of; so is a second final norm."""

    def params(self) -> tuple[Param, ...]:
        norms = (
            Param(f"layers.{{layer}}.attn.{x}_two.weight", "head", f"model.layers.{{layer}}.self_attn.{x}_two.weight")
            for x in "qk"
        )
        return (*super().params(), *norms, Param("extra.weight", "embed", "model.extra.weight", at="last", mean=1))


def normed(stages: int = 1, stage: int = 0, hollow: bool = False, tuning: Tuning = EVERYTHING) -> Model:
    config = Normed.from_hugging_face(configure(TINY).to_hugging_face())
    mesh = Mesh(MeshShape(pp=stages), stage, torch.device("cpu"))
    layout = layout_of(config, mesh.shape, tuning=tuning)
    return Model.create(config, layout, mesh, torch.float32, hollow=hollow, tuning=tuning)


Q_AND_K = "layers.{layer}.attn.q_two.weight, layers.{layer}.attn.k_two.weight"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (normed, f"{Q_AND_K}, extra.weight"),
        (lambda: normed(hollow=True), f"{Q_AND_K}, extra.weight"),
        (lambda: normed(tuning=Tuning(Lora(2, 4.0, ("attn.qkv",)))), f"{Q_AND_K}, extra.weight"),
        # Every rank finds what it holds itself.
        (lambda: normed(stages=2, stage=0), Q_AND_K),
        (lambda: normed(stages=2, stage=1), f"{Q_AND_K}, extra.weight"),
    ],
    ids=["one", "hollow", "adapters", "first-stage", "last-stage"],
)
def test_a_parameter_that_no_module_uses_is_refused(make: Callable[[], Model], names: str) -> None:
    with pytest.raises(ValueError, match=rf"llama: no module of rank \d \(.*\) uses {re.escape(names)}: use them in"):
        make()
