"""The house stands: imports go down, and what only counts and reads configs needs no torch."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import graph
import pytest
from graph import MODULES, PACKAGES, ROOT, counts, imports, ours

LOWER = {
    **dict.fromkeys(
        ("parallel.mesh", "parallel.collectives", "parallel.random", "parallel.recorder", "parallel.baton"), 1
    ),
    **{
        f"parallel.{name}": 0
        for name in (
            "budgets",
            "context_split",
            "enum_errors",
            "labels",
            "rank_sets",
            "routing",
            "virtual_stages",
            "weights.block_formats",
            "weights.fingerprint",
            "weights.layout",
            "weights.pattern",
            "weights.schema",
            "weights.transfer",
        )
    },
    "parallel.pipeline.schedules": 0,
}
# Floor 0 computes with these; anything else is another floor's.
INTEGERS = {"numpy"} | sys.stdlib_module_names


MEASURE = tuple(
    f"megacore.planning.trace.{x}" for x in ("fake_cuda", "measure", "rank_steps", "simulated_gpu", "torch_attention")
)
"""Run the model, and are imported when they are to."""
FILLS_TENSORS = "megacore.store.weight_folders.loader"
AGENT = tuple(
    f"megacore.recovery.{name}" for name in ("agent", "memory_checkpoints", "partners", "protection", "rendezvous")
)
"""Are torch's elastic agent, imported once the config is known to be right."""
TOKENS = (
    "indexed",
    "samples",
    "blend",
    "batches",
    "text",
    "tokenizer",
    "corpus",
    "encode",
    "grouping",
    "stage",
    "text_streams",
)
# No torch until they build or compute: floor 0, every family's config and weights table, and what moves bytes.
WITHOUT_TORCH = [name for name, floor in LOWER.items() if floor == 0] + [
    "parallel",
    "parallel.random",
    "megacore.training.check",
    "megacore.launcher.command",
    "megacore.exits",
    "megacore.launcher",
    "megacore.rank",
    "models",
    "models.names",
    "models.config",
    "models.lora",
    "models.rope_config",
    "models.registry",
    "models.stages",
    "models.tuning",
    *(
        name
        for name in MODULES
        if name.startswith(("megacore.planning.", "megacore.recovery.", "megacore.store."))
        and name not in (FILLS_TENSORS, *MEASURE, *AGENT)
    ),
    *(f"tools.{name}" for name in ("context", "convert", "reshard", "inspect", "main", "plan", "status")),
    *("tools.tokenize", "tools.merge_tokens", *(f"megacore.data.{name}" for name in TOKENS)),
]


def floor(name: str) -> int:
    return LOWER.get(name, PACKAGES[name.partition(".")[0]])


def complaints() -> Iterator[str]:
    """Yield the imports that stay on no floor of ours, or lead up."""
    for importer, path in MODULES.items():
        here = floor(importer)
        for line, name in imports(path):
            if ours(name) and name not in MODULES:
                yield f"{path}:{line}: there is no module {name}"
            elif ours(name) and floor(name) > here:
                yield f"{path}:{line}: floor {here} imports {name} of floor {floor(name)}"
            elif name.partition(".")[0] in ("tests", "benchmarks"):
                yield f"{path}:{line}: imports {name}"
            elif here == 0 and not ours(name) and name.partition(".")[0] not in INTEGERS:
                yield f"{path}:{line}: floor 0 computes with integers, and imports {name}"


@pytest.mark.quick
def test_imports_go_down() -> None:
    """Never to a higher floor; within one floor there are no circles (below)."""
    assert not [*complaints()]


def test_no_circles() -> None:
    graph = {name: {other for _, other in imports(path) if ours(other)} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' -> '.join(error.args[1])}")


ARROWS = {"launch": 1, "megacore": 113, "models": 9, "parallel": 12, "tools": 18}
"""The most arrows from the rooms of a package, which may only fall; `python tests/house/graph.py` draws them. Some are
of `megacore/__init__.py` alone, the Python door: a name for each command leads to the room where it is done; eleven are
of `megacore/planning/trace`, which runs a trainer."""


def test_arrows_between_rooms_do_not_grow() -> None:
    assert counts() <= Counter(ARROWS), "a room imports from one more: python tests/house/graph.py"


FLOORS = {"models": 10}
"""The rooms with more than six floors, which may only fall: a config builds its model, and configs of parts stand on it
that families are made of."""


def test_rooms_are_no_towers() -> None:
    assert not {name: floors for name, floors in graph.floors().items() if floors > FLOORS.get(name, 6)}


def test_the_page_of_the_house_is_printed_from_it() -> None:
    assert (ROOT / "docs" / "house.md").read_text() == graph.page(), "python tests/house/graph.py > docs/house.md"


def reached(*names: str) -> set[str]:
    """These modules and all that they import, directly or not."""
    wanted, found = set(names), set[str]()
    while new := wanted - found:
        found |= new
        wanted |= {other for name in new for _, other in imports(MODULES[name]) if ours(other)}
    return found


def test_a_bare_step_needs_torch_and_little_else() -> None:
    """Images with GPUs have torch, and often no pydantic: recipes alone need it."""
    found = reached(
        "megacore.training.step",
        "megacore.hardware",
        # Kernels in Triton are imported where it is.
        *(name for name in MODULES if not name.startswith(("megacore", "launch", "tools", "parallel.kernels.fused"))),
    )
    others = {other.partition(".")[0] for name in found for _, other in imports(MODULES[name]) if not ours(other)}
    # torch brings fsspec along, which is imported where a URL is named.
    assert others - sys.stdlib_module_names == {"torch", "numpy", "einops", "fsspec"}


TRAINING = {f"megacore.training.{name}" for name in ("initial_state", "main", "resume", "save", "step", "trainer")}
READERS = [f"tools.{name}" for name in ("convert", "evaluate", "generate", "inspect", "verify")]


def test_who_reads_weights_imports_nothing_of_training() -> None:
    """Loading lives below both: who generates, evaluates, exports or inspects waits for no optimizer and no run."""
    training = TRAINING | {other for other in MODULES if other.startswith("megacore.training.states.")}
    readers = READERS + [name for name in MODULES if name.startswith("megacore.inference")]
    assert not {name: found for name in readers if (found := reached(name) & training)}


def test_every_listed_module_exists() -> None:
    assert {*LOWER, *WITHOUT_TORCH, *TRAINING, FILLS_TENSORS} <= set(MODULES)


@pytest.mark.quick
def test_configs_and_weights_tables_import_without_torch() -> None:
    """In a fresh process: floor 0 and every preset's weights table, layout and plan, with torch nowhere."""
    script = f"""
import importlib, sys
for name in {WITHOUT_TORCH!r}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
from megacore.models.registry import configure, presets
from megacore.parallel.weights.layout import Layout, MeshShape, balanced_layers
from megacore.parallel.weights.transfer import hugging_face, native, plan
for preset in presets():
    schema = configure({{"preset": preset}}).schema
    assert schema.parameters
    mesh = MeshShape(tp=2, pp=2)
    layout = Layout(schema, mesh, balanced_layers(schema.sizes["layer"], 2)) if preset.endswith("-tiny") else None
    if layout:
        list(plan(schema, hugging_face(schema), native(layout, range(4))))
assert not {{"torch", "transformers"}} & set(sys.modules), "torch"
print("without torch")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "without torch\n", done.stderr
