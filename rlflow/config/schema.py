"""Every configuration key: its type, default, range and meaning, in one frozen dataclass a section.

The order and the words here are those of docs/configuration.md, which is generated from this file. Reading a file into
these classes is left to `load`, rules between keys to `check`.
"""

from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

Ranks = Literal["all"] | tuple[int, ...]
DType = Literal["float32", "bfloat16"]


def key(
    doc: str,
    default: Any = MISSING,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    known_as: tuple[str, ...] = (),
) -> Any:
    """A field with its documentation and range; `known_as` lists names other tools give it, to suggest this one."""
    limits = {"minimum": minimum, "above": above, "maximum": maximum, "below": below}
    metadata = {"doc": doc, "known_as": known_as, "limits": {k: v for k, v in limits.items() if v is not None}}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Model:
    """The pretrained model that is trained and sampled from."""

    path: str = key(
        "Folder with config.json, tokenizer and weights: safetensors, or a Megatron checkpoint (torch_dist).",
        known_as=("model_name_or_path",),
    )
    tokenizer: str | None = key("Folder of the tokenizer; null: `model.path`.", None)
    dtype: DType = key("Number format of weights and activations; the optimizer's state is float32.", "bfloat16")


@dataclass(frozen=True)
class Role:
    """A model's grid and how it computes; data parallelism takes the ranks that are left."""

    ranks: Ranks = key(
        "Ranks that hold the model: `all`, a list such as [0, 1], a range such as 0-3, or nodes such as `node 0` and "
        "`nodes 0-1`.", "all",
    )  # fmt: skip
    tensor_parallel_size: int = key("Ranks that share each layer.", 1, minimum=1, known_as=("tp", "tp_size"))
    pipeline_parallel_size: int = key("Ranks that share the stack of layers.", 1, minimum=1, known_as=("pp", "pp_size"))
    virtual_pipeline_parallel_size: int = key(
        "Separate pieces of the stack of layers on each pipeline rank: smaller bubbles, more messages.", 1, minimum=1,
        known_as=("vpp", "vp_size", "virtual_pipeline_model_parallel_size"),
    )  # fmt: skip
    context_parallel_size: int = key(
        "Ranks that share the tokens of each sample.", 1, minimum=1, known_as=("cp", "cp_size")
    )
    expert_parallel_size: int = key(
        "Places over which the routed experts of a layer are spread, among the ranks of a pipeline stage.", 1,
        minimum=1, known_as=("ep", "ep_size", "expert_model_parallel_size"),
    )  # fmt: skip
    expert_tensor_parallel_size: int | None = key(
        "Ranks that share each routed expert; null: `tensor_parallel_size`.", None, minimum=1,
        known_as=("etp", "etp_size"),
    )  # fmt: skip
    sequence_parallel: bool = key("Shard norms and residuals over the tensor-parallel ranks along tokens.", False,
                                  known_as=("sp",))  # fmt: skip
    order: str = key("Order of the grid's dimensions, the fastest varying first.", "tp-cp-ep-dp-pp")
    micro_batch_tokens: int = key(
        "Tokens of one forward and backward pass; a longer sample gets a pass of its own.", 4096, minimum=1,
        known_as=("micro_batch_size", "max_token_len_per_gpu"),
    )  # fmt: skip
    share_prompts: bool = key(
        "Compute a prompt once for its responses where the core attention allows it and ranks share no samples.", True
    )
    recompute: Literal["none", "selective", "full"] = key("Activations computed again in the backward pass.", "none")
    overlap: bool = key("Overlap the data-parallel collectives with computation.", True)
    logprob_chunk_tokens: int = key(
        "Tokens whose logits exist at once. They are computed once; twice in a micro-batch that scores more, if the "
        "loss is one of whole sequences or context is parallel.", 2048, minimum=1,
    )  # fmt: skip
    transformer_engine: bool | None = key(
        "Use Transformer Engine: its attention, but for deterministic or context-parallel models, and the layers of "
        "models with experts; null: where it is installed and computes the model.", None,
    )  # fmt: skip
    cuda_graphs: bool = key(
        "Capture the forward and backward pass of a micro-batch once for a shape and replay it, which pays where "
        "launching kernels takes longer than they do: models below about 2 billion weights. "
        "Data-parallel collectives then wait for the last micro-batch; without CUDA there are no graphs.", False,
    )  # fmt: skip
    offload: bool = key(
        "Keep weights, gradients and optimizer state in host memory while they are not needed; a CPU moves nothing.",
        False,
    )


