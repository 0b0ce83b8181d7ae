"""``python -m megacore.training RECIPE [section.key=value ...]`` is one rank of a run, protected where the room of
recovery is there."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from megacore.rank import Here
from megacore.training.main import main
from megacore.training.trainer import Callback


def _protection() -> list[Callback]:
    if find_spec("megacore.recovery") is None:
        return []
    from megacore.recovery.protection import protection

    return protection(Here.now())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _protection()))
