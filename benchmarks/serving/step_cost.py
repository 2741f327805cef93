"""Measures the cost of a step in the engine's process: that of the probes and of the clock policy.

    python benchmarks/serving.py cost [--samples N]

Each case alternates with the same work without it, some steps at a time, and the difference of the
two is reported: the mean of the middle half, so that a step that another process interrupted does
not count. Another process receives the messages, as the ledger does. Between turns 1 MB is read, so
that caches are not warmer than in an engine.

- `steps`: vLLM's scheduler probe on a scheduler like vLLM's; `same`: the same requests in each
  step, `new`: one of them ends in each and another comes.
- `stats`: the front end's stat logger, in vLLM's API server; outputs of 220 tokens.
- `Recorder.step`: your own engine, which names its requests in each step.
- `RequestFeed`: sums such rows for clock control in the engine's process.
- `ClockPolicy.step`: in the simulation of the named scenario, with no other load.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.serving_clocks import Timed
from benchmarks.serving_clocks_scenarios import SCENARIOS
from benchmarks.serving_clocks_world import simulate
from zeus.serving.clock_policy import ClockPolicy
from zeus.serving.clock_requests import RequestFeed
from zeus.serving.recorder import Recorder
from zeus.serving.vllm.probe import MODE_ENV, install
from zeus.serving.vllm.stats import EnergyStatLogger
from zeus.serving.wire import SOCKET_ENV, EngineStep

GOAL_US = {"step": 25.0, "policy": 60.0}
AT = 64
"""Sequences at which the first goal holds."""
SIZES = (8, 64, 256)
TURN = 20
"""Steps of one way before the other's turn."""
OUTPUT = 220
CACHE = bytearray(2**20)
SCENARIO = "10/s"
LISTENER = """
import sys, time
from zeus.serving.receiver import Receiver
receiver = Receiver(sys.argv[1], lambda message: True)
print("listens", flush=True)
while True:
    receiver.receive()
    time.sleep(0.1)
"""

Arm = Callable[[], None]


class Scheduler:
    """The attributes of vLLM that the probe reads."""

    def __init__(self, sequences: int, *, renew: bool) -> None:
        self.requests: dict[str, Any] = {}
        self._finished: set[str] = set()
        self._numbers = itertools.count()
        self._renew = renew
        for _ in range(sequences):
            self._add()

    def _add(self) -> None:
        name = f"chatcmpl-{next(self._numbers):032x}"
        self.add_request(
            SimpleNamespace(
                request_id=f"{name}-0123abcd",
                external_req_id=name,
                num_prompt_tokens=600,
                num_computed_tokens=600,
                trace_headers=None,
            )
        )

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def schedule(self) -> Any:
        planned = {}
        for name, request in self.requests.items():
            planned[name] = 1
            request.num_computed_tokens += 1
        finished, self._finished = self._finished, set()
        return SimpleNamespace(num_scheduled_tokens=planned, finished_req_ids=finished)

    def update_from_output(self, output: Any, model_output: Any) -> None:
        if self._renew:
            oldest = next(iter(self.requests))
            del self.requests[oldest]
            self._finished.add(oldest)
            self._add()

    def step(self) -> None:
        self.update_from_output(self.schedule(), None)


class Probed(Scheduler):
    """The same with the probe."""

    add_request = Scheduler.add_request
    schedule = Scheduler.schedule
    update_from_output = Scheduler.update_from_output


def probe(sequences: int, *, renew: bool) -> tuple[Arm, Arm]:
    """Without and with the scheduler's probe."""
    return Scheduler(sequences, renew=renew).step, Probed(sequences, renew=renew).step


