"""The policy model: megatron-core's GPTModel whose last stage returns log-probs of chosen tokens instead of logits.

Which layers it is made of is left to `layers`.
"""

from __future__ import annotations

import importlib.util
from typing import Any, TypeVar

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_bridge.families import Architecture
from rlflow.models.layers import block_spec, variant_of
from rlflow.models.log_probs import token_log_probs
from rlflow.models.packed import PackedInput
from rlflow.models.rope import Ropes, make_ropes
from rlflow.models.softmax import VocabShard
from rlflow.parallel import Grid, active, device

Model = TypeVar("Model", bound=GPTModel)


def fits_transformer_engine(arch: Architecture) -> bool:
    """Whether Transformer Engine computes a model's attention, and its experts."""
    return variant_of(arch).transformer_engine


def has_transformer_engine(dtype: torch.dtype) -> bool:
    """Whether Transformer Engine can be used; its attention of packed sequences has no float32 kernel."""
    return (
        device().type == "cuda"
        and dtype != torch.float32
        and importlib.util.find_spec("transformer_engine") is not None
    )


class LogProbHead(ColumnParallelLinear):
    """The output layer: scores the tokens that `PackedInput.scoring` names.

    Returns float32 [R] log-probs, and entropies [R] where they were asked for, else None.
    """

    vocab: int  # rows of the real vocabulary
    chunk_tokens: int
    exact_logits: bool

    def forward(self, hidden: Tensor, weight: Tensor | None, packed: PackedInput) -> tuple[Tensor, Tensor | None]:
        """hidden: [T, 1, H], or this rank's part of the rows under sequence parallelism."""
        scoring = packed.scoring
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            # Before rows are chosen: gradients of several responses meet in their prompt's last row, a GPU adds them in
            # any order, and after their sum over the ranks each rank would have another one.
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        return token_log_probs(
            hidden[:, 0].index_select(0, scoring.rows),
            self.weight if weight is None else weight,
            scoring.targets,
            self._shard(),
            temperature=scoring.temperature,
            chunk_tokens=self.chunk_tokens,
            with_entropy=scoring.with_entropy,
            exact_logits=self.exact_logits,
            slopes_of=scoring.slopes_of,
        )

    def _shard(self) -> VocabShard:
        start = self.tp_group.rank() * self.output_size_per_partition
        size = min(max(self.vocab - start, 0), self.output_size_per_partition)
        return VocabShard(start, size, self.tp_group)


class PolicyModel(GPTModel):
    """A pipeline stage of the policy. Called with token ids [1, T], positions [1, T], None and a `PackedInput`.

    Returns hidden states [T, 1, H], on the last stage (log-probs, entropies) as `LogProbHead` gives them.
    """

    ropes: Ropes  # of its layers

    def vocabulary_weights(self) -> list[torch.nn.Parameter]:
        """The embedding and the head of this stage, as far as it holds them; one where they are tied."""
        weights = [self.embedding.word_embeddings.weight] if self.pre_process else []
        if self.post_process and self.output_layer.weight is not None:
            weights.append(self.output_layer.weight)
        return weights

    def _postprocess(self, hidden_states: Tensor, *, packed_seq_params: PackedInput, **_: Any) -> Any:
        if not self.post_process:
            return hidden_states
        shared = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden_states, shared, packed_seq_params)


def build_policy(
    arch: Architecture,
    grid: Grid,
    config: TransformerConfig,
    *,
    padded_vocab: int,
    chunk_tokens: int = 2048,
    exact_logits: bool = False,
    chunk: int = 0,
) -> PolicyModel:
    """This rank's stage of the model, on its device, weights zero until they are loaded; call inside no `active`.

    With virtual pipeline stages `chunk` is the number of one of the rank's. `chunk_tokens`: rows scored at a time,
    from float32 logits with `exact_logits`.
    """
    model = build_stage(PolicyModel, arch, grid, config, padded_vocab, tied=arch.tied, chunk=chunk)
    if model.post_process:
        model.output_layer = _log_prob_head(model, arch.vocab, chunk_tokens, exact_logits)
    return model


def build_stage(
    kind: type[Model],
    arch: Architecture,
    grid: Grid,
    config: TransformerConfig,
    padded_vocab: int,
    *,
    tied: bool,
    chunk: int = 0,
) -> Model:
    """A stage with megatron's own output layer; `tied` is whether that is the embedding."""
    variant = variant_of(arch)
    chunks = config.virtual_pipeline_model_parallel_size
    vp_stage = None if chunks is None else chunk
    with active(grid):
        model = kind(
            config,
            block_spec(arch, config, vp_stage=vp_stage),
            vocab_size=padded_vocab,
            max_sequence_length=arch.max_positions,
            pre_process=grid.is_first_stage and chunk == 0,
            post_process=grid.is_last_stage and chunk == (chunks or 1) - 1,
            position_embedding_type="none",  # self-attention rotates
            share_embeddings_and_output_weights=tied,
            pg_collection=grid.groups,
            vp_stage=vp_stage,
        )
    model.ropes = make_ropes(arch).to(device())
    if model.pre_process:
        model.embedding.word_embeddings.__class__ = variant.embedding  # the same state, another forward and backward
    return model


def _log_prob_head(model: GPTModel, vocab: int, chunk_tokens: int, exact_logits: bool) -> LogProbHead:
    """A head in the place of the model's output layer, with that layer's weight."""
    plain = model.output_layer
    head = LogProbHead(
        plain.input_size,
        plain.output_size,
        config=plain.config,
        init_method=torch.nn.init.zeros_,
        bias=False,
        skip_weight_param_allocation=True,
        tp_group=plain.tp_group,
    )
    head.weight = plain.weight
    head.vocab, head.chunk_tokens, head.exact_logits = vocab, chunk_tokens, exact_logits
    return head
