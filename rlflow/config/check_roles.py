"""Rules of the roles that a run has: their models, their ranks and grids, and the batch that they share out.

What a grid must be like by itself is in `check_grid`. A fault that a role has only because it follows the actor is
reported once, as the actor's.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from megatron_bridge.families import Architecture, load_architecture
from rlflow.config.check_files import vocabulary_difference
from rlflow.config.check_grid import CP, EP, ETP, PP, SIZES, TP, grid_faults, sizes_of
from rlflow.config.check_rollout import rank_faults
from rlflow.config.faults import Fault
from rlflow.config.nearest_grids import change_words, nearest_grids
from rlflow.config.ranks import rank_list
from rlflow.config.roles import FOLLOWERS, TRAINED, data_parallel_size, role_path, role_sections
from rlflow.config.schema import Actor, Config, Critic, Role
from rlflow.errors import UserError
from rlflow.limits import model_limits

HEADS = {"actor": ("lm",), "critic": ("lm", "score"), "reference": ("lm",), "reward_model": ("score",)}
SHAPE = (
    "family", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied", "qkv_bias", "qk_norm",
    "layer_kinds", "experts", "latent",
)  # fmt: skip
"""Attributes of an architecture that decide which weights there are."""
WORDS = {"lm": "a language model", "score": "a score model"}


def role_faults(config: Config, arch: Architecture | None, world_size: int | None) -> list[Fault]:
    """All faults of the roles that training needs; `arch` is that of `model.path`, None where it cannot be read."""
    found: list[Fault] = []
    architectures = {}
    for name, role in role_sections(config).items():
        own, faults = (arch, []) if role_path(config, name) == config.model.path else _read(config, name)
        found += [*faults, *rank_faults(f"{name}.ranks", role.ranks, world_size)]
        found += grid_faults(name, role, own, _count(role, world_size))
        found += float32_faults(config, name, role)
        if own is not None:
            architectures[name] = own
            found += model_faults(config, name, own)
            if arch is not None and own is not arch:
                found += vocabulary_faults(config, name)
    if {"actor", "reference"} <= architectures.keys():
        found += update_faults(config, architectures["reference"], architectures["actor"])
    found = without_repeats([*found, *order_faults(config), *batch_faults(config, world_size)])
    for name, own in architectures.items():
        found = with_grids(found, config, name, own, _count(getattr(config, name), world_size))
    return found


def read_model(key: str, path: str) -> tuple[Architecture | None, list[Fault]]:
    """The sizes of the model in a folder from its config.json, or None and why not."""
    if not path:
        return None, [Fault(key, None, "must be given")]
    try:
        return load_architecture(path), []
    except UserError as error:
        if error.where == path and (Path(path) / "manifest.json").is_file():
            rule = "is a checkpoint of a run, of which `rlflow-convert export` makes a model's folder (docs/bridge.md)"
            return None, [Fault(key, path, rule)]
        where = "" if error.where == path else f" ({error.where})"
        return None, [Fault(key, path, f"{error.message}{where}")]


def model_faults(config: Config, name: str, arch: Architecture) -> Iterator[Fault]:
    """What the trainer does not compute of a role's model, and what a role cannot do with it."""
    path = role_path(config, name)
    key = "model.path" if path == config.model.path else f"{name}.path"
    yield from (Fault(key, path, f"{limit} ({Path(path) / 'config.json'})") for limit in model_limits(arch))
    if arch.head not in HEADS[name] and name != "actor":  # the rollout says it of the actor
        due = " or ".join(WORDS[head] for head in HEADS[name])
        yield Fault(f"{name}.path", path, f"is {WORDS[arch.head]}; {due} is due")
    if name == "critic" and arch.head == "score" and config.critic.head != Critic.head:
        yield Fault("critic.head", config.critic.head, "is not read where critic.path is a score model", Critic.head)
    if path == config.model.path:
        return
    tokens = config.rollout.max_prompt_length + config.rollout.max_response_length
    if tokens > arch.max_positions:
        rule = f"has {arch.max_positions} positions, and a sample up to {tokens} tokens"
        yield Fault(key, path, rule, None, ("rollout.max_prompt_length", "rollout.max_response_length"))


def vocabulary_faults(config: Config, name: str) -> Iterator[Fault]:
    """A role's model that does not know the tokens of the actor's."""
    path, policy = role_path(config, name), config.model.path
    if difference := vocabulary_difference(config.model.tokenizer or policy, policy, path):
        rule = f"has another vocabulary than model.path: {difference}"
        yield Fault(f"{name}.path", path, rule, None, ("model.path",))


def update_faults(config: Config, reference: Architecture, actor: Architecture) -> Iterator[Fault]:
    """A reference that the actor's weights do not fit."""
    every = config.reference.update_every
    different = [name for name in SHAPE if getattr(reference, name) != getattr(actor, name)]
    if every > 0 and different:
        values = f"{getattr(reference, different[0])} instead of {getattr(actor, different[0])}"
        rule = f"the actor's weights do not fit: {different[0].replace('_', ' ')} {values}"
        yield Fault("reference.update_every", every, rule, "0", ("reference.path", "model.path"))


