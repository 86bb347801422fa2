"""How much GPU memory each phase of a run takes, on the rank that takes most: predicted without a GPU.

Everything is counted from the architectures and the configuration; what cannot be counted, and what implementations
keep besides, comes from a calibration. Which numbers a model and a micro-batch have is left to `placed` and
`activations`, what a run measures of the same phases to `rlflow.tracking.memory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_bridge.families import Architecture, load_architecture
from megatron_bridge.layouts import Layout
from megatron_bridge.score import with_score_head
from rlflow.config.roles import needs_old_log_probs, role_path, role_sections
from rlflow.config.schema import Config
from rlflow.config.summary import PREDICT, UPDATE
from rlflow.inspect.calibration import GIB, Calibration
from rlflow.inspect.placed import PlacedRole, PlacedRollout

BUCKETS = 4
"""That a transfer takes: two to send, two to receive."""


class Part(NamedTuple):
    """Some of the memory that a phase takes."""

    what: str
    nbytes: float
    coefficient: str = ""  # of the calibration, by which the bytes are multiplied; "": they are exact

    def calibrated(self, calibration: Calibration) -> float:
        """Bytes."""
        return self.nbytes * (getattr(calibration, self.coefficient) if self.coefficient else 1.0)


Parts = list[Part]


@dataclass(frozen=True)
class Peak:
    """What is there at once when a phase takes most."""

    rank: int
    parts: tuple[Part, ...]

    def total(self, calibration: Calibration) -> float:
        """Bytes."""
        return sum(part.calibrated(calibration) for part in self.parts)


def architectures(config: Config) -> dict[str, Architecture]:
    """The architecture of each role's model. UserError for a folder that holds none."""
    found = {name: load_architecture(role_path(config, name)) for name in role_sections(config)}
    if "critic" in found:
        found["critic"] = with_score_head(found["critic"])
    return found


def predict(
    config: Config,
    models: Mapping[str, Architecture],
    world_size: int,
    calibration: Calibration,
    *,
    with_rollout: bool = True,
) -> dict[str, Peak]:
    """The peak of each phase on its worst rank, by the phase's name in the metrics; `config` is a checked one.

    `models` are those of the roles, as `architectures` finds them. `with_rollout=False`: the roles' models alone, as if
    vLLM were elsewhere.
    """
    roles = [PlacedRole(config, name, models[name], world_size) for name in role_sections(config)]
    rollout = PlacedRollout(config, models["actor"], world_size) if with_rollout else None
    peaks: dict[str, Peak] = {}
    for rank in range(world_size):
        for phase, parts in _Rank(config, rank, roles, rollout, calibration).phases():
            peak = Peak(rank, tuple(part for part in parts if part.nbytes))
            if phase not in peaks or peak.total(calibration) > peaks[phase].total(calibration):
                peaks[phase] = peak
    return peaks


