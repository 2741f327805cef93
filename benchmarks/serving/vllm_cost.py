"""Measures the cost of the plugins to a real engine: its time per output token with and without
them.

One engine in this process, whose scheduler's methods are wrapped and unwrapped every few steps;
beside it a zeusd on a simulated GPU, a ledger, and clock control in dry run, which receive the
messages of the wrapped scheduler. The mean of a turn counts, because some steps send and others do
not. Steps in which the kernel preempted the process do not count, except for the engine's CPU time,
which is reported too. Each arm is compared with the adjacent turn of the plain engine. It runs
until the interval of each median is as narrow as requested, or the time is over.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import vllm_engine

from zeus.serving.vllm.probe import MODE_ENV, Probe, install
from zeus.serving.vllm.stats import EnergyStatLogger
from zeus.serving.wire import SOCKET_ENV
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError

SIZES = {"tiny": (512, 8), "engine": (1024, 9)}
"""Hidden size and layers: of a model so small that the plugins show, and of one whose steps last as
long on this CPU as those of a model of 7 to 8 thousand million weights on an A100: 15 to 25 ms."""
STEPS = 13
"""Of a turn; the first is not counted."""
FEWEST = 30
"""Pairs of turns whose median is given."""
LEAST = 3
"""Steps of a turn without an interruption, for its time to count; its CPU time always does."""
ENOUGH = 0.004
"""Half the width of an interval that ends the measurement."""
LOOKED_AT = 100
"""Turns between two looks at the intervals."""
NEW_TOKENS = 900
ARMS = ("steps", "stats")
GOAL = 0.01
METHODS = ("schedule", "update_from_output", "add_request")


def cost(home: Path, minutes: float, sequences: int, hidden: int, layers: int) -> None:
    """Prints time per output token of each arm, and how it differs from the plain engine's."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ[MODE_ENV] = ""
    with beside(home, dry_run=True):
        arms = _engine(home, sequences, hidden, layers)
        next(arms)
        order = ["off", *ARMS]
        pairs: dict[tuple[str, str], list[tuple[float, float]]] = {
            (arm, what): [] for arm in ARMS for what in ("time", "CPU")
        }
        plain: list[float] = []
        generator = random.Random(0)
        until = time.monotonic() + 60 * minutes
        turn = 0
        while time.monotonic() < until:
            turn += 1
            generator.shuffle(order)
            found = {name: arms.send(name) for name in order}
            if found["off"][0] is not None:
                plain.append(found["off"][0])
            for arm in ARMS:
                for what, own, other in zip(("time", "CPU"), found[arm], found["off"], strict=True):
                    if own is not None and other is not None:
                        pairs[arm, what].append((own, other))
            if turn % LOOKED_AT == 0 and max(map(_half_width, pairs.values())) < ENOUGH:
                break
    print(f"hidden size {hidden}, {layers} layers, {sequences} sequences; {turn} turns of each")
    if plain:
        print(f"plain: {1000 * statistics.median(plain):.2f} ms per output token")
    wide = False
    for arm in ARMS:
        cells = []
        for what in ("time", "CPU"):
            values = pairs[arm, what]
            if len(values) < FEWEST:
                cells.append(f"{what}: too few turns without an interruption")
                wide = True
                continue
            shares, seconds = _shares(values), [own - other for own, other in values]
            low, high = interval(shares)
            few, many = interval(seconds)
            wide |= high > GOAL
            cells.append(
                f"{what} {1e6 * statistics.median(seconds):+.0f} µs per step "
                f"({1e6 * few:+.0f} to {1e6 * many:+.0f}), "
                f"{100 * statistics.median(shares):+.2f} % "
                f"({100 * low:+.2f} to {100 * high:+.2f}), "
                f"{len(values)} pairs"
            )
        print(f"ZEUS_SERVING={arm}: {'; '.join(cells)}")
    print("medians of pairs, in parentheses 95 % of them")
    print(
        f"goal {100 * GOAL:g} %: " + ("not shown; run it when less else runs" if wide else "kept")
    )
    sys.exit(wide)


def _shares(values: list[tuple[float, float]]) -> list[float]:
    return [own / other - 1 for own, other in values]


def _half_width(values: list[tuple[float, float]]) -> float:
    low, high = interval(_shares(values)) if len(values) >= FEWEST else (-1.0, 1.0)
    return (high - low) / 2


def interval(values: list[float]) -> tuple[float, float]:
    """Of the median, by bootstrap."""
    generator = random.Random(1)
    medians = sorted(
        statistics.median(generator.choices(values, k=len(values))) for _ in range(1000)
    )
    return medians[25], medians[-26]


