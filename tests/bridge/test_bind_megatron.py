"""The Megatron layout against what megatron-core builds: names, shapes and values on every stage and shard."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron_bridge.bind_megatron import bind
from megatron_bridge.checkpoints import load_hf
from megatron_bridge.errors import UserError
from megatron_bridge.families import Architecture
from megatron_bridge.layouts import MegatronLayout
from tests.bridge.accounts import Place, megatron
from tests.bridge.toys import labelled, toy, toy_experts


@dataclass(frozen=True)
class Case:
    """A model on a grid; `places`: of each rank, what each of its chunks holds."""

    name: str
    arch: Architecture
    places: list[list[Place]]
    grid: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)


def fill(case: Case, folder: Path) -> dict[str, Tensor]:
    """What the parameters of this rank's real modules hold after loading, by name."""
    from rlflow import parallel  # before megatron-core, which it makes ready for a CPU
    from rlflow.models import transformer_config
    from rlflow.models.layers import block_spec

    from megatron.core.models.gpt import GPTModel  # isort: skip

    arch = case.arch
    parallel.initialize(timeout_seconds=60, seed=0)
    grid = parallel.Grid(**case.grid)
    layout = MegatronLayout(
        arch, grid.tp, grid.pp, grid.dp, order="-".join(grid.order), ep=grid.ep, etp=grid.etp, **case.layout
    )
    chunked = None if layout.vpp == 1 else layout.vpp
    config = transformer_config(
        arch, grid, torch.float32, stages=None if chunked else layout.stages, sequence_parallel=arch.experts is not None
    )
    config = dataclasses.replace(config, virtual_pipeline_model_parallel_size=chunked)
    with parallel.active(grid):
        chunks = [
            GPTModel(
                config,
                block_spec(arch, config, vp_stage=stage),
                vocab_size=layout.padded_vocab,
                max_sequence_length=64,
                pre_process=grid.is_first_stage and not stage,
                post_process=grid.is_last_stage and stage in (None, layout.vpp - 1),
                share_embeddings_and_output_weights=arch.tied,
                position_embedding_type="none",
                pg_collection=grid.groups,
                vp_stage=stage,
            )
            for stage in (range(layout.vpp) if chunked else (None,))
        ]
    bound = bind(chunks if chunked else chunks[0], layout, dist.get_rank())
    with torch.no_grad():
        for parameter in bound.values():
            parameter.fill_(-1)
    load_hf(folder, layout, bound, rank=dist.get_rank())
    names = (f"{i}." * bool(chunked) + name for i, chunk in enumerate(chunks) for name, _ in chunk.named_parameters())
    return {name: bound[name].detach().clone() for name in names}


def tensor_parts(parts: int, **place: Any) -> list[list[Place]]:
    return [[Place(tensor=(parts, index), **place)] for index in range(parts)]


def expert_parts(layers: int, vocab_rows: int, *parts: tuple[Any, Any, Any]) -> list[list[Place]]:
    """Tensor, expert and expert tensor part of each rank."""
    return [[Place(range(layers), tensor=t, expert=e, expert_tensor=et, vocab_rows=vocab_rows)] for t, e, et in parts]


QWEN2, QWEN3, WIDE = (
    toy(model_type="qwen2"),
    toy(model_type="qwen3", tie_word_embeddings=True),
    toy(num_hidden_layers=5),
)
DEEP_TIED, DEEP = toy(num_hidden_layers=4, tie_word_embeddings=True), toy(num_hidden_layers=8)
EXPERTS = toy_experts()
MIXTRAL = toy(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, vocab_size=64)
GEMMA, GLM4 = toy(model_type="gemma3_text", tie_word_embeddings=True), toy(model_type="glm4", head_dim=4)
ONE_KV_HEAD = toy(num_key_value_heads=1, model_type="qwen2")

