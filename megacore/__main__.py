"""``python -m megacore`` is the ``megacore`` command."""

import sys

from megacore.tools.main import main

if __name__ == "__main__":
    sys.exit(main())
