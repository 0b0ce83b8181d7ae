"""Weights that some layers have, and axes over a product of dimensions: on disk, in conversion and in adapters."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import drawn
from tiny import LAYERS, LLAMA, assert_holds, edit_index, layout_of, run_checkpoint, whole

from megacore.models import lora
from megacore.models.families.llama import LlamaConfig
from megacore.models.lora import Lora
from megacore.models.registry import configure
from megacore.models.stages import default_layers
from megacore.parallel.limits import LAYERS as MOST_LAYERS
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.schema import SPLIT, Param
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.index import STATES
from megacore.tools import convert, inspect, reshard

pytestmark = pytest.mark.usefixtures("not_durable")

SOME = {"attn.qkv": (0, 1, 3), "mlp_norm": (4,), "mlp.down": (1, 2, 3, 4)}
DTYPES = {state: "BF16" if state == "weights" else "F32" for state in STATES}


@pytest.fixture
def some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A LLaMA of which some layers have no attention, say: its tables alone are looked at here."""
    params = LlamaConfig.params

    def fewer(self: LlamaConfig) -> tuple[Param, ...]:
        return tuple(
            replace(param, layers=next((n for name, n in SOME.items() if name in param.name), None))
            for param in params(self)
        )

    monkeypatch.setattr(LlamaConfig, "params", fewer)


@pytest.mark.usefixtures("some")
def test_a_checkpoint_goes_through_any_layout_and_back(tmp_path: Path) -> None:
    held = run_checkpoint(tmp_path / "a", LLAMA, layout_of(LLAMA, (2, 1, 2), pp=3, tp=2))
    names = held["weights"].keys()
    assert sum("q_proj" in name for name in names) == 3 and sum("down_proj" in name for name in names) == 4
    assert "model.layers.4.post_attention_layernorm.weight" in names
    made = assert_holds(tmp_path / "a", held, DTYPES)
    assert made.index.version == 2 and '"layers": "0-1,3"' in (tmp_path / "a/index.json").read_text()
    assert reshard.main([str(tmp_path / "a"), str(tmp_path / "b"), "--tp", "4", "--pp", "2"]) == 0
    assert_holds(tmp_path / "b", held, DTYPES)
    assert convert.main([str(tmp_path / "b"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert convert.main([str(tmp_path / "hf"), str(tmp_path / "c"), "--tp", "2"]) == 0
    assert_holds(tmp_path / "c", {"weights": held["weights"]}, DTYPES)
    assert inspect.main([str(tmp_path / "c"), "--check"]) == 0


@pytest.mark.parametrize("mesh", [{"ep": 2, "tp": 2}, {"ep": 4, "pp": 2}])
def test_an_axis_over_a_product_of_dimensions_goes_to_disk_and_back(mesh: Mapping[str, int], tmp_path: Path) -> None:
    plain = layout_of(LLAMA, (2, 3) if "pp" in mesh else (LAYERS,), **mesh)
    folded = Layout(plain.schema, plain.mesh, plain.layers, {**SPLIT, "mlp": ("ep", "tp")})
    held = run_checkpoint(tmp_path / "a", LLAMA, folded)
    made = assert_holds(tmp_path / "a", held, DTYPES)
    assert made.index.version == 2 and made.layout.split == folded.split
    up = [s for s in made.stored() if s.name == "layers.0.mlp.up.weight" or s.name == "layers.0.mlp.gate_up.weight"]
    assert len({s.box["mlp"] for s in up}) == len(up) == 4
    assert reshard.main([str(tmp_path / "a"), str(tmp_path / "b"), "--tp", "2"]) == 0
    assert Checkpoint.open(tmp_path / "b").layout.split == SPLIT
    assert_holds(tmp_path / "b", held, DTYPES)
    assert whole(made, "master").keys() == held["master"].keys()


def first(**fields: object) -> Any:
    """A change of the first parameter that some layers have; that others use, where what is changed is `also`."""
    key = "also" if "also" in fields else "layers"
    return lambda tree: next(each for each in tree["parameters"] if key in each).update(fields)


def first_layers(text: object) -> Any:
    return first(layers=text)


KINDS = ["hybrid", "linear_attention", "hybrid", "hybrid", "hybrid"]
BLOCKS: Mapping[str, Any] = drawn("zamba2", 3, layers_block_type=KINDS, num_mem_blocks=2)
"""Layers 0 and 3, and 2 and 4, share blocks."""


def test_layers_that_share_tensors_go_to_disk_and_back(tmp_path: Path) -> None:
    """Each stage that has one of them holds them; another release must refuse what it would read wrongly."""
    layout = layout_of(BLOCKS, (2, 1, 2), pp=3)
    held = run_checkpoint(tmp_path / "a", BLOCKS, layout)
    made = assert_holds(tmp_path / "a", held, DTYPES)
    assert made.index.version == 7 and made.layout.schema["layers.{layer}.attn.qkv.weight"].also == ((3,), (4,))
    for layer in (0, 2):
        assert len({s.where for s in made.stored() if s.name == f"layers.{layer}.mlp.up.weight"}) == 2
    assert reshard.main([str(tmp_path / "a"), str(tmp_path / "b"), "--tp", "2", "--pp", "2"]) == 0
    assert_holds(tmp_path / "b", held, DTYPES)
    assert inspect.main([str(tmp_path / "b"), "--check"]) == 0


def many(tree: dict[str, Any]) -> None:
    """Parameters of 150 bytes, each of which takes two megabytes."""
    one = next(each for each in tree["parameters"] if "layers" in each)
    tree.update(parameters=[one | {"layers": f"0-{MOST_LAYERS - 1}"}] * 20)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (first(also=["3", "9"]), "are not later ones of the 5 layers, ascending"),
        (first(also=["3", "1"]), "are not later ones of the 5 layers, ascending"),
        (first(also=["3", "3"]), "are not later ones of the 5 layers, ascending"),
        (first(also=["3"]), "for each of layers=(0, 2)"),
        (first(also=["4-3", ""]), "which do not ascend"),
        (first(also=["3", 4]), "has also=4, which are no numbers of layers"),
        (first(also="3,4"), "not of type list"),
        (first(also=["0-999999"] * 9), "which are 9000000 numbers: there may be 65536"),
        (many, "has parameters of more than 1048576 numbers of layers"),
        (first(also=["4", "3"]), "declares other pieces"),
        (lambda tree: tree.update(version=6), "declares other pieces"),
    ],
)
def test_an_index_that_says_nonsense_of_what_is_shared(change: Any, words: str, tmp_path: Path) -> None:
    run_checkpoint(tmp_path / "a", BLOCKS, layout_of(BLOCKS, (2, 3), pp=2))
    refused(tmp_path / "a", change, words)


@pytest.mark.usefixtures("some")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (first_layers("0-1,3,9"), "are not some of the 5 layers"),
        (first_layers("0-1"), "declares other pieces"),
        (first_layers("0-2"), "declares other pieces"),
        (first_layers("3-1"), "which do not ascend"),
        (first_layers("0-1,1-3"), "which do not ascend"),
        (first_layers("0-999999," * 99 + "0"), "which do not ascend"),
        (first_layers(""), "no numbers of layers such as 0-2,5"),
        (first_layers([0]), "not of type str"),
        (lambda tree: tree.update(split={"mlp": ["tp", "dp"]}), "no list of ep and tp"),
        (lambda tree: tree.update(split={"embed": ["tp"]}), "no list of ep and tp"),
        (lambda tree: tree.update(split={"heads": ["tp", "tp"]}), "no list of ep and tp"),
        (lambda tree: tree.update(split={"heads": "tp"}), "no list of ep and tp"),
        (lambda tree: tree.update(version=1), "declares other pieces"),
    ],
)
def test_an_index_that_says_nonsense_of_them_ends_in_a_sentence(change: Any, words: str, tmp_path: Path) -> None:
    run_checkpoint(tmp_path / "a", LLAMA, layout_of(LLAMA, (2, 3), pp=2))
    refused(tmp_path / "a", change, words)


