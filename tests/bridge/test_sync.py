"""Syncs between layouts on four real processes: each rank's tensors against an account that knows no layouts.

Weights come from files and go through gloo in buckets far smaller than a tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_bridge.checkpoints import load_hf
from megatron_bridge.execute import connect
from megatron_bridge.families import Architecture
from megatron_bridge.layouts import HFLayout, Layout, MegatronLayout, VLLMLayout
from tests.bridge import accounts
from tests.bridge.accounts import WHOLE, Place
from tests.bridge.toys import empty, toy, toy_experts

RANKS, VOCAB = 4, 64  # the toys' 37 tokens are padded to 64 rows unless a case says otherwise
BUCKET_BYTES = 512


@dataclass(frozen=True)
class Case:
    """A sync, and what each rank must hold before and after it: of Megatron per chunk, of an engine as one."""

    name: str
    source: Layout
    target: Layout
    held: list[list[Place]]
    wanted: list[list[Place]]
    dtype: torch.dtype = torch.float32

    @property
    def arch(self) -> Architecture:
        return self.source.arch


def weights(arch: Architecture) -> dict[str, Tensor]:
    """Random Hugging Face tensors, so that a cast is not exact."""
    draw = torch.Generator().manual_seed(0)
    shapes = {name: param.shape for name, param in HFLayout(arch, (0,)).parameters(0).items()}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def account(checkpoint: dict[str, Tensor], layout: Layout, chunks: Sequence[Place]) -> dict[str, Tensor]:
    if isinstance(layout, VLLMLayout):
        return accounts.vllm(checkpoint, layout.arch, chunks[0]) if chunks else {}
    prefixes = [f"{number}." if len(chunks) > 1 else "" for number in range(len(chunks))]
    parts = (accounts.megatron(checkpoint, layout.arch, *one) for one in zip(chunks, prefixes, strict=True))
    return {name: tensor for part in parts for name, tensor in part.items()}


def differing(found: dict[str, Tensor], due: dict[str, Tensor], dtype: torch.dtype) -> list[str]:
    """Names that only one side has, and those whose values are not the same bits."""
    both = found.keys() & due.keys()
    return sorted(found.keys() ^ due.keys()) + [n for n in both if not torch.equal(found[n], due[n].to(dtype))]


def sync(cases: Sequence[Case], folders: Sequence[Path]) -> list[tuple[list[str], list[str], int]]:
    """Of each case: what differs before and after on this rank, and the bytes it received."""
    rank, outcomes = dist.get_rank(), []
    for case, folder in zip(cases, folders, strict=True):
        checkpoint = load_file(folder / "model.safetensors")
        source = empty(case.source, rank, torch.float32)
        load_hf(folder, case.source, source, rank=rank)
        target = empty(case.target, rank, case.dtype)
        traffic = connect(
            case.source, source, case.target, target, rank=rank, dtype=case.dtype, bucket_bytes=BUCKET_BYTES
        ).run()
        before = differing(source, account(checkpoint, case.source, case.held[rank]), torch.float32)
        if isinstance(case.target, HFLayout):
            after = differing(target, {name: checkpoint[name] for name in target}, case.dtype)
        else:
            after = differing(target, account(checkpoint, case.target, case.wanted[rank]), case.dtype)
        outcomes.append((before, after, traffic.received))
    return outcomes


def megatron(stages: Sequence[Sequence[int]], tp: int = 1, dp: int = 1, rows: int = VOCAB, **experts: int) -> list[Any]:
    """Of each rank of a grid with TP fastest and PP slowest: its layers, and its parts of tensors and experts."""
    etp, ep = experts.get("etp", tp), experts.get("ep", 1)
    return [
        [
            Place(
                layers, first=stage == 0, last=stage == len(stages) - 1, tensor=(tp, i % tp), vocab_rows=rows,
                expert=(ep, i // etp % ep), expert_tensor=(etp, i % etp),
            )
        ]
        for stage, layers in enumerate(stages)
        for i in range(tp * dp)
    ]  # fmt: skip


def engines(stages: Sequence[Sequence[int]], tp: int = 1, ep: bool = False, count: int = 1) -> list[list[Place]]:
    """The same of consecutive vLLM engines; their experts are whole or cut over the ranks of a stage."""
    places = [
        [
            Place(
                layers, first=stage == 0, last=stage == len(stages) - 1, tensor=(tp, i), vocab_rows=VOCAB,
                expert=(tp, i) if ep else WHOLE, expert_tensor=WHOLE if ep else (tp, i),
            )
        ]
        for stage, layers in enumerate(stages)
        for i in range(tp)
    ]  # fmt: skip
    return places * count


NONE: list[list[Place]] = [[], []]  # two ranks outside a layout
LLAMA, TIED, FIVE = toy(), toy(num_hidden_layers=4, tie_word_embeddings=True), toy(num_hidden_layers=5)
EIGHT = toy(num_hidden_layers=8, model_type="qwen3")
BIASED = toy(model_type="qwen2", num_hidden_layers=4, num_key_value_heads=4)
ONE_KV_HEAD = toy(num_key_value_heads=1, model_type="qwen2")
EXPERTS = toy_experts(num_hidden_layers=4)
MIXTRAL = toy(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, intermediate_size=8)
ALL2, ALL4 = [range(2)], [range(4)]
CHUNKS = [
    [Place([0, 1], last=False, vocab_rows=VOCAB), Place([4, 5], False, False)],
    [Place([2, 3], False, False), Place([6, 7], False, vocab_rows=VOCAB)],
]
PP_FASTEST = [
    [Place([2 * (r % 2), 2 * (r % 2) + 1], r % 2 == 0, r % 2 == 1, tensor=(2, r // 2), vocab_rows=VOCAB)]
    for r in range(RANKS)
]

CASES = [
    Case(
        "uneven PP4 → TP4, KV heads repeated", MegatronLayout(FIVE, pp=4, stages=(1, 2, 1, 1)), VLLMLayout(FIVE, tp=4),
        megatron([[0], [1, 2], [3], [4]]), engines([range(5)], tp=4),
    ),
    Case(
        "PP2 of two chunks, DP2 → TP2 twice", MegatronLayout(EIGHT, pp=2, vpp=2, dp=2),
        VLLMLayout(EIGHT, tp=2, ranks=(0, 1, 2, 3)),
        [CHUNKS[0], CHUNKS[0], CHUNKS[1], CHUNKS[1]], engines([range(8)], tp=2, count=2),
    ),
    Case(
        "tied PP4 → TP4", MegatronLayout(TIED, pp=4), VLLMLayout(TIED, tp=4),
        megatron([[0], [1], [2], [3]]), engines(ALL4, tp=4),
    ),
    Case(
        "PP2 → TP2 on other ranks", MegatronLayout(LLAMA, pp=2), VLLMLayout(LLAMA, tp=2, ranks=(2, 3)),
        megatron([[0], [1]]) + NONE, NONE + engines(ALL2, tp=2),
    ),
    Case(
        "TP4 with two KV heads → TP1 four times", MegatronLayout(LLAMA, tp=4), VLLMLayout(LLAMA, ranks=(0, 1, 2, 3)),
        megatron(ALL2, tp=4), engines(ALL2, count=4),
    ),
    Case(
        "TP4 cut inside a head → TP2 twice", MegatronLayout(ONE_KV_HEAD, tp=4),
        VLLMLayout(ONE_KV_HEAD, tp=2, ranks=(0, 1, 2, 3)),
        megatron(ALL2, tp=4), engines(ALL2, tp=2, count=2),
    ),
    Case(
        "DP4 → TP4", MegatronLayout(LLAMA, dp=4), VLLMLayout(LLAMA, tp=4), megatron(ALL2, dp=4), engines(ALL2, tp=4),
    ),
    Case(
        "TP2 PP2 → engine of TP2 PP2, tied", MegatronLayout(TIED, tp=2, pp=2), VLLMLayout(TIED, tp=2, pp=2),
        megatron([[0, 1], [2, 3]], tp=2), engines([[0, 1], [2, 3]], tp=2),
    ),
    Case(
        "TP2 DP2 → engine of PP2 twice, five layers", MegatronLayout(FIVE, tp=2, dp=2),
        VLLMLayout(FIVE, pp=2, ranks=(0, 1, 2, 3)),
        megatron([range(5)], tp=2, dp=2), engines([[0, 1, 2], [3, 4]], count=2),
    ),
    Case(
        "PP fastest, with biases → TP4", MegatronLayout(BIASED, tp=2, pp=2, order="pp-tp-dp"), VLLMLayout(BIASED, tp=4),
        PP_FASTEST, engines(ALL4, tp=4),
    ),
    Case(
        "vocabulary padded to 128 a rank → 64, TP2", MegatronLayout(LLAMA, tp=2, dp=2, vocab_multiple=128),
        VLLMLayout(LLAMA, tp=2, ranks=(1, 3)),
        megatron(ALL2, tp=2, dp=2, rows=256), [[], *engines(ALL2, tp=2)[:1], [], *engines(ALL2, tp=2)[1:]],
    ),
    Case(
        "TP2 DP2 → TP4, float32 as bfloat16", MegatronLayout(TIED, tp=2, dp=2), VLLMLayout(TIED, tp=4),
        megatron(ALL4, tp=2, dp=2), engines(ALL4, tp=4), torch.bfloat16,
    ),
    Case(
        "EP2 × ETP2 → TP4", MegatronLayout(EXPERTS, tp=2, dp=2, ep=2), VLLMLayout(EXPERTS, tp=4),
        megatron(ALL4, tp=2, dp=2, ep=2), engines(ALL4, tp=4),
    ),
    Case(
        "EP2 × ETP2 → EP4", MegatronLayout(EXPERTS, tp=2, dp=2, ep=2), VLLMLayout(EXPERTS, tp=4, ep=True),
        megatron(ALL4, tp=2, dp=2, ep=2), engines(ALL4, tp=4, ep=True),
    ),
    Case(
        "TP2 EP4, experts whole → EP2 twice", MegatronLayout(EXPERTS, tp=2, dp=2, ep=4, etp=1),
        VLLMLayout(EXPERTS, tp=2, ranks=(0, 1, 2, 3), ep=True),
        megatron(ALL4, tp=2, dp=2, ep=4, etp=1), engines(ALL4, tp=2, ep=True, count=2),
    ),
    Case(
        "EP2 PP2 → engine of TP2 PP2", MegatronLayout(EXPERTS, pp=2, dp=2, ep=2), VLLMLayout(EXPERTS, tp=2, pp=2),
        megatron([[0, 1], [2, 3]], dp=2, ep=2), engines([[0, 1], [2, 3]], tp=2),
    ),
    Case(
        "Mixtral EP4 → TP2 twice, as bfloat16", MegatronLayout(MIXTRAL, dp=4, ep=4),
        VLLMLayout(MIXTRAL, tp=2, ranks=(0, 1, 2, 3)),
        megatron(ALL2, dp=4, ep=4), engines(ALL2, tp=2, count=2), torch.bfloat16,
    ),
    Case(
        "EP2 PP2 → files of four owners", MegatronLayout(EXPERTS, pp=2, dp=2, ep=2),
        HFLayout(EXPERTS, (0, 1, 2, 3), owners=(3, 0, 0, 1, 2, 2, 1, 3, 0, 1)),
        megatron([[0, 1], [2, 3]], dp=2, ep=2), [],
    ),
    Case(
        "EP2 × ETP2 → PP2 EP2", MegatronLayout(EXPERTS, tp=2, dp=2, ep=2), MegatronLayout(EXPERTS, pp=2, dp=2, ep=2),
        megatron(ALL4, tp=2, dp=2, ep=2), megatron([[0, 1], [2, 3]], dp=2, ep=2),
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(world: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Of each case, what its ranks say; all run one after another in the same processes."""
    folders = [tmp_path_factory.mktemp("weights") for _ in CASES]
    for case, folder in zip(CASES, folders, strict=True):
        save_file(weights(case.arch), folder / "model.safetensors")
    ranks = world(RANKS, sync, CASES, folders)
    return {case.name: [rank[number] for rank in ranks] for number, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_rank_holds_what_it_should(outcomes: dict[str, list[Any]], case: Case) -> None:
    assert [(before, after) for before, after, _ in outcomes[case.name]] == [([], [])] * RANKS


def test_only_missing_bytes_move(outcomes: dict[str, list[Any]]) -> None:
    assert [received for *_, received in outcomes["DP4 → TP4"]] == [0] * RANKS
    moved = [name for name, ranks in outcomes.items() if any(received for *_, received in ranks)]
    assert len(moved) >= len(CASES) - 2


def test_the_files_of_all_owners_are_the_whole_checkpoint() -> None:
    layout = next(case.target for case in CASES if isinstance(case.target, HFLayout))
    names = [name for rank in range(RANKS) for name in layout.parameters(rank)]
    assert sorted(names) == sorted(weights(layout.arch))
