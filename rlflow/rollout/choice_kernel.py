"""The Triton kernels that choose a token from each row of logits and score it: one pass over them, and a chunk again.

A chunk of the vocabulary is drawn by its share of the probability, then a token of the chunk by its own, which gives
each token its probability and needs two random numbers a row. Imported on CUDA devices only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096


def choose(
    logits: Tensor, slots: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """A token of each row and its log-prob: logits [N, V], of any float type and row stride → int64 [N], float32 [N].

    `slots` [N] is where a row's temperature and seed are. The logits are divided by the temperature already; where it
    is 0 the likeliest token is taken, the first of several. Seed and position [N] decide the draw, and nothing else.
    """
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    peaks = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    masses, log_probs = torch.empty_like(peaks), torch.empty_like(peaks[:, 0])
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _summarize[(rows * chunks,)](logits, logits.stride(0), peaks, masses, vocab, chunks, CHUNK)
    _choose[(rows,)](
        logits, logits.stride(0), slots, temperatures, seeds, positions, peaks, masses, tokens, log_probs, vocab,
        chunks, CHUNK, max(2, triton.next_power_of_2(chunks)),
    )  # fmt: skip
    return tokens, log_probs


@triton.jit
def _summarize(logits, stride, peaks, masses, vocab, chunks, CHUNK: tl.constexpr):
    """The largest logit of a chunk, and the sum of exp(logit − largest); one without finite logits has no mass."""
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    peak = tl.max(values, 0)
    mass = tl.sum(tl.exp(values - tl.where(peak == float("-inf"), 0.0, peak)), 0)
    tl.store(peaks + row * chunks + chunk, peak)
    tl.store(masses + row * chunks + chunk, mass)


@triton.jit
def _draw(weights, uniform, likeliest):
    """The place that holds `uniform` of the weights' sum; one without weight is never taken."""
    reached = tl.cumsum(weights, 0)
    found = ((reached > uniform * tl.max(reached, 0)) & (weights > 0.0)).to(tl.int32)
    return tl.where(tl.max(found, 0) > 0, tl.argmax(found, 0), likeliest)


@triton.jit
def _choose(
    logits, stride, slots, temperatures, seeds, positions, peaks, masses, tokens, log_probs, vocab, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One program for a row."""
    row = tl.program_id(0).to(tl.int64)
    which = tl.arange(0, CHUNKS)
    inside = which < chunks
    peak = tl.load(peaks + row * chunks + which, mask=inside, other=float("-inf"))
    highest = tl.max(peak, 0)
    mass = tl.load(masses + row * chunks + which, mask=inside, other=0.0) * tl.exp(peak - highest)
    slot = tl.load(slots + row).to(tl.int64)
    greedy = tl.load(temperatures + slot) == 0.0
    first, second, _, _ = tl.rand4x(tl.load(seeds + slot), tl.load(positions + row).to(tl.int32))
    likeliest = tl.argmax(peak, 0)
    chunk = tl.where(greedy, likeliest, _draw(mass, first, likeliest))
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    likeliest = tl.argmax(values, 0)
    place = tl.where(greedy, likeliest, _draw(tl.exp(values - tl.max(values, 0)), second, likeliest))
    token = tl.minimum(chunk * CHUNK + place, vocab - 1)
    value = tl.load(logits + row * stride + token).to(tl.float32)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(log_probs + row, value - highest - tl.log(tl.sum(mass, 0)))
