"""Modules in a folder that nobody may import from: each leaves a mark when it is run."""

from pathlib import Path

MODULES = ("yaml", "torch", "tqdm", "apex", "numpy", "transformers", "runpy", "json")
PACKAGES = ("megacore", "models", "parallel", "tools")


def set_traps(folder: Path) -> Path:
    """Fill a folder with modules of the names that are imported -> the mark, which is not there yet."""
    mark = folder / "mark"
    text = f"open({str(mark)!r}, 'a').write(__name__ + chr(10))\nraise SystemExit('a trap')\n"
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(text)
    for name in MODULES:
        (folder / f"{name}.py").write_text(text)
    return mark
