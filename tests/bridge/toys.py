"""Toy models whose every weight has a label of its own, and all ranks of a transfer simulated in one process."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.exchange import Exchange
from megatron_bridge.execute import Traffic, Transfer
from megatron_bridge.families import Architecture, load_architecture
from megatron_bridge.layouts import HFLayout, Layout
from megatron_bridge.plan import Plan, make_plan

Stores = dict[int, dict[str, Tensor]]  # rank -> parameter name -> tensor

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 16,
    "vocab_size": 37,
    "tie_word_embeddings": False,
}


def toy(**overrides: Any) -> Architecture:
    """A small model; keywords are keys of its config.json."""
    return load_architecture({**CONFIG, **overrides})


def toy_experts(**overrides: Any) -> Architecture:
    """A small Qwen3-MoE: layer 1 of 3 is dense, the others have four experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "mlp_only_layers": [1]}
    return toy(**{"model_type": "qwen3_moe", "num_hidden_layers": 3, **experts, **overrides})


def toy_latent(**overrides: Any) -> Architecture:
    """A small DeepSeek-V3: layer 0 of 3 is dense, the others have four experts and two shared ones."""
    latent = {"q_lora_rank": 6, "kv_lora_rank": 4, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 5}
    experts = {"n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    sizes = {"num_hidden_layers": 3, "num_key_value_heads": 4, "first_k_dense_replace": 1, "head_dim": None}
    groups = {"n_group": 1, "topk_group": 1}
    return toy(**{"model_type": "deepseek_v3", **sizes, **latent, **experts, **groups, **overrides})


def empty(layout: Layout, rank: int, dtype: torch.dtype = torch.int32, fill: int = -1) -> dict[str, Tensor]:
    """A rank's tensors, filled with what no weight is."""
    return {name: torch.full(param.shape, fill, dtype=dtype) for name, param in layout.parameters(rank).items()}


def labelled(arch: Architecture, dtype: torch.dtype = torch.int32) -> dict[str, Tensor]:
    """The Hugging Face tensors of a model, no two elements alike."""
    tensors, label = {}, 1
    for name, tensor in empty(HFLayout(arch, (0,)), 0).items():
        tensors[name] = torch.arange(label, label + tensor.numel(), dtype=torch.int64).view(tensor.shape).to(dtype)
        label += tensor.numel()
    return tensors


def rows(tensors: dict[str, Tensor], name: str, labels: Iterable[int]) -> None:
    """Set each row of a tensor to its label."""
    tensors[name].copy_(torch.tensor(list(labels)).view(-1, *[1] * (tensors[name].dim() - 1)).expand_as(tensors[name]))


def transfer(plan: Plan, source: Stores, target: Stores, bucket_bytes: int = 2**20) -> dict[int, Traffic]:
    """Run a plan on all ranks at once; only the collective is replaced, by copying messages between buckets."""
    dtype = next(tensor.dtype for store in source.values() for tensor in store.values())
    ranks = sorted(source.keys() | target.keys())
    bound = {
        r: Transfer(plan, source.get(r, {}), target.get(r, {}), rank=r, dtype=dtype, bucket_bytes=bucket_bytes)
        for r in ranks
    }
    for phase in range(plan.phases):
        exchanges = {r: bound[r].phases[phase].exchange for r in ranks}
        for r in ranks:
            bound[r].phases[phase].local.run()
        for k in range(len(exchanges[ranks[0]].rounds)):
            _exchange(exchanges, k, bucket_bytes)
    for r in ranks:
        bound[r].zero_padding()
    return {r: bound[r].traffic(0.0) for r in ranks}


def _exchange(exchanges: Mapping[int, Exchange], k: int, bucket_bytes: int) -> None:
    messages: dict[tuple[int, int], Tensor] = {}
    for r, exchange in exchanges.items():
        bucket = exchange.pack(k)
        assert bucket.nbytes <= bucket_bytes
        messages |= {(r, slot.peer): bucket[slot.begin :][: slot.nbytes] for slot in exchange.rounds[k].sends}
    for r, exchange in exchanges.items():
        bucket = exchange.incoming(k)
        assert bucket.nbytes <= bucket_bytes
        for slot in exchange.rounds[k].receives:
            bucket[slot.begin :][: slot.nbytes] = messages.pop((slot.peer, r))
        exchange.unpack(k)
    assert not messages


def on_arrival(transfer: Transfer, k: int, change: Callable[[Tensor], None]) -> None:
    """Let `change` alter the bytes that arrive in round k of the first phase from now on."""
    exchange = transfer.phases[0].exchange

    def unpack(arrived: int) -> None:
        if arrived == k:
            change(exchange.incoming(k))
        Exchange.unpack(exchange, arrived)

    exchange.unpack = unpack  # type: ignore[method-assign, assignment]


def flip(bucket: Tensor) -> None:
    """One wrong bit."""
    bucket[7] ^= 1


def move(source_layout: Layout, source: Stores, target_layout: Layout, bucket_bytes: int = 2**20) -> Stores:
    """The target's tensors after a transfer."""
    dtype = next(tensor.dtype for store in source.values() for tensor in store.values())
    target = {rank: empty(target_layout, rank, dtype) for rank in target_layout.ranks}
    transfer(make_plan(source_layout, target_layout, itemsize=dtype.itemsize), source, target, bucket_bytes)
    return target


def shards(checkpoint: Mapping[str, Tensor], layout: Layout) -> Stores:
    """A checkpoint's tensors as a layout's ranks hold them."""
    return move(HFLayout(layout.arch, layout.ranks), {rank: dict(checkpoint) for rank in layout.ranks}, layout)


def gathered(layout: Layout, stores: Stores) -> dict[str, Tensor]:
    """A layout's weights as Hugging Face tensors, all written by one rank."""
    first = layout.ranks[0]
    target = HFLayout(layout.arch, (first,), owners=(first,) * len(HFLayout(layout.arch, (first,)).all_units))
    return move(layout, stores, target)[first]
