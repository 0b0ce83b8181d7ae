"""torchrun that ends quietly: what a trainer has said is not followed by the launcher's own stack trace."""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main() -> int:
    """The exit status: of the first process that failed, or 128 + the signal that ended the launcher."""
    try:
        torchrun(sys.argv[1:])
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        failure = error.get_first_failure()[1]
        if failure.exitcode not in (1, 2):  # those two have said what was wrong
            print(error, file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
