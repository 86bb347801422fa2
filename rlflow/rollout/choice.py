"""Sampling by vLLM's second GPU runner with one pass over the logits, where its own sampler takes four.

vLLM draws a random number for every logit, then reads all of them again for the log-prob of the chosen token and once
more for its rank, which nobody asks for here. What is done to the logits before (temperature, top-p and top-k, tokens
that must not come yet) stays vLLM's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Choices:
    """Stands in for two functions of vLLM's sampler: the second is asked for what the first has found.

    Args:
        choose: `choice_kernel.choose`.
        score_by_vllm: computes what this does not, as for several log-probs a token.
    """

    def __init__(self, choose: Callable[..., tuple[Tensor, Tensor]], score_by_vllm: Callable[..., Any]) -> None:
        self._choose, self._score_by_vllm = choose, score_by_vllm
        self._tokens: Tensor | None = None
        self._log_probs: Tensor | None = None

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        temperatures: Tensor,
        seeds: Tensor,
        positions: Tensor,
        *,
        apply_temperature: bool,
        **_: Any,
    ) -> Tensor:
        """A token of each row of logits, which are divided by the temperature: int64 [N]."""
        if apply_temperature:
            raise ValueError("the logits are to be divided by the temperature before a token is chosen")
        self._tokens, self._log_probs = self._choose(logits, slots, temperatures, seeds, positions)
        return self._tokens

    def score(self, logits: Tensor, count: int, tokens: Tensor, *rest: Any, **more: Any) -> Any:
        """vLLM's form of the log-probs of the tokens that were sampled last; their ranks are left at 0."""
        from vllm.v1.outputs import LogprobsTensors

        log_probs, self._log_probs = self._log_probs, None
        plain = count == 0 and not more.get("max_per_req_token_ids") and not more.get("logits_mode")
        if not plain or tokens is not self._tokens or log_probs is None:
            return self._score_by_vllm(logits, count, tokens, *rest, **more)
        ranks = torch.zeros(len(tokens), dtype=torch.int32, device=tokens.device)
        return LogprobsTensors(tokens[:, None], log_probs[:, None], ranks)


@functools.cache  # a second engine of the process finds it done
def install() -> None:
    """Have vLLM's second GPU runner sample this way from now on, in this process."""
    from vllm.v1.worker.gpu.sample import sampler

    from rlflow.rollout.choice_kernel import choose

    module: Any = sampler
    choices = Choices(choose, module.compute_topk_scores)
    module.gumbel_sample, module.compute_topk_scores = choices.sample, choices.score
