"""Measures the overhead of a plan in a training loop, per instruction, beside a bare socket send.

    python benchmarks/pipeline_clocks.py [--rounds N]

All are measured in one run, alternating, by one training process: a bare AF_UNIX SOCK_SEQPACKET
send to a process that reads (the lower bound), and an instruction of a plan whose clock is that of
the last one, or another, with zeusd and a simulated GPU whose setters take no time. Compare the
ratios; microseconds depend on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

from ipc import REQUEST, Case, _cores, _swallow, peer, ratios, seqpacket

from zeus.optimizer.pipeline_frequency.follower import FREE, Schedule
from zeus.optimizer.pipeline_frequency.optimizer import PipelineFrequencyOptimizer
from zeus.utils import framework
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError

MICROBATCHES = 32


@contextlib.contextmanager
def daemon(directory: Path) -> Iterator[str]:
    """zeusd with a simulated GPU; its socket."""
    path = str(directory / "zeusd.sock")
    command = [sys.executable, "-m", "zeusd", "serve", "--simulate", "a100:setter_ms=0"]
    command += ["--socket", path, "--state-dir", str(directory / "state"), "--log-level", "warning"]
    process = subprocess.Popen(command)
    try:
        while True:
            with contextlib.suppress(ZeusIpcError), Client(path) as client:
                if client.node().gpus:
                    break
            time.sleep(0.02)
        yield path
    finally:
        process.terminate()
        process.wait()


class _Alone(PipelineFrequencyOptimizer):
    """Knows no server."""

    def _meet(self) -> None:
        return None


class Loop:
    """The instructions of a training loop, without the training.

    Args:
        clocks: Instructions alternate between these, MHz.
    """

    def __init__(self, clocks: tuple[int, int]) -> None:
        # The optimizer as it is, without a server and torch.distributed.
        with mock.patch.object(framework, "initialized", return_value=True):
            optimizer = self.optimizer = _Alone(0, 0, 0, 0, 0, 1, 1, 1, 1, "http://localhost")
        names = ("forward", "backward") * MICROBATCHES
        steps = tuple((name, clocks[n % 2]) for n, name in enumerate(names))
        optimizer._take(Schedule(1, steps))
        self.names = names
        self.position = 0
        optimizer.on_step_begin()
        assert optimizer.plan_version == 1
        assert optimizer._controller.working

    def instruction(self) -> None:
        """Times one instruction, from its begin hook to its end hook, without those of the step."""
        name = self.names[self.position]
        self.optimizer.on_instruction_begin(name)
        self.optimizer.on_instruction_end(name)
        self.position += 1

    def between(self) -> None:
        """The work between two instructions that are measured."""
        if self.position == len(self.names):
            assert self.optimizer.follower._position == len(self.names), FREE
            self.optimizer.on_step_end()
            self.optimizer.on_step_begin()
            self.position = 0


def measure(case: Case, count: int, loop: Loop | None) -> None:
    for _ in range(count):
        time.sleep(0.001)
        if loop is not None:
            loop.between()
        start = time.perf_counter_ns()
        case.call()
        case.times_ns.append(time.perf_counter_ns() - start)


def run(rounds: int, per_round: int, pinned: bool) -> list[Case]:
    cores, others = _cores(pinned)
    os.sched_setaffinity(0, others)  # inherited by everything that is started
    shm = Path("/dev/shm")
    with contextlib.ExitStack() as stack:
        where = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None, prefix="zeusd-")
            )
        )
        os.environ["ZEUSD_SOCK_PATH"] = stack.enter_context(daemon(where))
        sink = seqpacket(stack.enter_context(peer(_swallow, str(where / "sink"))))
        changing, same = Loop((1410, 900)), Loop((1200, 1200))
        client = Client()
        uuid = client.node().gpus[0].uuid
        clocks = [1410, 900]

        def plain() -> None:
            clocks.reverse()
            client.set_gpu_clocks(uuid, clocks[0], clocks[0], block=False)

        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)
        cases: list[tuple[Case, Loop | None]] = [
            (Case("bare AF_UNIX send", lambda: sink.send(REQUEST)), None),
            (Case("instruction, same clock", same.instruction), same),
            (Case("instruction, another clock", changing.instruction), changing),
            (Case("set_gpu_clocks, block=False", plain), None),
        ]
        for case, loop in cases:
            measure(case, 200, loop)
            case.times_ns.clear()
        chance = random.Random(1)
        for _ in range(rounds):
            order = list(cases)
            chance.shuffle(order)
            for case, loop in order:
                measure(case, per_round, loop)
        for loop in (changing, same):
            assert loop.optimizer._controller.working
            loop.optimizer._controller.end()
        client.close()
        return [case for case, _ in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--per-round", type=int, default=200)
    parser.add_argument(
        "--unpinned", action="store_true", help="do not reserve a core for the loop"
    )
    arguments = parser.parse_args()
    cases = run(arguments.rounds, arguments.per_round, not arguments.unpinned)
    floor = cases[0]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{len(floor.times_ns)} each\n"
    )
    print("| | p50 µs | p99 µs | p50 / bare | p99 / bare |")
    print("|---|--:|--:|--:|--:|")
    for case in cases:
        print(
            f"| {case.name} | {case.percentile_us(50):.1f} | {case.percentile_us(99):.1f} | "
            f"{ratios(case, floor, 50)} | {ratios(case, floor, 99)} |"
        )


if __name__ == "__main__":
    main()