@dataclass(frozen=True)
class Actor(Role):
    """The trained model: its grid and how it computes; data parallelism takes the ranks that are left."""

    moe_aux_loss_coef: float = key(
        "Weight of the auxiliary loss that balances the load of routed experts; 0: none.", 0.0, minimum=0,
        known_as=("aux_loss_coef", "router_aux_loss_coef"),
    )  # fmt: skip
    moe_aux_loss: Literal["global", "micro-batch"] = key(
        "Tokens whose load the auxiliary loss evens out: all of an optimizer step, which takes a forward pass more, or "
        "each micro-batch's.", "global",
    )  # fmt: skip
    router_replay: bool = key("Train each token in the experts that sampled it, as vLLM tells them (R3).", False)


@dataclass(frozen=True)
class Critic(Role):
    """The model that predicts returns, where `algorithm.advantage` is gae."""

    path: str | None = key("Folder of a score model or a language model; null: `model.path`.", None)
    head: Literal["zero", "random"] = key("First weights of the value head on a language model.", "zero")
    value_clip: float | None = key(
        "Values that moved further than this from those before the step are clipped in the loss; null: none.", 0.5,
        above=0, known_as=("cliprange_value",),
    )  # fmt: skip
    warmup_steps: int = key(
        "First steps, in which only the critic learns; the actor's schedule begins behind them.", 0, minimum=0,
        known_as=("critic_warmup",),
    )  # fmt: skip


@dataclass(frozen=True)
class Reference(Role):
    """The model that the KL divergence is measured to, where `algorithm.kl_coef` is above 0."""

    path: str | None = key("Folder of a language model; null: `model.path`.", None)
    update_every: int = key("Steps between updates by the actor's weights; 0: the reference stays as it is.", 0,
                            minimum=0)  # fmt: skip
    ema: float | None = key(
        "Share of the reference that an update keeps, the rest is the actor's; null: an update copies the actor.",
        None, minimum=0, below=1,
    )  # fmt: skip


@dataclass(frozen=True)
class RewardModel(Role):
    """A score model whose scores are a source of reward, where its `path` is given."""

    path: str | None = key("Folder of a score model (num_labels 1); null: no reward model.", None)
    weight: float = key("Factor of its score in the total; 0: a metric only.", 1.0)


@dataclass(frozen=True)
class Optimizer:
    """AdamW with its learning-rate schedule."""

    lr: float = key("Peak learning rate.", 1e-6, minimum=0, known_as=("learning_rate",))
    min_lr: float = key("Learning rate at the end of a linear or cosine schedule.", 0.0, minimum=0)
    schedule: Literal["constant", "linear", "cosine"] = key("Shape of the decay after warm-up.", "constant")
    warmup_steps: int = key("Steps of linear warm-up.", 0, minimum=0, known_as=("lr_warmup_steps",))
    beta1: float = key("Decay of the first moment.", 0.9, minimum=0, below=1)
    beta2: float = key("Decay of the second moment.", 0.999, minimum=0, below=1)
    eps: float = key("Added to the root of the second moment.", 1e-8, above=0)
    weight_decay: float = key("Decoupled weight decay.", 0.01, minimum=0)
    clip_grad: float = key(
        "Largest global norm of the gradient; 0: no clipping.", 1.0, minimum=0, known_as=("max_grad_norm", "grad_clip")
    )
    cpu_offload: float = key(
        "Share of the optimizer's state that the host keeps and updates; without a GPU it has all.", 0.0, minimum=0,
        maximum=1, known_as=("optimizer_offload_fraction",),
    )  # fmt: skip


