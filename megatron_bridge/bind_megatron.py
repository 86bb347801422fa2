"""From the names of Megatron's layout to the live parameters of a model's pipeline stage.

Names and shapes are checked once, here; what the layout says of a stage and what megatron-core built must agree in
both directions. Building the model is left to the caller.
"""

from collections.abc import Iterator, Sequence, Set

from torch import Tensor, nn

from megatron_bridge.errors import UserError
from megatron_bridge.execute import check_tensors
from megatron_bridge.layouts.megatron import MegatronLayout

WRAPPER = "module."  # DistributedDataParallel and Float16Module keep the model under this name


def bind(model: nn.Module | Sequence[nn.Module], layout: MegatronLayout, rank: int) -> dict[str, Tensor]:
    """The parameters of this rank's GPTModel stage (wrapped or not), by layout name, and the buffers that it names.

    With virtual pipeline stages `model` is the list of the rank's chunks in their order. Raises UserError that lists
    every parameter that is missing, has another shape, or that no canonical tensor fills.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    if len(chunks) != layout.vpp:
        raise UserError("model", f"{len(chunks)} chunks, but the layout has {layout.vpp} virtual pipeline stages")
    wanted = layout.parameters(rank)
    live: dict[str, Tensor] = {}
    for number, chunk in enumerate(chunks):
        prefix = f"{number}." if layout.vpp > 1 else ""
        live |= {prefix + name: tensor for name, tensor in _tensors(chunk, prefix, wanted.keys())}
    return check_tensors(layout, rank, live)


def _tensors(model: nn.Module, prefix: str, wanted: Set[str]) -> Iterator[tuple[str, Tensor]]:
    """All parameters by their names in the plain model, and those buffers that are wanted under `prefix`."""
    yield from ((_plain(name), parameter) for name, parameter in model.named_parameters())
    yield from ((_plain(name), buffer) for name, buffer in model.named_buffers() if prefix + _plain(name) in wanted)


def _plain(name: str) -> str:
    while name.startswith(WRAPPER):
        name = name.removeprefix(WRAPPER)
    return name
