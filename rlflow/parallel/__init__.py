"""Process groups of a role, the device, the CPU shim, seeds, shutdown, and what happens in a fault.

Everything that megatron-core or torch.distributed keep as global state is fenced in here; models and roles build on it.
"""

import warnings

from rlflow.parallel import cpu_shim, known_warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron-core names every optional package that it does not find
    # Before anything imports megatron-core, which binds torch.compile on import.
    cpu_shim.install()
    from rlflow.parallel.context import active
    from rlflow.parallel.grid import Grid
from rlflow.parallel.failure import reporting
from rlflow.parallel.process import device, initialize, limit_threads, ranks_per_node, shutdown
from rlflow.parallel.seeds import derive_seed
from rlflow.parallel.watchdog import Watchdog

known_warnings.silence()

__all__ = [
    "Grid", "Watchdog", "active", "derive_seed", "device", "initialize", "limit_threads", "ranks_per_node",
    "reporting", "shutdown",
]  # fmt: skip
