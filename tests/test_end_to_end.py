"""The commands on tiny models, from the configuration file to the exported model, with real Megatron and vLLM."""

import contextlib
import io
import json
import re
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_bridge.checkpoints import open_source
from megatron_bridge.distcp_writer import write_torch_dist
from megatron_bridge.families import load_architecture
from tests.end_to_end import configuration, records, rlflow, run_in, succeed
from tests.workers import World

# What no two runs have in common.
CLOCKED = ("time/", "perf/", "memory/", "rollout/idle_fraction", "rollout/seconds_max", "rollout/tokens_per_second")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Path:
    """The folder of a run of four steps on two ranks, Megatron TP2 → vLLM TP1 × 2, and its configuration."""
    folder = tmp_path_factory.mktemp("trained")
    config = configuration(
        folder,
        tiny_model("qwen2"),
        actor={"tensor_parallel_size": 2},
        bridge={"placement": "aligned"},
        evaluation={"every": 2},
        trainer={"steps": 4, "save_every": 2, "keep": 0},
    )
    succeed("train", config, "--nproc", "2")
    return folder


def test_a_run_leaves_what_it_promises(trained: Path) -> None:
    run = trained / "run"
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "samples/step_000004.jsonl", "model/config.json"):
        assert (run / name).is_file(), name
    assert list((run / "tensorboard").iterdir())
    assert [record["step"] for record in records(run)] == [0, 1, 2, 3, 4]
    summary = json.loads((run / "summary.json").read_text())
    wanted = {"reward/first", "reward/last", "eval/accuracy_first", "eval/accuracy_last", "seconds", "steps"}
    assert wanted <= summary.keys()


def test_the_saved_configuration_is_the_one_that_ran(trained: Path) -> None:  # cases.md H08
    from rlflow.config import load

    saved = load(trained / "run" / "config.yaml", world_size=2)
    assert saved == load(trained / "config.yaml", world_size=2)
    assert saved.actor.tensor_parallel_size == 2


def test_phases_account_for_each_step(trained: Path) -> None:
    for record in records(trained / "run")[1:]:
        assert record["time/other"] <= 0.02 * record["time/step"]
        assert record["memory/update/actor_gib"] > 0


def test_the_engines_agree(trained: Path) -> None:
    for record in records(trained / "run")[1:]:
        assert record["mismatch/log_prob_max"] < 1e-4


def test_the_exported_model_is_the_trained_one(trained: Path, tiny_model: Callable[..., Path]) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_model("qwen2"), trained / "run/model"))
    assert before.keys() == after.keys()
    assert all(before[name].shape == after[name].shape for name in before)
    assert not torch.equal(before["model.layers.0.mlp.up_proj.weight"], after["model.layers.0.mlp.up_proj.weight"])


def test_a_resumed_run_repeats_the_unbroken_one(world: World, trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    shutil.rmtree(run / "checkpoints" / "step_000004")
    run_in(world, 2, "train", trained / "config.yaml", f"trainer.output_dir={run}")
    unbroken, resumed = records(trained / "run"), records(run)
    assert [record["step"] for record in resumed] == [0, 1, 2, 3, 4]
    for theirs, ours in zip(unbroken, resumed, strict=True):
        same = [name for name in theirs if not name.startswith(CLOCKED)]
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}


