"""What others get: public names that a type checker knows, and a wheel with recipes and launch scripts."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import megacore
import parallel

ROOT = Path(__file__).parents[2]
PACKAGES = ("launch", "megacore", "models", "parallel", "tools")


@pytest.mark.quick
@pytest.mark.parametrize("package", [megacore, parallel], ids=lambda package: package.__name__)
def test_type_checkers_know_every_public_name(package: ModuleType) -> None:
    """They follow imports and not __getattr__: the same names of the same modules stand under TYPE_CHECKING."""
    tree = ast.parse(Path(str(package.__file__)).read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name))
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    told = {alias.asname: node.module for node in imports for alias in node.names}
    assert told == package._PUBLIC
    assert all(getattr(getattr(package, name), "__name__", name) == name for name in package._PUBLIC)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    subprocess.run(build, cwd=tree, check=True)
    (made,) = folder.glob("*.whl")
    return made


def test_a_wheel_has_all_that_a_user_needs(wheel: Path) -> None:
    assert wheel.name.startswith(f"megacore-{megacore.__version__}-")
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
    inside = {f"megacore/{name}" if name.partition("/")[0] != "megacore" else name for name in tracked()}
    assert inside <= names, "a file was forgotten"
    # The packages with short names lead to those inside, and hold nothing themselves.
    assert {name for name in names if not name.startswith("megacore/")} == {
        f"{short}/{name}" for short in ("models", "parallel") for name in ("__init__.py", "py.typed")
    }


def tracked() -> set[str]:
    """Every file of a package that is neither compiled nor a note."""
    files = {path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()}
    return {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}


@pytest.mark.in_turn(6, 1)
def test_packages_of_the_users_own_never_hide_ours(wheel: Path, tmp_path: Path) -> None:
    """A user's folder is on the path before ours, for the commands, under torchrun and in a notebook."""
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "site")
    own = tmp_path / "own"
    own.mkdir()
    for name in ("parallel", "models", "tools", "launch"):  # no folders: an editable install would lend them its files
        (own / f"{name}.py").write_text("MINE = True\n")
    environment = os.environ | {"PYTHONPATH": f".{os.pathsep}{tmp_path / 'site'}", "OMP_NUM_THREADS": "1"}

    def python(*arguments: str) -> str:
        given = [sys.executable, *arguments]
        done = subprocess.run(given, cwd=own, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    printed = "megacore.Trainer, models.MINE, parallel.MINE, tools.MINE"
    notebook = f"import megacore, models, parallel, tools; print({printed})"
    assert "megacore.training.trainer.Trainer" in python("-c", notebook)
    assert python("-c", "import megacore; print(megacore.__file__)").startswith(str(tmp_path / "site"))
    assert "tp" in python("-m", "megacore.tools.main", "config")
    recipe = ["quickstart", f"data.train={own / 'none'}"]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "megacore.training"]
    for command in (["-m", "megacore.tools.main", "train"], ranks):
        done = subprocess.run(
            [sys.executable, *command, *recipe], cwd=own, env=environment, capture_output=True, text=True, check=False
        )
        assert "problem" in done.stderr and "none.bin" in done.stderr, done.stderr


def test_the_short_names_are_the_same_modules() -> None:
    code = """
import parallel, models.registry, parallel.pipeline.run
from parallel import ColumnParallelLinear
from models.families.llama import LlamaConfig
import megacore.parallel, megacore.models.registry, megacore.parallel.pipeline.run
import megacore.models.families.llama as llama
assert parallel is megacore.parallel and models.registry is megacore.models.registry
assert parallel.pipeline.run is megacore.parallel.pipeline.run and LlamaConfig is llama.LlamaConfig
assert llama.__spec__.name == llama.__name__ == "megacore.models.families.llama"
assert ColumnParallelLinear is megacore.parallel.ColumnParallelLinear
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
