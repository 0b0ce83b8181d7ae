"""The virtual environments of the peers: one each, as their requirements exclude each other's."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / ".venvs"


@dataclass(frozen=True)
class Environment:
    """What pip installs beside torch.

    Args:
        requirements: All of it.
        built_with: What the build of one of them wants beside torch, in the environment itself; none for builds apart.
    """

    requirements: tuple[str, ...]
    built_with: tuple[str, ...] = ()


ENVIRONMENTS: Mapping[str, Environment] = {
    "hf": Environment(("transformers==5.23.0",)),
    "mcore": Environment(("megatron-core==0.16.1",)),
    "litgpt": Environment(("litgpt==0.5.13",)),
    "trl": Environment(
        ("transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0", "peft==0.21.2", "trl==1.16.0")
    ),
    "torchft": Environment(("torchft-nightly==2026.10.26", "transformers==5.23.0", "numpy")),
    "deepspeed": Environment(("deepspeed==0.19.8", "transformers==5.23.0"), ("setuptools", "wheel")),
}
CONSTRAINTS = ("torch==2.13.0",)
VARIABLES = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
"""For pip and for runs: DeepSpeed compiles no kernels beforehand, and looks for no GPU."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`ready` takes."""
    parser.add_argument("--python", nargs="+", default=[], metavar="NAME=PATH", help="an environment's interpreter")
    parser.add_argument("--setup", action="store_true", help="make the environments of the peers and stop")


def ready(arguments: argparse.Namespace, *names: str) -> dict[str, Path]:
    """{name: interpreter}: those given, those that were made, and the running one for us and transformers; with
    ``--setup`` the environments of these names, or all, are made and that is all."""
    if arguments.setup:
        set_up(*names)
        sys.exit()
    given = {name: Path(path) for name, path in (pair.split("=", 1) for pair in arguments.python)}
    here = Path(sys.executable)
    made = {name: FOLDER / name / "bin" / "python" for name in ENVIRONMENTS}
    return {"ours": here, "hf": here} | {name: python for name, python in made.items() if python.exists()} | given


def set_up(*names: str) -> None:
    """Make every environment of these, or of all, that is not there yet, with torch at the tested version."""
    for name, environment in ENVIRONMENTS.items():
        if names and name not in names:
            continue
        folder = FOLDER / name
        if (folder / "bin" / "python").exists():
            continue
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            constraints.write("\n".join(CONSTRAINTS))
            constraints.flush()
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-c", constraints.name]
            subprocess.run([*pip, *CONSTRAINTS, *environment.built_with], check=True)
            here = ["--no-build-isolation"] if environment.built_with else []
            subprocess.run([*pip, *here, *environment.requirements], env={**os.environ, **VARIABLES}, check=True)
