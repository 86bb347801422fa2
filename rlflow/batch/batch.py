"""The training batch: N responses to P prompts as flat tensors, each prompt held once for all its responses.

Fields per sample, per response token and per prompt token sit in dictionaries, so that every role adds its own without
a change here.
Cutting a batch into forwards is left to `packing`, moving it between ranks to `transfer`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlflow.batch.ragged import Ragged
from rlflow.batch.sample import Sample
from rlflow.batch.sizes import Sizes


@dataclass
class Batch:
    """N responses to P prompts.

    `samples["group"]` is the number of the prompt in this step, the same on every rank: two prompts of equal text are
    two groups. `tokens[...]` are flat like `responses.values` and `prompt_tokens[...]` like `prompts.values`; both may
    have further dimensions behind the tokens.
    """

    prompts: Ragged  # int64 token ids, P rows
    responses: Ragged  # int64 token ids, N rows
    prompt_of: Tensor  # int64 [N], row in prompts
    samples: dict[str, Tensor]  # [N]: "group", "index" int64, "rewards" float32 (nan: unscorable), "truncated" bool
    tokens: dict[str, Tensor]  # [sum of response lengths, …]: "mask" bool, "rollout_log_probs" float32, ...
    prompt_tokens: dict[str, Tensor] = field(default_factory=dict)  # [sum of prompt lengths, …]

    def __len__(self) -> int:
        return len(self.responses)

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], group_numbers: Mapping[str, int]) -> Batch:
        """Build a batch on the CPU; `group_numbers` maps prompt ids to the prompt's number in this step.

        An empty response has no token that could carry a reward, so it counts as unscorable.
        Raises ValueError where a sample's ids and log-probs differ in number or a prompt is empty.
        """
        for sample in samples:
            if len(sample.response_ids) != len(sample.log_probs) or not sample.prompt.token_ids:
                raise ValueError(
                    f"sample {sample.index} of {sample.prompt.id}: {len(sample.prompt.token_ids)} prompt tokens, "
                    f"{len(sample.response_ids)} response tokens, {len(sample.log_probs)} log-probs"
                )
        prompts = {sample.prompt.id: sample.prompt for sample in samples}
        row_of = {prompt_id: row for row, prompt_id in enumerate(prompts)}
        rewards = [
            math.nan if sample.reward is None or not sample.response_ids else sample.reward for sample in samples
        ]
        responses = Ragged.from_rows([sample.response_ids for sample in samples])
        log_probs = Ragged.from_rows([sample.log_probs for sample in samples], torch.float32)
        return cls(
            prompts=Ragged.from_rows([prompt.token_ids for prompt in prompts.values()]),
            responses=responses,
            prompt_of=_integers(row_of[sample.prompt.id] for sample in samples),
            samples={
                "group": _integers(group_numbers[sample.prompt.id] for sample in samples),
                "index": _integers(sample.index for sample in samples),
                "rewards": torch.tensor(rewards, dtype=torch.float32),
                "truncated": torch.tensor([sample.truncated for sample in samples], dtype=torch.bool),
            },
            tokens={
                "mask": torch.ones(len(responses.values), dtype=torch.bool),
                "rollout_log_probs": log_probs.values,
            },
        )

    def select(self, index: Tensor | Sequence[int]) -> Batch:
        """The given samples in the given order, with only the prompts that they need."""
        rows = torch.as_tensor(index, dtype=torch.int64, device=self.prompt_of.device)
        kept_prompts, prompt_of = torch.unique(self.prompt_of[rows], return_inverse=True)
        token_index, prompt_index = self.responses.value_index(rows), self.prompts.value_index(kept_prompts)
        return Batch(
            prompts=Ragged(self.prompts.values[prompt_index], self.prompts.lengths[kept_prompts]),
            responses=Ragged(self.responses.values[token_index], self.responses.lengths[rows]),
            prompt_of=prompt_of,
            samples={name: values[rows] for name, values in self.samples.items()},
            tokens={name: values[token_index] for name, values in self.tokens.items()},
            prompt_tokens={name: values[prompt_index] for name, values in self.prompt_tokens.items()},
        )

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """One batch of all parts' samples in order; a group's prompt that several parts hold is kept once."""
        first_row: dict[int, int] = {}
        kept: list[int] = []
        prompt_of: list[int] = []
        offset = 0
        for part in parts:
            for group, row in zip(part.samples["group"].tolist(), part.prompt_of.tolist(), strict=True):
                if group not in first_row:
                    first_row[group] = len(kept)
                    kept.append(offset + row)
                prompt_of.append(first_row[group])
            offset += len(part.prompts)
        device = parts[0].prompt_of.device
        prompts = Ragged.concat([part.prompts for part in parts])
        kept_rows = _integers(kept).to(device)
        prompt_index = prompts.value_index(kept_rows)
        return Batch(
            prompts=prompts.select(kept_rows),
            responses=Ragged.concat([part.responses for part in parts]),
            prompt_of=_integers(prompt_of).to(device),
            samples=_joined([part.samples for part in parts]),
            tokens=_joined([part.tokens for part in parts]),
            prompt_tokens={
                name: values[prompt_index] for name, values in _joined([part.prompt_tokens for part in parts]).items()
            },
        )

    def to(self, device: torch.device | str) -> Batch:
        return Batch(
            prompts=self.prompts.to(device),
            responses=self.responses.to(device),
            prompt_of=self.prompt_of.to(device),
            samples={name: values.to(device) for name, values in self.samples.items()},
            tokens={name: values.to(device) for name, values in self.tokens.items()},
            prompt_tokens={name: values.to(device) for name, values in self.prompt_tokens.items()},
        )

    def sizes(self) -> Sizes:
        """Lengths and groups as plain numbers, for planning."""
        return Sizes(
            prompts=self.prompts.lengths[self.prompt_of].tolist(),
            responses=self.responses.lengths.tolist(),
            groups=self.samples["group"].tolist(),
        )

    def per_token(self, values: Tensor) -> Tensor:
        """Give every response token its sample's value: [N] → [sum of response lengths]."""
        return torch.repeat_interleave(values, self.responses.lengths, output_size=len(self.responses.values))


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _integers(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
