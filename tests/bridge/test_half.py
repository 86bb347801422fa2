"""Which values float16 makes infinite, and that a file's infinities are carried over as they are."""

import math

import pytest
import torch

from megatron_bridge.errors import UserError
from megatron_bridge.fill import Filler
from megatron_bridge.half import is_beyond_float16
from megatron_bridge.layouts import HFLayout, MegatronLayout
from tests.bridge.toys import labelled, toy

WIDER = (torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", WIDER)
@pytest.mark.parametrize("value", [0.0, 65504.0, -65519.9, 65520.0, -65536.0, 3e38, math.inf, -math.inf, math.nan])
def test_it_is_what_the_cast_makes_infinite(dtype: torch.dtype, value: float) -> None:
    values = torch.tensor([[1.0, value], [2.0, 3.0]], dtype=dtype)
    cast = bool((values.half().isinf() & values.isfinite()).any())
    assert is_beyond_float16(values) == is_beyond_float16(values.t()) == cast
    beside = torch.tensor([math.nan, math.inf, value], dtype=dtype)
    assert is_beyond_float16(beside) == cast


def test_types_that_cannot_be_beyond() -> None:
    assert not is_beyond_float16(torch.tensor([math.inf], dtype=torch.float16))
    assert not is_beyond_float16(torch.tensor([100_000]))
    assert not is_beyond_float16(torch.empty(0))
    assert not is_beyond_float16(torch.tensor([448.0]).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("dtype", [torch.float16, *WIDER])
def test_a_file_may_hold_infinities(dtype: torch.dtype) -> None:
    arch, norm = toy(), "model.norm.weight"
    held = {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in labelled(arch).items()}
    held[norm][1] = math.inf
    filler = Filler(HFLayout(arch, (0,)), held, MegatronLayout(arch), rank=0)
    (part,) = filler.values("decoder.final_layernorm.weight", torch.float16)
    assert part.isinf().nonzero().tolist() == [[1]]
    held[norm][2] = 65536
    if dtype != torch.float16:
        with pytest.raises(UserError, match=r"final_layernorm\.weight: has values beyond float16's largest"):
            list(filler.values("decoder.final_layernorm.weight", torch.float16))
