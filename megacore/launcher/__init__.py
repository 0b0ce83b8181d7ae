"""What starts the ranks of this machine: the commands `megacore train` and `megacore finetune`, and those of tools."""

from megacore.launcher.processes import Node, gpus, launch, memory_of_gpus, threads

__all__ = ["Node", "gpus", "launch", "memory_of_gpus", "threads"]
