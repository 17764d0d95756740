"""`python -m inference.worker`: the model process."""

import sys

from inference.worker.service import main

if __name__ == "__main__":
    sys.exit(main())
