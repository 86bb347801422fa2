"""The conversion commands on small folders: bitwise there and back, in bounded memory, nothing half visible."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_bridge.cli import main
from megatron_bridge.conversion.memory import parse_bytes
from megatron_bridge.distcp import TRACKER
from megatron_bridge.files import SINGLE, open_hf
from tests.bridge.test_checkpoints import BYTE_EQUAL, folder, toy_folder
from tests.bridge.test_distcp import FAMILIES
from tests.bridge.toys import CONFIG, labelled, toy
from tools.bench_convert import make_model

Run = Callable[..., str]
ROOT = Path(__file__).parent.parent.parent


def there_and_back(run: Run, source: Path, tmp_path: Path, *options: Any) -> Path:
    """A folder through Megatron's format and back."""
    run("import", "--hf", source, "--out", tmp_path / "megatron", *options)
    run("export", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back", "--max-shard-size", "2K")
    return tmp_path / "back"


def assert_same(a: Path, b: Path) -> None:
    before, after = open_hf(a), open_hf(b)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name


# ---------------------------------------------------------------- values and names
@pytest.mark.parametrize("window", [24, 2**20])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bitwise(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, window: int
) -> None:
    """In one piece, and in windows of a few elements that end anywhere."""
    monkeypatch.setattr("megatron_bridge.fill.WINDOW_BYTES", window)
    source = toy_folder(tmp_path / "source", **({"num_hidden_layers": 3, "num_key_value_heads": 4} | FAMILIES[family]))
    back = there_and_back(run, source, tmp_path, "--tp", 2, "--vocab-multiple", 128)
    assert_same(source, back)
    assert (tmp_path / "megatron" / TRACKER).read_text() == "0"
    assert "0 not" in run("verify", source, tmp_path / "megatron")
    assert len(list(back.glob("*.safetensors"))) > 1


@pytest.mark.parametrize("separate", [True, False])
def test_a_tied_model_of_another_root_keeps_its_key_set(run: Run, tmp_path: Path, separate: bool) -> None:  # A04
    config = {"tie_word_embeddings": True}
    names = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in labelled(toy(**config), torch.float32).items()
    }
    if separate:
        names["lm_head.weight"] = names["model.language_model.embed_tokens.weight"].clone()
    source = folder(tmp_path / "source", names, config)
    run("reshard", "--from", source, "--to", tmp_path / "again")
    for path in (tmp_path / "again", there_and_back(run, source, tmp_path)):
        assert_same(source, path)
    if separate:
        again = load_file(tmp_path / "again" / SINGLE)
        head, embedding = again["lm_head.weight"], again["model.language_model.embed_tokens.weight"]
        assert torch.equal(head, embedding)
        assert head.data_ptr() != embedding.data_ptr()


