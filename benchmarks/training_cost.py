"""Measures what measuring costs a training loop, and what failures cost it.

    python benchmarks/training_cost.py [--front F ...] [--step MS ...] [--loop sleep|compute ...]
        [--gpus N ...] [--node zeusd|process ...] [--seconds S] [--peers FOLDER]
    python benchmarks/training_cost.py --failures [--front F ...] [--node ...]
    python benchmarks/training_cost.py --search

1. Each row is a process: a bare loop, then the same loop with one way to measure (front). It shows
   the ratio of the two mean step times, the processor time that it adds (of one core; beside other
   work this says more than the ratio), the longest step of both beyond the bare loop's mean, and
   how long the end of training takes. Without options: steps of 10 ms, sleeping and computing, 1
   GPU, with and without zeusd. GPUs are the C stand-in for libnvidia-ml (update period 100 ms).
2. `--failures`: the driver fails in the middle of a loop of 10 ms steps. Shows the longest delay of
   a step, the delay of all steps in the first second and after it, of the end, and the warnings.
3. `--search`: the power limit optimizer on a simulated A100, alone and with windows, callbacks
   and reads on its own monitor: steps to the choice, and the choice.

`--peers` is a folder with ml-energy/zeus, codecarbon and nvitop (`pip install --target FOLDER zeus
codecarbon nvitop`), which run as rows if they can be imported. It needs gcc.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if "--peer" not in sys.argv:
    sys.path.insert(0, str(ROOT))

TICK_MS = 100
WARM_UP_S = 1.0
FAILS_S, BACK_S, FAILURE_S = 1.5, 2.5, 5.0
"""When the driver fails and works again, and the length of the loop, in seconds."""

Hook = Callable[[], object]


class Front:
    """One way to measure: called before and after each step, and at the end."""

    def __init__(
        self, begin: Hook = lambda: None, end: Hook = lambda: None, close: Hook = lambda: None
    ) -> None:
        self.begin, self.end, self.close = begin, end, close


def _bare(gpus: list[int]) -> Front:
    return Front()


def _windows(gpus: list[int]) -> Front:
    from zeus.monitor import ZeusMonitor

    monitor, kept = ZeusMonitor(gpus), []
    return Front(
        lambda: monitor.begin_window("step"), lambda: kept.append(monitor.end_window("step"))
    )


def _reads(gpus: list[int]) -> Front:
    from zeus.monitor import ZeusMonitor

    monitor = ZeusMonitor(gpus)
    return Front(
        lambda: monitor.begin_window("step"), lambda: monitor.end_window("step").total_energy
    )


def _callback(**options: Any) -> Callable[[list[int]], Front]:
    def front(gpus: list[int]) -> Front:
        from zeus.measure import EnergyCallback
        from zeus.monitor import ZeusMonitor

        callback = EnergyCallback(ZeusMonitor(gpus), print_summary=False, **options)
        callback.on_train_begin()
        return Front(callback.on_step_begin, callback.on_step_end, callback.on_train_end)

    return front


def _decorator(gpus: list[int]) -> Front:
    from zeus.measure import measure_energy
    from zeus.monitor import ZeusMonitor

    block = measure_energy("step", monitor=ZeusMonitor(gpus))
    return Front(lambda: block.__enter__(), lambda: block.__exit__(None, None, None))


def _rated(kind: str) -> Callable[[list[int]], Front]:
    def front(gpus: list[int]) -> Front:
        from zeus.monitor.carbon import CarbonEmissionMonitor, ElectrictyMapsClient
        from zeus.monitor.price import EnergyCostMonitor, OpenEIClient

        nobody = "http://10.255.255.1"  # packets to it get no answer
        if kind == "carbon":
            monitor: Any = CarbonEmissionMonitor(ElectrictyMapsClient((0, 0), url=nobody), gpus)
        else:
            provider = OpenEIClient((0, 0), "label", api_key="key", url=nobody)
            monitor = EnergyCostMonitor(provider, gpus)
        return Front(lambda: monitor.begin_window("step"), lambda: monitor.end_window("step"))

    return front


def _metrics(gpus: list[int]) -> Front:
    from zeus.metric import EnergyCumulativeCounter

    metric = EnergyCumulativeCounter([], gpus, 1.0, "http://127.0.0.1:9", "job")
    return Front(
        lambda: metric.begin_window("step"), lambda: metric.end_window("step"), metric.close
    )


def _hugging_face(gpus: list[int]) -> Front:
    from zeus.measure import HFEnergyCallback
    from zeus.monitor import ZeusMonitor

    callback = HFEnergyCallback(ZeusMonitor(gpus), print_summary=False)
    control: Any = types.SimpleNamespace(should_log=False)
    callback.on_train_begin()
    return Front(
        lambda: callback.on_step_begin(None, control, control),
        lambda: callback.on_step_end(None, control, control),
        callback.on_train_end,
    )


def _lightning(gpus: list[int]) -> Front:
    from zeus.measure import LightningEnergyCallback
    from zeus.monitor import ZeusMonitor

    callback = LightningEnergyCallback(ZeusMonitor(gpus), print_summary=False)
    trainer: Any = types.SimpleNamespace(is_global_zero=True, loggers=[], global_step=0)
    callback.on_train_start(trainer, trainer)
    return Front(
        lambda: callback.on_train_batch_start(trainer, trainer, None, 0),
        lambda: callback.on_train_batch_end(trainer, trainer, None, None, 0),
        lambda: callback.on_train_end(trainer, trainer),
    )


def _optimizer(gpus: list[int]) -> Front:
    from zeus.monitor import ZeusMonitor
    from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer

    plo = GlobalPowerLimitOptimizer(ZeusMonitor(gpus))
    plo.on_epoch_begin()
    return Front(plo.on_step_begin, plo.on_step_end, plo.close)


def _ml_energy(gpus: list[int]) -> Front:
    from zeus.monitor import ZeusMonitor

    monitor = ZeusMonitor(gpu_indices=gpus, cpu_indices=[])
    return Front(
        lambda: monitor.begin_window("step", sync_execution=False),
        lambda: monitor.end_window("step", sync_execution=False),
    )


def _codecarbon(gpus: list[int]) -> Front:
    from codecarbon import OfflineEmissionsTracker

    tracker = OfflineEmissionsTracker(
        country_iso_code="DEU", measure_power_secs=1, save_to_file=False, log_level="error"
    )
    tracker.start()
    return Front(close=tracker.stop)


def _nvitop(gpus: list[int]) -> Front:
    from nvitop import Device, ResourceMetricCollector

    collector = ResourceMetricCollector(Device.from_indices(gpus), interval=1.0)
    collector.daemonize(lambda metrics: True)
    return Front()


FRONTS: dict[str, Callable[[list[int]], Front]] = {
    "bare": _bare,
    "windows": _windows,
    "callback": _callback(),
    "callback-10": _callback(log=lambda figures, step: None, log_every=10),
    "callback-1": _callback(log=lambda figures, step: None, log_every=1),
    "huggingface": _hugging_face,
    "lightning": _lightning,
    "decorator": _decorator,
    "carbon": _rated("carbon"),
    "price": _rated("price"),
    "metrics": _metrics,
    "optimizer": _optimizer,
    "reads": _reads,
}
"""The last one reads each window's energy at once, and so waits for each update."""

