"""Generalised advantage estimation on rows of unequal length, as a pure function of rewards and values.

Where rewards on tokens come from, which samples count and whether the result is whitened is left to `advantages`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.algorithms.aggregation import rows_count
from rlflow.batch import Ragged


def estimate_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, lengths: Tensor, last_values: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """A_t = δ_t + γλ·A_{t+1} with δ_t = r_t + γ·V_{t+1} − V_t (Schulman et al. 2016), float64 [R], 0 outside the mask.

    `rewards`, `values` and `mask` (bool) are [R], tokens of n rows with `lengths` [n]; V_t is the value before token t
    is chosen. `last_values` [n] is what follows a row's last token: 0 where the episode is over. Tokens outside the
    mask are skipped: the next value and advantage pass through them, and what they hold is never read.
    """
    kept = rows_count(mask, lengths)
    kept_values = Ragged(values[mask].double(), kept)
    following = _following(kept_values, last_values.double())
    deltas = Ragged(rewards[mask].double() + gamma * following - kept_values.values, kept)
    advantages = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    return advantages.masked_scatter(mask, _discounted_sums(deltas, gamma * lam))


def _following(rows: Ragged, last: Tensor) -> Tensor:
    """For each value the next one of its row, and `last` [n] after the end: [sum of lengths]."""
    shifted = rows.values.roll(-1)
    ends = rows.offsets[1:] - 1
    filled = rows.lengths > 0
    return shifted.index_copy(0, ends[filled], last[filled])


def _discounted_sums(rows: Ragged, discount: float) -> Tensor:
    """Σ_k discount^k · x_{t+k} to the end of the row: [sum of lengths].

    All rows are walked at once from their ends, one token before the other: as many steps as the longest row is long.
    """
    row = rows.row_ids()
    from_end = rows.offsets[1:][row] - 1 - torch.arange(len(row), device=row.device)
    longest = int(rows.lengths.max()) if len(rows) else 0
    table = rows.values.new_zeros(longest, len(rows))
    table[from_end, row] = rows.values
    for distance in range(1, longest):
        table[distance].add_(table[distance - 1], alpha=discount)
    return table[from_end, row]
