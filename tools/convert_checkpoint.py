"""Convert, verify and inspect model folders: the same commands as `python -m megatron_bridge` and `rlflow-convert`."""

import sys

from megatron_bridge.cli import main

if __name__ == "__main__":
    sys.exit(main())
