"""The Megatron layout against what megatron-core builds: the same names and shapes on every stage and shard."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_bridge.bind_megatron import bind
from megatron_bridge.errors import UserError
from megatron_bridge.families import Architecture
from megatron_bridge.layouts import MegatronLayout
from tests.bridge.toys import toy


def _bind(arch: Architecture, tp: int, pp: int) -> int:
    from rlflow import parallel  # before megatron-core, which it makes ready for a CPU
    from rlflow.models.config import transformer_config

    from megatron.core.models.gpt import GPTModel  # isort: skip
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip

    parallel.initialize(timeout_seconds=60, seed=0)
    grid = parallel.Grid(tensor=tp, pipeline=pp)
    layout = MegatronLayout(arch, tp, pp)
    with parallel.active(grid):
        model = GPTModel(
            transformer_config(arch, grid, torch.float32),
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=layout.padded_vocab,
            max_sequence_length=64,
            pre_process=grid.is_first_stage,
            post_process=grid.is_last_stage,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="rope",
            pg_collection=grid.groups,
        )
    return len(bind(model, layout, dist.get_rank()))


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_names_and_shapes_are_megatrons(world: Callable[..., Any], family: str, tied: bool, tp: int, pp: int) -> None:
    arch = toy(
        model_type=family, tie_word_embeddings=tied, num_hidden_layers=4, hidden_size=12, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=130,
    )  # fmt: skip
    bound = world(tp * pp, _bind, arch, tp, pp)
    layout = MegatronLayout(arch, tp, pp)
    assert bound == [len(layout.parameters(rank)) for rank in range(tp * pp)]


def test_a_wrapped_model_is_bound_and_a_strange_parameter_named() -> None:
    layout = MegatronLayout(toy())
    inner = nn.ParameterDict()
    for name, param in layout.parameters(0).items():
        inner[name.replace(".", "/")] = nn.Parameter(torch.zeros(param.shape))

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = inner

        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            return ((name.replace("/", "."), p) for name, p in super().named_parameters(*args, **kwargs))

    assert bind(Wrapper(), layout, 0).keys() == layout.parameters(0).keys()
    inner["decoder/layers/0/self_attention/q_layernorm/weight"] = nn.Parameter(torch.ones(2))
    with pytest.raises(UserError, match=r"q_layernorm.weight has no place in the layout"):
        bind(Wrapper(), layout, 0)
