"""The layout of vLLM's models under tensor, expert and pipeline parallelism, one or several replicas.

Names and shapes are those of `model.named_parameters()` in a vLLM worker. Binding them to live tensors is left to
`bind_vllm`.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from megatron_bridge.boxes import Param
from megatron_bridge.families import FAMILIES, Architecture
from megatron_bridge.layouts.layout import (
    EMBEDDING,
    NORM,
    Cuts,
    Layout,
    Unit,
    cut_faults,
    expert_cuts,
    head_units,
    layer_prefix,
    layer_units,
    raise_faults,
    round_up,
    sharded_params,
    tensor_cuts,
    vocab_params,
)

VOCAB_PADDING = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE


@dataclass(frozen=True)
class VLLMLayout(Layout):
    """Engines of `tp · pp` consecutive entries of `ranks` (by default ranks 0 … tp·pp − 1, one engine), tp fastest.

    With `ep` routed experts go whole to the tensor-parallel ranks of a stage; else each expert is cut over them.
    """

    arch: Architecture
    tp: int = 1
    ranks: tuple[int, ...] = ()
    pp: int = 1
    ep: bool = False

    def __post_init__(self) -> None:
        size = self.tp * self.pp
        object.__setattr__(self, "ranks", tuple(self.ranks) or tuple(range(size)))
        cuts = {**tensor_cuts(self.tp, 0), **self._expert_cuts(0)}
        faults = cut_faults(self.arch, cuts, replicate_kv=True)
        if self.arch.head != "lm":
            faults.append("a model with a score head generates nothing")
        if len(set(self.ranks)) != len(self.ranks) or len(self.ranks) % size:
            faults.append(
                f"ranks {list(self.ranks)} do not form engines of tensor parallel size {self.tp}, pp {self.pp}"
            )
        if self.padded_vocab % self.tp:
            faults.append(f"padded vocabulary {self.padded_vocab} does not split over tensor parallel size {self.tp}")
        if self.arch.layers < self.pp:
            faults.append(f"{self.arch.layers} layers do not fill {self.pp} pipeline stages")
        raise_faults("vllm layout", faults)

    @property
    def padded_vocab(self) -> int:
        """Rows of the whole embedding, padding included."""
        return round_up(self.arch.vocab, VOCAB_PADDING)

    @cached_property
    def _index(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.ranks)}

    def _expert_cuts(self, index: int) -> Cuts:
        return expert_cuts(self.tp, index, 1, 0) if self.ep else expert_cuts(1, 0, self.tp, index)

    def shard(self, rank: int, kind: str) -> Hashable:
        return self._index[rank] % self.tp

    def units(self, rank: int) -> tuple[Unit, ...]:
        return _stage_units(self.arch, self.pp, self._index[rank] // self.tp % self.pp) if rank in self._index else ()

    def params(self, kind: str, shard: Hashable) -> tuple[Param, ...]:
        assert isinstance(shard, int)
        if kind == "vocab":
            return vocab_params(self.arch, self.padded_vocab, self.tp, shard)
        cuts = self._expert_cuts(shard) if kind == "experts" else tensor_cuts(self.tp, shard)
        return sharded_params(self.arch, kind, FAMILIES[self.arch.family].units[kind].vllm, cuts)


def stage_layers(layers: int, pp: int) -> list[range]:
    """Layers of each pipeline stage as vLLM splits them: what is left over goes to the stages before the last."""
    sizes = [layers // pp] * pp
    for extra in range(layers % pp):
        sizes[-extra - 2] += 1
    ends = list(accumulate(sizes, initial=0))
    return [range(begin, end) for begin, end in pairwise(ends)]


@lru_cache(maxsize=256)
def _stage_units(arch: Architecture, pp: int, stage: int) -> tuple[Unit, ...]:
    """Units of a pipeline stage; the last one has a copy of a tied embedding."""
    last = stage == pp - 1
    units = [Unit("vocab", EMBEDDING, EMBEDDING)] if stage == 0 or (last and arch.tied) else []
    for layer in stage_layers(arch.layers, pp)[stage]:
        units += layer_units(arch, layer, layer_prefix(layer))
    return (*units, Unit("norm", NORM, NORM), *head_units(arch)) if last else tuple(units)
