"""What float16 does not hold: whoever casts weights to it asks here, for a sync as for a file."""

import torch
from torch import Tensor

BEYOND = "has values beyond float16's largest, 65504"
INFINITE = 65520.0  # between the largest and the power of 2 that would follow: from here on float16 rounds to infinity


def is_beyond_float16(values: Tensor) -> bool:
    """Whether float16 would make an infinity of a finite value; one that is infinite already is no such value.

    Takes no memory where all values are in range, as they nearly always are.
    """
    if values.dtype == torch.float16 or values.itemsize == 1 or not values.is_floating_point() or not values.numel():
        return False
    least, most = values.detach().aminmax()
    if bool((least > -INFINITE) & (most < INFINITE)):
        return False
    magnitudes = values.detach().abs()  # NaN, which hides all others in a maximum, is neither
    return bool(((magnitudes >= INFINITE) & magnitudes.isfinite()).any())
