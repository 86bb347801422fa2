"""The layout of megatron-core's GPTModel on a tensor × pipeline × data parallel grid.

Names and shapes are those of `GPTModel.named_parameters()` on the rank's pipeline stage, for the local layer spec or
Transformer Engine's. Binding them to live tensors is left to `bind_megatron`.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import lcm
from typing import Literal

from megatron_bridge.boxes import Param
from megatron_bridge.families import FAMILIES, Architecture
from megatron_bridge.layouts.layout import (
    EMBEDDING,
    HEAD,
    NORM,
    Layout,
    Unit,
    layer_prefix,
    raise_faults,
    round_up,
    sharded_params,
    split_faults,
    vocab_params,
)
from megatron_bridge.layouts.vllm import VOCAB_PADDING

TE_NAMES = {  # Transformer Engine fuses a norm with the linear layer that follows it
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
DEFAULT_ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True)
class MegatronLayout(Layout):
    """TP × PP × DP shards of one model.

    `order` names the grid's dimensions, fastest first; those that are not tp, dp or pp have size 1 here. `ranks`
    lists the grid's ranks in grid order, by default 0 … tp·pp·dp − 1. `stages` gives the layers of each pipeline
    stage, by default even. `vocab_multiple` None pads the vocabulary as vLLM does, so that equal TP sizes exchange no
    rows; a number pads to Megatron's rule, a multiple of `vocab_multiple · tp`.
    """

    arch: Architecture
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ranks: tuple[int, ...] = ()
    order: str = DEFAULT_ORDER
    stages: tuple[int, ...] = ()
    spec: Literal["local", "te"] = "local"
    vocab_multiple: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks) or tuple(range(self.tp * self.pp * self.dp)))
        object.__setattr__(self, "stages", tuple(self.stages) or (self.arch.layers // self.pp,) * self.pp)
        raise_faults("megatron layout", split_faults(self.arch, self.tp, replicate_kv=False) + self._grid_faults())

    def _grid_faults(self) -> list[str]:
        faults = []
        if not len(self.ranks) == len(set(self.ranks)) == self.tp * self.pp * self.dp:
            faults.append(f"ranks {list(self.ranks)} do not fill tp {self.tp} × pp {self.pp} × dp {self.dp}")
        names = self.order.split("-")
        if len(set(names)) != len(names) or not {"tp", "dp", "pp"} <= set(names):
            faults.append(f"order {self.order!r} does not name tp, dp and pp once each")
        if len(self.stages) != self.pp or sum(self.stages) != self.arch.layers or min(self.stages) < 1:
            stages, layers = "-".join(map(str, self.stages)), self.arch.layers
            faults.append(
                f"stages of {stages} layers are not {layers} layers on {self.pp} pipeline stages: give `stages`"
            )
        return faults

    @property
    def padded_vocab(self) -> int:
        """Rows of the whole embedding, padding included."""
        multiple = lcm(VOCAB_PADDING, self.tp) if self.vocab_multiple is None else self.vocab_multiple * self.tp
        return round_up(self.arch.vocab, multiple)

    @cached_property
    def _index(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.ranks)}

    def coordinate(self, rank: int, dimension: str) -> int:
        """A rank's place along `tp`, `pp` or `dp`."""
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        index = self._index[rank]
        for name in self.order.split("-"):
            index, place = divmod(index, sizes.get(name, 1))
            if name == dimension:
                return place
        raise KeyError(dimension)

    def shard(self, rank: int, kind: str) -> Hashable:
        return self.coordinate(rank, "tp")

    def units(self, rank: int) -> tuple[Unit, ...]:
        return _stage_units(self, self.coordinate(rank, "pp")) if rank in self._index else ()

    def params(self, kind: str, shard: Hashable) -> tuple[Param, ...]:
        assert isinstance(shard, int)
        if kind == "vocab":
            return vocab_params(self.arch, self.padded_vocab, self.tp, shard)
        params = sharded_params(self.arch, kind, FAMILIES[self.arch.family].megatron[kind], self.tp, shard)
        if self.spec == "te":
            params = tuple(param._replace(name=TE_NAMES.get(param.name, param.name)) for param in params)
        return params


@lru_cache(maxsize=4096)
def _stage_units(layout: MegatronLayout, stage: int) -> tuple[Unit, ...]:
    """Units of a pipeline stage; Megatron numbers the layers of each stage from 0."""
    starts = list(accumulate(layout.stages, initial=0))
    units = [Unit("vocab", EMBEDDING, "embedding.word_embeddings.")] if stage == 0 else []
    units += [
        Unit("layer", layer_prefix(layer), f"decoder.layers.{local}.")
        for local, layer in enumerate(range(starts[stage], starts[stage + 1]))
    ]
    if stage == layout.pp - 1:
        units.append(Unit("norm", NORM, "decoder.final_layernorm."))
        if not layout.arch.tied:
            units.append(Unit("vocab", HEAD, "output_layer."))
        elif layout.pp > 1:  # the last stage has no embedding to share, so it keeps a copy
            units.append(Unit("vocab", EMBEDDING, "output_layer."))
    return tuple(units)
