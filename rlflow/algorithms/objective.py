"""The actor's objective: policy loss, KL term and entropy bonus, weighted and summed, with their metrics.

Advantages, log-probs and weights are given; who computes them, and over which micro-batches, is the trainer's matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlflow.algorithms.aggregation import rows_count
from rlflow.algorithms.importance import mismatch_metrics, truncated_weights
from rlflow.algorithms.kl import k3, kl_estimator
from rlflow.algorithms.masked import masked
from rlflow.algorithms.policy_losses import PER_TOKEN, PolicyTerms, clipped, policy_loss


@dataclass(frozen=True)
class PolicyObjective:
    """Σ weight · (policy loss + kl_coef · KL − entropy_coef · entropy) over the tokens of a micro-batch."""

    policy_loss: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0  # of the term in the loss; 0 where the KL penalty is part of the reward
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    importance_correction: str | None = None  # None or "tis"
    importance_cap: float = 2.0

    def __post_init__(self) -> None:
        policy_loss[self.policy_loss], kl_estimator[self.kl_estimator]  # unknown names raise here, not in a step
        if self.importance_correction not in (None, "tis"):
            raise ValueError(f"no importance correction named {self.importance_correction!r}. Valid: tis")
        if self.kl_coef and self.kl_estimator == "k1":
            raise ValueError("k1 in the loss has an expected gradient of zero: take k2, k3 or k1-straight-through")

    @property
    def is_per_token(self) -> bool:
        """Whether tokens do not meet: the loss is a sum over them, each summand of the token's own numbers."""
        return self.policy_loss in PER_TOKEN

    def with_kl_coef(self, kl_coef: float) -> PolicyObjective:
        """The objective at another KL coefficient; where the loss has no KL term it gets none."""
        return replace(self, kl_coef=kl_coef) if self.kl_coef else self

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, fields: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar loss, and metrics to be combined by `metrics.combine`.

        `log_probs` and `entropy` are float32 [R]; `fields` holds [R] tensors "mask", "weights", "advantages",
        "sample_index", and where there are such "old_log_probs", "rollout_log_probs", "ref_log_probs". Without
        "old_log_probs" the policy is the one that is being updated: right if each sample is used for one step.
        """
        terms = self._terms(log_probs, fields)
        token_loss, ratio = policy_loss[self.policy_loss](terms)
        metrics = {"tokens": terms.mask.sum(), **self._ratio_metrics(ratio.detach(), terms)}
        if "rollout_log_probs" in fields:
            token_loss = self._correct(token_loss, terms, fields["rollout_log_probs"], metrics)
        loss = (fields["weights"] * token_loss).sum()
        metrics["policy_loss"] = loss
        loss = self._add_kl(loss, terms.log_probs, fields, metrics)
        loss = self._add_entropy(loss, entropy, fields, metrics)
        metrics["loss"] = loss
        return loss, {name: value.detach().double() for name, value in metrics.items()}

    def _terms(self, log_probs: Tensor, fields: Mapping[str, Tensor]) -> PolicyTerms:
        mask = fields["mask"]
        current = masked(log_probs, mask)
        return PolicyTerms(
            log_probs=current,
            old_log_probs=masked(fields["old_log_probs"], mask) if "old_log_probs" in fields else current.detach(),
            advantages=masked(fields["advantages"], mask),
            mask=mask,
            sample_index=fields["sample_index"],
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )

    def _ratio_metrics(self, ratio: Tensor, terms: PolicyTerms) -> dict[str, Tensor]:
        cut = clipped(ratio, terms.advantages, self.clip_low, self.clip_high)
        error = (ratio - 1).abs()
        return {"clipped": (cut & terms.mask).sum(), "ratio_error_max": torch.nn.functional.pad(error, (0, 1)).max()}

    def _correct(
        self, token_loss: Tensor, terms: PolicyTerms, rollout_log_probs: Tensor, metrics: dict[str, Tensor]
    ) -> Tensor:
        """Measure the gap to the rollout engine, and weigh the tokens by it where that is asked for."""
        rollout = masked(rollout_log_probs, terms.mask)
        cap = self.importance_cap if self.importance_correction else None
        metrics |= mismatch_metrics(terms.old_log_probs, rollout, terms.mask, cap)
        return token_loss if cap is None else token_loss * truncated_weights(terms.old_log_probs, rollout, cap)

    def _add_kl(
        self, loss: Tensor, log_probs: Tensor, fields: Mapping[str, Tensor], metrics: dict[str, Tensor]
    ) -> Tensor:
        if "ref_log_probs" not in fields and not self.kl_coef:
            return loss
        reference = masked(fields["ref_log_probs"], fields["mask"])
        metrics["kl"] = k3(log_probs.detach(), reference).sum()
        if not self.kl_coef:
            return loss
        estimate = kl_estimator[self.kl_estimator](log_probs, reference)
        metrics["kl_loss"] = self.kl_coef * (fields["weights"] * estimate).sum()
        return loss + metrics["kl_loss"]

    def _add_entropy(
        self, loss: Tensor, entropy: Tensor | None, fields: Mapping[str, Tensor], metrics: dict[str, Tensor]
    ) -> Tensor:
        if entropy is None:
            if self.entropy_coef:
                raise ValueError("an entropy bonus needs the entropy of each token")
            return loss
        entropy = masked(entropy, fields["mask"])
        metrics["entropy"] = entropy.sum()
        return loss - self.entropy_coef * (fields["weights"] * entropy).sum()

    def has_zero_gradient(self, advantages: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        """Samples whose gradient is exactly zero, so that they need no forward: bool [n].

        Those without a trainable token, and, where neither KL nor entropy is in the loss, those whose advantages are
        all zero. Leaving them out changes no weight: the denominators are counted before.
        """
        needed = mask if self.kl_coef or self.entropy_coef else mask & (advantages != 0)
        return rows_count(needed, lengths) == 0
