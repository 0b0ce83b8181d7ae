"""Fills a run's parameters and optimizer from what it starts from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacore.control import Control
from megacore.parallel.parameters import Parameters
from megacore.store.weight_folders import audit
from megacore.store.weight_folders.index import MASTER, RESIDUAL, kept_as, kind_of, residuals_of
from megacore.store.weight_folders.loader import Loader

if TYPE_CHECKING:
    from megacore.training.resume import Start
    from megacore.training.states.optimizer import Optimizer

_JOBS = 2
"""Threads that read what is carried."""


def load_initial_state(start: Start, parameters: Parameters, optimizer: Optimizer, seed: int, control: Control) -> None:
    """Fill this rank's parameters, and of a run that goes on the optimizer, one tensor at a time.

    Masters, where a checkpoint has them, are what the weights that are trained are rounded from, in whatever precision
    they are now. What no folder has is drawn. Raises DamageError, StoreError: as of :meth:`Loader.verify`, or what a
    checkpoint carries is damaged, which nobody loads, but saves write on; on every rank.
    """
    loader = Loader(parameters, control)
    left = set(parameters)
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    for folder in (start.adapters, start.source):
        for state, names in ((MASTER, trained), ("weights", left)):
            if folder is not None:
                for name, tensor in loader.tensors(folder, state, names & left & folder.names(state)):
                    optimizer.load_weight(name, tensor)
                    left.discard(name)
    for name in sorted(left):
        optimizer.load_weight(name, parameters.drawn(name, seed))
    if start.trainer is not None:
        going_on = start.adapters or start.source
        assert going_on is not None  # it has said how far it is
        for state in optimizer.states():  # in one order on all ranks, whose sets of strings have orders of their own
            kept = kept_as(state, going_on.states)
            if state != MASTER and kind_of(state)[0] != RESIDUAL and kept is not None:
                mine = kind_of(state)[1] in (None, optimizer.replica)
                wanted = trained & going_on.names(kept) if mine else set[str]()
                for name, tensor in loader.tensors(going_on, kept, wanted):
                    optimizer.load_from(state, name, tensor)
        if ours := optimizer.residuals:
            apart = Loader(parameters, control, share=False)
            for number, state in enumerate(residuals_of(going_on.states)):
                # Dealt out in turns: what all have left together is as it was.
                mine = number % ours == optimizer.data_rank
                for name, tensor in apart.tensors(going_on, state, trained & going_on.names(state) if mine else set()):
                    optimizer.add_residual(name, tensor)
            apart.verify()
        optimizer.updates = start.progress.updates
    loader.verify()
    source = start.source if start.adapters is None else None
    if source is not None and source.index.carried is not None:

        def check() -> list[str]:
            carried = source.carried if control.mesh.rank == 0 else None
            return [] if carried is None else [str(each) for each in audit.check(carried, _JOBS)]

        if told := control.tell(control.attempt(check)):
            raise audit.DamageError.of(source.path, told)