def _engine(home: Path, sequences: int, hidden: int, layers: int) -> Generator[Any, str, None]:
    """Runs a turn of each arm that is sent; yields mean time and CPU time of its steps, s, or None
    where most were interrupted.
    """
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.metrics.loggers import StatLoggerBase

    plugins: list[Any] = []

    class Logger(StatLoggerBase):
        """Hands statistics to the plugin in its arm."""

        on = False

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            os.environ[MODE_ENV] = "stats"
            plugins.append(EnergyStatLogger(vllm_config, engine_index))

        def record(self, *arguments: Any, **named: Any) -> None:
            if Logger.on:
                plugins[0].record(*arguments, **named)

        def log_engine_initialized(self) -> None:
            pass

    plain = {name: getattr(Scheduler, name) for name in METHODS}
    arguments = vllm_engine.options(
        vllm_engine.model(home, hidden=hidden, layers=layers),
        max_model_len=2048,
        enable_logging_iteration_details=False,
    )
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments), stat_loggers=[Logger])
    install(Scheduler)
    wrapped = {name: getattr(Scheduler, name) for name in METHODS}
    scheduler = engine.engine_core.engine_core.scheduler
    probe = scheduler._zeus_probe = Probe(scheduler)
    number = 0

    def fill() -> None:
        """Has all sequences decode."""
        nonlocal number
        while engine.has_unfinished_requests():
            engine.step()
        for _ in range(sequences):
            how = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
            engine.add_request(f"r{number}", vllm_engine.prompt(64, number), how)
            number += 1
        while any(one.num_output_tokens < 4 for one in scheduler.requests.values()):
            engine.step()

    left = 0

    def run(name: str) -> tuple[float | None, float]:
        nonlocal left
        if left < 2 * STEPS:
            fill()
            left = NEW_TOKENS - 40
        for method, function in (wrapped if name == "steps" else plain).items():
            setattr(Scheduler, method, function)
        Logger.on = name == "stats"
        walls: list[float] = []
        cpus: list[float] = []
        for position in range(STEPS):
            taken_away = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            wall, cpu = time.perf_counter(), time.process_time()
            engine.step()
            took = time.perf_counter() - wall, time.process_time() - cpu
            if position:
                cpus.append(took[1])
                if resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == taken_away:
                    walls.append(took[0])
        left -= STEPS
        return (statistics.fmean(walls) if len(walls) >= LEAST else None), statistics.fmean(cpus)

    for name in ("off", "steps", "stats"):
        run(name)
    name = yield None
    while True:
        name = yield run(name)
        if probe.failed or probe._recorder.dropped:
            sys.exit(f"the probe failed, or nobody listened: {probe._recorder.dropped} dropped")


@contextlib.contextmanager
def beside(home: Path, *, dry_run: bool) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """A zeusd on a simulated GPU, a ledger, and clock control."""
    os.environ["ZEUSD_SOCK_PATH"] = str(home / "zeusd.sock")
    ledger, control = home / "ledger.sock", home / "clocks.sock"
    os.environ[SOCKET_ENV] = f"{ledger}:{control}"
    found: dict[str, subprocess.Popen[bytes]] = {}
    try:
        found["zeusd"] = start_zeusd(home)
        found["ledger"] = start_ledger(home)
        found["clocks"] = start_clocks(home, dry_run=dry_run)
        yield found
    finally:
        for one in reversed(found.values()):
            one.send_signal(signal.SIGTERM)
            one.wait()


def start_zeusd(home: Path) -> subprocess.Popen[bytes]:
    """zeusd on a simulated GPU."""
    zeusd = ["-m", "zeusd", "serve", "--simulate", "a100", "--state-dir", str(home / "state")]
    zeusd += ["--socket", os.environ["ZEUSD_SOCK_PATH"], "--log-level", "warning"]
    found = subprocess.Popen([sys.executable, *zeusd])
    wait_for_zeusd()
    return found


def start_ledger(home: Path) -> subprocess.Popen[bytes]:
    """A ledger that logs requests."""
    serve = ["-m", "zeus.serving", "serve", "--socket", str(home / "ledger.sock")]
    serve += ["--log", str(home / "requests.jsonl")]
    return _listening(home / "ledger.sock", [*serve, "--listen", "127.0.0.1:9462"])


def start_clocks(home: Path, *, dry_run: bool) -> subprocess.Popen[bytes]:
    """Clock control with objectives that a CPU can keep."""
    clocks = ["-m", "zeus.serving", "clocks", "--slo-ttft", "30", "--slo-tpot", "1", "--gpu", "0"]
    clocks += ["--feed", str(home / "clocks.sock"), *(["--dry-run"] if dry_run else [])]
    return _listening(home / "clocks.sock", clocks, home / "clocks.log")


def _listening(
    path: Path, arguments: list[str], log: Path | None = None
) -> subprocess.Popen[bytes]:
    """A Python program, when it listens."""
    path.unlink(missing_ok=True)
    with contextlib.nullcontext() if log is None else log.open("ab") as errors:
        found = subprocess.Popen([sys.executable, *arguments], stderr=errors)
    wait_for(path)
    return found


def wait_for(path: Path) -> None:
    """Returns when a file is there."""
    until = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > until:
            sys.exit(f"{path} does not appear")
        time.sleep(0.05)


def wait_for_zeusd() -> None:
    """Returns when zeusd has its GPU."""
    until = time.monotonic() + 60
    while True:
        with contextlib.suppress(ZeusIpcError), Client() as client:
            if client.node().gpus:
                return
        if time.monotonic() > until:
            sys.exit("zeusd does not start")
        time.sleep(0.1)
