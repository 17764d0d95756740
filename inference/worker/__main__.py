"""`python -m inference.worker`: the model process; decides nothing."""

import sys

from inference.worker.service import main

if __name__ == "__main__":
    sys.exit(main())
