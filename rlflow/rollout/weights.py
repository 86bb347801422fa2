"""The receiving side of a weight sync: from any layout into vLLM's parameters, by megatron_bridge.

At start it is proven that writing in place gives what vLLM's loader gives; where it does not, weights go through that
loader, whole tensors of one unit at a time. When weights may be written is left to `engine.Lifecycle`.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import astuple
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_bridge import compat
from megatron_bridge.bind_vllm import bind, require_complete
from megatron_bridge.checkpoints import open_source
from megatron_bridge.execute import Traffic, Transfer, connect
from megatron_bridge.families.architecture import Architecture
from megatron_bridge.layouts import HFLayout, Layout, VLLMLayout
from megatron_bridge.layouts.part import one_unit
from megatron_bridge.proof import startup_proof
from rlflow.parallel import device
from rlflow.rollout.world import Replicas

if TYPE_CHECKING:
    from vllm import LLM

logger = logging.getLogger(__name__)


class WeightReceiver:
    """Holds vLLM's live parameters on rollout ranks, and nothing on the others. All methods are collective.

    Args:
        architecture: the model's record.
        replicas: where vLLM runs.
        llm: this rank's engine, None outside the rollout.
        dtype: vLLM's, in which weights travel.
        bucket_bytes: most bytes that a rank receives in one round.
        prove: run the start-up proof; without it writing in place is taken to be right.
        checksum: compare what arrives with what was sent.
    """

    def __init__(
        self, architecture: Architecture, replicas: Replicas, llm: "LLM | None", dtype: torch.dtype, bucket_bytes: int,
        prove: bool, checksum: bool = False,
    ) -> None:  # fmt: skip
        self._rank, self._llm, self._dtype, self._bucket_bytes = dist.get_rank(), llm, dtype, bucket_bytes
        self._checksum = checksum
        self._ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        self.layout = VLLMLayout(architecture, replicas.tensor_parallel_size, replicas.ranks)
        self._tensors = bind(llm, self.layout, self._rank) if llm is not None else {}
        self._last: tuple[Layout, dict[str, int], Transfer] | None = None
        self.in_place = not prove or self._proven()

    def _proven(self) -> bool:
        """Whether every rollout rank may write in place. All ranks learn it, because the sync is collective."""
        different = startup_proof(self._llm, self.layout, self._tensors, self._rank) if self._llm is not None else []
        failed = torch.tensor([len(different)], device=device())
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if different:
            logger.warning("weights go through vLLM's loader: written in place, %s differ", ", ".join(different[:4]))
        if not failed.item():
            logger.info("start-up proof passed: weights written in place equal those of vLLM's loader, bit for bit")
        return not failed.item()

    def receive(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Traffic:
        """Write the weights that the ranks hold as `tensors` in `layout` into vLLM; returns the bytes moved.

        UserError where tensors are missing, before anything is written here; SyncError where not all arrived.
        """
        require_complete(layout, self._rank, tensors, self.layout)
        traffic = self._write(layout, tensors) if self.in_place else self._load(layout, tensors)
        if self._llm is not None and device().type == "cpu":
            compat.pack_vllm_cpu_weights(self._llm)
        return traffic

    def read(self, path: str) -> Traffic:
        """Write the weights of a model's folder, of which every rank reads its own part."""
        return self.receive(*open_source(path, self.layout.arch, range(dist.get_world_size())))

    def _write(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Traffic:
        """Send everything straight into vLLM's parameters."""
        transfer = self._bound(layout, tensors)
        traffic = transfer.run()
        transfer.release()  # vLLM's cache wakes next
        return traffic

    def _bound(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Transfer:
        """The transfer from these tensors, made once as long as the same ones come."""
        places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        if self._last is None or self._last[:2] != (layout, places):
            self._last = layout, places, self._connect(layout, self.layout, tensors, self._tensors)
        return self._last[2]

    def _connect(
        self, source: Layout, target: Layout, held: Mapping[str, torch.Tensor], filled: Mapping[str, torch.Tensor]
    ) -> Transfer:
        return connect(
            source, held, target, filled, rank=self._rank, dtype=self._dtype, bucket_bytes=self._bucket_bytes,
            ranks_per_node=self._ranks_per_node, checksum=self._checksum,
        )  # fmt: skip

    def _load(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Traffic:
        """Send everything through vLLM's loader."""
        whole = HFLayout(self.layout.arch, self.layout.ranks)
        moved = [self._load_unit(layout, whole, unit.canonical, tensors) for unit in whole.all_units]
        return Traffic(*(sum(column) for column in zip(*map(astuple, moved), strict=True)))

    def _load_unit(self, layout: Layout, whole: HFLayout, unit: str, tensors: Mapping[str, torch.Tensor]) -> Traffic:
        """Bring a unit's whole tensors to every rollout rank and give them to vLLM's loader."""
        source, target = one_unit(layout, unit), one_unit(whole, unit)
        held = {name: tensors[name] for name in source.parameters(self._rank)}
        filled = {
            name: torch.empty(param.shape, dtype=self._dtype, device=device())
            for name, param in target.parameters(self._rank).items()
        }
        traffic = self._connect(source, target, held, filled).run()
        if self._llm is not None:
            compat.vllm_load(self._llm, filled.items())
        return traffic

    def release(self) -> None:
        """Forget vLLM's parameters, whose engine is about to end."""
        self._llm, self._tensors, self._last = None, {}, None