class _Rank:
    """One rank of a run, phase by phase."""

    def __init__(
        self, config: Config, rank: int, roles: Sequence[PlacedRole], rollout: PlacedRollout | None,
        calibration: Calibration,
    ) -> None:  # fmt: skip
        self._config, self._rank, self._calibration = config, rank, calibration
        self._roles = [role for role in roles if rank in role.layout.ranks]
        self._rollout = rollout if rollout is not None and rank in rollout.layout.ranks else None
        layouts: list[Layout] = [role.layout for role in roles] + ([] if rollout is None else [rollout.layout])
        self._is_alone = all({rank} == set(layout.ranks) for layout in layouts)

    def phases(self) -> Iterator[tuple[str, Parts]]:
        """The phases that the rank has a part in, in their order."""
        if self._rollout is not None:
            yield "generate", self._generating()
        here = {role.name: role for role in self._roles}
        for name in PREDICT if needs_old_log_probs(self._config) else PREDICT[:-1]:
            if name in here:
                yield f"predict/{name}", self._computing(here[name], training=False)
        for name in UPDATE:
            if name in here:
                yield f"update/{name}", self._computing(here[name], training=True)
        if self._rollout is not None:
            yield "sync", self._syncing()

    def _generating(self) -> Parts:
        assert self._rollout is not None
        rollout = self._rollout
        at_work = self._larger(
            [Part("prompts in vLLM", rollout.prefill, "prefill")], [Part("vLLM's sampler", rollout.logits, "sampling")]
        )
        return [*self._resting(), *self._engine(weights=True, cache=True), *at_work]

    def _computing(self, role: PlacedRole, *, training: bool) -> Parts:
        """While one role's model computes; vLLM sleeps."""
        stays = self._config.rollout.sleep_level == 0
        return [
            *self._resting(but=role), *self._engine(weights=stays, cache=stays), *_held(role, self._rank, training),
            *self._computed(role, training=training),
        ]  # fmt: skip

    def _syncing(self) -> Parts:
        """The actor's weights go to vLLM's, and leave before the cache is there again; or all of that stays."""
        assert self._rollout is not None
        actor = next((role for role in self._roles if role.name == "actor"), None)
        bucket = min(self._config.bridge.bucket_mib << 20, self._rollout.weights(self._rank))
        buckets = 0.0 if self._is_alone else BUCKETS * bucket
        source = [] if actor is None else _held(actor, self._rank, training=False)
        before = [*self._resting(but=actor), *source, Part("transfer", buckets)]
        stays = self._config.rollout.sleep_level == 0
        return self._larger(
            [*before, *self._engine(weights=True, cache=stays)],
            [*self._resting(), *self._engine(weights=True, cache=True)],
        )

    def _engine(self, *, weights: bool, cache: bool) -> Parts:
        """What is there besides the roles: the process's own, and vLLM as far as it is awake."""
        parts = [Part("libraries", GIB, "libraries")]
        if (rollout := self._rollout) is None:
            return parts
        parts.append(Part("vLLM's own", GIB, "rollout"))
        if weights:
            parts.append(Part("vLLM's weights", rollout.weights(self._rank)))
        if cache:
            parts.append(Part("KV cache", rollout.cache()))
        return parts

    def _resting(self, but: PlacedRole | None = None) -> Parts:
        """What roles leave on the GPU while they do not compute."""
        return [
            part
            for role in self._roles
            if role is not but and not role.role.offload
            for part in [*_held(role, self._rank, training=True), *self._graphs(role)]
        ]

    def _computed(self, role: PlacedRole, *, training: bool) -> Parts:
        """Activations and logits of the largest micro-batch; in graphs those of all micro-batches have one place.

        Where micro-batches differ in length, one of a new length is computed beside that place at first.
        """
        graphs = self._graphs(role)
        if graphs and self._config.rollout.ignore_eos:
            return graphs
        return [*graphs, *(self._trained(role) if training else self._looked_at(role))]

    def _graphs(self, role: PlacedRole) -> Parts:
        if not role.role.cuda_graphs:
            return []
        return self._trained(role) if role.is_trained else self._looked_at(role)

    def _trained(self, role: PlacedRole) -> Parts:
        """Of a forward and backward pass: the head and the last layer take turns with what comes on top."""
        one = role.one_micro_batch(self._rank)
        top = [Part("a layer's backward pass", one.gradients, "gradients"), Part("a layer again", one.again, "kept")]
        return [
            Part("activations", one.kept * role.in_flight(self._rank), "kept"),
            *self._larger(top, [Part("logits", one.logits, "logits")]),
        ]

    def _looked_at(self, role: PlacedRole) -> Parts:
        """Of a forward pass that keeps nothing."""
        one = role.one_micro_batch(self._rank)
        return self._larger([Part("activations", one.passing, "passing")], [Part("logits", one.logits, "logits")])

    def _larger(self, *alternatives: Parts) -> Parts:
        return max(alternatives, key=lambda parts: sum(part.calibrated(self._calibration) for part in parts))


def _held(role: PlacedRole, rank: int, training: bool) -> Parts:
    """What of a role's model is there when it trains, or only looks and is away otherwise."""
    state = role.state(rank)
    wanted = state if training or not role.role.offload else {"weights": state["weights"]}
    return [Part(f"{role.name}'s {what}", nbytes) for what, nbytes in wanted.items()]
