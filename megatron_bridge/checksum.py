"""64-bit digests of tensors, and of messages, with which they go, to compare what arrived with what was sent.

A digest is the sum of a tensor's words, each times an odd random factor of its place, wrapping around: one changed
word always changes it, words in another order almost surely. With a message also travels which one it is, because an
exchange that delivers nothing leaves an older message, whole with its digest, in the bucket.
"""

from functools import lru_cache

import torch
from torch import Tensor

from megatron_bridge.streams import DIGEST_BYTES

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 16  # words that one row of factors serves: in cache with their products on a CPU
CHUNKS_AT_ONCE = 256  # on a GPU, where launches cost more than 128 MiB of temporary memory


def seal(message: Tensor, identity: int) -> None:
    """Write digest and identity behind the payload of a message, uint8 with room for both at the end."""
    words, trailer = _split(message)
    trailer[0] = digest(words)
    trailer[1] = identity


def broken(message: Tensor, identity: int) -> Tensor:
    """Whether a message that arrived is not the one that was sealed with this identity: bool, on its device."""
    words, trailer = _split(message)
    return (trailer[0] != digest(words)) | (trailer[1] != identity)


def digest(tensor: Tensor) -> Tensor:
    """The digest of a tensor's bits, whatever its shape and type: an int64 scalar on its device."""
    words = tensor.contiguous().view(-1).view(WORDS[tensor.element_size()])
    inner, outer = _factors(words.device)
    at_once = CHUNKS_AT_ONCE if words.is_cuda else 1
    whole = words[: len(words) // CHUNK * CHUNK].view(-1, CHUNK)
    sums = [(part * inner).sum(1) for part in whole.split(at_once)]
    rest = words[whole.numel() :]
    sums.append((rest * inner[: len(rest)]).sum().view(1))
    chunks = torch.cat(sums)
    return (chunks * outer[: len(chunks)]).sum()


def _split(message: Tensor) -> tuple[Tensor, Tensor]:
    words, trailer = DIGEST_BYTES // 8, message.view(torch.int64)
    return trailer[:-words], trailer[-words:]


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**63), 2**63 - 1, (2, CHUNK), generator=generator) | 1
    return tuple(factors.to(device))
