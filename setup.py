"""All else is in pyproject.toml."""

from setuptools import setup
from setuptools.command.build_py import build_py


class ShortNames(build_py):
    """What builds ``parallel`` and ``models`` of a wheel: their first file alone, which leads to ``megacore``."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        return [each for each in found if package.startswith("megacore") or each[1] == "__init__"]


setup(cmdclass={"build_py": ShortNames})
