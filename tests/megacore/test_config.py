"""A recipe and its overrides: what loads, and that each thing that is wrong is named with the way out."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest

from megacore import recipe as recipe_module
from megacore.checks.machine import surroundings
from megacore.checks.rules import problems
from megacore.config import RANGES, SECTIONS, Config, CorpusConfig, parts
from megacore.models.anatomy import Anatomy
from megacore.models.registry import configure
from megacore.parallel.weights.schema import Param, Schema
from megacore.recipe import ConfigError, load, processes

RECIPE = """
model: {family: llama, preset: llama-3.2-1b}
mesh: {pp: 2, tp: 2}
data: {train: corpus/text, sequence_length: 512}
batch: {global_size: 8, micro_size: 1}
optimizer: {lr: 3e-4}
train: {steps: 100, precision: bf16, device: cpu}
"""


ONE_B = {"layer": 16, "heads": 32, "kv": 8, "head": 64, "embed": 2048, "mlp": 8192, "vocab": 128256}


@dataclass(frozen=True)
class Sizes:
    """What the rules ask of a model; the numbers are LLaMA 3.2 1B's."""

    sizes: Mapping[str, int] = field(default_factory=lambda: ONE_B)
    max_positions: int | None = 1024
    drops_attention: bool = False
    drops: bool = False
    mtp_layers: int = 0
    labels: int = 0
    schema: Schema = configure({"preset": "llama-3.2-1b"}).schema
    anatomy: Anatomy = configure({"preset": "llama-3.2-1b"}).anatomy


LLAMA: Any = Sizes()
_TINY = configure({"preset": "mixtral-tiny"})
MIXTRAL = Sizes(_TINY.sizes, schema=_TINY.schema)
_BIASES = Param("layers.{layer}.mlp.router.correction", "routes", "b", buffer=True)
MODELS: Mapping[str, Any] = {
    "llama": LLAMA,
    "sparse": Sizes({**LLAMA.sizes, "experts": 2}),
    "mixtral": MIXTRAL,
    "biased": replace(MIXTRAL, schema=replace(_TINY.schema, params=(*_TINY.schema.params, _BIASES))),
    "indexed": configure({"preset": "deepseek_v32-tiny"}),
    "shared": configure({"preset": "glm_moe_dsa-tiny", "index_topk_freq": 4}),
    "keys": configure({"preset": "gemma-4-e2b"}),
    "further": configure({"preset": "glm4_moe-tiny", "num_nextn_predict_layers": 1}),
}


@dataclass(frozen=True)
class Bad:
    """Overrides of RECIPE (or another recipe) that make exactly one problem, and what its message must say."""

    overrides: tuple[str, ...]
    words: tuple[str, ...]
    recipe: str = RECIPE
    ranks: int = 8
    gpus: int = 0
    sizes: Any = LLAMA


def bad(overrides: str, *words: str, **given: Any) -> Bad:
    return Bad(tuple(overrides.split()), words, **given)


def listed(sections: str) -> Iterator[Bad]:
    """Rows of configs.json: overrides of RECIPE, words, and in a mapping what else is another. ``train`` is what stands
    for the corpus in RECIPE, ``model`` one of MODELS, of which other sizes or fields may be given."""
    for rows in json.loads(Path(__file__).with_name("configs.json").read_text("utf-8"))[sections].values():
        for overrides, *words in rows:
            given = words.pop() if words and isinstance(words[-1], dict) else {}
            if "train" in given:
                given["recipe"] = RECIPE.replace("corpus/text", given.pop("train"))
            sizes = MODELS[given.pop("model", "llama")]
            changed = {name: given.pop(name) for name in {*given} & {each.name for each in fields(Sizes)}}
            if "sizes" in changed:
                changed["sizes"] = {**sizes.sizes, **changed["sizes"]}
            yield bad(overrides, *words, sizes=replace(sizes, **changed) if changed else sizes, **given)


BOMB = "\n".join(["x0: &x0 1", *(f"x{i}: &x{i} [*x{i - 1}, *x{i - 1}]" for i in range(1, 30))])
CHAIN = "\n".join(["x0: &x0 1", *(f"x{i}: &x{i} [*x{i - 1}]" for i in range(1, 99))])

