"""From the names of Megatron's layout to the live parameters of a model's pipeline stage.

Names and shapes are checked once, here; what the layout says of a stage and what megatron-core built must agree in
both directions. Building the model is left to the caller.
"""

from torch import nn

from megatron_bridge.execute import check_tensors
from megatron_bridge.layouts.megatron import MegatronLayout

WRAPPER = "module."  # DistributedDataParallel and Float16Module keep the model under this name


def bind(model: nn.Module, layout: MegatronLayout, rank: int) -> dict[str, nn.Parameter]:
    """The parameters of this rank's GPTModel stage (wrapped or not), by layout name.

    Raises UserError that lists every parameter that is missing, has another shape, or that no canonical tensor fills.
    """
    live: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        while name.startswith(WRAPPER):
            name = name.removeprefix(WRAPPER)
        live[name] = parameter
    check_tensors(layout, rank, live)
    return {name: live[name] for name in layout.parameters(rank)}