PEERS = {"ml-energy-zeus": _ml_energy, "codecarbon": _codecarbon, "nvitop": _nvitop}


# -------------------------------------------------------------------------- one row, in a process


def worker(options: argparse.Namespace) -> None:
    """Runs the loop, and prints what was observed."""
    step = _step(options.step[0] / 1000, options.loop[0] == "compute")
    front = FRONTS | PEERS
    if options.failures:
        seen = _failing(step, front[options.worker](options.gpus_of))
    else:
        bare, bare_longest, bare_cpu = _timed(step, Front(), options.seconds)
        measured = front[options.worker](options.gpus_of)
        _timed(step, measured, WARM_UP_S)
        mean, longest, cpu = _timed(step, measured, options.seconds)
        began = time.perf_counter()
        measured.close()
        seen = {
            "ratio": mean / bare,
            "cpu": cpu - bare_cpu,
            "longest": longest - bare,
            "bare_longest": bare_longest - bare,
            "end": time.perf_counter() - began,
        }
    print(json.dumps(seen), flush=True)
    os._exit(0)  # the end of the process is not measured


def _step(seconds: float, computes: bool) -> Hook:
    if not computes:
        return lambda: time.sleep(seconds)

    def spin(rounds: int) -> None:
        value = 0
        for number in range(rounds):
            value += number

    best = math.inf
    for _ in range(20):
        began = time.perf_counter()
        spin(20_000)
        best = min(best, time.perf_counter() - began)
    rounds = round(20_000 * seconds / best)
    return lambda: spin(rounds)


def _timed(step: Hook, front: Front, seconds: float) -> tuple[float, float, float]:
    """The mean and the longest time of a step, and the process's share of a core."""
    began = last = time.perf_counter()
    used = time.process_time()
    longest, count = 0.0, 0
    while last - began < seconds:
        front.begin()
        step()
        front.end()
        now = time.perf_counter()
        longest, last, count = max(longest, now - last), now, count + 1
    took = last - began
    return took / count, longest, (time.process_time() - used) / took


