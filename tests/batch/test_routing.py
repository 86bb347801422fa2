"""Routing of samples as fields of a batch."""

import pytest
import torch

from rlflow.batch import Batch, Prompt, Sample
from rlflow.batch.routing import ROUTING, RoutingShape, add_routing, without_routing

SHAPE = RoutingShape(layers=2, per_token=2, experts=8)


def sample(prompt: Prompt, index: int, response: int) -> Sample:
    """Row r of the routing has the experts 10·index + r four times, as numbers easily told apart."""
    rows = len(prompt.token_ids) + response - 1
    numbers = torch.arange(rows, dtype=torch.uint8) + 10 * index
    return Sample(
        prompt, index, [9] * response, [0.0] * response, False, "", 0, numbers[:, None, None].expand(-1, 2, 2)
    )


def batch_of(samples: list[Sample]) -> Batch:
    return Batch.from_samples(samples, {"a": 0, "b": 1})


def test_a_prompts_rows_are_its_first_samples_and_the_last_token_repeats_the_one_before() -> None:
    a, b = Prompt("a", [1, 2, 3], {}, None), Prompt("b", [4], {}, None)
    samples = [sample(a, 0, 2), sample(b, 1, 3), sample(a, 2, 1)]
    batch = batch_of(samples)
    add_routing(batch, samples, SHAPE)
    assert batch.prompt_tokens[ROUTING][:, 0].tolist() == [0, 1, 2, 10]
    assert batch.tokens[ROUTING][:, 3].tolist() == [3, 3, 11, 12, 12, 22]
    assert batch.tokens[ROUTING].dtype == torch.uint8


def test_a_rank_without_samples_has_the_same_fields() -> None:
    batch = batch_of([])
    add_routing(batch, [], SHAPE._replace(experts=512))
    assert batch.tokens[ROUTING].shape == batch.prompt_tokens[ROUTING].shape == (0, 4)
    assert batch.tokens[ROUTING].dtype == torch.int16  # uint8 numbers 256 experts


def test_roles_without_routers_get_none() -> None:
    samples = [sample(Prompt("a", [1], {}, None), 0, 2)]
    batch = batch_of(samples)
    add_routing(batch, samples, SHAPE)
    plain = without_routing(batch)
    assert (set(batch.tokens) - set(plain.tokens), dict(plain.prompt_tokens)) == ({ROUTING}, {})


def test_routing_that_does_not_fit_its_tokens_is_refused() -> None:
    prompt = Prompt("a", [1, 2, 3], {}, None)
    short = sample(prompt, 0, 2)
    assert short.routing is not None
    for routing in (short.routing[:-1], short.routing[:, :1], None):
        short.routing = routing
        with pytest.raises(ValueError, match=r"sample 0 of a: routing of .*, not \[4, 4\]"):
            add_routing(batch_of([short]), [short], SHAPE)
