"""Convert, verify and inspect model folders: the same commands as `python -m megatron_bridge` and `rlflow-convert`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also where rlflow is not installed

from megatron_bridge.cli import main

if __name__ == "__main__":
    sys.exit(main())