def _failing(step: Hook, front: Front) -> dict[str, Any]:
    bare, *_ = _timed(step, Front(), 1.0)
    events = {FAILS_S, BACK_S}
    delays = []
    error = ""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        began = time.perf_counter()
        try:
            while time.perf_counter() - began < FAILURE_S:
                due = {at for at in events if time.perf_counter() - began > at}
                for _ in due:
                    print("event", flush=True)
                    sys.stdin.readline()
                events -= due
                start = time.perf_counter()
                front.begin()
                step()
                front.end()
                delays.append((start - began, time.perf_counter() - start - bare))
            start = time.perf_counter()
            front.close()
        except Exception as raised:
            error = repr(raised)
    late = [(at, delay) for at, delay in delays if at > FAILS_S and delay > 0.002]
    return {
        "longest": max((delay for _, delay in late), default=0.0),
        "first": sum(delay for at, delay in late if at < BACK_S),
        "after": sum(delay for at, delay in late if at >= BACK_S),
        "end": time.perf_counter() - start,
        "warnings": len(told),
        "error": error or "none",
    }


# ------------------------------------------------------------------------------------ the tables


@contextlib.contextmanager
def node(kind: str, gpus: int) -> Iterator[tuple[dict[str, str], Any]]:
    """The environment of a process on a node, and the stand-in for its driver."""
    from benchmarks.processes import without_limits
    from tests.fake_nvml.double import ALWAYS, NvmlDouble

    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        specs = [{"tick_ms": TICK_MS, "architecture": 7} for _ in range(gpus)]
        double = NvmlDouble(Path(directory), specs, privilege=ALWAYS)
        env = {**os.environ, **double.env, "LD_LIBRARY_PATH": str(Path(double.library).parent)}
        env |= {"ZEUSD_STATE_DIR": f"{directory}/embedded", "PYTHONPATH": str(ROOT)}
        env.pop("ZEUSD_SOCK_PATH", None)
        env.pop("CUDA_VISIBLE_DEVICES", None)
        if kind == "process":
            yield env, double
            return
        socket = f"{directory}/zeusd.sock"
        config = Path(directory, "zeusd.toml")
        config.write_text(without_limits() + "[[allow]]\nusers = ['*']\n")
        command = [sys.executable, "-m", "zeusd", "serve", "--socket", socket, "--config"]
        command += [str(config), "--state-dir", f"{directory}/state", "--log-level", "error"]
        daemon = subprocess.Popen([*command, "--nvml-library", double.library], env=env)
        try:
            _await(socket, gpus)
            yield {**env, "ZEUSD_SOCK_PATH": socket}, double
        finally:
            daemon.kill()
            daemon.wait()


def _await(socket: str, gpus: int) -> None:
    from zeus_ipc import Client
    from zeus_ipc.errors import ZeusIpcError

    with Client(socket) as client:
        while True:
            with contextlib.suppress(ZeusIpcError):
                if len(client.node().gpus) == gpus:
                    return
            time.sleep(0.05)


def run(
    front: str, env: dict[str, str], gpus: int, options: list[str], events: list[Hook] | None = None
) -> dict[str, Any]:
    """Runs one row. Returns what it saw; nothing if the peer cannot be imported or used."""
    command = [sys.executable, __file__, "--worker", front, "--gpus", str(gpus), *options]
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if front in (*PEERS, "decorator") else None,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for event in events or []:
        if process.stdout.readline() == "event\n":
            event()
            process.stdin.write("\n")
            process.stdin.flush()
    last = (process.communicate()[0].strip().splitlines() or [""])[-1]
    return json.loads(last) if last.startswith("{") else {}


def costs(options: argparse.Namespace) -> None:
    """Prints the cost of each front."""
    print(
        f"{'node':8} {'GPUs':>4} {'loop':8} {'step':>6} {'front':15} {'ratio':>6} {'CPU':>6} "
        f"{'longest':>9} {'(bare)':>9} {'end':>9}"
    )
    fronts = [*options.front, *(PEERS if options.peers else [])]
    for kind in options.node:
        for gpus in options.gpus:
            for front in fronts:
                if front in PEERS and kind != "process":
                    continue
                for loop in options.loop:
                    for step in options.step:
                        with node(kind, gpus) as (env, _):
                            given = ["--loop", loop, "--step", str(step)]
                            given += ["--seconds", str(options.seconds)]
                            if front in PEERS:
                                env["PYTHONPATH"] = options.peers
                                given.append("--peer")
                            seen = run(front, env, gpus, given)
                        row = f"{kind:8} {gpus:4} {loop:8} {step:3g} ms {front:15} "
                        if not seen:
                            print(f"{row} does not run here", flush=True)
                            continue
                        ms = [seen[name] * 1000 for name in ("longest", "bare_longest", "end")]
                        figures = " ".join(f"{one:6.1f} ms" for one in ms)
                        print(f"{row}{seen['ratio']:6.3f} {seen['cpu']:6.1%} {figures}", flush=True)


