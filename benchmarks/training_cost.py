"""Measures what measuring costs a training loop, and what failures cost it.

    python benchmarks/training_cost.py [--front F ...] [--step MS ...] [--loop sleep|compute ...]
        [--gpus N ...] [--node zeusd|process ...] [--seconds S] [--peers FOLDER]
    python benchmarks/training_cost.py --failures [--front F ...] [--node ...] [--event E ...]
    python benchmarks/training_cost.py --search

1. Each row is a process: a bare loop, then the same loop with one way to measure (front). It shows
   the ratio of the two mean step times, the processor time that it adds (of one core; beside other
   work this says more than the ratio), the longest step of both beyond the bare loop's mean, and
   how long the end of training takes. Without options: steps of 10 ms, sleeping and computing, 1
   GPU, with and without zeusd. GPUs are the C stand-in for libnvidia-ml (update period 100 ms).
   Hugging Face's and Lightning's trainers and ZeusDataLoader are real ones; `vllm` is the probe on
   a scheduler like vLLM's.
2. `--failures`: the driver or zeusd fails in the middle of a step of a loop of 10 ms steps. Shows
   the longest delay of a step, the delay of all steps in the first second and after it, of the end
   of training and of the process, and the warnings.
3. `--search`: the power limit optimizer on a simulated A100, alone and with windows, callbacks
   and reads on its own monitor: steps to the choice, the choice, the longest time that the
   optimizer and the windows take in a step, and how often that is over 20 ms.

`--peers` is a folder with ml-energy/zeus, codecarbon and nvitop (`pip install --target FOLDER zeus
codecarbon nvitop`), which run as rows if they can be imported. It needs gcc.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if "--peer" not in sys.argv:
    sys.path.insert(0, str(ROOT))

TICK_MS = 100
WARM_UP_S = 1.0
STEPS = 100_000
"""More than any row takes."""
FAILS_S, BACK_S, FAILURE_S = 1.5, 2.5, 5.0
"""When the driver fails and works again, and the length of the loop, in seconds."""

Hook = Callable[[], object]


class Front:
    """One way to measure: called before and after each step, and at the end."""

    def __init__(
        self, begin: Hook = lambda: None, end: Hook = lambda: None, close: Hook = lambda: None
    ) -> None:
        self.begin, self.end, self.close = begin, end, close

    def drive(self, step: Callable[[], bool]) -> None:
        """Runs steps until one says that it is the last."""
        more = True
        while more:
            self.begin()
            more = step()
            self.end()
        self.close()


class Trainer(Front):
    """A trainer with a loop of its own.

    Args:
        train: Runs steps until one says that it is the last, with a callback or without.
    """

    def __init__(
        self, train: Callable[[Callable[[], bool], Any], None], callback: Any = None
    ) -> None:
        super().__init__()
        self._train, self._callback = train, callback

    def drive(self, step: Callable[[], bool]) -> None:
        self._train(step, self._callback)


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


def _train_with_hugging_face(step: Callable[[], bool], callback: Any) -> None:
    import torch
    from transformers import Trainer as HFTrainer
    from transformers import TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.more = True

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            self.more = step()
            return {"loss": self.layer(x).mean()}

    class Until(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            control.should_training_stop = not model.more

    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            max_steps=STEPS,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        callbacks = [Until(), *([] if callback is None else [callback])]
        data = [{"x": torch.zeros(1)}] * STEPS
        HFTrainer(model, arguments, train_dataset=data, callbacks=callbacks).train()


def _train_with_lightning(step: Callable[[], bool], callback: Any) -> None:
    import torch
    from lightning.pytorch import LightningModule
    from lightning.pytorch import Trainer as LightningTrainer

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.more = True

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.more = step()
            loss: torch.Tensor = self.layer(batch).mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Data(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            while model.more:
                yield torch.zeros(1)

    model = Model()
    LightningTrainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if callback is None else [callback],
    ).fit(model, torch.utils.data.DataLoader(Data()))


def _train_with_data_loader(step: Callable[[], bool], loader: Any) -> None:
    import torch

    data = torch.utils.data.TensorDataset(torch.zeros(STEPS, 1))
    batches = torch.utils.data.DataLoader(data) if loader is None else loader
    for _ in range(1) if loader is None else loader.epochs():
        for _ in batches:
            if not step():
                break
        if loader is not None:
            loader.report_metric(1.0, higher_is_better=True)


def _trainer(name: str) -> Callable[[list[int]], Front]:
    def front(gpus: list[int]) -> Front:
        from zeus import measure
        from zeus.monitor import ZeusMonitor
        from zeus.optimizer import power_limit

        if name.endswith("Optimizer"):
            return Trainer(train, getattr(power_limit, name)(ZeusMonitor(gpus)))
        return Trainer(train, getattr(measure, name)(ZeusMonitor(gpus), print_summary=False))

    train = _train_with_hugging_face if name.startswith("HF") else _train_with_lightning
    return front


def _data_loader(gpus: list[int]) -> Front:
    import torch

    from zeus.run import ZeusDataLoader

    data = torch.utils.data.TensorDataset(torch.zeros(STEPS, 1))
    loader = ZeusDataLoader(data, batch_size=1, max_epochs=1)
    return Trainer(_train_with_data_loader, loader)


def _scheduler() -> Front:
    sys.path.insert(0, str(ROOT / "benchmarks" / "serving"))
    from step_cost import Scheduler

    return Front(Scheduler(64, renew=True).step)


def _vllm(gpus: list[int]) -> Front:
    from step_cost import Probed  # as `_scheduler` has found it

    from zeus.serving.vllm.probe import install

    install(Probed)
    return Front(Probed(64, renew=True).step)


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
    "huggingface": _trainer("HFEnergyCallback"),
    "lightning": _trainer("LightningEnergyCallback"),
    "decorator": _decorator,
    "carbon": _rated("carbon"),
    "price": _rated("price"),
    "metrics": _metrics,
    "optimizer": _optimizer,
    "hf-optimizer": _trainer("HFGlobalPowerLimitOptimizer"),
    "pl-optimizer": _trainer("LightningGlobalPowerLimitOptimizer"),
    "data-loader": _data_loader,
    "vllm": _vllm,
    "reads": _reads,
}
"""The last one reads each window's energy at once, and so waits for each update."""

