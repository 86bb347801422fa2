"""The best one-to-one assignment of rows to columns, exactly: small matrices, integers, no dependency."""

from collections.abc import Sequence
from math import inf


def assign(gain: Sequence[Sequence[int]]) -> list[int]:
    """The column of each row of a square matrix, such that the sum of the chosen entries is largest.

    The primal-dual method of Kuhn and Munkres with shortest augmenting paths (Jonker and Volgenant, 1987): O(n³). The
    diagonal is returned if it is among the best.
    """
    size = len(gain)
    row_of = [-1] * size  # of each column
    row_price, column_price = [0.0] * size, [0.0] * size
    for row in range(size):
        _augment(gain, row, row_of, row_price, column_price)
    columns = [0] * size
    for column, row in enumerate(row_of):
        columns[row] = column
    best = sum(gain[row][column] for row, column in enumerate(columns))
    return list(range(size)) if sum(gain[i][i] for i in range(size)) == best else columns


def _augment(
    gain: Sequence[Sequence[int]], start: int, row_of: list[int], row_price: list[float], column_price: list[float]
) -> None:
    """Give row `start` a column, moving rows that have one already along the cheapest alternating path."""
    size = len(gain)
    distance, before = [inf] * size, [-1] * size  # to each column, and the column before it on the path
    done: list[int] = []
    row, last, length = start, -1, 0.0
    while row >= 0:
        for column in set(range(size)) - set(done):
            through = length - gain[row][column] - row_price[row] - column_price[column]
            if through < distance[column]:
                distance[column], before[column] = through, last
        last = min(set(range(size)) - set(done), key=lambda column: (distance[column], column))
        length, row = distance[last], row_of[last]
        done.append(last)
    row_price[start] += length
    for column in done[:-1]:
        row_price[row_of[column]] += length - distance[column]
        column_price[column] -= length - distance[column]
    while last >= 0:
        row_of[last] = row_of[before[last]] if before[last] >= 0 else start
        last = before[last]
