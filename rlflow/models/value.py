"""The value model (a critic, or a reward model's scorer): the policy's stages under a head of one output.

Weights of its head come from a checkpoint that has one, or are made by `megatron_bridge.score`.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_bridge.families import Architecture
from rlflow.models.packed import PackedInput
from rlflow.models.policy import build_stage
from rlflow.models.rope import Ropes
from rlflow.parallel import Grid


class ValueHead(nn.Module):
    """hidden · weight in float32, the same weight on every tensor-parallel rank."""

    def __init__(self, config: TransformerConfig, tp_group: Any) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        # Under sequence parallelism each rank sees a part of the rows: megatron then sums this gradient over the group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.sequence_parallel, self.tp_group = config.sequence_parallel, tp_group

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, 1, H], or this rank's part of the rows under sequence parallelism → float32 [T]."""
        values = torch.nn.functional.linear(hidden[:, 0].float(), self.weight.float())
        if self.sequence_parallel:  # what follows is the same on all ranks, and so are its gradients
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values[:, 0]


class ValueModel(GPTModel):
    """A pipeline stage. Called with token ids [1, T], positions [1, T], None and a `PackedInput`, of no `scoring`.

    Returns hidden states [T, 1, H], on the last stage the value of each row, float32 [T].
    """

    ropes: Ropes  # of its layers

    def vocabulary_weights(self) -> list[nn.Parameter]:
        """The embedding of this stage, if it holds one."""
        return [self.embedding.word_embeddings.weight] if self.pre_process else []

    def _postprocess(self, hidden_states: Tensor, *, packed_seq_params: PackedInput, **_: Any) -> Tensor:
        return self.output_layer(hidden_states) if self.post_process else hidden_states


def build_value(
    arch: Architecture, grid: Grid, config: TransformerConfig, *, padded_vocab: int, chunk: int = 0
) -> ValueModel:
    """This rank's stage (or its virtual stage `chunk`) of the model, on its device; call inside no `active`.

    Weights are zero until they are loaded.
    """
    assert arch.head == "score", "a value model has a score head"
    model = build_stage(ValueModel, arch, grid, config, padded_vocab, tied=False, chunk=chunk)
    if model.post_process:
        model.output_layer = ValueHead(config, grid.groups.tp)
    return model
