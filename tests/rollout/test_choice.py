"""The kernels that choose tokens, in Triton's interpreter, against softmax in float64."""

import torch

from tests.interpreter import interpret
from tests.workers import World

DRAWS = 100  # few, because the interpreter takes milliseconds for each; tests/gpu draws many


def choose_and_score() -> list[bool]:
    """In a process that may import vLLM: what is scored by us, and what vLLM is asked for."""
    from rlflow.rollout.choice import Choices

    tokens, log_probs = torch.tensor([3, 1]), torch.tensor([-0.5, -2.0])
    choices = Choices(lambda *_: (tokens, log_probs), lambda *_, **__: "by vLLM")
    how = {"slots": tokens, "temperatures": log_probs, "seeds": tokens, "positions": tokens}
    sampled = choices.sample(torch.zeros(2, 4), **how, apply_temperature=False, use_fp64=False)
    ours = choices.score(torch.zeros(2, 4), 0, sampled)
    found = [
        sampled is tokens,
        torch.equal(ours.logprobs[:, 0], log_probs),
        torch.equal(ours.logprob_token_ids[:, 0], tokens),
    ]
    found.append(choices.score(torch.zeros(2, 4), 0, sampled) == "by vLLM")  # scored already
    choices.sample(torch.zeros(2, 4), **how, apply_temperature=False)
    found.append(choices.score(torch.zeros(2, 4), 0, tokens.clone()) == "by vLLM")  # other tokens
    choices.sample(torch.zeros(2, 4), **how, apply_temperature=False)
    found.append(choices.score(torch.zeros(2, 4), 5, tokens) == "by vLLM")  # several a token
    try:
        choices.sample(torch.zeros(2, 4), **how, apply_temperature=True)
    except ValueError:
        found.append(True)
    return found


def test_only_what_was_sampled_last_is_scored_here(world: World) -> None:
    assert world(1, choose_and_score)[0] == [True] * 7


def check(device: str, dtype: torch.dtype, rows: int, vocab: int) -> None:
    """Scores, greedy rows and filtered tokens of random logits whose rows lie further apart than they are long."""
    from rlflow.rollout.choice_kernel import choose

    draw = torch.Generator().manual_seed(rows)
    held = (4 * torch.randn(rows, vocab + 3, generator=draw)).to(dtype)
    held[0, 5:] = -torch.inf
    logits = held.to(device)[:, :vocab]
    temperatures = torch.tensor([1.0, 0.0, 0.5] * rows)[:rows].to(device)
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=draw).to(device)
    slots = torch.arange(rows, dtype=torch.int32).flip(0).to(device)
    positions = torch.arange(rows).to(device)
    tokens, log_probs = choose(logits, slots, temperatures, seeds, positions)
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert (log_probs.double() - expected).abs().max() < 1e-5
    greedy = temperatures[slots.long()] == 0
    assert torch.equal(tokens[greedy], logits.argmax(-1)[greedy])
    assert tokens[0] < 5
    assert torch.equal(tokens, choose(logits, slots, temperatures, seeds, positions)[0])


def check_frequencies(device: str, vocab: int, draws: int) -> None:
    """Each token comes as often as its probability says, over positions and over seeds."""
    from rlflow.rollout.choice_kernel import choose

    row = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 2
    logits = row.to(device).expand(draws, -1)
    one, many = torch.zeros(draws, dtype=torch.int32), torch.arange(draws, dtype=torch.int32)
    for slots, positions in ((one, many), (many, one)):
        tokens, _ = choose(
            logits, slots.to(device), torch.ones(draws).to(device),
            torch.randint(2**62, (draws,), generator=torch.Generator().manual_seed(2)).to(device),
            positions.to(device),
        )  # fmt: skip
        wanted = row.double().softmax(0) * draws
        seen = torch.bincount(tokens.cpu(), minlength=vocab).double()
        often = wanted > 5
        squares = ((seen - wanted).square() / wanted)[often].sum().item()
        freedom = int(often.sum())
        assert squares < freedom + 5 * (2 * freedom) ** 0.5  # χ², five standard deviations


def check_kernels() -> None:
    from rlflow.rollout import choice_kernel

    choice_kernel.CHUNK = 8  # several chunks, the last one short
    check("cpu", torch.float32, 7, 20)
    check("cpu", torch.float32, 3, 8)
    check_frequencies("cpu", 12, DRAWS)


def test_the_kernels_in_the_interpreter() -> None:
    interpret(check_kernels)