def failures(options: argparse.Namespace) -> None:
    """Prints what each failure of the driver costs each front."""

    def fails(code: int = 0, delay_ms: int = 0) -> Callable[[Any], Hook]:
        return lambda double: lambda: double.inject(0, "*", code, delay_ms=delay_ms)

    def back(double: Any) -> Hook:
        return double.clear_faults

    def nothing(double: Any) -> Hook:
        return lambda: None

    events = {
        "gone for good": (fails(999), nothing),
        "lost GPU": (fails(15), nothing),
        "calls take 0.3 s": (fails(delay_ms=300), nothing),
        "errors for 1 s": (fails(999), back),
        "hangs": (fails(delay_ms=60_000), nothing),
    }
    print(
        f"{'node':8} {'driver':17} {'front':15} {'longest':>10} {'1st second':>10} {'after':>10} "
        f"{'end':>10} "
        f"{'warnings':>8}  exception"
    )
    for kind in options.node:
        for name, (first, second) in events.items():
            for front in options.front:
                with node(kind, 1) as (env, double):
                    hooks = [first(double), second(double)]
                    seen = run(front, env, 1, ["--failures", "--step", "10"], hooks)
                ms = [seen[name] * 1000 for name in ("longest", "first", "after", "end")]
                figures = " ".join(f"{one:7.1f} ms" for one in ms)
                print(
                    f"{kind:8} {name:17} {front:15} {figures} {seen['warnings']:8}  "
                    f"{seen['error']}",
                    flush=True,
                )


def search() -> None:
    """Prints the search of the optimizer, alone and beside other uses of its monitor."""
    from tests.support import running_daemon
    from zeus import _node
    from zeus.measure import EnergyCallback
    from zeus.monitor import ZeusMonitor
    from zeus.optimizer.power_limit import Done, Energy, GlobalPowerLimitOptimizer
    from zeus_ipc import Client
    from zeus_ipc.simulation import SimulatedWork

    print(f"{'beside':22} {'steps':>5} {'choice':>8} {'longest wait':>13} {'waits over 20 ms':>17}")
    for beside in ("nothing", "windows", "callback", "reads every 10 steps"):
        with (
            running_daemon("--simulate", "a100-sxm-80:setter_ms=0", gpus=1) as daemon,
            Client(daemon.socket) as client,
            _node.use(client),
        ):
            gpu = client.node().gpus[0]
            path = client.node().simulated
            assert path is not None
            monitor = ZeusMonitor([0], cpu_indices=[])
            plo = GlobalPowerLimitOptimizer(monitor, Energy())
            callback = EnergyCallback(
                monitor, log=lambda figures, step: None, log_every=1, print_summary=False
            )
            kept, waits, steps = [], [], 0
            with SimulatedWork(path, [gpu.uuid], "model/compute") as work, plo:
                plo.on_epoch_begin()
                while not isinstance(plo.state, Done) and steps < 1000:
                    began = time.perf_counter()
                    plo.on_step_begin()
                    if beside == "callback":
                        callback.on_step_begin()
                    elif beside != "nothing":
                        monitor.begin_window("step", sync_execution=False)
                    waited = time.perf_counter() - began
                    work.run(1)
                    began = time.perf_counter()
                    if beside == "callback":
                        callback.on_step_end()
                    elif beside != "nothing":
                        kept.append(monitor.end_window("step", sync_execution=False))
                        if beside != "windows" and steps % 10 == 9:
                            _ = kept[-1].total_energy  # waits, as it asks for it
                            began = time.perf_counter()
                    plo.on_step_end()
                    waits.append(waited + time.perf_counter() - began)
                    steps += 1
                limit = plo.state.optimal_power_limit / 1000 if isinstance(plo.state, Done) else 0
        late = sum(wait > 0.02 for wait in waits)
        longest = max(waits) * 1000
        print(f"{beside:22} {steps:5} {limit:6g} W {longest:10.1f} ms {late:17}", flush=True)


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--front", nargs="+", choices=[*FRONTS, *PEERS], default=list(FRONTS), metavar="F")
    add("--step", nargs="+", type=float, default=[10.0], metavar="MS")
    add("--loop", nargs="+", choices=["sleep", "compute"], default=["sleep", "compute"])
    add("--gpus", nargs="+", type=int, default=[1], metavar="N")
    add("--node", nargs="+", choices=["zeusd", "process"], default=["zeusd", "process"])
    add("--seconds", type=float, default=1.5, help="of each loop")
    add("--peers", metavar="FOLDER")
    add("--failures", action="store_true")
    add("--search", action="store_true")
    add("--worker", help=argparse.SUPPRESS)
    add("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        options.gpus_of = list(range(options.gpus[0]))
        worker(options)
    elif options.search:
        search()
    elif options.failures:
        failures(options)
    else:
        costs(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
