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
from rlflow.config.check_grid import CP, EP, ETP, PP, SIZES, TP, grid_faults
from rlflow.config.check_rollout import rank_faults
from rlflow.config.faults import Fault
from rlflow.config.nearest_grids import change_words, nearest_grids
from rlflow.config.ranks import rank_list
from rlflow.config.roles import FOLLOWERS, data_parallel_size, role_path, role_sections
from rlflow.config.schema import Actor, Config, Critic, Role
from rlflow.errors import UserError
from rlflow.limits import model_limits

TRAINED = ("actor", "critic")
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
    for name, role in role_sections(config).items():
        own, faults = (arch, []) if role_path(config, name) == config.model.path else _read(config, name)
        found += faults
        if own is not None:
            found += model_faults(config, name, own)
        found += rank_faults(f"{name}.ranks", role.ranks, world_size)
        found += _with_nearest(config, name, own, _count(role, world_size))
        if name == "reference" and own is not None and arch is not None:
            found += update_faults(config, own, arch)
    found += [*order_faults(config), *batch_faults(config, world_size)]
    return without_repeats(found)


def read_model(key: str, path: str) -> tuple[Architecture | None, list[Fault]]:
    """The sizes of the model in a folder from its config.json, or None and why not."""
    if not path:
        return None, [Fault(key, None, "must be given")]
    try:
        return load_architecture(path), []
    except UserError as error:
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
    if difference := vocabulary_difference(config.model.tokenizer or config.model.path, config.model.path, path):
        yield Fault(key, path, f"has another vocabulary than model.path: {difference}", None, ("model.path",))


def update_faults(config: Config, reference: Architecture, actor: Architecture) -> Iterator[Fault]:
    """A reference that the actor's weights do not fit."""
    every = config.reference.update_every
    different = [name for name in SHAPE if getattr(reference, name) != getattr(actor, name)]
    if every > 0 and different:
        values = f"{getattr(reference, different[0])} instead of {getattr(actor, different[0])}"
        rule = f"the actor's weights do not fit: {different[0].replace('_', ' ')} {values}"
        yield Fault("reference.update_every", every, rule, "0", ("reference.path", "model.path"))


def order_faults(config: Config) -> Iterator[Fault]:
    """A placement that chooses the order which the actor's grid has been given."""
    order = config.actor.order
    if config.bridge.placement == "aligned" and order != Actor.order:
        rule = f"chooses the order of the actor's dimensions itself, and actor.order is {order}"
        yield Fault("bridge.placement", "aligned", rule, "natural", ("actor.order",))


def batch_faults(config: Config, world_size: int | None) -> Iterator[Fault]:
    """A step's samples must divide evenly over mini-batches and the data-parallel ranks of each trained role."""
    prompts, n, parts = config.trainer.prompts_per_step, config.rollout.n, config.algorithm.mini_batches
    for name, role in role_sections(config).items():
        dp = data_parallel_size(role, _count(role, world_size)) or 1
        if name not in TRAINED or min(prompts, n, parts) < 1 or prompts * n % (parts * dp) == 0:
            continue
        unit = parts * dp // math.gcd(parts * dp, n)
        of_whom = "" if name == "actor" else f" of the {name}"
        rule = (
            f"{prompts} prompts × {n} responses = {prompts * n} samples do not divide over "
            f"{parts} mini-batches × {dp} data-parallel ranks{of_whom} = {parts * dp}"
        )
        nearest = " or ".join(str(k * unit) for k in (prompts // unit, prompts // unit + 1) if k)
        reads = ("rollout.n", "algorithm.mini_batches", *(f"{name}.{key}" for key in (TP, CP, PP, "ranks")))
        yield Fault("trainer.prompts_per_step", prompts, rule, nearest, reads)


def without_repeats(faults: Iterable[Fault]) -> list[Fault]:
    """`faults` without those of roles that the actor has in the same words, and without any a second time."""
    seen: set[tuple[str, str, str]] = set()
    kept = []
    for fault in faults:
        section, _, name = fault.key.partition(".")
        leader = "actor" if section in FOLLOWERS else section
        words = (f"{leader}.{name}", str(fault.value), fault.rule.replace(f"{section}.", f"{leader}."))
        if words not in seen:
            kept.append(fault)
        seen.add(words)
    return kept


def _read(config: Config, name: str) -> tuple[Architecture | None, list[Fault]]:
    return read_model(f"{name}.path", role_path(config, name))


def _count(role: Role, world_size: int | None) -> int | None:
    ranks = rank_list(role.ranks, world_size)
    return None if ranks is None else len(ranks)


def _with_nearest(config: Config, name: str, arch: Architecture | None, ranks: int | None) -> list[Fault]:
    """The faults of a role's grid; the first that is about its sizes names whole grids that would do."""
    role: Role = getattr(config, name)
    faults = list(grid_faults(name, role, arch, ranks))
    about_sizes = [fault for fault in faults if fault.key.partition(".")[2] in _cuts(arch)]
    if arch is None or not ranks or not about_sizes or min(_sizes(role)) < 1:
        return faults
    samples, parts = config.trainer.prompts_per_step * config.rollout.n, max(1, config.algorithm.mini_batches)

    def suits(dp: int) -> bool:
        return name not in TRAINED or samples % (parts * dp) == 0

    words = ", ".join(change_words(role, other, ranks) for other in nearest_grids(role, arch, ranks, suits=suits))
    first = about_sizes[0]
    return [
        replace(fault, nearest=words if fault is first else None) if fault in about_sizes else fault for fault in faults
    ]


def _cuts(arch: Architecture | None) -> tuple[str, ...]:
    """The keys of the sizes that can be other than 1 for a model."""
    return tuple(name for name in SIZES if arch is None or arch.experts is not None or name not in (EP, ETP))


def _sizes(role: Role) -> list[int]:
    return [1 if (size := getattr(role, name)) is None else size for name in SIZES]
