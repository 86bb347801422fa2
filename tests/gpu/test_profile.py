"""Profiles on a GPU: the table counts what was launched, and what graphs have run, in the phase that launched it."""

import gzip
import json
from pathlib import Path

import torch

from rlflow.tracking.profile import Profile
from tests.gpu.devices import needs_gpus
from tests.tracking.test_profile import words

pytestmark = needs_gpus(1)


def graph_of_additions(values: torch.Tensor, count: int) -> torch.cuda.CUDAGraph:
    values.add_(1)  # what is captured has run before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            values.add_(1)
    return graph


def test_kernels_are_counted_where_they_were_launched(tmp_path: Path) -> None:
    """`generate`: a graph of 50 kernels replayed 10 times; `update`: 40 multiplications in place, one kernel each."""
    values = torch.ones(1 << 26, device="cuda")  # 40 kernels take milliseconds: the table's digits end there
    graph = graph_of_additions(values, 50)
    profile = Profile((2,), tmp_path, rank=0, trace=True)
    for step in (1, 2):
        profile.begin(step)
        with profile.phase("generate"):
            for _ in range(10):
                graph.replay()
            torch.cuda.synchronize()
        with profile.phase("update"):
            for _ in range(40):
                values.mul_(0.5)
            torch.cuda.synchronize()
        table = profile.end(step)
    assert table is not None
    print(table)
    rows = {row[0]: row for row in reversed(words(table))}  # the first of a name is the phase's, not its kernels'
    assert rows["generate"][-2:] == ["10", "500"]
    assert rows["update"][-2:] == ["40", "40"]
    assert rows["other"][-2:] == ["0", "0"]
    assert 0 < float(rows["update"][4]) <= float(rows["update"][1])
    trace = json.loads(gzip.decompress((tmp_path / "step_000002_rank_0.json.gz").read_bytes()))
    assert sum(item.get("cat") == "kernel" for item in trace["traceEvents"]) == 540
