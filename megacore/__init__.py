"""The training engine: ``megacore.train(recipe, overrides, callbacks)`` trains, as ``megacore train`` does, and
``megacore.plan(recipe, overrides)`` says what that needs, as ``megacore plan`` does.

Names are imported when they are asked for: recipes are read without torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # type checkers and editors follow imports, not __getattr__
    from megacore.planning.run_plan import plan as plan
    from megacore.training.main import train as train
    from megacore.training.trainer import Callback as Callback
    from megacore.training.trainer import Trainer as Trainer

__version__ = "0.1.0"

_PUBLIC = {
    "Callback": "megacore.training.trainer",
    "Trainer": "megacore.training.trainer",
    "plan": "megacore.planning.run_plan",
    "train": "megacore.training.main",
}


def __getattr__(name: str) -> object:
    import importlib

    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return [*_PUBLIC, "__version__"]