RANGE = {
    "at least 1": "mesh.pp=0 mesh.cp=0 mesh.ep=0 mesh.tp=0 mesh.dp=-1 mesh.etp=0 pipeline.chunks=0 context.heads=0 "
    "data.sequence_length=0 batch.global_size=0 batch.micro_size=0 loss_scale.growth_interval=0 schedule.decay_steps=0 "
    "train.steps=0 train.threads=0 evaluate.batches=0 log.every=0 memory.loss_chunk=0 memory.offload_buffer=0 "
    "zero.replicas=0",
    "above 0": "optimizer.lr=0.0 optimizer.eps=0.0 optimizer.clip=0.0 log.peak_tflops=0.0",
    "at least 0": "optimizer.weight_decay=-0.1 schedule.warmup_steps=-1 train.seed=-1 evaluate.every=-5 "
    "loss.indexer=-1.0 experts.sequence_balance=-1.0 experts.batch_balance=-0.1 experts.z_loss=-1.0 "
    "experts.bias_rate=-0.001",
    "at least 0 and below 1": "data.validation_fraction=1.0",
    "at least 0 and below 2^63": "data.seed=-1 data.seed=9223372036854775808",
    "between 0 and 1": "schedule.min_ratio=1.5",
    "between 1 and 99": "optimizer.max_skipped=100",
    "a power of two": "loss_scale.minimum=0.0",
    "a power of two up to 2^24": "loss_scale.initial=3.0 loss_scale.initial=33554432.0",
    "minutes above 0, and at most a day (1440)": "train.timeout=0.0",
}

BAD = [
    *listed("bad"),
    bad("", "cannot divide 8 ranks", recipe=RECIPE.replace("pp: 2", "pp: 3")),
    bad("", "recipe.yaml: line 2 is nested more than 32 levels deep", recipe="model:\n  " + "[" * 10**5),
    bad("", "recipe.yaml: line 1 is nested more than 32 levels", recipe="model: " + "{a: " * 99 + "1" + "}" * 99),
    bad("", "aliases stand for more than 100,000 values", recipe=BOMB),
    bad("", "aliases are nested more than 32 levels deep", recipe=CHAIN),
    bad("", "recipe.yaml has more than 1,048,576 bytes", recipe="a: 1\n" * 2**18),
    *(
        bad(case, "{} ({}): must be ".format(*case.split("=")) + bound, sizes=MODELS["biased"])
        for bound, cases in RANGE.items()
        for case in cases.split()
    ),
    *(bad(f"data.train={name}", f"data.train: there is no {name}") for name in ("x.jsonl", "x.parquet", "x.jsonl.gz")),
]


