"""`python -m megatron_bridge`."""

import sys

from megatron_bridge.cli import main

if __name__ == "__main__":
    sys.exit(main())