def test_a_run_starts_from_a_converted_folder(  # cases.md A31
    world: World, trained: Path, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    """At step 0 with a fresh optimizer: the first step is that of the run from the Hugging Face folder."""
    source, converted, run = tiny_model("qwen2"), tmp_path / "megatron", tmp_path / "run"
    layout, weights = open_source(source, load_architecture(source))
    write_torch_dist(converted, layout, weights, rank=0, model=source)
    options = (f"model.path={converted}", f"trainer.output_dir={run}", "trainer.steps=1")
    run_in(world, 2, "train", trained / "config.yaml", *options)
    assert [record["step"] for record in records(run)] == [0, 1]
    for theirs, ours in zip(records(trained / "run"), records(run), strict=False):
        same = [name for name in theirs if not name.startswith((*CLOCKED, "eval/"))]
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    before, after = load_file(source / "model.safetensors"), load_file(run / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype for name in before)
    assert (run / "model" / "config.json").read_bytes() == (source / "config.json").read_bytes()


VARIANTS: dict[str, dict[str, Any]] = {
    "pipeline to tensor parallel, KL in the loss, two updates a step": {
        "actor": {"pipeline_parallel_size": 2},
        "rollout": {"tensor_parallel_size": 2},
        "algorithm": {"kl_coef": 0.1, "mini_batches": 2, "entropy_coef": 0.01},
    },
    "data parallel, KL in the reward, two passes, per-sample seeds": {
        "rollout": {"deterministic": True},
        "algorithm": {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1", "epochs": 2},
    },
    "actor and rollout on ranks of their own": {
        "actor": {"ranks": [1]},
        "rollout": {"ranks": [0]},
        "algorithm": {"kl_coef": 0.1, "epochs": 2},
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_train(world: World, name: str, tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    run_in(world, 2, "train", configuration(tmp_path, tiny_model("llama", tied=False), **VARIANTS[name]))
    last = records(tmp_path / "run")[-1]
    assert last["actor/first_ratio_error"] < 1e-5
    assert last["mismatch/log_prob_max"] < 1e-4
    assert last["actor/kl"] >= 0
    assert last["actor/grad_norm"] > 0


def test_one_failing_rank_ends_the_job_and_is_named_once(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """cases.md G05. Rank 1 samples alone, in a world of its own for vLLM, and has groups of two roles' grids: G04."""
    config = configuration(
        tmp_path,
        tiny_model("qwen2"),
        actor={"tensor_parallel_size": 2},
        critic={"tensor_parallel_size": 1},
        algorithm={"advantage": "gae"},
        rollout={"ranks": [1]},
        rewards=[{"function": "tests.end_to_end:fail_on_rank_one"}],
        evaluation={"at_start": False},
        trainer={"timeout_seconds": 777},
    )
    done = rlflow("train", config, "--nproc", "2")
    assert done.returncode == 1
    assert done.stderr.count("rank 1 failed in phase 'score'") == 1
    assert done.stderr.count("rank 0 failed") == 0
    groups, timeouts = re.search(r"SystemExit: the judge is unwell: (\d+) groups, timeouts (.*)", done.stderr).groups()
    assert int(groups) > 10
    assert timeouts == "[777.0]"


def test_evaluation_and_generation_by_themselves(world: World, trained: Path) -> None:
    model, sampled = f"model.path={trained / 'run/model'}", ("evaluation.n=4", "evaluation.temperature=0.7")
    output = run_in(world, 1, "eval", trained / "config.yaml", model, *sampled)
    for name in ("greedy/accuracy", "sampled/accuracy", "pass@1", "pass@2", "pass@4"):
        assert name in output
    output = run_in(world, 1, "generate", trained / "config.yaml", "rollout.n=2", "--prompt", "3 plus 4 =")
    assert output.count("response") == 2


def _frames(arguments: list[str]) -> list[str]:
    """The files of the package that are on the stack of AdamW's step, from the command on."""
    from rlflow import cli

    package, found, step = str(Path(cli.__file__).parent), list[str](), torch.optim.AdamW.step

    def recorded(*given: Any, **options: Any) -> Any:
        names = [frame.filename for frame in traceback.extract_stack()]
        found[:] = [name.removeprefix(package) for name in names if name.startswith(package)]
        return step(*given, **options)

    torch.optim.AdamW.step = recorded  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            assert cli.main(arguments) == 0
    finally:
        torch.optim.AdamW.step = step  # type: ignore[method-assign]
    return found


def test_the_optimizer_is_four_frames_from_the_command(
    world: World, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    config = configuration(tmp_path, tiny_model("qwen2"), evaluation={"at_start": False})
    frames = world(1, _frames, ["train", str(config), "trainer.steps=1"])[0]
    assert 1 <= len(frames) <= 4, frames


def test_experts_are_trained(world: World, tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """Qwen3-MoE, two experts on each of two ranks, which sample with all four; log-probs of both sides agree."""
    model = tiny_model("qwen3_moe", norm_topk_prob=True, num_hidden_layers=2)
    config = configuration(tmp_path, model, actor={"expert_parallel_size": 2}, trainer={"steps": 2})
    run_in(world, 2, "train", config)
    for record in records(tmp_path / "run")[1:]:
        assert record["mismatch/log_prob_max"] < 1e-4
        assert record["actor/grad_norm"] > 0
    trained, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "run" / "model", model))
    assert trained.keys() == before.keys()
    assert not torch.equal(*(weights["model.layers.0.mlp.experts.3.down_proj.weight"] for weights in (trained, before)))