CASES = [
    Case("biases", QWEN2, tensor_parts(2, layers=range(2), vocab_rows=64), {"tensor": 2}),
    Case("q and k norms, tied", QWEN3, tensor_parts(2, layers=range(2), vocab_rows=64), {"tensor": 2}),
    Case("Gemma-3's norms", GEMMA, tensor_parts(2, layers=range(2), vocab_rows=64), {"tensor": 2}),
    Case("GLM-4's norms and fused gate", GLM4, tensor_parts(2, layers=range(2), vocab_rows=64), {"tensor": 2}),
    Case(
        "uneven PP", WIDE,
        [[Place([0], last=False, vocab_rows=64)], [Place([1, 2], False, False)], [Place([3, 4], False, vocab_rows=64)]],
        {"pipeline": 3}, {"stages": (1, 2, 2)},
    ),
    Case(
        "tied PP4", DEEP_TIED,
        [
            [Place([stage], first=stage == 0, last=stage == 3, vocab_rows=64)] for stage in range(4)
        ],
        {"pipeline": 4},
    ),
    Case(  # cases.md A11
        "PP2 of two chunks", DEEP,
        [
            [Place([0, 1], last=False, vocab_rows=64), Place([4, 5], False, False)],
            [Place([2, 3], False, False), Place([6, 7], False, vocab_rows=64)],
        ],
        {"pipeline": 2}, {"vpp": 2},
    ),
    Case(
        "PP2 of four chunks", DEEP,
        [
            [Place([2 * i], first=i == 0, last=False, vocab_rows=64) for i in range(4)],
            [Place([2 * i + 1], first=False, last=i == 3, vocab_rows=64) for i in range(4)],
        ],
        {"pipeline": 2}, {"vpp": 4},
    ),
    Case(
        "TP2 × PP2, PP fastest", DEEP_TIED,
        [
            [Place([2 * (r % 2), 2 * (r % 2) + 1], r % 2 == 0, r % 2 == 1, tensor=(2, r // 2), vocab_rows=64)]
            for r in range(4)
        ],
        {"tensor": 2, "pipeline": 2, "order": "pp-tp-cp-ep-dp"},
    ),
    Case("any multiple", toy(), tensor_parts(2, layers=range(2), vocab_rows=40), {"tensor": 2}, {"vocab_multiple": 10}),
    Case("fewer KV heads than TP", toy(), tensor_parts(4, layers=range(2), vocab_rows=64), {"tensor": 4}),
    Case("a cut inside heads", ONE_KV_HEAD, tensor_parts(4, layers=range(2), vocab_rows=64), {"tensor": 4}),
    Case("EP2", EXPERTS, expert_parts(3, 64, *[((1, 0), (2, e), (1, 0)) for e in (0, 1)]), {"expert": 2}),
    Case("Mixtral", MIXTRAL, expert_parts(2, 64, *[((1, 0), (2, e), (1, 0)) for e in (0, 1)]), {"expert": 2}),
    Case(
        "EP2 × ETP2", EXPERTS, expert_parts(3, 64, *[((2, t), (2, e), (2, t)) for e in (0, 1) for t in (0, 1)]),
        {"tensor": 2, "expert": 2},
    ),
    Case(
        "TP2 and EP2, experts whole", EXPERTS,
        expert_parts(3, 64, *[((2, r % 2), (2, r % 2), (1, 0)) for r in range(4)]),
        {"tensor": 2, "expert": 2, "expert_tensor": 1},
    ),
    Case("TP2, ETP2", EXPERTS, expert_parts(3, 64, *[((2, t), (1, 0), (2, t)) for t in (0, 1)]), {"tensor": 2}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_real_modules_hold(world: Callable[..., Any], tmp_path: Path, case: Case) -> None:
    checkpoint = labelled(case.arch, torch.float32)
    save_file(checkpoint, tmp_path / "model.safetensors")
    for held, chunks in zip(world(len(case.places), fill, case, tmp_path), case.places, strict=True):
        due: dict[str, Tensor] = {}
        for number, place in enumerate(chunks):
            due |= megatron(checkpoint, case.arch, place, prefix=f"{number}." if len(chunks) > 1 else "")
        assert held.keys() == due.keys()
        assert [name for name in due if not torch.equal(held[name], due[name])] == []


def inner_names(layout: MegatronLayout) -> nn.ParameterDict:
    inner = nn.ParameterDict()
    for name, param in layout.parameters(0).items():
        inner[name.replace(".", "/")] = nn.Parameter(torch.zeros(param.shape))
    return inner


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name.replace("/", "."), p) for name, p in super().named_parameters(*args, **kwargs))


def test_a_wrapped_model_is_bound_and_a_strange_parameter_named() -> None:
    layout = MegatronLayout(toy())
    inner = inner_names(layout)
    assert bind(Wrapper(inner), layout, 0).keys() == layout.parameters(0).keys()
    inner["adapter"] = nn.Parameter(torch.zeros(1))
    del inner["decoder/layers/1/mlp/linear_fc2/weight"]
    with pytest.raises(UserError) as error:
        bind(Wrapper(inner), layout, 0)
    assert "decoder.layers.1.mlp.linear_fc2.weight is missing" in str(error.value)
    assert "adapter has no place in the layout" in str(error.value)


def test_chunks_must_be_as_many_as_the_layout_has() -> None:
    layout = MegatronLayout(DEEP, pp=2, vpp=2)
    with pytest.raises(UserError, match="1 chunks, but the layout has 2 virtual pipeline stages"):
        bind(nn.Linear(1, 1), layout, 0)