def refused(folder: Path, change: Any, words: str) -> None:
    edit_index(folder, change)
    with pytest.raises(StoreError) as caught:
        Checkpoint.open(folder)
    assert words in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 2000


@pytest.mark.usefixtures("some")
def test_adapters_and_stages_follow() -> None:
    schema = configure(LLAMA).schema
    made = lora.adapters(schema, Lora(2, 4.0, ("attn.qkv.q", "mlp.down")))
    assert {param.name: param.layers for param in made.params} == {
        "layers.{layer}.attn.qkv.lora_a": (0, 1, 3),
        "layers.{layer}.attn.qkv.lora_b": (0, 1, 3),
        "layers.{layer}.mlp.down.lora_a": (1, 2, 3, 4),
        "layers.{layer}.mlp.down.lora_b": (1, 2, 3, 4),
    }
    assert schema.numel(schema["layers.{layer}.mlp_norm.weight"]) == schema.sizes["embed"]
    config = configure({**LLAMA, "num_hidden_layers": 9, "intermediate_size": 4096, "vocab_size": 8})
    assert default_layers(config, 2) == (4, 5), "layers 1 to 4 have most of the work"
    assert {shard.name for shard in Layout(schema, MeshShape(pp=2), (2, 3)).shards(MeshShape(pp=2).place(1))} >= {
        "layers.4.mlp_norm.weight"
    }
