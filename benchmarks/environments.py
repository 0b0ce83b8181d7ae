"""The virtual environments of the peers: one each, as their requirements exclude each other's."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent / ".venvs"

REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "hf": ("transformers==5.23.0",),
    "mcore": ("megatron-core==0.16.1",),
    "litgpt": ("litgpt==0.5.13",),
}
CONSTRAINTS = ("torch==2.13.0",)


def find(given: Mapping[str, Path]) -> dict[str, Path]:
    """{name: interpreter}: those given, those that `set_up` made, and the running one for us and transformers."""
    here = Path(sys.executable)
    made = {name: FOLDER / name / "bin" / "python" for name in REQUIREMENTS}
    return {"ours": here, "hf": here} | {name: python for name, python in made.items() if python.exists()} | dict(given)


def set_up() -> None:
    """Make every environment that is not there yet, with torch at the tested version."""
    for name, requirements in REQUIREMENTS.items():
        folder = FOLDER / name
        if (folder / "bin" / "python").exists():
            continue
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            constraints.write("\n".join(CONSTRAINTS))
            constraints.flush()
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-c", constraints.name]
            subprocess.run([*pip, *CONSTRAINTS, *requirements], check=True)
