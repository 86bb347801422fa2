"""vLLM in the trainer's own processes, sampling in model-parallel replicas on all or some ranks of the job.

Every rank of the job builds a `VLLMRollout` and calls it alike; ranks outside `rollout.ranks` only send weights. What
moves where is planned and carried out by megatron_bridge; when which call is allowed is `engine.Lifecycle`'s.
"""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_bridge import compat
from megatron_bridge.families.architecture import Architecture
from megatron_bridge.layouts import VLLMLayout
from rlflow.batch.sample import Prompt, Sample
from rlflow.config.schema import Rollout
from rlflow.parallel import device
from rlflow.rollout import sampling
from rlflow.rollout.engine import Lifecycle
from rlflow.rollout.seeds import engine_seed, seeded_generators
from rlflow.rollout.shares import split
from rlflow.rollout.timing import Generation
from rlflow.rollout.vllm_process import start
from rlflow.rollout.weights import WeightReceiver
from rlflow.rollout.world import Replicas, rollout_ranks, vllm_world

if TYPE_CHECKING:
    from megatron_bridge.execute import Traffic
    from megatron_bridge.layouts import Layout


class VLLMRollout:
    """The rollout engine of one rank.

    Args:
        architecture: the model's record.
        model_path: its Hugging Face folder; only the config is read, weights come by `sync`.
        config: the `rollout` section.
        tokenizer: decodes sampled ids (`batch_decode`).
        dtype: "float32" or "bfloat16", used where `config.dtype` is None.
        seed: the run's seed.
        timeout_seconds: longest wait in vLLM's collectives.
        bucket_bytes: most bytes that a rank receives in one round of a sync.
        prove: compare bridge and vLLM's loader at start, see `megatron_bridge.proof`.
        checksum: compare what arrives in each sync with what was sent.
        ranks: the job's ranks that roll out in the order in which replicas take them; None: ascending.
        with_routing: samples tell to which experts their tokens were sent; for a model with experts.
    """

    def __init__(
        self, architecture: Architecture, model_path: str, config: Rollout, tokenizer: sampling.Tokenizer, *,
        dtype: str, seed: int, timeout_seconds: float = 600, bucket_bytes: int = 256 << 20, prove: bool = True,
        checksum: bool = False, ranks: tuple[int, ...] | None = None, with_routing: bool = False,
    ) -> None:  # fmt: skip
        self._architecture, self._config, self._tokenizer, self._seed = architecture, config, tokenizer, seed
        self._rank = dist.get_rank()
        self.replicas = Replicas(
            ranks or rollout_ranks(config.ranks, dist.get_world_size()), config.tensor_parallel_size,
            config.pipeline_parallel_size,
        )  # fmt: skip
        layout = VLLMLayout(
            architecture, config.tensor_parallel_size, self.replicas.ranks, config.pipeline_parallel_size,
            config.expert_parallel,
        )  # fmt: skip
        self.replica = self.replicas.replica_of(self._rank)
        on_gpu = device().type == "cuda"
        self._expert_layers = architecture.expert_layers if with_routing else None
        self._llm = None
        with vllm_world(self.replicas.ranks, timeout_seconds) as member:
            if member:
                self._llm = start(
                    architecture, model_path, config, dtype=config.dtype or dtype,
                    timeout_seconds=int(timeout_seconds), on_gpu=on_gpu,
                    with_routing=with_routing,
                )  # fmt: skip
        # Of the last `generate`, on the rank that returns a replica's samples.
        self.generation: Generation | None = None
        self._lifecycle = Lifecycle(self._llm, config.sleep_level if on_gpu else 0)
        self._weights = WeightReceiver(
            layout, self._llm, getattr(torch, config.dtype or dtype), bucket_bytes, startup_proof=prove,
            quantized=config.quantization is not None, checksum=checksum,
        )  # fmt: skip

    @property
    def ranks(self) -> tuple[int, ...]:
        """The job's ranks that roll out."""
        return self.replicas.ranks

    @property
    def is_member(self) -> bool:
        return self.replica is not None

    @property
    def owns_samples(self) -> bool:
        """Whether this rank is the one of its replica that decodes and returns samples."""
        return self.replicas.place_of(self._rank) == 0

    @property
    def weights(self) -> WeightReceiver:
        """How weights come in, with the proof of it."""
        return self._weights

    @property
    def version(self) -> int:
        return self._lifecycle.version

    def generate(
        self, prompts: list[Prompt], *, n: int, temperature: float, step: int, greedy: bool = False,
        min_tokens: int = 0, expected: Sequence[float] | None = None,
    ) -> list[Sample]:  # fmt: skip
        """n responses to each prompt; every rank passes the same global list.

        Args:
            prompts: what to answer; a replica takes its share.
            temperature: of the sampling and of the returned log-probs.
            step: the training step, from which the seeds follow; `(run seed, step)` samples the same wherever the same
                weights give the same logits, which in bfloat16 a prompt that is still cached does not promise.
            greedy: take the likeliest token each time (evaluation).
            min_tokens: tokens before a stop id may be sampled.
            expected: tokens that each prompt's responses are expected to have, the same on all ranks, by which replicas
                share the work; None: all alike. In deterministic mode it is not used, so that no sample's neighbours in
                a forward depend on what was sampled before.

        Returns:
            This replica's samples in prompt order on its first rank, [] on all other ranks.

        Raises:
            NotReady: no complete weights, or the engine is asleep.
            UserError: a prompt is empty or too long.
        """
        self._lifecycle.require_ready()
        sampling.check_lengths(prompts, self._config.max_prompt_length)
        if self._llm is None or self.replica is None:
            return []
        limit, lengths = self._config.max_response_length, [len(prompt.token_ids) for prompt in prompts]
        foreseen = limit if expected is None or self._config.deterministic else expected
        shares = split(lengths, n, foreseen, self.replicas.count)[self.replica]
        wanted = sampling.requests(prompts, shares, self._seed, step, self._config.deterministic and not greedy)
        how = sampling.choose(self._config, self._architecture.eos_token_ids, temperature, greedy, min_tokens)
        begin = time.perf_counter()
        with seeded_generators(engine_seed(self._seed, step, self.replica)):
            outputs = self._llm.generate(
                [{"prompt_token_ids": request.prompt.token_ids} for request in wanted],
                [how.parameters(request.count, request.seed) for request in wanted],
                use_tqdm=False,
            )
        if not self.owns_samples:
            return []
        tokens = sum(len(response.token_ids) for output in outputs for response in output.outputs)
        self.generation = Generation(time.perf_counter() - begin, tokens)
        return sampling.samples(wanted, outputs, self._tokenizer, self.version, self._expert_layers)

    def sync(self, layout: "Layout", tensors: Mapping[str, torch.Tensor]) -> "Traffic":
        """Take over the weights that all ranks hold as `tensors` in `layout`; counts the bytes moved. Collective."""
        with self._lifecycle.updating():
            return self._weights.receive(layout, tensors)

    def sync_from_hf(self, path: str) -> "Traffic":
        """Take the weights of a Hugging Face folder, each rank reading only its own bytes (eval, generate)."""
        with self._lifecycle.updating():
            return self._weights.read(path)

    def sleep(self) -> None:
        """Free what `rollout.sleep_level` says; on a CPU nothing."""
        self._lifecycle.sleep()

    def wake_weights(self) -> None:
        self._lifecycle.wake("weights")

    def wake_kv_cache(self) -> None:
        self._lifecycle.wake("kv_cache")

    def shutdown(self) -> None:
        """Release the engine and its process groups, so that the process can start another one."""
        self._weights.release()
        self._lifecycle = Lifecycle(None, 0)
        if self._llm is not None:
            compat.stop_vllm(self._llm)
            self._llm = None
