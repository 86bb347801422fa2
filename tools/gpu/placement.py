"""PPO on two GPUs: roles side by side, each with GPUs of its own, against all roles on both GPUs.

    python -m tools.gpu.placement [--shape 0.5b] [--steps 3] [--limit-s 160] [section.key=value …]

Side by side the actor has one GPU, critic and reference the other, and passes of the two run at the same time; on both
GPUs every role is data parallel over the two, one role after another. vLLM samples on each GPU in either case. 32
prompts of 128 tokens, 8 responses to each of exactly 256, two optimizer steps of actor and critic, nothing is taken off
the GPUs but vLLM, which sleeps at level 2. Told are the seconds of a step and its phases behind the first step, and the
peaks of memory. A run takes about a minute; overrides go to `rlflow train`.
"""

from __future__ import annotations

import sys

from tools.gpu import several
from tools.gpu.runs import Sections, merged, tell_step
from tools.gpu.several import ROLE, WORK, shared_sections
from tools.gpu.whole_step import Work

PLACES: dict[str, Sections] = {
    "on both GPUs": {},
    "side by side": {"actor": {"ranks": [0]}, "critic": {"ranks": [1]}, "reference": {"ranks": [1]}},
}


def sections_of(place: str, steps: int, work: Work = WORK) -> Sections:
    """The configuration of a run."""
    ppo: Sections = {
        "critic": ROLE, "reference": ROLE,
        "algorithm": {"advantage": "gae", "kl_coef": 1e-3, "mini_batches": 2},
        "bridge": {"startup_proof": False},  # `tools.gpu.grpo_grids` has it
    }  # fmt: skip
    return merged(merged(shared_sections(work, steps), ppo), PLACES[place])


class Runs(several.Runs):
    """The same work with the roles in one place and in another."""

    _before: tuple[float | None, str] = (None, "")  # seconds of a step of the run before, and where that had them

    def __call__(self, place: str) -> bool:
        """Train with the roles in a place and report the steps that were made; whether all are there and sound."""
        config = self.configure(place.replace(" ", "_"), sections_of(place, self.steps, self.work))
        made, good = self.make(config, "placement", f"PPO {place}")
        if made:
            bound, against = self._before
            seconds = tell_step("placement", f"PPO {place}: step", made, bound=bound, against=against)
            self._before = seconds, f"s {place}"
        return good


def main() -> int:
    return several.run(__doc__, Runs, PLACES, shape="0.5b", limit_s=160.0)


if __name__ == "__main__":
    sys.exit(main())