@pytest.mark.parametrize("vocabulary", [50257, 151936])
def test_padding_never_reaches_the_files(run: Run, tmp_path: Path, vocabulary: int) -> None:  # A07
    config = {"num_hidden_layers": 1, "vocab_size": vocabulary}
    source = toy_folder(tmp_path / "source", **config)
    run("import", "--hf", source, "--out", tmp_path / "megatron", "--tp", 2, "--vocab-multiple", 128)
    stored = json.loads(run("inspect", tmp_path / "megatron", "--json"))["tensors"]
    rows = {50257: 50432, 151936: 152064}[vocabulary]  # cases.md A07, TP2
    assert {t["name"]: t["shape"] for t in stored}["embedding.word_embeddings.weight"] == [rows, 8]
    run("export", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back")
    assert open_hf(tmp_path / "back")["lm_head.weight"].shape == (vocabulary, 8)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == vocabulary
    assert_same(source, tmp_path / "back")


def test_each_expert_has_its_own_name(run: Run, tmp_path: Path) -> None:  # A13
    experts = {"model_type": "qwen3_moe", "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    source = toy_folder(tmp_path / "source", **experts)
    back = open_hf(there_and_back(run, source, tmp_path, "--ep", 4))
    assert "model.layers.0.mlp.experts.11.gate_proj.weight" in back
    assert len([name for name in back if ".experts." in name]) == 2 * 12 * 3
    assert sum(t.numel() for t in back.values()) == sum(t.numel() for t in open_hf(source).values())


def test_stacked_experts(run: Run, tmp_path: Path) -> None:  # A14
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 2,
    }  # fmt: skip
    weights = labelled(toy(**config), torch.float32)
    for expert in range(2):
        for name, rows in (("gate", (0, 1)), ("up", (5, 6))):
            weight = weights[f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"]
            weight.copy_(torch.tensor([[10.0 * expert + row] for row in rows]).expand_as(weight))
    source = folder(tmp_path / "source", weights, config)
    run("reshard", "--from", source, "--to", tmp_path / "stacked", "--experts", "stacked")
    fused = open_hf(tmp_path / "stacked")["model.layers.0.mlp.experts.gate_up_proj"]
    assert fused[..., 0].tolist() == [[0, 1, 5, 6], [10, 11, 15, 16]]
    run("reshard", "--from", tmp_path / "stacked", "--to", tmp_path / "again", "--experts", "separate")
    assert_same(source, tmp_path / "again")
    assert_same(tmp_path / "stacked", there_and_back(run, tmp_path / "stacked", tmp_path))
    assert "0 not" in run("verify", source, tmp_path / "stacked")
    dense = toy_folder(tmp_path / "dense")
    assert "have no such form" in run(
        "reshard", "--from", dense, "--to", tmp_path / "x", "--experts", "stacked", code=2
    )


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("config", [MIXTRAL, FAMILIES["latent"]], ids=["mixtral", "latent"])
def test_other_families_stack_experts_too(run: Run, tmp_path: Path, config: dict[str, Any]) -> None:
    source = toy_folder(tmp_path / "source", **({"num_hidden_layers": 3} | config))
    run("reshard", "--from", source, "--to", tmp_path / "stacked", "--experts", "stacked")
    assert open_hf(tmp_path / "stacked")["model.layers.2.mlp.experts.gate_up_proj"].dim() == 3
    assert "0 not" in run("verify", source, tmp_path / "stacked")
    back = there_and_back(run, tmp_path / "stacked", tmp_path, "--ep", 2)
    assert_same(tmp_path / "stacked", back)
    run("reshard", "--from", back, "--to", tmp_path / "again", "--experts", "separate")
    assert_same(source, tmp_path / "again")


def test_a_score_model(run: Run, tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    source = toy_folder(tmp_path / "source", **config)
    assert open_hf(source)["score.weight"].shape == (1, 8)
    assert_same(source, there_and_back(run, source, tmp_path))


ROPES = {
    "old form": {"rope_theta": 500000},
    "new form": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}},
}


@pytest.mark.parametrize("rope", ROPES)
def test_the_config_comes_back_as_it_was(run: Run, tmp_path: Path, rope: str) -> None:  # A20, A21, A23, A24
    source = folder(tmp_path / "source", labelled(toy(), torch.bfloat16), ROPES[rope], **BYTE_EQUAL)
    assert CONFIG["head_dim"] != CONFIG["hidden_size"] / 8  # so that it cannot be derived
    back = there_and_back(run, source, tmp_path)
    for name in ("config.json", *BYTE_EQUAL):
        assert (back / name).read_bytes() == (source / name).read_bytes()


def test_what_is_absent_stays_absent(run: Run, tmp_path: Path) -> None:  # A24
    folder(tmp_path / "old", labelled(toy(), torch.bfloat16), {}, **BYTE_EQUAL)
    source = toy_folder(tmp_path / "source")
    run("reshard", "--from", source, "--to", tmp_path / "old", "--overwrite")
    assert sorted(path.name for path in (tmp_path / "old").iterdir()) == ["config.json", SINGLE]
    (source / "generation_config.json").write_text("{")
    assert "broken JSON" in run("import", "--hf", source, "--out", tmp_path / "out", code=2)


def test_usual_names_need_no_note(run: Run, tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "source", torch.float32)
    run("import", "--hf", source, "--out", tmp_path / "megatron")
    assert not (tmp_path / "megatron" / "hf_names.json").exists()


def test_dtypes_are_kept_or_cast(run: Run, tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "source", **FAMILIES["latent"], num_hidden_layers=2, torch_dtype="bfloat16")
    weights = load_file(source / SINGLE)
    bias = next(name for name in weights if name.endswith("e_score_correction_bias"))
    weights[bias] = weights[bias].float() + 2**-20
    save_file(weights, source / SINGLE)
    assert_same(source, there_and_back(run, source, tmp_path))
    run("reshard", "--from", source, "--to", tmp_path / "wide", "--dtype", "fp32")
    run("reshard", "--from", tmp_path / "wide", "--to", tmp_path / "narrow", "--dtype", "bf16")
    run("import", "--hf", tmp_path / "wide", "--out", tmp_path / "cast", "--dtype", "bf16")
    assert {tensor.dtype for tensor in open_hf(tmp_path / "wide").values()} == {torch.float32}
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["torch_dtype"] == "float32"
    assert_same(source, tmp_path / "narrow")
    assert "0 not" in run("verify", source, tmp_path / "cast")


def test_one_dtype_for_what_becomes_one_tensor(run: Run, tmp_path: Path) -> None:
    """Queries in half precision, keys in single: Megatron's one tensor of both loses nothing, and that is said."""
    source = toy_folder(tmp_path / "source", torch.float32)
    weights = load_file(source / SINGLE)
    queries = "model.layers.1.self_attn.q_proj.weight"
    weights[queries] = (weights[queries] / 4096).half()
    folder(source, weights, {})
    line = f"promoted, as what lies in one tensor there has one dtype: 1 from float16 to float32 ({queries})\n"
    for more in (["--dry-run"], []):
        assert run("import", "--hf", source, "--out", tmp_path / "out", *more).endswith(line)
    assert "promoted" not in run("reshard", "--from", source, "--to", tmp_path / "again")
    assert "promoted" not in run("import", "--hf", source, "--out", tmp_path / "cast", "--dtype", "fp32")
    assert f"{queries}  float16 and float32" in run("verify", source, tmp_path / "out", code=1)
    run("verify", source, tmp_path / "out", "--atol", 0)


def test_values_that_float16_cannot_hold(run: Run, tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "source", vocab_size=9000)  # labels up to 144,000
    said = run("reshard", "--from", source, "--to", tmp_path / "out", "--dtype", "fp16", code=2)
    assert "model.embed_tokens.weight: has values beyond float16's largest" in said
    assert not (tmp_path / "out.partial").exists()


def test_ignored_and_unknown_tensors(run: Run, tmp_path: Path) -> None:  # A27
    weights = labelled(toy(), torch.float32)
    weights |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(1) for i in range(2)}
    source = folder(tmp_path / "source", weights, {})
    assert open_hf(there_and_back(run, source, tmp_path)).keys() == labelled(toy()).keys()
    bad = folder(tmp_path / "bad", {**weights, "foo": torch.ones(1)}, {})
    said = run("reshard", "--from", bad, "--to", tmp_path / "out", code=2)
    assert said == f"error: {bad}: foo is not a tensor of a llama model\n"
    assert "fault: foo is not a tensor" in run("inspect", bad)


