"""`python -m headgate` is the `headgate` console script."""

import sys

from headgate.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