@dataclass(frozen=True)
class CriticOptimizer(Optimizer):
    """AdamW of the critic."""

    lr: float = key("Peak learning rate.", 1e-5, minimum=0, known_as=("learning_rate",))


@dataclass(frozen=True)
class Algorithm:
    """What is optimised; docs/adding_an_algorithm.md has the formulas."""

    advantage: Literal[
        "grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "gae"
    ] = key("Advantage estimator; gae is PPO's, with a critic.", "grpo", known_as=("adv_estimator",))
    normalize_std: bool = key("Divide GRPO's advantages by the group's standard deviation; false: Dr. GRPO.", True)
    gamma: float = key("Discount of later rewards in gae.", 1.0, minimum=0, maximum=1, known_as=("discount",))
    lam: float = key("Decay of later errors in gae: 1 trusts returns, 0 the critic.", 1.0, minimum=0, maximum=1,
                     known_as=("lambda", "gae_lambda"))  # fmt: skip
    bootstrap_truncated: bool = key(
        "Let gae continue a response that was cut at the length limit with the critic's value after its last token.",
        False,
    )
    whiten_advantages: bool = key("Give gae's advantages mean 0 and variance 1 over the tokens of the step.", True)
    policy_loss: Literal["ppo", "gspo", "cispo", "reinforce", "gmpo"] = key(
        "Policy loss.", "ppo", known_as=("loss_type",)
    )
    clip_low: float = key("Ratios below 1 − clip_low are clipped.", 0.2, above=0, below=1, known_as=("clip_ratio_low",))
    clip_high: float = key("Ratios above 1 + clip_high are clipped.", 0.2, above=0, known_as=("clip_ratio_high",))
    dual_clip: float | None = key(
        "Bound of the loss at negative advantages, in multiples of the advantage; null: none.", None, above=1
    )
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = key(
        "How token losses become one number; the denominator is global.", "token-mean", known_as=("loss_agg_mode",)
    )
    aggregation_length: int | None = key("Divisor of seq-mean-token-sum-norm, which needs it.", None, minimum=1)
    kl_coef: float = key("Weight of the KL divergence to the reference; 0: there is none.", 0.0, minimum=0,
                         known_as=("beta",))  # fmt: skip
    kl_in: Literal["loss", "reward"] = key("Where the KL divergence is added.", "loss")
    kl_estimator: Literal["k1", "k2", "k3", "k1-straight-through"] = key("Estimator of the KL divergence.", "k3")
    kl_controller: Literal["fixed", "adaptive"] = key(
        "Whether the weight of the KL divergence stays, or follows the divergence to its target.", "fixed"
    )
    kl_target: float = key("Divergence that the adaptive controller aims at.", 0.1, above=0)
    kl_horizon: int = key("Samples over which the adaptive controller acts: more are slower.", 10000, minimum=1)
    entropy_coef: float = key("Weight of the entropy bonus.", 0.0, minimum=0)
    epochs: int = key("Passes over each step's samples.", 1, minimum=1, known_as=("ppo_epochs",))
    mini_batches: int = key(
        "Optimizer steps of each pass.", 1, minimum=1, known_as=("mini_batch_size", "num_mini_batches")
    )
    importance_correction: Literal["tis"] | None = key(
        "Weights for the gap between trainer and rollout log-probs: truncated importance sampling; null: none.", None
    )
    importance_cap: float = key("Largest weight of truncated importance sampling.", 2.0, above=0)
    skip_zero_advantage: bool = key(
        "Leave out the computation of samples whose gradient is exactly zero; denominators stay.", True
    )


