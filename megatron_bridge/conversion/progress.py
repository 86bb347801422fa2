"""The progress bar of a conversion: bytes, rate and time left, on a terminal only."""

import sys
from types import TracebackType

from tqdm import tqdm


class Progress:
    """Counts bytes; shows them while it is open, if standard error is a terminal and nobody asked for quiet."""

    def __init__(self, total: int, label: str, *, quiet: bool = False) -> None:
        hidden = quiet or not sys.stderr.isatty()
        self._bar = tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=hidden, leave=False)

    def __call__(self, nbytes: int) -> None:
        """So many more bytes are done."""
        self._bar.update(nbytes)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
