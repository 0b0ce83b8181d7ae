"""The training engine and what it trains, from Python: each command is thin over a function of its name
(docs/python.md).

Names are imported when they are asked for: recipes are read, and folders converted, without torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # type checkers and editors follow imports, not __getattr__
    from megacore.config import Config as Config
    from megacore.inference.evaluation import evaluate as evaluate
    from megacore.inference.loaded_model import LoadedModel as LoadedModel
    from megacore.inference.loaded_model import generate as generate
    from megacore.inference.loaded_model import load_model as load_model
    from megacore.models.config import ModelConfigError as ModelConfigError
    from megacore.models.registry import register_family as register_family
    from megacore.parallel.weights.layout import MeshShape as MeshShape
    from megacore.planning.run_plan import plan as plan
    from megacore.recipe import ConfigError as ConfigError
    from megacore.store.conversions.convert import convert as convert
    from megacore.store.io.errors import StoreError as StoreError
    from megacore.store.weight_folders.audit import DamageError as DamageError
    from megacore.training.callbacks.bad_steps import NonFinite as NonFinite
    from megacore.training.finished_run import FinishedRun as FinishedRun
    from megacore.training.main import finetune as finetune
    from megacore.training.main import train as train
    from megacore.training.save import SaveError as SaveError
    from megacore.training.trainer import Callback as Callback
    from megacore.training.trainer import Trainer as Trainer

__version__ = "0.1.0"

_PUBLIC = {
    "Callback": "megacore.training.trainer",
    "Config": "megacore.config",
    "ConfigError": "megacore.recipe",
    "DamageError": "megacore.store.weight_folders.audit",
    "FinishedRun": "megacore.training.finished_run",
    "LoadedModel": "megacore.inference.loaded_model",
    "MeshShape": "megacore.parallel.weights.layout",
    "ModelConfigError": "megacore.models.config",
    "NonFinite": "megacore.training.callbacks.bad_steps",
    "SaveError": "megacore.training.save",
    "StoreError": "megacore.store.io.errors",
    "Trainer": "megacore.training.trainer",
    "convert": "megacore.store.conversions.convert",
    "evaluate": "megacore.inference.evaluation",
    "finetune": "megacore.training.main",
    "generate": "megacore.inference.loaded_model",
    "load_model": "megacore.inference.loaded_model",
    "plan": "megacore.planning.run_plan",
    "register_family": "megacore.models.registry",
    "train": "megacore.training.main",
}


def __getattr__(name: str) -> object:
    import importlib

    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return [*_PUBLIC, "__version__"]
