"""Small batches for the tests of this folder."""

from collections.abc import Sequence

from rlflow.batch import Batch, Prompt, Sample


def make_sample(prompt_ids: Sequence[int], response_ids: Sequence[int], prompt: str = "p/0", index: int = 0) -> Sample:
    """A sample whose log-probs are −0.01 × its token ids, so that misplaced tokens show."""
    return Sample(
        prompt=Prompt(prompt, list(prompt_ids), {}, None),
        index=index,
        response_ids=list(response_ids),
        log_probs=[-0.01 * token for token in response_ids],
        truncated=False,
        text="",
        weights_version=1,
        reward=float(index),
    )


def make_batch(*groups: tuple[Sequence[int], Sequence[Sequence[int]]]) -> Batch:
    """A batch of (prompt ids, [response ids, …]) groups."""
    samples = [
        make_sample(prompt, response, f"p/{number}", index)
        for number, (prompt, responses) in enumerate(groups)
        for index, response in enumerate(responses)
    ]
    return Batch.from_samples(samples, {f"p/{number}": number for number in range(len(groups))})
