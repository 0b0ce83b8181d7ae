"""gloo with NCCL's rule of first use: ranks connect at their first call on a group, and each waits for the others.

Collectives connect all ranks of a group, messages one pair of it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from megacore.parallel import collectives

PATIENCE = timedelta(seconds=20)
MESSAGES = (dist.isend, dist.irecv, dist.send, dist.recv)
COLLECTIVES = ((dist, "all_reduce"), (dist, "broadcast"))
SHARDED = ((collectives, "_all_gather_single"), (collectives, "_reduce_scatter_single"))


@contextmanager
def connecting_at_first_use() -> Iterator[list[str]]:
    """In this block, of this process -> what has connected so far. Who waits for too long raises."""
    connected: list[str] = []
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()

    def meet(group: dist.ProcessGroup | None, kind: str, ranks: list[int]) -> None:
        group = group or dist.group.WORLD
        assert group is not None
        name = f"{group.group_name}, {kind} of {sorted(ranks)}"
        if name not in connected:
            store.set(f"{name}/{rank}", "here")
            store.wait([f"{name}/{other}" for other in ranks], PATIENCE)
            connected.append(name)

    def message(real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def call(tensor: Any, peer: int, group: dist.ProcessGroup | None = None) -> Any:
            meet(group, "messages", [rank, peer])
            return real(tensor, peer, group=group)

        return call

    def collective(real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def call(*given: Any, group: dist.ProcessGroup | None = None, **more: Any) -> Any:
            meet(group, "collectives", dist.get_process_group_ranks(group))
            return real(*given, group=group, **more)

        return call

    patches = [patch.object(dist, real.__name__, message(real)) for real in MESSAGES]
    patches += [patch.object(dist, "get_backend", lambda group=None: "nccl")]  # no messages in place of collectives
    patches += [patch.object(where, name, collective(getattr(where, name))) for where, name in (*COLLECTIVES, *SHARDED)]
    for each in patches:
        each.start()
    try:
        yield connected
    finally:
        for each in patches:
            each.stop()
