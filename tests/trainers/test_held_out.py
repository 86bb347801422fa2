"""Held-out accuracy: every row is scored once, wherever it was sampled, and no rank needs to have any."""

import torch.distributed as dist

from rlflow.batch import Prompt, Sample
from rlflow.config import Config, Evaluation, Model, Reward
from rlflow.rewards.scorer import Scorer
from rlflow.rollout.shares import split
from rlflow.trainers import held_out

REWARD = Reward("rlflow.rewards:exact_match")


class Recall:
    """A rollout engine that knows which responses it is to get right: (row, index) pairs; a replica on every rank."""

    def __init__(self, right: set[tuple[int, int]]) -> None:
        self.right = right

    def generate(
        self, prompts: list[Prompt], *, n: int, temperature: float, step: int, greedy: bool = False
    ) -> list[Sample]:
        shares = split([len(prompt.token_ids) for prompt in prompts], n, 8, dist.get_world_size())[dist.get_rank()]
        return [
            self.respond(prompts[share.prompt], index)
            for share in shares
            for index in range(share.first, share.first + share.count)
        ]

    def respond(self, prompt: Prompt, index: int) -> Sample:
        row = int(prompt.id.partition("/")[2])
        text = str(prompt.answer) if (row, index) in self.right else "wrong"
        return Sample(prompt, index, [1], [0.0], truncated=False, text=text, weights_version=1)


class Counting(Scorer):
    """Remembers what it scored."""

    def score(self, samples: list[Sample]) -> dict[str, float]:
        self.seen = [(sample.prompt.id, sample.index) for sample in samples]
        return super().score(samples)


def rows(count: int) -> list[Prompt]:
    return [Prompt(f"evaluation/{row}", [1] * (row + 1), {}, row) for row in range(count)]


def run_measure(count: int) -> tuple[dict[str, float], list[tuple[str, int]]]:
    scorer = Counting([REWARD])
    config = Config(Model(""), rewards=(REWARD,))
    return held_out.measure(Recall({(0, 0)}), scorer, rows(count), config, step=3), scorer.seen


def test_ten_rows_on_four_ranks_are_scored_once_each(world):
    """cases.md D06: the first of 10 is right: 0.10, where duplicates give 3/12 and dropping the rest leaves 8 rows."""
    results = world(4, run_measure, 10)
    assert sorted(item for _, seen in results for item in seen) == [(f"evaluation/{row}", 0) for row in range(10)]
    assert [metrics["eval/accuracy"] for metrics, _ in results] == [0.1] * 4


def test_fewer_rows_than_ranks(world):
    results = world(4, run_measure, 2)
    assert sorted(len(seen) for _, seen in results) == [0, 0, 1, 1]
    assert [metrics["eval/accuracy"] for metrics, _ in results] == [0.5] * 4


def run_report() -> dict[str, float]:
    config = Config(Model(""), rewards=(REWARD,), evaluation=Evaluation(n=4))
    right = {(0, 0), *((1, index) for index in range(4))}  # one of four, all, none
    return held_out.report(Recall(right), Scorer(config.rewards), rows(3), config)


def test_pass_at_k_gathers_a_prompts_responses_from_all_ranks(world):
    """Three prompts, four responses each, on two ranks; chances of each prompt by 1 − C(4 − c, k) / C(4, k)."""
    for report in world(2, run_report):
        assert report["greedy/accuracy"] == 2 / 3
        assert report["sampled/accuracy"] == 5 / 12
        assert report["pass@1"] == (1 / 4 + 1 + 0) / 3
        assert report["pass@2"] == (1 / 2 + 1 + 0) / 3
        assert report["pass@4"] == (1 + 1 + 0) / 3


def test_without_held_out_rows_nothing_is_measured():
    assert held_out.measure(Recall(set()), Scorer([REWARD]), [], Config(Model(""), rewards=(REWARD,)), step=0) == {}
