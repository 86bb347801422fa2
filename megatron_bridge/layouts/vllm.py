"""The layout of vLLM's models under tensor parallelism, one or several replicas.

Names and shapes are those of `model.named_parameters()` in a vLLM worker. Binding them to live tensors is left to
`bind_vllm`.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

from megatron_bridge.boxes import Param
from megatron_bridge.families import FAMILIES, Architecture
from megatron_bridge.layouts.layout import (
    Layout,
    Unit,
    canonical_units,
    raise_faults,
    round_up,
    sharded_params,
    split_faults,
    vocab_params,
)

VOCAB_PADDING = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE


@dataclass(frozen=True)
class VLLMLayout(Layout):
    """Engines of `tp` consecutive entries of `ranks` (by default ranks 0 … tp − 1, one engine)."""

    arch: Architecture
    tp: int = 1
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks) or tuple(range(self.tp)))
        faults = split_faults(self.arch, self.tp, replicate_kv=True)
        if len(set(self.ranks)) != len(self.ranks) or len(self.ranks) % self.tp:
            faults.append(f"ranks {list(self.ranks)} do not form engines of tensor parallel size {self.tp}")
        if self.padded_vocab % self.tp:
            faults.append(f"padded vocabulary {self.padded_vocab} does not split over tensor parallel size {self.tp}")
        raise_faults("vllm layout", faults)

    @property
    def padded_vocab(self) -> int:
        """Rows of the whole embedding, padding included."""
        return round_up(self.arch.vocab, VOCAB_PADDING)

    @cached_property
    def _index(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.ranks)}

    def shard(self, rank: int, kind: str) -> Hashable:
        return self._index[rank] % self.tp

    def units(self, rank: int) -> tuple[Unit, ...]:
        return canonical_units(self.arch) if rank in self._index else ()

    def params(self, kind: str, shard: Hashable) -> tuple[Param, ...]:
        assert isinstance(shard, int)
        if kind == "vocab":
            return vocab_params(self.arch, self.padded_vocab, self.tp, shard)
        return sharded_params(self.arch, kind, FAMILIES[self.arch.family].vllm[kind], self.tp, shard)
