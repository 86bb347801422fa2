"""What a role's model takes on each rank of its grid, and vLLM on its: weights and state, and what is computed at once.

In which phase that is there, and beside what, is left to `memory`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import cached_property, lru_cache

from megatron_bridge.families import Architecture
from megatron_bridge.layouts import MegatronLayout, VLLMLayout
from megatron_bridge.layouts.layout import FLOAT32_KINDS, Layout, Unit
from rlflow.config.ranks import rank_list
from rlflow.config.roles import TRAINED, data_parallel_size
from rlflow.config.schema import Config, Optimizer, Role
from rlflow.inspect.activations import Activations, Rows, activations, widths
from rlflow.models import split_layers
from rlflow.roles.graphs import row_multiple
from rlflow.rollout.vllm_process import cache_bytes

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GRADIENT_BYTES = 4
MOMENTS_BYTES = 8
PREFILL_TOKENS = 16_384
"""Tokens of one forward over prompts: vLLM's default on GPUs of 70 GiB and more."""


class PlacedRole:
    """One role of a run on the ranks of its grid, in the dtype of the run."""

    def __init__(self, config: Config, name: str, arch: Architecture, world_size: int) -> None:
        self.name, self.arch, self._config = name, arch, config
        self.role: Role = getattr(config, name)
        self.itemsize = ITEM_BYTES[config.model.dtype]
        ranks = rank_list(self.role.ranks, world_size)
        replicas = data_parallel_size(self.role, len(ranks))
        assert replicas, "the configuration's check refuses ranks that hold no whole replicas"
        self.replicas = replicas
        self.layout = self._layout(ranks)

    def _layout(self, ranks: tuple[int, ...]) -> MegatronLayout:
        role, virtual = self.role, self.role.virtual_pipeline_parallel_size
        return MegatronLayout(
            self.arch, role.tensor_parallel_size, role.pipeline_parallel_size, self.replicas, ranks, role.order,
            split_layers(self.arch, role.pipeline_parallel_size) if virtual == 1 else (),
            vpp=virtual, cp=role.context_parallel_size, ep=role.expert_parallel_size,
            etp=role.expert_tensor_parallel_size,
        )  # fmt: skip

    @property
    def is_trained(self) -> bool:
        return self.name in TRAINED

    def state(self, rank: int) -> dict[str, float]:
        """Bytes of weights, and of a trained role's gradients and optimizer, by these names."""
        units = self.layout.units(rank)
        found = {"weights": float(sum(nbytes_of(self.layout, rank, unit, self.itemsize) for unit in units))}
        if not self.is_trained:
            return found
        trained, owned = 0, 0.0
        for unit in units:
            numbers = nbytes_of(self.layout, rank, unit, 1) if unit.kind not in FLOAT32_KINDS else 0
            trained += numbers
            owned += numbers / (self._expert_shards if unit.kind == "experts" else self._dense_shards)
        return found | {"gradients": GRADIENT_BYTES * trained, "optimizer": self._optimizer_bytes * owned}

    @property
    def _dense_shards(self) -> int:
        """Ranks that share the optimizer's state of all but routed experts."""
        return self.replicas * self.role.context_parallel_size

    @property
    def _expert_shards(self) -> int:
        experts = self.role.expert_parallel_size * self.layout.expert_tp
        return max(1, self._dense_shards * self.role.tensor_parallel_size // experts)

    @property
    def _optimizer_bytes(self) -> float:
        """On the GPU for each number: two moments, and float32 weights beside those of less precision."""
        settings: Optimizer = self._config.critic_optimizer if self.name == "critic" else self._config.optimizer
        main = 4 if self.itemsize < 4 else 0
        return (MOMENTS_BYTES + main) * (1 - settings.cpu_offload)

    def stage(self, rank: int) -> int:
        return self.layout.coordinate(rank, "pp")

    def layers(self, rank: int) -> list[int]:
        """Numbers of the layers of a rank, of all its virtual stages."""
        starts = [0, *self._ends]
        chunks = (chunk * self.layout.pp + self.stage(rank) for chunk in range(self.layout.vpp))
        return [layer for at in chunks for layer in range(starts[at], starts[at + 1])]

    @cached_property
    def _ends(self) -> list[int]:
        return [sum(self.layout.stages[: at + 1]) for at in range(len(self.layout.stages))]

    def one_micro_batch(self, rank: int) -> Activations:
        """Bytes of the largest micro-batch while it is on the rank."""
        is_last = self.stage(rank) == self.layout.pp - 1
        logit_bytes = self._logit_bytes if is_last else 0
        return activations(self.arch, self.role, self.layers(rank), self.rows, self.itemsize, logit_bytes)

    @property
    def _logit_bytes(self) -> int:
        """Float32 logits of a model of less precision have their gradient beside them."""
        exact = self._config.rollout.match_trainer and self.itemsize < 4
        return 4 + self.itemsize if exact else self.itemsize

    def in_flight(self, rank: int) -> float:
        """Micro-batches whose activations a rank keeps at once in training, of all its layers.

        In one-forward-one-backward schedules a stage keeps as many as there are stages from it to the last; with
        virtual stages, whose micro-batches are of a chunk each, see Narayanan et al. 2021 (arXiv:2104.04473), 2.2.
        """
        pp, vpp, behind = self.layout.pp, self.layout.vpp, self.layout.pp - self.stage(rank) - 1
        if pp == 1:
            return 1
        chunks = behind + 1 if vpp == 1 else 2 * behind + (vpp - 1) * pp + 1
        return min(chunks, self._micro_batches * vpp) / vpp

    @cached_property
    def rows(self) -> Rows:
        """Of the largest micro-batch, on each context-parallel rank.

        Responses are as long as they may be; where they may end earlier, micro-batches are as full as they may be.
        """
        rollout, role, context = self._config.rollout, self.role, self.role.context_parallel_size
        length = self._row_length
        computed: float = min(max(role.micro_batch_tokens, self._longest), self._samples * length)
        if rollout.ignore_eos:
            computed = math.ceil(self._samples / self._micro_batches) * length
        scored = computed * rollout.max_response_length / length
        part = row_multiple(role.micro_batch_tokens, 1) if role.cuda_graphs else 1
        computed, scored = (math.ceil(rows / part) * part // context for rows in (computed, scored))
        return Rows(int(computed), int(scored), seen=context * self._longest / length)

    @property
    def _longest(self) -> int:
        """Rows of the longest sample, whose last token is none."""
        return self._config.rollout.max_prompt_length + self._config.rollout.max_response_length - 1

    @property
    def _row_length(self) -> float:
        """Rows of a sample on average, with its part of the prompt, which context-parallel ranks do not share."""
        prompt, shared_by = self._config.rollout.max_prompt_length, self._config.rollout.n
        if not self.role.share_prompts or self.role.context_parallel_size > 1:
            shared_by = 1
        return self._longest - prompt + prompt / shared_by

    @property
    def _samples(self) -> int:
        """Of an optimizer step on each replica."""
        config = self._config
        all_of_them = config.trainer.prompts_per_step * config.rollout.n
        return math.ceil(all_of_them / config.algorithm.mini_batches / self.replicas)

    @property
    def _micro_batches(self) -> int:
        """Of an optimizer step, where all responses are as long as they may be."""
        held = max(1, int(self.role.micro_batch_tokens // self._row_length))
        return math.ceil(self._samples / held)


class PlacedRollout:
    """vLLM on the ranks that roll out."""

    def __init__(self, config: Config, arch: Architecture, world_size: int) -> None:
        self._rollout = rollout = config.rollout
        self._arch, self._dtype = arch, rollout.dtype or config.model.dtype
        self._itemsize = ITEM_BYTES[self._dtype]
        self.layout = VLLMLayout(
            arch, rollout.tensor_parallel_size, rank_list(rollout.ranks, world_size), rollout.pipeline_parallel_size,
            rollout.expert_parallel,
        )  # fmt: skip

    def weights(self, rank: int) -> float:
        """Bytes. Quantised are linear layers alone, not what has a row for each of the vocabulary's tokens."""
        linear = 1 if self._rollout.quantization else self._itemsize
        return sum(
            nbytes_of(self.layout, rank, unit, self._itemsize if unit.kind == "vocab" else linear)
            for unit in self.layout.units(rank)
        )

    def cache(self) -> float:
        """Bytes of the KV cache on a rank."""
        return cache_bytes(self._arch, self._rollout, self._dtype)

    @property
    def prefill(self) -> float:
        """Bytes of a layer's activations in the largest forward over prompts."""
        as_role = Role(tensor_parallel_size=self._rollout.tensor_parallel_size)
        widest = max(widths(self._arch, layer, as_role).passing for layer in range(self._arch.layers))
        return PREFILL_TOKENS * widest * self._itemsize

    @property
    def logits(self) -> float:
        """Bytes of the logits of all sequences that are decoded at once."""
        itemsize = 4 if self._rollout.match_trainer else self._itemsize
        return itemsize * self._rollout.max_num_seqs * self._arch.vocab


def nbytes_of(layout: Layout, rank: int, unit: Unit, itemsize: int) -> int:
    """Bytes of what a rank holds of a unit."""
    size = 4 if unit.kind in FLOAT32_KINDS else itemsize
    return size * _numbers(layout, unit.kind, layout.shard(rank, unit.kind))


@lru_cache(maxsize=4096)
def _numbers(layout: Layout, kind: str, shard: Hashable) -> int:
    return sum(math.prod(param.shape) for param in layout.params(kind, shard))