# ---------------------------------------------------------------- many processes
def _code(*words: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_bridge.cli.SECONDS_FOR_RANK_0", 0)
        return main(words)


def test_every_process_writes_its_share(run: Run, world: Callable[..., Any], tmp_path: Path) -> None:  # A30
    source, megatron = toy_folder(tmp_path / "source", num_hidden_layers=4), tmp_path / "megatron"
    words = ["import", "--hf", str(source), "--out", str(megatron)]
    assert world(2, _code, *words) == [0, 0]
    assert len(list((megatron / "iter_0000000").glob("*.distcp"))) == 2
    back = ["export", "--megatron", str(megatron), "--out", str(tmp_path / "back"), "--max-shard-size", "1K"]
    assert world(2, _code, *back) == [0, 0]
    assert_same(source, tmp_path / "back")
    assert world(2, _code, "verify", str(source), str(megatron)) == [0, 0]
    assert world(2, _code, *words) == [2, 2]  # the target exists: all are told


def _fail_to_write(bad: int, *words: str) -> int:
    def no_space(file: Any, data: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == bad:
            patch.setattr("megatron_bridge.files.write_all", no_space)
        return _code(*words)


def test_a_writers_failure_ends_all(world: Callable[..., Any], tmp_path: Path) -> None:  # A30
    source = toy_folder(tmp_path / "source", num_hidden_layers=4)
    words = ["reshard", "--from", str(source), "--to", str(tmp_path / "out"), "--max-shard-size", "1K"]
    assert world(2, _fail_to_write, 1, *words) == [2, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_torchrun(tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "source")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "megatron_bridge", "import", "--hf", str(source), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path / 'out'}: ")
    assert done.stdout.count("\n") == 1


# ---------------------------------------------------------------- dry run and memory
def test_a_dry_run_touches_nothing(run: Run, tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "source")
    said = run("import", "--hf", source, "--out", tmp_path / "out", "--dry-run")
    assert "__0_0.distcp" in said
    assert "config.json  copied" in said
    assert "peak memory about" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    (tmp_path / "out").mkdir()
    run("import", "--hf", source, "--out", tmp_path / "out", "--dry-run", code=2)


@pytest.mark.parametrize(("text", "size"), [("2G", 2 << 30), ("512MiB", 512 << 20), ("0.5gb", 1 << 29), ("77", 77)])
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_memory_is_bounded(run: Run, tmp_path: Path) -> None:
    """A model several times larger than what a process may take besides itself."""
    tiny, source = toy_folder(tmp_path / "tiny"), tmp_path / "source"
    config = {**CONFIG, "hidden_size": 512, "vocab_size": 150_000}
    size = make_model(source, config)
    limit = _peak("import", "--hf", tiny, "--out", tmp_path / "a") + 70 * 2**20
    assert size > 4 * 70 * 2**20
    for words in (
        ("import", "--hf", source, "--out", tmp_path / "b", "--tp", 2),
        ("export", "--megatron", tmp_path / "b", "--out", tmp_path / "c"),
    ):
        assert _peak(*words, "--max-memory", limit) < limit
    assert_same(source, tmp_path / "c")
    said = run("import", "--hf", source, "--out", tmp_path / "d", "--max-memory", "10M", code=2)
    assert "is too little: the program itself takes" in said


def _peak(*words: Any) -> int:
    """Bytes that a command takes at most."""
    program = "import resource, sys; from megatron_bridge.cli import main; assert main(sys.argv[1:]) == 0; "
    program += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return int(done.stdout.split()[-1]) * 1024