QUIET = ("decorator",)
"""They print much."""

BARE: dict[str, Callable[[], Front]] = {
    "huggingface": lambda: Trainer(_train_with_hugging_face),
    "hf-optimizer": lambda: Trainer(_train_with_hugging_face),
    "lightning": lambda: Trainer(_train_with_lightning),
    "pl-optimizer": lambda: Trainer(_train_with_lightning),
    "data-loader": lambda: Trainer(_train_with_data_loader),
    "vllm": _scheduler,
}
"""What they run in, without them; of the others, a loop."""

PEERS = {"ml-energy-zeus": _ml_energy, "codecarbon": _codecarbon, "nvitop": _nvitop}


# -------------------------------------------------------------------------- one row, in a process


def worker(options: argparse.Namespace) -> None:
    """Runs the loop, and prints what was observed."""
    step = _step(options.step[0] / 1000, options.loop[0] == "compute")
    bare = _loop(step, BARE.get(options.worker, Front)(), options.seconds)
    front = (FRONTS | PEERS)[options.worker](options.gpus_of)
    if options.failures:
        print(json.dumps(_failing(step, front, bare.mean)), flush=True)
        return  # how long the process takes to end is seen from outside
    measured = _loop(step, front, options.seconds)
    seen = {
        "ratio": measured.mean / bare.mean,
        "cpu": measured.cpu - bare.cpu,
        "longest": measured.longest - bare.mean,
        "bare_longest": bare.longest - bare.mean,
        "end": measured.end_s - bare.end_s,
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


@dataclass
class Loop:
    """What a loop took.

    Attributes:
        steps: When each began, s, and what it and the hooks around it took, s.
        end_s: From the end of the last step to that of training.
        cpu: The process's share of a core.
    """

    steps: list[tuple[float, float]] = field(default_factory=list)
    end_s: float = 0.0
    cpu: float = 0.0

    @property
    def mean(self) -> float:
        """Of a step, s."""
        return sum(took for _, took in self.steps) / len(self.steps)

    @property
    def longest(self) -> float:
        """Of a step, s."""
        return max(took for _, took in self.steps)


def _loop(step: Hook, front: Front, seconds: float, warm_up_s: float = WARM_UP_S) -> Loop:
    """Runs steps for some seconds after a warm-up."""
    loop = Loop()
    began = last = used = 0.0
    events = [FAILS_S, BACK_S] if not warm_up_s else []

    def run() -> bool:
        nonlocal began, last, used
        now = time.perf_counter()
        began = began or now + warm_up_s  # a trainer takes a while to begin
        if last:
            loop.steps.append((last - began, now - last))
        elif now >= began:
            used = time.process_time()
        if events and now - began > events[0]:
            events.pop(0)
            print("event", flush=True)
            sys.stdin.readline()
        last = time.perf_counter() if now >= began else 0.0
        step()
        more = time.perf_counter() - began < seconds
        if not more:
            loop.cpu = (time.process_time() - used) / seconds
            loop.end_s = time.perf_counter()
        return more

    front.drive(run)
    loop.end_s = time.perf_counter() - loop.end_s
    return loop


def _failing(step: Hook, front: Front, bare_s: float) -> dict[str, Any]:
    error, loop = "none", Loop([(0.0, 0.0)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            loop = _loop(step, front, FAILURE_S, warm_up_s=0.0)
        except Exception as raised:
            error = repr(raised)
    delays = [(at, took - bare_s) for at, took in loop.steps if at > FAILS_S - 0.1]
    late = [(at, delay) for at, delay in delays if delay > 0.002]
    return {
        "longest": max((delay for _, delay in late), default=0.0),
        "first": sum(delay for at, delay in late if at < BACK_S),
        "after": sum(delay for at, delay in late if at >= BACK_S),
        "end": loop.end_s,
        "warnings": len(told),
        "error": error,
    }


# ------------------------------------------------------------------------------------ the tables


class Node:
    """A node: the stand-in for its driver, and a zeusd, if it has one.

    Attributes:
        env: The environment of a process on it.
    """

    def __init__(self, directory: str, gpus: int, with_zeusd: bool) -> None:
        from benchmarks.processes import without_limits
        from tests.fake_nvml.double import ALWAYS, NvmlDouble

        specs = [{"tick_ms": TICK_MS, "architecture": 7} for _ in range(gpus)]
        self.double = double = NvmlDouble(Path(directory), specs, privilege=ALWAYS)
        self.env = {**os.environ, **double.env, "PYTHONPATH": str(ROOT)}
        self.env["LD_LIBRARY_PATH"] = str(Path(double.library).parent)
        self.env |= {"ZEUSD_STATE_DIR": f"{directory}/embedded", "ZEUS_LOG_DIR": directory}
        self.env["ZEUS_TARGET_METRIC"] = "2"  # that no row reaches
        for name in ("ZEUSD_SOCK_PATH", "CUDA_VISIBLE_DEVICES"):
            self.env.pop(name, None)
        if not with_zeusd:
            return
        self.socket = f"{directory}/zeusd.sock"
        config = Path(directory, "zeusd.toml")
        config.write_text(without_limits() + "[[allow]]\nusers = ['*']\n")
        self._command = [sys.executable, "-m", "zeusd", "serve", "--socket", self.socket]
        self._command += ["--config", str(config), "--state-dir", f"{directory}/state"]
        self._command += ["--log-level", "error", "--nvml-library", double.library]
        self._env = dict(self.env)
        self.start()
        _await(self.socket, gpus)
        self.env["ZEUSD_SOCK_PATH"] = self.socket

    def start(self) -> None:
        """Starts zeusd."""
        self.daemon = subprocess.Popen(self._command, env=self._env, stderr=subprocess.DEVNULL)

    def send(self, number: int) -> None:
        """Sends zeusd a signal, and waits for its end if it ends."""
        self.daemon.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.daemon.wait()


def _await(socket: str, gpus: int) -> None:
    from zeus_ipc import Client
    from zeus_ipc.errors import ZeusIpcError

    with Client(socket) as client:
        while True:
            with contextlib.suppress(ZeusIpcError):
                if len(client.node().gpus) == gpus:
                    return
            time.sleep(0.05)


@contextlib.contextmanager
def node(kind: str, gpus: int) -> Iterator[Node]:
    """A node with zeusd, or without."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        opened = Node(directory, gpus, kind == "zeusd")
        try:
            yield opened
        finally:
            if kind == "zeusd":
                opened.send(signal.SIGKILL)


def run(
    front: str, env: dict[str, str], gpus: int, options: list[str], events: list[Hook] | None = None
) -> dict[str, Any]:
    """Runs one row. Returns what it saw; nothing if the peer cannot be imported or used."""
    command = [sys.executable, __file__, "--worker", front, "--gpus", str(gpus), *options]
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if front in (*PEERS, *QUIET) else None,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        due, found = iter(events or []), {}
        for line in process.stdout:
            if line == "event\n":
                next(due)()
                process.stdin.write("\n")
                process.stdin.flush()
            elif line.startswith('{"'):
                found, began = json.loads(line), time.perf_counter()
                process.wait()
                found["exit"] = time.perf_counter() - began
        return found


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
                        with node(kind, gpus) as opened:
                            env = opened.env
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


def _driver(code: int = 0, delay_ms: int = 0) -> Event:
    return lambda node: node.double.inject(0, "*", code, delay_ms=delay_ms)


def _sends(number: int) -> Event:
    return lambda node: node.send(number)


def _nothing(node: Node) -> None: ...


def _cannot_write(node: Node) -> None:
    resource.prlimit(node.daemon.pid, resource.RLIMIT_FSIZE, (0, 0))


Event = Callable[[Node], None]
DRIVER: dict[str, tuple[Event, Event]] = {
    "nothing": (_nothing, _nothing),
    "driver gone for good": (_driver(999), _nothing),
    "lost GPU": (_driver(15), _nothing),
    "calls take 0.3 s": (_driver(delay_ms=300), _nothing),
    "errors for 1 s": (_driver(999), lambda node: node.double.clear_faults()),
    "driver hangs": (_driver(delay_ms=60_000), _nothing),
}
EVENTS = DRIVER | {
    "zeusd killed": (_sends(signal.SIGKILL), _nothing),
    "zeusd restarted": (_sends(signal.SIGTERM), Node.start),
    "zeusd frozen": (_sends(signal.SIGSTOP), _nothing),
    "frozen for 1 s": (_sends(signal.SIGSTOP), _sends(signal.SIGCONT)),
    "zeusd's disk full": (_cannot_write, _nothing),
    "socket deleted": (lambda node: os.unlink(node.socket), _nothing),
}


def failures(options: argparse.Namespace) -> None:
    """Prints what each failure of the driver and of zeusd costs each front."""
    print(
        f"{'node':8} {'event':20} {'front':13} {'longest':>10} {'1st second':>10} {'after':>10} "
        f"{'end':>10} {'exit':>10} {'warnings':>8}  exception"
    )
    for kind in options.node:
        for name, pair in (EVENTS if kind == "zeusd" else DRIVER).items():
            if name not in options.event:
                continue
            for front in options.front:
                with node(kind, 1) as opened:
                    hooks: list[Hook] = [partial(event, opened) for event in pair]
                    given = ["--failures", "--step", "10", "--loop", "sleep", "--seconds", "1"]
                    seen = run(front, opened.env, 1, given, hooks)
                row = f"{kind:8} {name:20} {front:13}"
                if not seen:
                    print(f"{row} does not run here", flush=True)
                    continue
                ms = [seen[name] * 1000 for name in ("longest", "first", "after", "end", "exit")]
                figures = " ".join(f"{one:7.1f} ms" for one in ms)
                print(f"{row} {figures} {seen['warnings']:8}  {seen['error']}", flush=True)


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
    add("--event", nargs="+", choices=list(EVENTS), default=list(EVENTS), metavar="E")
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
