"""A decorator, a block and a callback that measure and set nothing."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import re
import threading
import time
import types
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.support import TIMEOUT_S, for_users
from tests.zeus.node import VirtualNode
from zeus import _node
from zeus.measure import EnergyCallback, EnergySummary, measure_energy
from zeus.measure import decorator as decorator_module
from zeus.measure.logs import as_log
from zeus.metric import EnergyCumulativeCounter
from zeus.monitor import Window, ZeusMonitor
from zeus.monitor.carbon import (
    CarbonEmissionMeasurement,
    CarbonEmissionMonitor,
    CarbonIntensityProvider,
)
from zeus.optimizer import GlobalPowerLimitOptimizer
from zeusd import embed
from zeusd.devices.simulated import SimulatedBackend, Work
from zeusd.nodes import OpenedNode


def test_a_function_is_measured_at_each_call(
    node: VirtualNode, work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[tuple[str, Window]] = []

    @measure_energy(
        monitor=node.monitor(), report=lambda name, window: found.append((name, window))
    )
    def train(steps: int) -> str:
        """Trains."""
        work.run(steps)
        return "done"

    assert (train.__name__, train.__doc__) == ("train", "Trains.")
    assert [train(10), train(20)] == ["done", "done"]
    (name, short), (_, long) = found
    assert name.endswith("train")
    assert long.total_energy == pytest.approx(2 * short.total_energy, rel=0.05)
    assert capsys.readouterr().err == ""


def test_a_block_is_measured_and_printed_also_when_it_fails(
    node: VirtualNode, work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = node.monitor()
    with pytest.raises(KeyError), measure_energy("evaluation", monitor=monitor) as window:
        work.run(10)
        raise KeyError
    assert capsys.readouterr().err == "", "its energy is not known yet"
    node.clock.sleep(0.2)
    assert monitor.available(window.measurement)
    printed = capsys.readouterr().err
    found = re.fullmatch(r"evaluation: ([\d.]+) s, ([\d.]+) J ± [\d.]+ J, ([\d.]+) W\n", printed)
    assert found is not None, printed
    assert float(found[1]) == pytest.approx(window.time, abs=0.001)
    assert float(found[2]) == pytest.approx(window.total_energy, rel=0.001)


def test_the_plain_decorator_finds_the_gpus_when_it_is_first_called(
    node: VirtualNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decorator_module, "_shared", None)

    def unreachable() -> None:
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(_node, "get_client", unreachable)

        @measure_energy
        def train() -> None: ...

    monkeypatch.setattr(decorator_module, "ZeusMonitor", lambda: node.monitor())
    train()
    decorator_module.shared_monitor().flush()
    assert "train: " in capsys.readouterr().err


def test_a_call_can_wait_for_its_report(
    node: VirtualNode, work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    with measure_energy("evaluation", monitor=node.monitor(), wait=True):
        work.run(10)
    assert capsys.readouterr().err.startswith("evaluation: ")


def test_a_coroutine_is_measured_to_its_end(node: VirtualNode) -> None:
    found: list[Window] = []

    @measure_energy("wait", monitor=node.monitor(), report=lambda _, window: found.append(window))
    async def wait() -> int:
        await asyncio.sleep(0)
        node.clock.sleep(3)
        return 1

    assert asyncio.run(wait()) == 1
    assert found[0].time == pytest.approx(3)


def test_threads_and_tasks_that_share_a_block_measure_their_own_time(node: VirtualNode) -> None:
    """The first to enter is the first to leave."""
    shared = measure_energy("shared", monitor=node.monitor(), report=None)
    found: dict[str, float] = {}

    def outer() -> None:
        with shared as window:
            entered.set()
            assert left.wait(TIMEOUT_S)
            node.clock.sleep(5)
        found["thread"] = window.time

    entered, left = threading.Event(), threading.Event()
    thread = threading.Thread(target=outer)
    with shared as window:
        node.clock.sleep(1)
        thread.start()
        assert entered.wait(TIMEOUT_S)
    found["main"] = window.time
    left.set()
    thread.join()

    async def task(name: str, begins_s: int, ends_s: int) -> None:
        for _ in range(begins_s):
            await asyncio.sleep(0)
        with shared as window:
            for _ in range(ends_s - begins_s):
                node.clock.sleep(1)
                await asyncio.sleep(0)
        found[name] = window.time

    async def both() -> None:
        await asyncio.gather(task("first", 0, 2), task("second", 1, 4))

    asyncio.run(both())
    assert found == {
        "main": pytest.approx(1),
        "thread": pytest.approx(5),
        "first": pytest.approx(3),  # with 1 s of the second, as they share a clock
        "second": pytest.approx(3),
    }


@pytest.mark.parametrize("what", [classmethod(len), 5])
def test_what_is_no_function_is_refused(what: Any) -> None:
    with pytest.raises(TypeError, match="next to the function, below @classmethod"):
        measure_energy(what)


def test_a_generator_is_refused() -> None:
    """Its work is done after the call that would be measured."""

    async def asynchronous() -> AsyncIterator[int]:
        yield 1

    class Called:
        def __call__(self) -> Iterator[int]:
            yield 1

    for function in (lambda: (yield 1), asynchronous, functools.partial(asynchronous), Called()):
        with pytest.raises(TypeError, match=r"is a generator.*use `with measure_energy\(\.\.\.\)`"):
            measure_energy(function)


def test_whatever_can_be_called_is_measured(node: VirtualNode) -> None:
    class Model:
        def __init__(self) -> None:
            self.weights = [1] * 1000

        def __call__(self, x: int) -> int:
            node.clock.sleep(1)
            return x + 1

    class Served(Model):
        async def __call__(self, x: int) -> int:
            return super().__call__(x)

    def add(x: int, y: int) -> int:
        node.clock.sleep(1)
        return x + y

    seen: list[tuple[str, float]] = []
    measured = measure_energy(
        monitor=node.monitor(), report=lambda name, window: seen.append((name, window.time))
    )
    assert measured(Model())(1) == 2
    assert not hasattr(measured(Model()), "weights")
    assert measured(functools.partial(functools.partial(add, 1), y=2))() == 3
    assert measured(functools.partial(Model()))(3) == 4
    assert measured(max)(3, 4) == 4
    assert asyncio.run(measured(Served())(4)) == 5
    one_s = pytest.approx(1)
    model, own = Model.__qualname__, add.__qualname__
    expected = [(model, one_s), (own, one_s), (model, one_s), ("max", pytest.approx(0))]
    assert seen == [*expected, (Served.__qualname__, one_s)]


class Figures:
    """The log."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []

    def __call__(self, figures: dict[str, float], step: int) -> None:
        self.logged.append((figures, step))

    def of(self, name: str) -> list[float]:
        return [figures[name] for figures, _ in self.logged if name in figures]