def float32_faults(config: Config, name: str, role: Role) -> Iterator[Fault]:
    """Ways to compute a role that float32 has not."""
    if config.model.dtype == "float32":
        if role.transformer_engine:
            rule = "packed attention of Transformer Engine has no float32: needs model.dtype = bfloat16"
            yield Fault(f"{name}.transformer_engine", "true", rule, "null", ("model.dtype",))
        if role.cuda_graphs:
            rule = "attention in float32 is planned on the host: needs model.dtype = bfloat16"
            yield Fault(f"{name}.cuda_graphs", "true", rule, "false", ("model.dtype",))


def order_faults(config: Config) -> Iterator[Fault]:
    """A placement that chooses the order which the actor's grid has been given."""
    order = config.actor.order
    if config.bridge.placement == "aligned" and order != Actor.order:
        rule = f"chooses the order of the actor's dimensions itself, and actor.order is {order}"
        yield Fault("bridge.placement", "aligned", rule, "natural", ("actor.order",))


def batch_faults(config: Config, world_size: int | None) -> Iterator[Fault]:
    """A step's samples must divide evenly over mini-batches and the data-parallel ranks of each trained role.

    Mini-batches are whole prompts: otherwise some would have fewer samples than others, or none.
    """
    prompts, n, parts = config.trainer.prompts_per_step, config.rollout.n, config.algorithm.mini_batches
    said: set[int] = set()
    for name, role in role_sections(config).items():
        dp = data_parallel_size(role, _count(role, world_size)) or 1
        if name not in TRAINED or min(prompts, n, parts) < 1:
            continue
        unit = math.lcm(parts, parts * dp // math.gcd(parts * dp, n))
        if prompts % unit and dp not in said:
            said.add(dp)
            nearest = " or ".join(str(k * unit) for k in (prompts // unit, prompts // unit + 1) if k)
            reads = ("rollout.n", "algorithm.mini_batches", *(f"{name}.{key}" for key in (TP, CP, PP, "ranks")))
            yield Fault("trainer.prompts_per_step", prompts, _batch_rule(prompts, n, parts, dp, name), nearest, reads)


def _batch_rule(prompts: int, n: int, parts: int, dp: int, role: str) -> str:
    if prompts * n % (parts * dp) == 0:
        return f"{prompts} prompts do not divide over {parts} mini-batches, in which a prompt's samples stay together"
    of_whom = "" if role == "actor" else f" of the {role}"
    return (
        f"{prompts} prompts × {n} responses = {prompts * n} samples do not divide over "
        f"{parts} mini-batches × {dp} data-parallel ranks{of_whom} = {parts * dp}"
    )


def with_grids(faults: list[Fault], config: Config, name: str, arch: Architecture, ranks: int | None) -> list[Fault]:
    """`faults`, of which the first that is about the sizes of a role's grid names whole grids that would do."""
    role: Role = getattr(config, name)
    keys = [f"{name}.{size}" for size in SIZES if arch.experts is not None or size not in (EP, ETP)]
    about_sizes = [fault for fault in faults if fault.key in keys]
    if not ranks or not about_sizes or any(size is not None and size < 1 for size in sizes_of(role)):
        return faults
    samples, parts = config.trainer.prompts_per_step * config.rollout.n, max(1, config.algorithm.mini_batches)

    def suits(dp: int) -> bool:
        return name not in TRAINED or samples % (parts * dp) == 0

    words = ", ".join(change_words(role, other, ranks) for other in nearest_grids(role, arch, ranks, suits=suits))
    first = about_sizes[0]
    return [
        replace(fault, nearest=words if fault is first else None) if fault in about_sizes else fault for fault in faults
    ]


def without_repeats(faults: Iterable[Fault]) -> list[Fault]:
    """`faults` without those of roles that the actor has in the same words, and without any a second time."""
    seen: set[tuple[str, str, str]] = set()
    kept = []
    for fault in faults:
        words = (fault.key, str(fault.value), fault.rule)
        if words not in seen and _as_actors(*words) not in seen:
            kept.append(fault)
        seen.add(words)
    return kept


def _as_actors(key: str, value: str, rule: str) -> tuple[str, str, str]:
    """How a fault of a role that follows the actor would be worded of the actor."""
    section, _, name = key.partition(".")
    leader = "actor" if section in FOLLOWERS else section
    return f"{leader}.{name}", value, rule.replace(f"{section}.", f"{leader}.")


def _read(config: Config, name: str) -> tuple[Architecture | None, list[Fault]]:
    return read_model(f"{name}.path", role_path(config, name))


def _count(role: Role, world_size: int | None) -> int | None:
    """How many ranks a role has; None where that is unknown, or the job has not all of them."""
    ranks = rank_list(role.ranks, world_size)
    return None if ranks is None or any(rank_faults("", ranks, world_size)) else len(ranks)