@dataclass(frozen=True)
class Rollout:
    """The vLLM replicas and how they sample."""

    ranks: Ranks = key("Ranks that sample, written as `actor.ranks`.", "all")
    tensor_parallel_size: int = key(
        "Ranks of one vLLM replica that share each layer.", 1, minimum=1, known_as=("tp", "tp_size")
    )
    pipeline_parallel_size: int = key("Ranks of one vLLM replica that share the stack of layers.", 1, minimum=1,
                                      known_as=("pp", "pp_size"))  # fmt: skip
    expert_parallel: bool = key("Give each rank of a vLLM replica whole experts instead of a part of each.", False)
    n: int = key("Responses to each prompt.", 8, minimum=1, known_as=("num_generations", "group_size"))
    temperature: float = key("Sampling temperature.", 1.0, above=0, maximum=2)
    top_p: float = key("Nucleus sampling; 1: off.", 1.0, above=0, maximum=1)
    top_k: int = key("Sample among the k likeliest tokens; -1: all.", -1, minimum=-1)
    max_prompt_length: int = key("Most tokens of a prompt.", 512, minimum=1)
    max_response_length: int = key("Most tokens of a response.", 512, minimum=1, known_as=("max_new_tokens",))
    stop_token_ids: tuple[int, ...] = key("Token ids that end a response, besides the model's own.", ())
    ignore_eos: bool = key("Let no token end a response: all have the greatest length. For benchmarks.", False)
    dtype: Literal["float32", "bfloat16", "float16"] | None = key(
        "Number format of the rollout; null: `model.dtype`.", None
    )
    quantization: Literal["fp8"] | None = key(
        "Number format that vLLM gives the weights of linear layers as it loads them; null: `rollout.dtype`. Its "
        "samples are those of a slightly different model: see `algorithm.importance_correction`.", None,
    )  # fmt: skip
    deterministic: bool = key("Seed each sample by itself, so that samples do not depend on the layout; slower.", False)
    cuda_graphs: bool = key("Decode with CUDA graphs; without CUDA there are none.", True)
    attention_backend: str | None = key(
        "vLLM's attention on a GPU, by its name there, such as TRITON_ATTN; null: what vLLM takes.", None
    )
    match_trainer: bool = key(
        "Compute logits in float32 from the head's 16-bit factors, in rollout, actor and reference: their log-probs "
        "differ less, for twice the memory of logits.", False,
    )  # fmt: skip
    sleep_level: int = key("What vLLM frees during training: 0 nothing, 1 weights to the host, 2 weights.", 2,
                           minimum=0, maximum=2)  # fmt: skip
    kv_cache_gib: float = key("Size of the KV cache of each rank, GiB.", 4.0, above=0)
    max_num_seqs: int = key("Most sequences decoded at once by a replica.", 256, minimum=1)


@dataclass(frozen=True)
class Bridge:
    """The weight transfer between trainer and rollout."""

    bucket_mib: int = key("Most MiB a rank receives in one round of the transfer.", 256, minimum=1)
    startup_proof: bool = key("Compare the bridge with vLLM's own loader at start.", True)
    checksum: bool = key("Compare what arrives in each transfer with what was sent.", False)
    placement: Literal["natural", "aligned"] = key(
        "Which rank trains and samples which slice: as `actor.order` says, or so that fewest bytes move.", "natural"
    )


@dataclass(frozen=True)
class Data:
    """Prompts: parquet or JSON-lines files at any fsspec URL."""

    train: str = key("Training file; needed to train.", "", known_as=("train_files", "path", "dataset"))
    evaluation: str | None = key("Held-out file.", None, known_as=("val_files", "eval", "test", "validation"))
    prompt_key: str = key("Column of the prompt: a string, a list of messages, or the JSON text of one.", "prompt")
    answer_key: str | None = key("Column of the answer that reward functions are given; null: none.", "answer")
    system_prompt: str | None = key("System message put before prompts that have none.", None)
    chat_template: bool = key("Apply the tokenizer's chat template; false: the prompt string as it is.", True)
    overlong: Literal["error", "filter", "left", "right"] = key(
        "Prompts over `rollout.max_prompt_length`: stop, drop them, keep their last (left) or first (right) tokens.",
        "error",
    )
    shuffle: bool = key("Shuffle each epoch.", True)


@dataclass(frozen=True)
class Reward:
    """One source of reward; the list `rewards` mixes them by weight."""

    function: str = key("`module:function`, for example rlflow.rewards:exact_match.")
    weight: float = key("Factor of its score in the total; 0: a metric only.", 1.0)
    name: str | None = key("Name in metrics; null: the function's.", None)
    args: dict[str, Any] = field(default_factory=dict, metadata={"doc": "Keyword arguments of the function."})

    @property
    def label(self) -> str:
        """Its name in metrics."""
        return self.function.rpartition(":")[2] if self.name is None else self.name


