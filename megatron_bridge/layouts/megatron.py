"""The layout of megatron-core's GPTModel on a tensor × pipeline × expert × data parallel grid.

Names and shapes are those of `GPTModel.named_parameters()` on the rank's pipeline stage, for the local layer spec or
Transformer Engine's. Binding them to live tensors is left to `bind_megatron`.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import lcm
from typing import Literal

from megatron_bridge.boxes import Param
from megatron_bridge.errors import UserError
from megatron_bridge.families import FAMILIES, Architecture
from megatron_bridge.layouts.grid import LARGEST_WORLD, expert_sizes, shares_stages
from megatron_bridge.layouts.layout import (
    EMBEDDING,
    NORM,
    Cuts,
    Layout,
    Unit,
    cut_faults,
    expert_cuts,
    head_units,
    layer_units,
    raise_faults,
    round_up,
    sharded_params,
    tensor_cuts,
    vocab_params,
)
from megatron_bridge.layouts.vllm import VOCAB_PADDING

GROUPED = {  # one grouped product for all local experts keeps each expert's matrix as a numbered parameter
    "local_experts.{}.linear_fc1.weight": "linear_fc1.weight{}",
    "local_experts.{}.linear_fc2.weight": "linear_fc2.weight{}",
}
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
SHOWN_STAGES = 8
PARTS = {"experts": "mlp.experts.", "router_bias": "mlp.router."}
LATENTS = ("query_latent", "kv_rank_and_rope")  # made by projections that only the local spec cuts


@dataclass(frozen=True)
class MegatronLayout(Layout):
    """TP × CP × DP × PP shards of one model, its routed experts on ETP × EP × PP of the same ranks.

    `order` names the grid's dimensions, fastest first; what it leaves out has size 1. `ranks` lists the grid's ranks in
    grid order, by default 0 … tp·cp·dp·pp − 1. `etp` None is `tp`. With `vpp` > 1 each rank holds so many chunks, whose
    number begins their parameters' names (`1.decoder.layers.0.`). `stages` gives the layers of all pp·vpp stages in the
    order of the forward pass, by default even; a stage of none holds an embedding or a head only. `experts` says how
    routed experts are kept: one module each, or grouped. `vocab_multiple` None pads the vocabulary as vLLM does, so
    that equal TP sizes exchange no rows; a number pads to Megatron's rule, a multiple of `vocab_multiple · tp`.
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
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    experts: Literal["sequential", "grouped"] = "sequential"

    def __post_init__(self) -> None:
        count = self.pp * self.vpp
        if (most := max(self.world, count)) > LARGEST_WORLD:
            raise UserError("megatron layout", f"{most:,} {'ranks' if most == self.world else 'stages'} are too many")
        object.__setattr__(self, "ranks", tuple(self.ranks) or tuple(range(self.world)))
        object.__setattr__(self, "stages", tuple(self.stages) or (self.arch.layers // count,) * count)
        object.__setattr__(self, "etp", self.tp if self.etp is None else self.etp)
        faults = self._grid_faults()
        cuts = {**self._cuts(0), **expert_cuts(self.ep, 0, self.expert_tp, 0)}
        raise_faults("megatron layout", cut_faults(self.arch, cuts, replicate_kv=True) + self._row_faults() + faults)

    @property
    def world(self) -> int:
        """Ranks of the grid."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_tp(self) -> int:
        """Into how many parts each routed expert is cut."""
        return self.tp if self.etp is None else self.etp

    def _row_faults(self) -> list[str]:
        """More shards than KV heads cut fused rows evenly, which must come out."""
        rows = (self.arch.heads // self.arch.kv_heads + 2) * self.arch.head_dim
        parts = max(1, self.tp // self.arch.kv_heads)
        if self.arch.latent is not None or rows % parts == 0:
            return []
        return [f"{rows} fused rows of a KV head do not split over the {parts} ranks that share it"]

    def _grid_faults(self) -> list[str]:
        faults = []
        if not len(self.ranks) == len(set(self.ranks)) == self.world:
            cp = f" × cp {self.cp}" if self.cp > 1 else ""
            faults.append(f"ranks {list(self.ranks)} do not fill tp {self.tp} × pp {self.pp} × dp {self.dp}{cp}")
        names = self.order.split("-")
        if len(set(names)) != len(names) or not {"tp", "dp", "pp"} <= set(names):
            faults.append(f"order {self.order!r} does not name tp, dp and pp once each")
        sizes = {"cp": self.cp, "ep": self.ep}
        faults += [
            f"order {self.order!r} does not name {name}, whose size is {size}"
            for name, size in sizes.items() if size > 1 and name not in names
        ]  # fmt: skip
        if len(self.stages) != self.pp * self.vpp or sum(self.stages) != self.arch.layers or min(self.stages) < 0:
            shown = "-".join(map(str, self.stages[:SHOWN_STAGES])) + ("-…" if len(self.stages) > SHOWN_STAGES else "")
            layers = self.arch.layers
            virtual = f" of {self.vpp} chunks" if self.vpp > 1 else ""
            wanted = f"{layers} layers on {self.pp} pipeline stages{virtual}"
            faults.append(f"stages of {shown} layers are not {wanted}: give `stages`")
        if self.arch.experts is not None and not faults:
            faults += self._expert_grid_faults()
        return faults

    def _expert_grid_faults(self) -> list[str]:
        sizes, experts = self._grids
        if experts is None:
            ranks = self.tp * self.cp * self.dp
            return [f"etp {self.expert_tp} × ep {self.ep} does not divide the {ranks} ranks of a pipeline stage"]
        if not shares_stages(self.order.split("-"), sizes, experts):
            return [f"order {self.order!r} gives experts other pipeline stages than the rest: put pp first or last"]
        return []

    @cached_property
    def _grids(self) -> tuple[dict[str, int], dict[str, int] | None]:
        """Sizes of the grid's dimensions: everywhere, and for routed experts."""
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        return sizes, expert_sizes(sizes, self.ep, self.expert_tp)

    @property
    def padded_vocab(self) -> int:
        """Rows of the whole embedding, padding included."""
        multiple = lcm(VOCAB_PADDING, self.tp) if self.vocab_multiple is None else self.vocab_multiple * self.tp
        return round_up(self.arch.vocab, multiple)

    @cached_property
    def _index(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.ranks)}

    def coordinate(self, rank: int, dimension: str, experts: bool = False) -> int:
        """A rank's place along a dimension of the grid, or of the experts' grid, which has `ep` and no `cp`."""
        sizes, index = self._grids[experts], self._index[rank]
        assert sizes is not None
        for name in self.order.split("-"):
            index, place = divmod(index, sizes.get(name, 1))
            if name == dimension:
                return place
        return 0

    def shard(self, rank: int, kind: str) -> Hashable:
        if kind == "experts":
            return self.coordinate(rank, "ep", experts=True), self.coordinate(rank, "tp", experts=True)
        return self.coordinate(rank, "tp")

    def _cuts(self, index: int) -> Cuts:
        latents = dict.fromkeys(LATENTS, (self.tp, index)) if self.spec == "local" else {}
        return {**tensor_cuts(self.tp, index), **latents}

    def units(self, rank: int) -> tuple[Unit, ...]:
        return _rank_units(self, self.coordinate(rank, "pp")) if rank in self._index else ()

    def params(self, kind: str, shard: Hashable) -> tuple[Param, ...]:
        declared = FAMILIES[self.arch.family].units[kind].megatron
        if isinstance(shard, tuple):
            if self.experts == "grouped":
                declared = tuple(replace(one, name=GROUPED.get(one.name, one.name)) for one in declared)
            return sharded_params(self.arch, kind, declared, expert_cuts(self.ep, shard[0], self.expert_tp, shard[1]))
        assert isinstance(shard, int)
        if kind == "vocab":
            return vocab_params(self.arch, self.padded_vocab, self.tp, shard)
        params = sharded_params(self.arch, kind, declared, self._cuts(shard), cut_fused=True)
        if self.spec == "te":
            names = FAMILIES[self.arch.family].transformer_engine.get(kind, {})
            params = tuple(param._replace(name=names.get(param.name, param.name)) for param in params)
        return params


@lru_cache(maxsize=4096)
def _rank_units(layout: MegatronLayout, stage: int) -> tuple[Unit, ...]:
    """Units of all chunks of a pipeline rank; Megatron numbers the layers of each chunk from 0."""
    starts = list(accumulate(layout.stages, initial=0))
    units: list[Unit] = []
    for chunk in range(layout.vpp):
        at = chunk * layout.pp + stage
        prefix = f"{chunk}." if layout.vpp > 1 else ""
        units += _stage_units(layout, at, range(starts[at], starts[at + 1]), prefix)
    return tuple(units)


def _stage_units(layout: MegatronLayout, at: int, layers: range, prefix: str) -> list[Unit]:
    arch, count = layout.arch, layout.pp * layout.vpp
    units = [Unit("vocab", EMBEDDING, f"{prefix}embedding.word_embeddings.")] if at == 0 else []
    for local, layer in enumerate(layers):
        units += layer_units(arch, layer, f"{prefix}decoder.layers.{local}.", PARTS)
    if at == count - 1:
        units.append(Unit("norm", NORM, f"{prefix}decoder.final_layernorm."))
        units += [unit._replace(prefix=f"{prefix}output_layer.") for unit in head_units(arch)]
        if arch.tied and arch.head == "lm" and count > 1:
            units.append(Unit("vocab", EMBEDDING, f"{prefix}output_layer."))  # it has no embedding to share
    return units
