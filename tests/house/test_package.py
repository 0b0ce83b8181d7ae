"""What others get: public names that a type checker knows, and a wheel with recipes and launch scripts."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import megacore
import parallel

ROOT = Path(__file__).parents[2]


def test_type_checkers_know_every_public_name() -> None:
    """They follow imports and not __getattr__: the same names of the same modules stand under TYPE_CHECKING."""
    tree = ast.parse(Path(str(parallel.__file__)).read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    told = {
        alias.asname: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert told == parallel._PUBLIC
    assert all(getattr(parallel, name) is not None for name in parallel._PUBLIC)


def test_a_wheel_has_all_that_a_user_needs(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    tree = tmp_path / "tree"
    for name in ("launch", "megacore", "models", "parallel", "tools"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    subprocess.run(build, cwd=tree, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"megacore-{megacore.__version__}-")
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    assert {f"{name}/py.typed" for name in ("megacore", "models", "parallel", "tools")} <= names
    wanted = [*(ROOT / "launch").glob("*.sh"), *(ROOT / "launch").glob("*.sbatch"), *ROOT.glob("launch/recipes/*.yaml")]
    assert {str(path.relative_to(ROOT)) for path in wanted} <= names and len(wanted) > 8
    sources = {str(path.relative_to(tree)) for path in tree.rglob("*.py") if "build" not in path.parts}
    assert sources <= names, "a package was forgotten"
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "docs"))]
