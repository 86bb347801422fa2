"""`python -m rlflow` is the `rlflow` command."""

import sys

from rlflow.cli import main

if __name__ == "__main__":
    sys.exit(main())
