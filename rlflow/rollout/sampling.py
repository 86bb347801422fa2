"""From prompts to vLLM's requests, and from its outputs to samples.

Token ids and log-probs are kept exactly as sampled; text is decoded from them once. When vLLM may be called at all is
left to `engine.Lifecycle`, which prompts a replica takes to `shares`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlflow.batch.sample import Prompt, Sample
from rlflow.config.schema import Rollout
from rlflow.errors import UserError
from rlflow.rollout.routing import routing_of
from rlflow.rollout.seeds import response_seed
from rlflow.rollout.shares import Share

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import RequestOutput, SamplingParams


class Tokenizer(Protocol):
    def batch_decode(self, sequences: list[list[int]], *, skip_special_tokens: bool) -> list[str]: ...


@dataclass(frozen=True)
class Sampling:
    """How one call of `generate` samples. `stop` holds every id that ends a response (cases.md B30)."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    min_tokens: int
    stop: tuple[int, ...]

    def parameters(self, n: int, seed: int | None = None) -> "SamplingParams":
        """vLLM's form. `stop` is the whole list of stop ids, whatever vLLM knows of the model; sampled ids are kept."""
        from vllm import SamplingParams

        return SamplingParams(
            n=n, seed=seed, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k,
            max_tokens=self.max_tokens, min_tokens=self.min_tokens,
            ignore_eos=True, stop_token_ids=list(self.stop), include_stop_str_in_output=True,
            logprobs=0, flat_logprobs=True, detokenize=False,
        )  # fmt: skip


def choose(config: Rollout, eos: Sequence[int], temperature: float, greedy: bool, min_tokens: int) -> Sampling:
    """The sampling of a call: greedy turns off all randomness, otherwise the configured filters hold."""
    stop = () if config.ignore_eos else tuple(dict.fromkeys([*eos, *config.stop_token_ids]))
    if greedy:
        return Sampling(0.0, 1.0, -1, config.max_response_length, min_tokens, stop)
    return Sampling(temperature, config.top_p, config.top_k, config.max_response_length, min_tokens, stop)


def check_lengths(prompts: Iterable[Prompt], limit: int) -> None:
    """UserError for a prompt that is empty or over `rollout.max_prompt_length`; the loader filters or cuts before."""
    for prompt in prompts:
        if not 0 < len(prompt.token_ids) <= limit:
            message = f"has {len(prompt.token_ids)} tokens, rollout.max_prompt_length is {limit}"
            raise UserError(f"prompt {prompt.id}", message)


@dataclass(frozen=True)
class Request:
    """One vLLM request: `count` responses to a prompt, the first with index `first`."""

    prompt: Prompt
    first: int
    count: int
    seed: int | None


def requests(
    prompts: list[Prompt], shares: Iterable[Share], run_seed: int, step: int, deterministic: bool
) -> list[Request]:
    """A replica's requests: one a prompt, or in deterministic mode one a response, each with its own seed."""
    if not deterministic:
        return [Request(prompts[share.prompt], share.first, share.count, None) for share in shares]
    return [
        Request(prompts[share.prompt], index, 1, response_seed(run_seed, step, prompts[share.prompt].id, index))
        for share in shares
        for index in range(share.first, share.first + share.count)
    ]


def samples(
    wanted: list[Request], outputs: list["RequestOutput"], tokenizer: Tokenizer, version: int,
    expert_layers: list[int] | None = None,
) -> list[Sample]:  # fmt: skip
    """vLLM's outputs, in the order of the requests, as samples with their decoded text.

    They tell where their tokens went in the `expert_layers`, where such are named.
    """
    found = [
        Sample(
            prompt=request.prompt,
            index=request.first + completion.index,
            response_ids=list(completion.token_ids),
            log_probs=_sampled_log_probs(completion),
            truncated=completion.finish_reason == "length",
            text="",
            weights_version=version,
            routing=None if expert_layers is None else _routing(request, completion, expert_layers),
        )
        for request, output in zip(wanted, outputs, strict=True)
        for completion in output.outputs
    ]
    texts = tokenizer.batch_decode([sample.response_ids for sample in found], skip_special_tokens=True)
    for sample, text in zip(found, texts, strict=True):
        sample.text = text
    return found


def _routing(request: Request, completion: Any, layers: list[int]) -> "Tensor":
    """The last token was sampled and not computed, and so went nowhere."""
    return routing_of(completion, len(request.prompt.token_ids) + len(completion.token_ids) - 1, layers)


def _sampled_log_probs(completion: Any) -> list[float]:
    """The log-prob of each sampled token: first of its position, where vLLM also lists the likeliest."""
    log_probs = [completion.logprobs.logprobs[start] for start in completion.logprobs.start_indices]
    if len(log_probs) != len(completion.token_ids):
        raise RuntimeError(f"vLLM returned {len(log_probs)} log-probs for {len(completion.token_ids)} tokens")
    return log_probs