@dataclass(frozen=True)
class Evaluation:
    """Scores of the reward functions on the held-out file; a reward model takes no part."""

    every: int = key("Steps between evaluations; 0: only before the first step and after the last.", 0, minimum=0)
    n: int = key("Responses to each prompt.", 1, minimum=1)
    temperature: float = key(
        "Sampling temperature; 0: greedy (`eval`, which does both, then samples at the rollout's).", 0.0,
        minimum=0, maximum=2,
    )  # fmt: skip
    max_prompts: int | None = key("Use only the first prompts; null: all.", None, minimum=1)
    at_start: bool = key("Evaluate before the first step.", True)


@dataclass(frozen=True)
class Trainer:
    """Length, batch, seeds and files of a run."""

    steps: int | None = key("Steps to train; null: `trainer.epochs` passes over the data.", None, minimum=1,
                            known_as=("max_steps", "total_training_steps"))  # fmt: skip
    epochs: int = key("Passes over the data where `trainer.steps` is null.", 1, minimum=1, known_as=("total_epochs",))
    prompts_per_step: int = key(
        "Prompts of each step; samples are `rollout.n` times as many.", 64, minimum=1,
        known_as=("batch_size", "train_batch_size"),
    )  # fmt: skip
    seed: int = key("Seed of everything random.", 0, minimum=0)
    deterministic: bool = key("Use deterministic kernels; slower.", False)
    save_every: int = key("Steps between checkpoints; 0: none.", 0, minimum=0, known_as=("save_freq", "save_steps"))
    resume: str = key("`auto`: the newest complete checkpoint of the run, `never`, or a checkpoint's folder.", "auto")
    keep: int = key("Newest checkpoints to keep; 0: all.", 2, minimum=0, known_as=("save_total_limit", "max_keep"))
    output_dir: str = key("Folder of the run; needed to train.", "", known_as=("default_local_dir",))
    timeout_seconds: int = key("Longest wait in any collective, vLLM's too.", 1800, minimum=1, known_as=("timeout",))
    export: bool = key("Write the trained model as a Hugging Face folder at the end.", True)


@dataclass(frozen=True)
class Tracking:
    """What is shown and recorded; metrics.jsonl and sample files are always written."""

    console: bool = key("A line for each step.", True)
    tensorboard: bool = key("TensorBoard files.", True)
    wandb: str | None = key("Weights & Biases project; null: none.", None, known_as=("project", "project_name"))
    samples_per_step: int = key("Samples shown as text in TensorBoard at each step.", 4, minimum=0)


@dataclass(frozen=True)
class Profile:
    """Where the time of single steps goes, in the run's folder `profile`; docs/performance.md says how to read it."""

    steps: tuple[int, ...] = key(
        "Steps to profile, counted from 1: a table of phases and the costliest kernels of each, by the first rank that "
        "samples and the first of each role.", (), known_as=("profile_steps",),
    )  # fmt: skip
    trace: bool = key("Write a trace of these steps too, for Perfetto: tens of megabytes after a long rollout.", True)


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: Model
    actor: Actor = field(default_factory=Actor)
    critic: Critic = field(default_factory=Critic)
    reference: Reference = field(default_factory=Reference)
    reward_model: RewardModel = field(default_factory=RewardModel)
    optimizer: Optimizer = field(default_factory=Optimizer)
    critic_optimizer: CriticOptimizer = field(default_factory=CriticOptimizer)
    algorithm: Algorithm = field(default_factory=Algorithm)
    rollout: Rollout = field(default_factory=Rollout)
    bridge: Bridge = field(default_factory=Bridge)
    data: Data = field(default_factory=Data)
    rewards: tuple[Reward, ...] = ()
    evaluation: Evaluation = field(default_factory=Evaluation)
    trainer: Trainer = field(default_factory=Trainer)
    tracking: Tracking = field(default_factory=Tracking)
    profile: Profile = field(default_factory=Profile)