ABSENT = "wandb", "lm_eval"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with one corpus, half of another, a run, and what is none of them."""
    corpus = (f"corpus/{name}" for name in ("text.bin", "text.idx", "half.bin", "corpus.json"))
    for name in (*corpus, "done/metrics.jsonl", "notes/facts.csv", "pairs.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megacore.checks.machine.importlib.util.find_spec", lambda name: None if name in ABSENT else 1)
    return tmp_path


def write(folder: Path, text: str) -> Path:
    recipe = folder / "recipe.yaml"
    recipe.write_text(text)
    return recipe


def found(folder: Path, case: Bad) -> list[str]:
    """Every problem of a case, as a launch sees them."""
    try:
        config = load(write(folder, case.recipe), case.overrides)
    except ConfigError as error:
        return list(error.problems)
    return problems(config, case.ranks, case.sizes, gpus=case.gpus, local_ranks=case.ranks) + surroundings(config)


@pytest.mark.parametrize("case", BAD, ids=[" ".join(case.overrides) or case.words[0] for case in BAD])
def test_bad_configs_are_named(folder: Path, case: Bad) -> None:
    messages = found(folder, case)
    assert len(messages) == 1, messages
    assert [word for word in case.words if word not in messages[0]] == [], messages[0]


GOOD = [*listed("good")]


@pytest.mark.parametrize("case", GOOD, ids=[" ".join(case.overrides) or f"{case.ranks} ranks" for case in GOOD])
def test_good_configs_pass_and_load_back_equal(folder: Path, case: Bad) -> None:
    assert found(folder, case) == []
    config = load(write(folder, case.recipe), case.overrides)
    assert load(write(folder, config.to_yaml())) == config


def test_all_spelling_and_type_problems_come_together(folder: Path) -> None:
    case = bad("optimzer.lr=1 train.steps=many nonsense schedule.name=flat data.trian=x")
    messages = "\n".join(found(folder, case))
    for words in ("optimizer?", "train.steps", "'nonsense'", "schedule.name", "data.train?"):
        assert words in messages
    assert len(found(folder, case)) == 5


def test_every_number_has_a_range() -> None:
    """Stated where its key is; a rule between values looks only at those that are within it."""
    numbers = {
        f"{section}.{each.name}"
        for section, kind in SECTIONS.items()
        for each in fields(kind)
        if not {int, float}.isdisjoint(parts(each.type))
    }
    assert numbers == set(RANGES) and len(RANGES) > 40


def test_what_other_trainers_call_a_key_leads_to_one_of_ours() -> None:
    for key in recipe_module.OTHER_NAMES:
        section, _, name = key.rpartition(".")
        assert section == "model" or name in recipe_module._keys([section] if section else []), key


def test_a_rule_ends_where_it_reads_a_value_that_is_out_of_range(folder: Path) -> None:
    """By a property of the config too; what needs no such value is told."""
    assert [text.split()[0] for text in found(folder, bad("mesh.tp=0 optimizer.lr=-1"))] == ["mesh.tp", "optimizer.lr"]
    words = "\n".join(found(folder, bad("mesh.tp=0 pipeline.chunks=2 zero.replicas=2")))
    assert "mesh.tp (0)" in words and "runs one chunk per stage" in words and "zero.replicas" not in words
    messages = found(folder, bad("lora.rank=0 lora.targets=[none] train.only=[none] checkpoint.init=x"))
    assert [text.split()[0] for text in messages] == ["lora.rank"]


def test_products_overlap_with_what_is_sent_within_a_node(folder: Path) -> None:
    config = load(write(folder, RECIPE), ["mesh.tp=8", "train.async_tp=true", "train.device=auto"])
    assert problems(config, 16, LLAMA, gpus=8, local_ranks=8) == []
    (message,) = problems(config, 16, LLAMA, gpus=8, local_ranks=4)
    assert "the ranks of mesh.tp (8) on one node, and each has 4" in message


@pytest.mark.parametrize("override", ["=" + "[" * 10**5, ".a" * 100 + "=1", ".a" * 2000 + "=1"], ids=len)
def test_overrides_that_are_nested_too_deeply(folder: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"nested more than 32 levels deep"):
        load(write(folder, RECIPE), [f"model{override}"])


def test_overrides_that_are_one_text() -> None:
    with pytest.raises(ConfigError, match=r"the overrides are one text, 'out=x': give a list of them, \['out=x'\]"):
        load({}, "out=x")


def test_the_error_numbers_its_problems() -> None:
    error = ConfigError(["one thing", "another"])
    assert str(error) == "2 problems in the config:\n  1. one thing\n  2. another"
    assert error.problems == ("one thing", "another")


def test_recipe_then_overrides_then_defaults(folder: Path) -> None:
    config = load(
        write(folder, RECIPE),
        ["optimizer.lr=1e-3", "mesh.tp=4", "model.n_layer=3", "mesh.tp=1", "batch={micro_size: 2}"],
    )
    assert config.optimizer.lr == 1e-3
    assert (config.mesh.pp, config.mesh.dp, config.mesh.tp) == (2, None, 1)
    assert config.model == {"family": "llama", "preset": "llama-3.2-1b", "n_layer": 3}
    assert config.data.train == (CorpusConfig("corpus/text", 1.0),)
    assert (config.batch.global_size, config.batch.micro_size) == (8, 2)
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.out == "runs/recipe"
    assert replace(load(write(folder, "")), out=Config().out) == Config()


def test_a_recipe_that_comes_along_is_found_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"there is no recipe nowhere\.yaml: .*one that comes along \(.*quickstart\)"):
        load("nowhere.yaml")
    assert load("quickstart", ["train.steps=3"]) == load(recipe_module.RECIPES / "quickstart.yaml", ["train.steps=3"])
    (folder / "quickstart").write_text("out: mine")
    assert load("quickstart").out == "mine"


def test_aliases_and_merges_of_yaml(folder: Path) -> None:
    """Each is a copy: what is set in one place stays in it."""
    text = "model: &m {a: 1, b: &b {c: 1}}\nmesh: {<<: &two {tp: 2, pp: 2}, pp: 4}\ndata: {seed: 3, <<: {seed: 5}}"
    config = load(write(folder, f"{text}\nlora: {{<<: {{rank: 4}}, alpha: 1e1}}"), ["model.d=[{}]", "model.d[0].e=x"])
    assert config.model == {"a": 1, "b": {"c": 1}, "d": [{"e": "x"}]}
    assert (config.mesh.tp, config.mesh.pp, config.data.seed) == (2, 4, 3)
    assert config.lora is not None and (config.lora.rank, config.lora.alpha) == (4, 10.0)


@pytest.mark.parametrize("text", ["1e3", "1.5e3", "true", "null", "010", "a: b", "2020-01-01", "naïve", "- x", "#"])
def test_texts_that_look_like_something_else_load_back(folder: Path, text: str) -> None:
    config = replace(Config(), out=text, model={"name": text, "list": [1, 2.5e-7, None, {"deep": text}]})
    assert load(write(folder, config.to_yaml())) == config


@pytest.mark.parametrize(
    ("overrides", "nodes", "gpus", "expected"),
    [
        ("train.device=cpu", 1, 8, 4),  # pp x tp
        ("train.device=auto", 1, 0, 4),
        ("train.device=auto", 1, 8, 8),  # dp takes the rest
        ("train.device=auto mesh.dp=1", 1, 8, 4),
        ("train.device=cpu mesh.dp=3", 2, 0, 6),
        ("train.device=cpu mesh.pp=1 mesh.tp=1", 2, 0, 1),
    ],
)
def test_processes_to_start(folder: Path, overrides: str, nodes: int, gpus: int, expected: int) -> None:
    assert processes(load(write(folder, RECIPE), overrides.split()), nodes, gpus) == expected
