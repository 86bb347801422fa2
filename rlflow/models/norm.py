"""RMSNorm for the local layer spec; unlike megatron-core's torch norm it may be used under sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """x / rms(x) · weight over the last dimension, computed in float32 inside."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        # Under sequence parallelism each rank sees a part of the rows: megatron then sums this gradient over the group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
