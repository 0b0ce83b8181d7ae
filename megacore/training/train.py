"""The function `megacore.train`: a run from Python."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from megacore.rank import Here, leave
from megacore.recipe import ConfigError
from megacore.say import say
from megacore.store.strict_json import StoreError
from megacore.training.callbacks.bad_steps import NonFinite
from megacore.training.export import export
from megacore.training.main import checked, fit, ready
from megacore.training.save import SaveError
from megacore.training.trainer import Callback


def train(recipe: str, overrides: Sequence[str] = (), callbacks: Sequence[Callback] = ()) -> int:
    """Train what a recipe describes, as the rank that this process is -> the last step that was done.

    Alone, in a notebook say, it is the only rank; under torchrun it is one of them. Checkpoints are kept in memory as
    under `megacore train`; whoever starts the ranks starts them again.

    Args:
        recipe: A file, or the name of one that comes along.
        overrides: Overrides of it, ``section.key=value``.
        callbacks: The callbacks beside those that the config asks for, in this order; the same on all ranks.

    Raises:
        ConfigError: all that is wrong with it, before any process group starts.
        NonFinite, SaveError, StoreError: the run has ended, on all ranks.
    """
    here = Here.now()
    setup = checked(recipe, overrides, here)
    device = ready(setup, here)
    try:
        run = fit(setup, device, here, [*protection(), *callbacks])
    except (ConfigError, NonFinite, SaveError, StoreError):  # on every rank
        leave(here)
        raise
    leave(here)
    if here.rank == 0 and setup.config.checkpoint.export is not None:
        say(export(setup.config, run.step))
    return run.step


def protection() -> list[Callback]:
    """Return the callbacks that protect a run, where the room of recovery is there: it trains without."""
    if find_spec("megacore.recovery") is None:
        return []
    from megacore.recovery import protection

    return protection.protection()
