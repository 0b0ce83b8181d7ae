"""The launcher of ranks on this machine: of `megacore train` and `megacore finetune`, and of tools."""

from megacore.launcher.node import Node
from megacore.launcher.processes import launch, threads

__all__ = ["Node", "launch", "threads"]
