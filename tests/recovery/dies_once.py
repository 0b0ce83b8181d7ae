"""One rank of a run that is killed in its sixth step, if nobody has started the run before."""

import os
import signal
import sys
from typing import Any

from megacore.rank import RankPlace
from megacore.training.main import main
from megacore.training.step import TrainStep

STEP = 6

before = TrainStep.backward
done = list[TrainStep]()


def step(self: TrainStep, *given: Any, **named: Any) -> Any:
    done.append(self)
    if len(done) == STEP and RankPlace.of_environment().rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return before(self, *given, **named)


if __name__ == "__main__":
    setattr(TrainStep, "backward", step)  # noqa: B010 # mypy lets no method be assigned
    sys.exit(main(sys.argv[1:]))
