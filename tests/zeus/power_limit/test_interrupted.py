"""The README's loop and its search continue when zeusd fails in any phase."""

from __future__ import annotations

import contextlib
import math
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import snippets
from tests.support import TIMEOUT_S, RunningDaemon, for_users, running_daemon, wait_for
from zeus import _node
from zeus.monitor import ZeusMonitor
from zeus.optimizer.power_limit import (
    Done,
    GlobalPowerLimitOptimizer,
    Profiling,
    Warmup,
)
from zeus_ipc import Client

ROOT = Path(__file__).parents[3]
(LOOP,) = [one for one in snippets.of(ROOT / "README.md") if "plo.steps(loader)" in one.source]
STEP_S = 0.002
EPOCH = range(30)


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", "v100-pcie:setter_ms=0", gpus=1) as running:
        yield running
        running.process.send_signal(signal.SIGCONT)


class Loop:
    """The README's loop, with an event in some steps.

    Args:
        daemon: A zeusd.
        happens: Called before each step with the optimizer.
        over: Whether the loop may end after this epoch.
    """

    def __init__(self, daemon: RunningDaemon, over: Callable[[], bool]) -> None:
        self.daemon = daemon
        self.over = over
        self.steps = 0
        self.evaluations = 0
        self.happens: Callable[[], None] = lambda: None
        self.evaluates: Callable[[], None] = lambda: None
        self.plo: GlobalPowerLimitOptimizer | None = None
        self.caught: list[warnings.WarningMessage] = []

    def run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Raises what reaches the loop: nothing."""
        loop = self

        class Remembered(GlobalPowerLimitOptimizer):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                loop.plo = self

        class Epochs:
            def __iter__(self) -> Iterator[int]:
                yield 0
                end_s = time.monotonic() + TIMEOUT_S
                while not loop.over():
                    assert time.monotonic() < end_s, loop.plo.state
                    yield 0

        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr("zeus.optimizer.power_limit.GlobalPowerLimitOptimizer", Remembered)
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(Client(self.daemon.socket))
            stack.enter_context(_node.use(client))
            self.caught = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            LOOP.run(
                ZeusMonitor=lambda: ZeusMonitor(cpu_indices=[]),
                epochs=Epochs(),
                range=lambda epochs: epochs,
                loader=EPOCH,
                train_step=self.train_step,
                evaluate=self.evaluate,
            )

    def train_step(self, *batch: Any) -> None:
        self.steps += 1
        self.happens()
        time.sleep(STEP_S)

    def evaluate(self) -> None:
        self.evaluations += 1
        self.evaluates()


def kill(daemon: RunningDaemon) -> None:
    daemon.kill()


def stop_in_order(daemon: RunningDaemon) -> None:
    assert daemon.stop() == 0


def freeze(daemon: RunningDaemon) -> None:
    daemon.process.send_signal(signal.SIGSTOP)


def start(daemon: RunningDaemon) -> None:
    daemon.start_again()
    daemon.wait_until_serving(1)


def thaw(daemon: RunningDaemon) -> None:
    daemon.process.send_signal(signal.SIGCONT)


Event = Callable[[RunningDaemon], None]


def phases(plo: GlobalPowerLimitOptimizer) -> list[str]:
    """In which phases a loop is now."""
    state = plo.state
    found = {Warmup: "warm-up", Profiling: "profiling", Done: "after the choice"}
    return [name for kind, name in found.items() if isinstance(state, kind)]


ALL = ["warm-up", "profiling", "evaluation", "after the choice"]


@pytest.mark.parametrize(
    ("away", "back"),
    [(kill, start), (stop_in_order, start), (freeze, thaw)],
    ids=["killed", "stopped in order", "frozen"],
)
def test_the_search_continues_when_zeusd_is_back(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, away: Event, back: Event
) -> None:
    """Away for a few steps once in each phase; then it chooses, and keeps its choice."""
    left = list(ALL)
    since: list[int] = []

    def over() -> bool:
        state = loop.plo.state
        return not left and not since and isinstance(state, Done) and settled()

    def settled() -> bool:
        return loop.plo.current_power_limit == getattr(loop.plo.state, "optimal_power_limit", 0)

    loop = Loop(daemon, over)

    def happens(*, evaluation: bool = False) -> None:
        if since:
            if loop.steps - since[0] >= 10:
                since.clear()
                back(daemon)
                wait_for(_node.answers, "the client to see that zeusd is back")
            return
        now = ["evaluation"] if evaluation else phases(loop.plo)
        for phase in now:
            if phase in left:
                left.remove(phase)
                away(daemon)
                since.append(loop.steps)
                return

    loop.happens = happens
    loop.evaluates = lambda: happens(evaluation=True)
    loop.run(monkeypatch)
    assert isinstance(loop.plo.state, Done)
    assert loop.plo.state.chosen
    assert loop.plo.report().estimates
    with daemon.client() as client:
        (gpu,) = client.node().gpus
        wait_for(lambda: not client.leases(), "the leases to end with the block")
        assert client.state(gpu.uuid)[gpu.uuid].power_limit_mw == 250_000


@pytest.mark.parametrize(
    ("away", "phase"),
    [*((kill, phase) for phase in ALL), (freeze, "profiling"), (freeze, "after the choice")],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_training_continues_without_zeusd(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, away: Event, phase: str
) -> None:
    """Permanently. Unknown energies are nan; each reason is reported once."""
    gone: list[int] = []
    loop = Loop(daemon, lambda: bool(gone) and loop.steps > gone[0] + 100)

    def happens(*, evaluation: bool = False) -> None:
        if not gone and phase in (["evaluation"] if evaluation else phases(loop.plo)):
            away(daemon)
            gone.extend((loop.steps, len(loop.caught)))

    loop.happens = happens
    loop.evaluates = lambda: happens(evaluation=True)
    loop.run(monkeypatch)
    assert loop.steps > gone[0] + 100
    before, after = for_users(loop.caught[: gone[1]]), for_users(loop.caught[gone[1] :])
    warned = [str(one.message) for one in after]
    unknown = ["is nan until it can be known" in str(one.message) for one in (*before, *after)]
    assert any(unknown)  # before it was gone, if zeusd was slow to answer at that very moment
    assert sum(unknown[len(before) :]) <= 1
    assert len(warned) <= 2, warned  # the other is that zeusd has been silent for long
    assert not loop.plo.disabled
    assert not math.isnan(loop.plo.report().saving)
