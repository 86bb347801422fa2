"""The receiving side of a weight sync: from any layout into vLLM's parameters, by megatron_bridge.

At start it is proven that writing in place gives what vLLM's loader gives; where it does not, or vLLM is to quantise
what it loads, weights go through that loader, a bounded number of whole tensors at a time. When weights may be written
is left to `engine.Lifecycle`.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_bridge import compat
from megatron_bridge.agreement import gather_faults
from megatron_bridge.bind_vllm import bind, missing_parts, unfilled
from megatron_bridge.checkpoints import open_source
from megatron_bridge.errors import SyncError, UserError
from megatron_bridge.execute import Traffic, Transfer, connect
from megatron_bridge.groups import gather_integers, or_default
from megatron_bridge.half import BEYOND, is_beyond_float16
from megatron_bridge.layouts import Layout, VLLMLayout
from megatron_bridge.layouts.layout import FLOAT32_KINDS
from megatron_bridge.layouts.loader import LoaderLayout, Portion, portions
from megatron_bridge.proof import Proof, prove
from rlflow.parallel import device, ranks_per_node

if TYPE_CHECKING:
    from vllm import LLM

logger = logging.getLogger(__name__)

FAULTS_SHOWN = 8


class WeightReceiver:
    """Holds vLLM's live parameters on rollout ranks, and nothing on the others. All methods are collective.

    Args:
        layout: what vLLM holds, and where it runs.
        llm: this rank's engine, None outside the rollout.
        dtype: vLLM's, in which weights travel.
        bucket_bytes: most bytes that a rank receives in one round.
        startup_proof: prove that weights may be written in place; without it that is taken to be so.
        quantized: vLLM quantises what it loads, so that all goes through its loader.
        checksum: compare what arrives with what was sent.
    """

    def __init__(
        self, layout: VLLMLayout, llm: "LLM | None", dtype: torch.dtype, bucket_bytes: int, *,
        startup_proof: bool, quantized: bool = False, checksum: bool = False,
    ) -> None:  # fmt: skip
        self._rank, self._llm, self._dtype, self._bucket_bytes = dist.get_rank(), llm, dtype, bucket_bytes
        self._checksum = checksum
        self._ranks_per_node = ranks_per_node()
        self.layout, self._wanted = layout, LoaderLayout(layout)
        self._portions = portions(layout.arch, max(1, bucket_bytes // dtype.itemsize))
        self._tensors = bind(llm, layout, self._rank) if llm is not None and not quantized else {}
        self._last: tuple[Layout, dict[str, torch.Tensor], Transfer] | None = None
        self._through_loader: tuple[Layout, dict[Portion, Transfer]] | None = None
        self.proofs: list[Proof | None] = self._prove() if startup_proof and not quantized else []
        self.in_place = not quantized and not any(proof is not None and proof.different for proof in self.proofs)
        self.decision = self._decide(quantized)
        if self._rank == layout.ranks[0]:
            logger.log(logging.INFO if self.in_place or quantized else logging.WARNING, self.decision)

    def _prove(self) -> list[Proof | None]:
        """The proof of each rank, None outside the rollout. All ranks learn all, because a sync is collective."""
        mine = prove(self._llm, self.layout, self._tensors, self._rank) if self._llm is not None else None
        proofs: list[Proof | None] = [None] * dist.get_world_size()
        dist.all_gather_object(proofs, mine)
        return proofs

    def _decide(self, quantized: bool) -> str:
        """How weights are written from now on, and why."""
        if quantized:
            return "weights go through vLLM's loader, which quantises them"
        proofs = [proof for proof in self.proofs if proof is not None]
        if not proofs:
            return "weights are written in place, without a proof that this is right (bridge.startup_proof)"
        if different := sorted({name for proof in proofs for name in proof.different}):
            return f"weights go through vLLM's loader: written in place, {_some(different)} would differ"
        compared, size = sum(proof.tensors for proof in proofs), sum(proof.bytes for proof in proofs)
        return (
            f"start-up proof passed: {compared} tensors, {size / 1e6:,.1f} MB, written in place equal those of vLLM's "
            "loader, bit for bit"
        )

    def receive(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Traffic:
        """Write the weights that the ranks hold as `tensors` in `layout` into vLLM; returns the bytes moved.

        Returns when all ranks have theirs. UserError where tensors are missing, or have values that vLLM's dtype does
        not hold, before anything is written anywhere; SyncError on the other ranks then, and where not all arrived.
        """
        missing = [] if self._is_known(layout, tensors) else missing_parts(layout, self._rank, tensors, self.layout)
        self._require_none(missing or self._beyond_range(layout, tensors))
        traffic = self._write(layout, tensors) if self.in_place else self._load(layout, tensors)
        if self._llm is not None and (self.in_place or device().type == "cpu"):
            compat.renew_vllm_derived(self._llm)
        self._require_none([])
        return traffic

    def read(self, path: str) -> Traffic:
        """Write the weights of a model's folder, of which every rank reads its own part."""
        return self.receive(*open_source(path, self.layout.arch, range(dist.get_world_size())))

    def _beyond_range(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """The tensors of this rank with values that only float16 would make infinite; of files each rank reads a part.

        Other dtypes have the range of what is trained, and nothing is read for them.
        """
        if self._dtype != torch.float16:
            return []
        names = [
            unit.prefix + param.name
            for unit in layout.units(self._rank)
            if unit.kind not in FLOAT32_KINDS
            for param in layout.params(unit.kind, layout.shard(self._rank, unit.kind))
        ]
        if layout.is_read_anywhere:
            names = names[self._rank :: dist.get_world_size()]
        return [f"{name} {BEYOND}: take rollout.dtype bfloat16" for name in names if is_beyond_float16(tensors[name])]

    def _require_none(self, faults: Sequence[str]) -> None:
        """Raise on all ranks if one has faults: none may go on with an engine of which another part is old."""
        elsewhere = gather_faults(or_default(None), len(faults))
        if faults:
            raise UserError(f"weights of rank {self._rank}", _some(faults))
        if elsewhere:
            raise SyncError(f"ranks {elsewhere} could not send or take their weights")

    def _write(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Traffic:
        """Send everything straight into vLLM's parameters."""
        transfer = self._bound(layout, tensors)
        traffic = transfer.run()
        transfer.release()  # vLLM's cache wakes next
        return traffic

    def _bound(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Transfer:
        """The transfer from these tensors, made once as long as the same ones come to every rank.

        They may lie elsewhere each time: between two syncs their memory may have been given to others.
        """
        known = self._is_known(layout, tensors)
        # A new transfer's first run agrees with the other ranks' first runs: where one rank needs it, all make one.
        known_everywhere = all(same for (same,) in gather_integers(or_default(None), [known]))
        if self._last is None or not known_everywhere:
            given = dict(tensors.items())
            self._last = layout, given, self._connect(layout, self.layout, tensors, self._tensors)
        return self._last[2]

    def _is_known(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the last transfer was made for these very tensors."""
        return self._last is not None and self._last[0] == layout and _are_same(self._last[1], tensors)

    def _connect(
        self, source: Layout, target: Layout, held: Mapping[str, torch.Tensor], filled: Mapping[str, torch.Tensor]
    ) -> Transfer:
        return connect(
            source, held, target, filled, rank=self._rank, dtype=self._dtype, bucket_bytes=self._bucket_bytes,
            ranks_per_node=self._ranks_per_node, checksum=self._checksum,
        )  # fmt: skip

    def _load(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Traffic:
        """Send everything through vLLM's loader, which takes each tensor when it has arrived."""
        moved: list[Traffic] = []
        transfers = self._known_transfers(layout)
        arriving = self._arriving(layout, tensors, transfers, moved)
        loaded = compat.vllm_load(self._llm, arriving) if self._llm is not None else None
        for _ in arriving:  # the other ranks' loaders may wait for what this one's did not ask for
            pass
        self._require_none([] if loaded is None else unfilled(self.layout, self._rank, loaded))
        self._through_loader = layout, transfers
        return sum(moved, start=Traffic(0, 0, 0, 0))

    def _known_transfers(self, layout: Layout) -> dict[Portion, Transfer]:
        """Those of the last sync, if on every rank it came from this layout and succeeded; else none."""
        last, self._through_loader = self._through_loader, None
        known = last is not None and last[0] == layout
        known_everywhere = all(same for (same,) in gather_integers(or_default(None), [known]))
        return last[1] if last is not None and known_everywhere else {}

    def _arriving(
        self, layout: Layout, tensors: Mapping[str, torch.Tensor], transfers: dict[Portion, Transfer],
        moved: list[Traffic],
    ) -> Iterator[tuple[str, torch.Tensor]]:  # fmt: skip
        """The whole tensors that this rank's loader needs, portion by portion, which all ranks exchange together.

        Layers alike are sent by the transfer of the first, as if their tensors were its own. `transfers` keeps those
        that were made, without tensors and buckets.
        """
        for portion in self._portions:
            held = [tensors[name] for name in portion.of(layout).parameters(self._rank)]
            filled = self._empty(portion.of(self._wanted))
            first = portion.first_alike(layout, self._wanted)
            source, target = first.of(layout), first.of(self._wanted)
            sent = dict(zip(source.parameters(self._rank), held, strict=True))
            taken = dict(zip(target.parameters(self._rank), filled.values(), strict=True))
            if first in transfers:
                transfers[first].bind(sent, taken)
            else:
                transfers[first] = self._connect(source, target, sent, taken)
            moved.append(transfers[first].run())
            transfers[first].release()
            transfers[first].unbind()
            yield from filled.items()

    def _empty(self, layout: Layout) -> dict[str, torch.Tensor]:
        """Room for what a layout has on this rank."""
        return {
            unit.prefix + param.name: torch.empty(
                param.shape, dtype=torch.float32 if unit.kind in FLOAT32_KINDS else self._dtype, device=device()
            )
            for unit in layout.units(self._rank)
            for param in layout.params(unit.kind, layout.shard(self._rank, unit.kind))
        }

    def release(self) -> None:
        """Forget vLLM's parameters, whose engine is about to end."""
        self._llm, self._tensors, self._last = None, {}, None
        self._through_loader = None


def _are_same(some: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(some[name] is tensor for name, tensor in others.items())


def _some(faults: Sequence[str]) -> str:
    more = len(faults) - FAULTS_SHOWN
    return "; ".join(faults[:FAULTS_SHOWN]) + (f"; and {more} more" if more > 0 else "")
