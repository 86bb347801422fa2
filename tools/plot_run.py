"""Draw a run: reward and held-out accuracy against steps, the format rate apart.

python tools/plot_run.py RUN_DIR [--out FILE]      writes RUN_DIR/curve.png
"""

import argparse
import sys
from pathlib import Path

from rlflow.errors import UserError
from rlflow.tracking import plot, read_records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--out", type=Path, help="picture to write; RUN_DIR/curve.png if left out")
    args = parser.parse_args()
    out = args.out or args.run_dir / plot.FILE_NAME
    try:
        plot.draw(read_records(args.run_dir), args.run_dir.resolve().name, out)
    except UserError as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