def train(callback: EnergyCallback, node: VirtualNode, work: Work, epochs: int = 2) -> Any:
    """Ten steps and an evaluation an epoch. Returns the summary."""
    with callback:
        for _ in range(epochs):
            for _ in callback.steps(range(10)):
                work.run(1)
                work.wait()
            node.clock.sleep(5)
    return callback.summary


def test_a_loop_gets_its_figures_and_a_summary(
    node: VirtualNode, work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = Figures()
    callback = EnergyCallback(node.monitor(), log=figures, log_every=5, price=0.30, currency="EUR")
    before_j = node.nvml.true_energy_j(0)
    summary = train(callback, node, work)
    assert (summary.steps, summary.epochs, summary.gpus) == (20, 2, 1)
    assert summary.energy == pytest.approx(node.nvml.true_energy_j(0) - before_j, rel=0.02)
    assert summary.kwh == pytest.approx(summary.energy / 3.6e6)
    assert summary.power == pytest.approx(summary.energy / summary.time)
    assert summary.cost == pytest.approx(0.30 * summary.kwh)
    assert summary.co2 is None
    # Steps draw the work's 240 W for 0.1 s; the rests of five seconds are in the summary alone.
    assert summary.step_energy == pytest.approx(24, rel=0.1)
    for step_j in figures.of("energy/step_J"):
        assert step_j == pytest.approx(24, rel=0.15)
    assert len(figures.of("energy/epoch_J")) == 2
    assert figures.of("energy/total_kWh") == [summary.kwh]
    assert figures.of("energy/cost_EUR") == [summary.cost]
    printed = capsys.readouterr().err
    assert printed == f"zeus: {summary}\n"
    assert " EUR" in printed
    assert node.client.leases() == [], "nothing was set"


def test_a_second_training_has_its_own_summary(node: VirtualNode, work: Work) -> None:
    callback = EnergyCallback(node.monitor(), carbon_intensity=500, print_summary=False)
    first = train(callback, node, work, epochs=2)
    second = train(callback, node, work, epochs=1)
    assert (first.epochs, second.epochs) == (2, 1)
    assert second.energy < first.energy
    assert second.co2 == pytest.approx(second.kwh * 500)
    assert second.cost is None


def test_a_summary_says_all_that_is_known() -> None:
    summary = EnergySummary(10.0, 1800.0, 1, 20, 24.0, 2)
    assert str(summary) == "0.0005 kWh in 10.0 s, mean 180.0 W on 1 GPU, 24 J/step over 20 steps"
    assert summary.figures() == {"energy/total_kWh": 0.0005, "energy/mean_W": 180.0}
    summary = EnergySummary(10.0, 1800.0, 2, 0, math.nan, 0, 0.25, "EUR", 3.0, 1.0)
    assert str(summary) == (
        "0.0005 kWh in 10.0 s, mean 200.0 W on 2 GPUs, 0.25 EUR, 3 gCO2eq, without 1.0 s whose "
        "energy is not known"
    )
    amounts = {"energy/cost_EUR": 0.25, "energy/co2_g": 3.0}
    assert summary.figures() == {"energy/total_kWh": 0.0005, "energy/mean_W": 200.0, **amounts}
    assert math.isnan(EnergySummary(10.0, 0.0, 1, 0, math.nan, 0, unknown=10.0).power)


class Midnight(CarbonIntensityProvider):
    """The same at all hours."""

    update_period = timedelta(hours=1)
    history_length = 1

    def get_current_carbon_intensity(self) -> float:
        return 250.0

    def get_recent_carbon_intensity(self) -> dict[datetime, float]:
        return {datetime(1970, 1, 1, tzinfo=timezone.utc): 250.0}


def test_emissions_can_be_asked_of_a_provider(node: VirtualNode, work: Work) -> None:
    callback = EnergyCallback(node.monitor(), carbon_intensity=Midnight(), print_summary=False)
    summary = train(callback, node, work, epochs=1)
    assert summary.co2 == pytest.approx(summary.kwh * 250, rel=0.01)


class Hanging(Midnight):
    """A service that does not answer."""

    def __init__(self) -> None:
        self.asked_by: list[str] = []

    def get_recent_carbon_intensity(self) -> dict[datetime, float]:
        self.asked_by.append(threading.current_thread().name)
        threading.Event().wait()
        raise AssertionError


@pytest.fixture
def askers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A node in real time; the names of the threads that ask it for anything."""
    opened = OpenedNode(SimulatedBackend("v100:setter_ms=0"), "simulated", lambda: None)
    with embed.connect(opened, state_dir=str(tmp_path)) as client, _node.use(client):
        request, asked_by = client._transport.request, []

        def recorded(*arguments: Any) -> Any:
            asked_by.append(threading.current_thread().name)
            return request(*arguments)

        monkeypatch.setattr(client._transport, "request", recorded)
        yield asked_by


def _unread_windows(monitor: ZeusMonitor, hanging: Hanging) -> Callable[[], object]:
    def step() -> Window:
        with monitor.window("step") as window:
            time.sleep(0.002)
        return window

    return step


def _callback(monitor: ZeusMonitor, hanging: Hanging) -> Callable[[], object]:
    callback = EnergyCallback(
        monitor, log=Figures(), log_every=1, carbon_intensity=hanging, print_summary=False
    )

    def step() -> None:
        for _ in callback.steps([0]):
            time.sleep(0.002)

    return step


def _decorator(monitor: ZeusMonitor, hanging: Hanging) -> Callable[[], object]:
    return measure_energy("step", monitor=monitor)(lambda: time.sleep(0.002))


def _carbon(monitor: ZeusMonitor, hanging: Hanging) -> Callable[[], object]:
    carbon = CarbonEmissionMonitor(hanging)

    def step() -> CarbonEmissionMeasurement:
        carbon.begin_window("step")
        time.sleep(0.002)
        return carbon.end_window("step")

    return step


def _metric(monitor: ZeusMonitor, hanging: Hanging) -> Callable[[], object]:
    metric = EnergyCumulativeCounter([], None, 0.03, "http://127.0.0.1:9", "job")

    def step() -> None:
        metric.begin_window("step")
        time.sleep(0.002)
        metric.end_window("step")

    return step


def _optimizer(monitor: ZeusMonitor, hanging: Hanging) -> Callable[[], object]:
    plo = GlobalPowerLimitOptimizer(monitor, warmup_steps=1, profile_steps=8)
    plo.on_epoch_begin()

    def step() -> None:
        plo.on_step_begin()
        time.sleep(0.002)
        plo.on_step_end()

    return step


@pytest.mark.parametrize(
    "front", [_unread_windows, _callback, _decorator, _carbon, _metric, _optimizer]
)
def test_the_training_thread_asks_nobody(
    askers: list[str],
    front: Callable[[ZeusMonitor, Hanging], Callable[[], object]],
) -> None:
    monitor, hanging = ZeusMonitor(), Hanging()
    step = front(monitor, hanging)
    askers.clear()
    done, kept = time.monotonic() + 0.5, []
    while time.monotonic() < done or not askers:
        kept.append(step())
    assert threading.current_thread().name not in askers
    assert threading.current_thread().name not in hanging.asked_by


def test_nothing_is_read_before_the_end_if_nobody_gets_the_figures(
    node: VirtualNode, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows, asked = node.client.windows, []
    monkeypatch.setattr(
        node.client, "windows", lambda *given: asked.append(given) or windows(*given)
    )
    callback = EnergyCallback(node.monitor(), print_summary=False)
    asked.clear()
    callback.on_train_begin()
    for _ in callback.steps(range(100)):
        work.run(1)
    assert asked == []
    before_ns = node.clock()
    callback.on_train_end()
    assert node.clock() < before_ns + 150_000_000, "one update"
    assert callback.summary.step_energy == pytest.approx(24, rel=0.1)


def test_figures_come_with_the_next_step_after_an_update(node: VirtualNode, work: Work) -> None:
    figures = Figures()
    callback = EnergyCallback(node.monitor(), log=figures, log_every=1, print_summary=False)
    callback.on_train_begin()
    for _ in callback.steps(range(10)):
        work.run(1)
        work.wait()
    assert [step for _, step in figures.logged] == list(range(3, 11)), "two steps of 0.1 s later"
    callback.on_train_end()
    assert figures.logged[-1][1] == 10


def test_failures_of_logging_or_measuring_never_end_training(node: VirtualNode, work: Work) -> None:
    def full(figures: dict[str, float], step: int) -> None:
        raise OSError("disk full")

    callback = EnergyCallback(node.monitor(), log=full, log_every=1, print_summary=False)
    with pytest.warns(UserWarning, match="no longer logged.*disk full") as seen:
        assert train(callback, node, work) is not None
    assert len(for_users(seen)) == 1
    monitor = node.monitor()
    callback = EnergyCallback(monitor, print_summary=False)
    monitor.begin_window = None
    with pytest.warns(UserWarning, match="training continues") as seen:
        train(callback, node, work)
    assert len(for_users(seen)) == 1


def test_steps_whose_energy_is_not_known_are_left_out_of_the_mean(
    node: VirtualNode, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    joules = itertools.chain([math.nan, 4.0, 6.0], itertools.repeat(5.0))
    figures = Figures()
    monkeypatch.setattr("zeus.measure.account._joules", lambda measurement: next(joules))
    callback = EnergyCallback(node.monitor(), log=figures, print_summary=False)
    summary = train(callback, node, work, epochs=1)
    assert summary.steps == 10
    assert summary.step_energy == pytest.approx(5)
    assert all(one == pytest.approx(5) for one in figures.of("energy/step_J"))


def test_the_known_part_is_counted_where_zeusd_lost_its_history(
    node: VirtualNode, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = node.monitor()
    windows, remembered_ns = node.client.windows, 0

    def forgetful(sources: list[str], asked: list[tuple[int, int, bool]]) -> dict[str, Any]:
        found = windows(sources, asked)
        for energies in found.values():
            for position, (begin_ns, _, _) in enumerate(asked):
                if begin_ns < remembered_ns:
                    energies.energy_uj[position] = None
        return found

    monkeypatch.setattr(node.client, "windows", forgetful)
    callback = EnergyCallback(monitor, log=Figures(), log_every=5, price=0.30, print_summary=False)
    before_j = node.nvml.true_energy_j(0)
    with pytest.warns(UserWarning, match="nan until it can be known"):
        callback.on_train_begin()
        for number in range(4):
            for _ in callback.steps(range(10)):
                work.run(1)
                work.wait()
            if number == 1:
                node.clock.sleep(1)
                remembered_ns = node.clock()  # zeusd is started again
            node.clock.sleep(5)
        callback.on_train_end()
    summary = callback.summary
    # The piece with the restart.
    assert 5 < summary.unknown < 8
    lost_j = node.nvml.true_energy_j(0) - before_j - summary.energy
    assert 0 < lost_j < summary.unknown * 250
    assert summary.power == pytest.approx(summary.energy / (summary.time - summary.unknown))
    assert summary.cost == pytest.approx(0.30 * summary.kwh)
    assert f"without {summary.unknown:.1f} s whose energy is not known" in str(summary)


def test_arguments_are_checked(node: VirtualNode) -> None:
    with pytest.raises(ValueError, match="log_every must be 1 step or more, not 0"):
        EnergyCallback(node.monitor(), log_every=0)
    with pytest.raises(TypeError, match="log must be a SummaryWriter"):
        EnergyCallback(node.monitor(), log="runs/")
    with pytest.raises(ValueError, match="log_every must be 1 step or more, not nan"):
        EnergyCallback(node.monitor(), log_every=math.nan)
    for price in ("0.3", math.nan, math.inf):
        with pytest.raises(ValueError, match="price must be a finite number or Elec"):
            EnergyCallback(node.monitor(), price=price)
    with pytest.raises(ValueError, match="carbon_intensity must be a finite number or Carbon"):
        EnergyCallback(node.monitor(), carbon_intensity="DE")


def test_loggers_are_used_by_their_standard_interfaces() -> None:
    calls: list[tuple[Any, ...]] = []

    def keep(*arguments: Any, **named: Any) -> None:
        calls.append((*arguments, named))

    figures = {"energy/step_J": 2.0}
    for target in (
        types.SimpleNamespace(add_scalar=keep),
        types.SimpleNamespace(log_metrics=keep),
        types.SimpleNamespace(log=keep),
        keep,
    ):
        as_log(target)(figures, 7)
    assert calls == [
        ("energy/step_J", 2.0, 7, {}),
        (figures, {"step": 7}),
        (figures, {"step": 7}),
        (figures, 7, {}),
    ]


def test_a_loop_that_never_said_training_begins_is_measured(node: VirtualNode, work: Work) -> None:
    callback = EnergyCallback(node.monitor(), print_summary=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in callback.steps(range(3)):
            work.run(1)
        callback.on_train_end()
        callback.on_train_end()
    assert (callback.summary.steps, callback.summary.epochs) == (3, 1)


def test_callbacks_that_share_a_monitor_do_not_disturb_each_other(
    node: VirtualNode, work: Work
) -> None:
    monitor = node.monitor()
    whole = EnergyCallback(monitor, print_summary=False)
    folds = [EnergyCallback(monitor, print_summary=False) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with whole:
            parts = [train(fold, node, work, epochs=1) for fold in folds]
    assert [one.steps for one in parts] == [10, 10]
    assert whole.summary.energy == pytest.approx(sum(one.energy for one in parts), rel=0.01)
