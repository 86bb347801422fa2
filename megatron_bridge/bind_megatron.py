"""From the names of Megatron's layout to the live parameters of a model's pipeline stage.

Names and shapes are checked once, here; what the layout says of a stage and what megatron-core built must agree in
both directions. Building the model is left to the caller.
"""

from itertools import chain

from torch import Tensor, nn

from megatron_bridge.execute import check_tensors
from megatron_bridge.layouts.megatron import MegatronLayout

WRAPPER = "module."  # DistributedDataParallel and Float16Module keep the model under this name


def bind(model: nn.Module, layout: MegatronLayout, rank: int) -> dict[str, Tensor]:
    """The parameters of this rank's GPTModel stage (wrapped or not), by layout name, and the buffers that it names.

    Raises UserError that lists every parameter that is missing, has another shape, or that no canonical tensor fills.
    """
    wanted, live = layout.parameters(rank), {}
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if _plain(name) in wanted)
    for name, tensor in chain[tuple[str, Tensor]](model.named_parameters(), buffers):
        live[_plain(name)] = tensor
    return check_tensors(layout, rank, live)


def _plain(name: str) -> str:
    while name.startswith(WRAPPER):
        name = name.removeprefix(WRAPPER)
    return name