def stats(sequences: int) -> tuple[Arm, Arm]:
    """Without and with the stat logger."""
    logger = EnergyStatLogger(SimpleNamespace())

    def iterations() -> Iterator[tuple[Any, Any]]:
        every, number = max(1, OUTPUT // sequences), 0
        for step in itertools.count():
            ended = []
            if step > OUTPUT and step % every == 0:
                for _ in range(max(1, sequences // OUTPUT)):
                    number += 1
                    ended.append(
                        SimpleNamespace(
                            request_id=f"chatcmpl-{number:032x}",
                            num_prompt_tokens=600,
                            num_cached_tokens=0,
                            num_generation_tokens=OUTPUT,
                            prefill_time=1e-5,
                            decode_time=2e-5 * OUTPUT,
                        )
                    )
            running = SimpleNamespace(num_running_reqs=sequences - len(ended))
            yield running, SimpleNamespace(finished_requests=ended)

    plain, logged = iterations(), iterations()

    def without() -> None:
        next(plain)

    def with_it() -> None:
        logger.record(*next(logged))

    return without, with_it


def recorder(sequences: int) -> tuple[Arm, Arm]:
    """Nothing, and a recorder that is handed rows."""
    one = Recorder()
    names = [f"chatcmpl-{number:032x}" for number in range(sequences)]
    flags, tokens, context = [False] * sequences, [1] * sequences, [700] * sequences

    def with_it() -> None:
        now_ns = time.monotonic_ns()
        one.step(now_ns, now_ns, names, flags, tokens, context)

    return lambda: None, with_it


def feed(sequences: int) -> tuple[Arm, Arm]:
    """Nothing, and sums over rows for clock control."""
    nothing = SimpleNamespace(
        step=lambda *_: None, finished=lambda *_: None, drained=lambda *_: None
    )
    one = RequestFeed(nothing)
    names = [f"chatcmpl-{number:032x}" for number in range(sequences)]
    flags, tokens, context = [False] * sequences, [1] * sequences, [700] * sequences

    def with_it() -> None:
        now_ns = time.monotonic_ns()
        one.take(EngineStep("0", 1, now_ns, now_ns + 1000, names, flags, tokens, context))

    return lambda: None, with_it


WAYS: dict[str, Callable[[int], tuple[Arm, Arm]]] = {
    "steps, same requests": lambda n: probe(n, renew=False),
    "steps, a new request in each": lambda n: probe(n, renew=True),
    "stats": stats,
    "Recorder.step": recorder,
    "RequestFeed": feed,
}


def main() -> int:
    """Prints a line for each way. Returns 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog=sys.argv[0], description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--samples", type=int, default=200, help="rounds of each variant")
    options = parser.parse_args()
    missed = []
    print("µs per step: middle half, in parentheses the 5th and 95th percentile of turns")
    print(f"{'sequences':30}" + "".join(f"{size:>26}" for size in SIZES))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "steps.sock")
        listener = subprocess.Popen(
            [sys.executable, "-c", LISTENER, path], stdout=subprocess.PIPE, env=os.environ
        )
        assert listener.stdout is not None
        listener.stdout.readline()
        os.environ |= {SOCKET_ENV: path, MODE_ENV: "stats"}
        install(Probed)
        try:
            for name, make in WAYS.items():
                cells = []
                for size in SIZES:
                    times = differences(*make(size), options.samples)
                    cells.append(_cell(times))
                    if size == AT and _middle(times) > GOAL_US["step"]:
                        missed.append(name)
                print(f"{name:30}" + "".join(f"{cell:>26}" for cell in cells), flush=True)
        finally:
            listener.kill()
            listener.wait()
    times = policy()
    print(f"ClockPolicy.step, {SCENARIO}: {_cell(times)}")
    if _middle(times) > GOAL_US["policy"]:
        missed.append("ClockPolicy.step")
    print(
        f"goals: {GOAL_US['step']:g} at {AT} sequences, policy {GOAL_US['policy']:g}; missed by: "
    )
    print(", ".join(missed) or "none")
    return bool(missed)


def differences(plain: Arm, with_it: Arm, samples: int) -> list[float]:
    """µs per step that the second takes longer than the first, of each pair of turns."""
    for arm in (plain, with_it):
        for _ in range(2 * OUTPUT):
            arm()
    found = []
    generator = random.Random(0)
    for _ in range(samples):
        order = [plain, with_it]
        generator.shuffle(order)
        took = {arm: _turn(arm) for arm in order}
        found.append(took[with_it] - took[plain])
        time.sleep(0.005)
    return found


def _turn(arm: Arm) -> float:
    """µs of one step: the mean of a turn."""
    sum(CACHE[::64])
    began = time.perf_counter_ns()
    for _ in range(TURN):
        arm()
    return (time.perf_counter_ns() - began) / TURN / 1000


def policy() -> list[float]:
    """µs of each step of a simulated load."""
    scenario = next(one for one in SCENARIOS if one.name == SCENARIO)
    timed = Timed(ClockPolicy(scenario.truth.clocks(), scenario.ttft_s, scenario.tpot_s))
    simulate(
        scenario.truth,
        scenario.load(21),
        timed,
        ttft_s=scenario.ttft_s,
        tpot_s=scenario.tpot_s,
        seed=1021,
        **scenario.options,
    )
    return [1e6 * one for one in timed.times]


def _middle(times: list[float]) -> float:
    """Mean of the middle half."""
    ordered = sorted(times)
    quarter = len(ordered) // 4
    return statistics.fmean(ordered[quarter : len(ordered) - quarter])


def _cell(times: list[float]) -> str:
    ordered = sorted(times)
    low, high = ordered[len(ordered) // 20], ordered[-len(ordered) // 20]
    return f"{_middle(times):.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    sys.exit(main())
