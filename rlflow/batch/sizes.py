"""Lengths of samples and what they cost to compute: all that packing and balancing need to know."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


def whole_multiple(multiple: int, context: int) -> int:
    """What the rows of a micro-batch are padded to, where each of `context` ranks must get a multiple of `multiple`.

    Each of several has two chunks of every sequence, so that its part is even.
    """
    return multiple if context == 1 else context * math.lcm(2, multiple)


@dataclass(frozen=True)
class Sizes:
    """Lengths of N samples, and what a forward makes of them; samples of one group have the same prompt."""

    prompts: list[int]  # prompt tokens of each sample
    responses: list[int]  # response tokens of each sample
    groups: list[int]
    context: int = 1  # context-parallel ranks: each sequence is padded to a multiple of twice as many rows
    with_last: bool = False  # whether the last response token is a row

    def __len__(self) -> int:
        return len(self.responses)

    def select(self, members: Sequence[int]) -> Sizes:
        return replace(
            self,
            prompts=[self.prompts[i] for i in members],
            responses=[self.responses[i] for i in members],
            groups=[self.groups[i] for i in members],
        )

    def grown(self, sample: int) -> int:
        """Rows of a response in a forward: its last token predicts nothing and may be left out."""
        return max(self.responses[sample] - (not self.with_last), 0)

    def prompts_held(self, members: Iterable[int], share_prompts: bool) -> list[int]:
        """The prompt lengths that a forward over these samples computes."""
        if share_prompts:
            return list({self.groups[i]: self.prompts[i] for i in members}.values())
        return [self.prompts[i] for i in members]

    def rows(self, members: Sequence[int], share_prompts: bool) -> int:
        """Rows of one forward over these samples, before it is padded as a whole."""
        if self.context > 1:
            lengths = [self.prompts[i] + self.grown(i) for i in members]
            return sum(length + -length % (2 * self.context) for length in lengths)
        return sum(self.prompts_held(members, share_prompts)) + sum(self.grown(i) for i in members)

    def cost(self, members: Sequence[int], share_prompts: bool, hidden: int) -> float:
        """Work of a forward over these samples, in rows without attention.

        A layer of hidden size h does about 24·h² FLOPs a row and 4·h a pair of query and key, so that a pair is worth
        1/(6·h) of a row.
        """
        pairs = sum(length * length / 2 for length in self.prompts_held(members, share_prompts))
        pairs += sum(self.grown(i) * (self.prompts[i] + self.grown(i) / 2) for i in members)
        return self.rows(members, share_prompts) + pairs / (6 * hidden)

    def by_group(self) -> list[list[int]]:
        """Samples of each group, groups in the order of their first sample."""
        members: dict[int, list[int]] = {}
        for sample, group in enumerate(self.groups):
            members.setdefault(group, []).append(sample)
        return list(members.values())
