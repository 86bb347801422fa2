"""What the suite does to an exchange to see where its time goes; it goes from one GPU to itself."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_bridge.copies import FusedCopies
from megatron_bridge.execute import Phase
from megatron_bridge.groups import Group
from megatron_bridge.plan import Copy, Place
from tests.gpu.devices import needs_gpus
from tests.gpu.test_copies import MIB, ROUNDS, exchange_of_rows
from tests.workers import World
from tools.gpu.reshard import copying_by, group_before_others
from tools.gpu.stages import STAGES, Recorder, each_alone, host_seconds

pytestmark = needs_gpus(1)


def _transfer(group: Group) -> Any:
    """As much of a transfer as is looked at: rows to another place through buckets, and as many bytes without."""
    source = {"a": torch.randn(96, MIB + 8, device="cuda")}
    target = {name: torch.full_like(source["a"], torch.nan) for name in "bc"}
    size = source["a"].numel()
    local = FusedCopies([Copy((size,), Place(0, "a", 0, (1,)), Place(0, "c", 0, (1,)))], source, target)
    phase = Phase(local, exchange_of_rows(source, target, torch.float32))

    def run() -> None:
        phase.exchange.run(group, phase.local.run)
        torch.cuda.synchronize()

    return SimpleNamespace(phases=[phase], run=run, source=source, target=target)


def _stages() -> tuple[dict[str, float], dict[str, float], float, int]:
    device, transfer = torch.device("cuda", 0), _transfer(dist.group.WORLD)
    transfer.run()
    recorder = Recorder(device)
    together = recorder.run(transfer, 2)
    alone = each_alone(transfer, recorder.exchanges, 2, device)
    return together, alone, host_seconds(transfer), len(recorder.exchanges)


def test_stages_are_marked_by_the_gpu(gpus: World) -> None:
    """Each alone takes what its bytes need at no more than twice the rate of an H200's memory, 4.8 TB/s."""
    ((together, alone, host, exchanges),) = gpus(1, _stages)
    assert exchanges == ROUNDS
    least = 2 * 96 * (MIB + 8) * 4 / 9.6e12
    for stage in STAGES:
        assert least < together[stage] < together["whole"]
        assert alone[stage] > least
    assert host > 0


def _ways() -> list[bool]:
    found = []
    for programs in (1, 33, None):
        transfer = _transfer(group_before_others())
        with copying_by(programs):
            transfer.run()
        rows = transfer.target["b"].sum(1).sort().values
        found.append(torch.equal(rows, transfer.source["a"].sum(1).sort().values))
        found.append(torch.equal(transfer.target["c"], transfer.source["a"]))
    return found


def test_few_programs_and_a_preferred_stream_move_the_same(gpus: World) -> None:
    (found,) = gpus(1, _ways)
    assert all(found)
