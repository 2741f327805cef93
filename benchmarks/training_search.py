"""Measures the search of the power limit optimizer beside other uses of its monitor:
`training_cost.py`.
"""

from __future__ import annotations

import time
from unittest import mock

from benchmarks.training_fronts import FRONTS, Front, Job
from tests.support import running_daemon
from zeus import _node
from zeus.monitor import ZeusMonitor
from zeus.optimizer.power_limit import Done, Energy, GlobalPowerLimitOptimizer
from zeus_common.simulation import SimulatedWork
from zeus_ipc import Client

BESIDE = {
    "nothing": ("bare", 0),
    "windows": ("windows", 0),
    "callback": ("callback-1", 0),
    "reads every 10 steps": ("windows", 10),
}
"""A front, and after how many steps the newest window's energy is read; 0: never."""
LATE_S = 0.02


def search() -> None:
    """Prints steps, choice and waits of each."""
    print(f"{'beside':22} {'steps':>5} {'choice':>8} {'longest wait':>13} {'waits over 20 ms':>17}")
    for beside, (front, reads_every) in BESIDE.items():
        with (
            running_daemon("--simulate", "a100-sxm-80:setter_ms=0", gpus=1) as daemon,
            Client(daemon.socket) as client,
            _node.use(client),
            # `work.run` waits for the GPU, as a framework does.
            mock.patch("zeus.monitor.energy.synchronize", return_value=True),
        ):
            job = Job([0])
            job.monitor = ZeusMonitor([0], cpu_indices=[])
            with GlobalPowerLimitOptimizer(job.monitor, Energy()) as plo:
                waits = _waits(client, plo, FRONTS[front](job), reads_every)
                limit = plo.state.optimal_power_limit / 1000 if isinstance(plo.state, Done) else 0
        late = sum(wait > LATE_S for wait in waits)
        longest = f"{max(waits) * 1000:10.1f} ms"
        print(f"{beside:22} {len(waits):5} {limit:6g} W {longest} {late:17}", flush=True)


def _waits(
    client: Client, plo: GlobalPowerLimitOptimizer, front: Front, reads_every: int
) -> list[float]:
    """What the optimizer and the front take in each step of a search, s, without the reads."""
    gpu, path, waits = client.node().gpus[0], client.node().simulated, list[float]()
    assert path is not None
    with SimulatedWork(path, [gpu.uuid], "model/compute") as work:
        plo.on_epoch_begin()
        while not isinstance(plo.state, Done) and len(waits) < 1000:
            began = time.perf_counter()
            plo.on_step_begin()
            front.begin()
            waited = time.perf_counter() - began
            work.run(1)
            began = time.perf_counter()
            window = front.end()
            waited += time.perf_counter() - began
            if reads_every and len(waits) % reads_every == reads_every - 1:
                _ = window.total_energy  # waits, as it asks for it
            began = time.perf_counter()
            plo.on_step_end()
            waits.append(waited + time.perf_counter() - began)
    return waits
