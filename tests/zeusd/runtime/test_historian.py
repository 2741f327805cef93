from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from zeus_ipc.errors import ErrorCode
from zeus_ipc.requests import PAUSE, Domain, GetTimeline
from zeusd.energy.curve import EnergyCurve, WindowEnergy
from zeusd.energy.history import SIZE, History
from zeusd.energy.meter import Edge
from zeusd.runtime import historian as module
from zeusd.runtime.historian import Historian, LookUp, WindowsQuery
from zeusd.runtime.sources import Slow

TICK_NS = 100_000_000
SECOND_NS = 1_000_000_000
BEGIN_NS = 10 * SECOND_NS


class Device:
    """A source that draws 100 W and ticks when a test says so."""

    aligns = True
    failure = None
    slow = Slow()
    counted_ns: Sequence[int] = ()

    def __init__(self, phase_ns: int = 0, period_ns: int = TICK_NS) -> None:
        self.history = History(memoryview(bytearray(SIZE)))
        self.period_ns = period_ns
        self.next_read_ns = self.latest_read_ns = BEGIN_NS - 4 * period_ns + phase_ns

    @property
    def curve(self) -> EnergyCurve:
        return EnergyCurve(self.history, None, 1_000_000)

    def read(self, streamed: bool) -> Edge:
        t_ns = self.next_read_ns
        edge = Edge(t_ns, t_ns // 10, 100_000, 100_000, t_ns // 10)
        self.history.limited.add(t_ns, self.counted_ns)
        self.history.add(edge, None, self.slow)
        self.next_read_ns += self.period_ns
        return edge

    @property
    def next_tick_ns(self) -> int:
        return self.next_read_ns


class Scene:
    """A historian, with the parts of sampler and loop that it uses, and a clock."""

    def __init__(self, *devices: Device, simulated: bool = False) -> None:
        self.devices = {f"GPU-{number}": device for number, device in enumerate(devices)}
        self.now_ns = BEGIN_NS
        self.urgent: list[str] = []
        self.soon: list[Callable[[], None]] = []
        self.timers: list[tuple[int, Callable[[], None]]] = []
        self.done: list[LookUp] = []
        self.spent_ns: list[int] = []
        # A test double: it has only what the historian uses of the two.
        self.hurried = 0
        hurry = self.advance if simulated else None
        self.historian = Historian(self, self, lambda: self.now_ns, hurry)  # type: ignore[arg-type]  # a double
        for device in devices:
            while device.next_read_ns <= BEGIN_NS:
                device.read(False)

    # What the sampler offers, and the loop.

    def find(self, name: str) -> Device | None:
        return self.devices.get(name)

    def hurry(self, name: str) -> None:
        self.urgent.append(name)

    def post(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    call_soon = post

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.timers.append((self.now_ns + round(delay_s * 1e9), callback))

    def advance(self) -> None:
        self.hurried += 1
        self.now_ns += 1

    # What a test does.

    def ask(
        self,
        *names: str,
        windows: int = 1,
        end_ns: int | None = None,
        user: int = -1,
        limited: bool = False,
    ) -> LookUp:
        end_ns = self.now_ns if end_ns is None else end_ns
        query = WindowsQuery(((end_ns - 2 * TICK_NS, end_ns, 0),) * windows, limited)
        look_up = LookUp(names, query, self.done.append, user, self.spent_ns.append)
        self.historian.submit(look_up)
        return look_up

    def tick(self, name: str) -> None:
        self.devices[name].read(False)
        if name in self.urgent:
            self.urgent.remove(name)
            self.historian.ticked(name)

    def turn(self) -> None:
        """One iteration of the loop."""
        calls, self.soon = self.soon, []
        due = [one for one in self.timers if one[0] <= self.now_ns]
        self.timers = [one for one in self.timers if one[0] > self.now_ns]
        for call in [*calls, *(callback for _, callback in due)]:
            call()

    def settle(self) -> None:
        while self.soon:
            self.turn()


def test_several_sources_are_awaited_one_at_a_time_and_answered_at_once() -> None:
    scene = Scene(Device(0), Device(70_000_000), Device(30_000_000))
    scene.now_ns += 5_000_000
    look_up = scene.ask("GPU-0", "GPU-1", "GPU-2")
    scene.settle()
    assert scene.urgent == ["GPU-0"]  # it is read last
    scene.tick("GPU-1")
    scene.tick("GPU-0")
    scene.settle()
    assert scene.done == []
    assert scene.urgent == ["GPU-2"]
    scene.tick("GPU-2")
    scene.settle()
    assert scene.done == [look_up]
    assert scene.urgent == []
    for result in look_up.results.values():
        assert result.energy_uj == [pytest.approx(20_000_000, abs=2)]


def test_one_that_needs_a_later_tick_waits_for_it() -> None:
    scene = Scene(Device())
    scene.now_ns += 1
    early, late = (scene.ask("GPU-0", end_ns=end_ns) for end_ns in (BEGIN_NS, BEGIN_NS + 1))
    scene.settle()
    assert scene.done == [early]
    scene.tick("GPU-0")
    scene.settle()
    assert scene.done == [early, late]
    assert not scene.historian._waiting


def test_nobody_waits_for_the_time_limited_that_is_no_longer_counted() -> None:
    scene = Scene(Device())
    (device,) = scene.devices.values()
    device.counted_ns = [0] * 5
    device.read(False)
    device.counted_ns = ()  # from now on
    scene.now_ns = device.history.ends_ns + 1
    look_up = scene.ask("GPU-0", limited=True)
    scene.tick("GPU-0")
    scene.settle()
    assert scene.done == [look_up]
    assert device.history.limited.ends_ns > 0


def test_a_tick_that_arrives_before_it_is_requested_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(Device())
    monkeypatch.setattr(scene, "hurry", lambda name: scene.devices[name].read(False))
    look_up = scene.ask("GPU-0")
    scene.settle()
    assert scene.done == [look_up]


@pytest.mark.parametrize("names", [("GPU-9",), ("GPU-0", "GPU-9"), ("GPU-0", "GPU-1")])
def test_a_source_that_shows_nothing_is_given_up(names: tuple[str, ...]) -> None:
    scene = Scene(Device(), Device(period_ns=SECOND_NS))
    scene.now_ns += 1
    look_up = scene.ask(*names)
    scene.settle()
    assert scene.done == []
    scene.now_ns += 10 * SECOND_NS
    scene.turn()
    scene.settle()
    assert scene.done == [look_up]
    assert scene.timers == []
    assert set(look_up.results) == set(names)
    if "GPU-9" in names:
        assert look_up.results["GPU-9"].code is ErrorCode.NOT_SUPPORTED


def test_simulated_time_advances_only_while_a_look_up_waits() -> None:
    scene = Scene(Device(), simulated=True)
    scene.now_ns += 1
    look_up = scene.ask("GPU-0")
    scene.settle()
    for hurried in (1, 2):
        scene.now_ns += module.HURRY_NS
        scene.turn()
        assert scene.hurried == hurried
    scene.tick("GPU-0")
    scene.settle()
    assert scene.done == [look_up]
    assert scene.timers
    scene.now_ns += SECOND_NS
    scene.turn()
    assert scene.hurried == 2
    assert scene.timers == []


def test_each_is_given_up_at_its_own_time() -> None:
    scene = Scene(Device(), Device(period_ns=SECOND_NS))
    scene.now_ns += 1
    slow, quick = scene.ask("GPU-1"), scene.ask("GPU-0")
    quick_ns = 3 * TICK_NS + module.PATIENCE_NS
    assert quick_ns < module.MAX_PATIENCE_NS
    for delay_ns, done in (
        (quick_ns - 1, []),
        (1, [quick]),
        (module.MAX_PATIENCE_NS - quick_ns - 1, [quick]),
        (1, [quick, slow]),
    ):
        scene.now_ns += delay_ns
        scene.turn()
        scene.settle()
        assert scene.done == done


def test_a_long_query_lets_short_ones_and_other_events_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ns = 0

    def monotonic_ns() -> int:  # each look at it is a step later
        nonlocal now_ns
        now_ns += module.TURN_NS // 2
        return now_ns

    scene = Scene(Device())
    monkeypatch.setattr(time, "monotonic_ns", monotonic_ns)
    end_ns = BEGIN_NS
    long = scene.ask("GPU-0", windows=1000, end_ns=end_ns)
    short = scene.ask("GPU-0", end_ns=end_ns)
    turns = 0
    while scene.done != [short]:
        scene.turn()
        turns += 1
    assert turns <= 3
    while scene.soon:
        scene.turn()
        turns += 1
    assert turns > 10
    assert scene.done == [short, long]
    assert len(long.results["GPU-0"].energy_uj) == 1000


def test_a_failure_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(Device(), Device())
    scene.devices["GPU-0"].failure = None
    monkeypatch.setattr(Device, "curve", property(lambda self: 1 / 0))
    look_up = scene.ask("GPU-0", end_ns=BEGIN_NS)
    scene.settle()
    assert look_up.results["GPU-0"].code is ErrorCode.INTERNAL


def test_a_reply_that_fails_costs_the_others_nothing() -> None:
    scene = Scene(Device())

    def fail(look_up: LookUp) -> None:
        raise RuntimeError("no idea")

    scene.historian.submit(LookUp(("GPU-0",), WindowsQuery(()), fail))
    look_up = scene.ask("GPU-0", end_ns=BEGIN_NS)
    with pytest.raises(RuntimeError):
        scene.settle()
    scene.settle()
    assert scene.done == [look_up]


def test_too_many_at_once_are_refused() -> None:
    scene = Scene(Device())
    asked = [scene.ask("GPU-0", end_ns=BEGIN_NS) for _ in range(module.MAX_READY + 1)]
    assert scene.done == asked[-1:]
    assert scene.done[0].results["GPU-0"].code is ErrorCode.OVERLOADED
    scene.settle()
    assert len(scene.done) == len(asked)


def test_a_user_with_many_look_ups_delays_others_by_one_turn_and_pays_for_all() -> None:
    scene = Scene(Device())
    asked = [scene.ask("GPU-0", end_ns=BEGIN_NS, user=1) for _ in range(module.MAX_READY)]
    other = scene.ask("GPU-0", end_ns=BEGIN_NS, user=2)
    for look_up in asked[2:]:
        look_up.wanted = lambda: False  # their connection has ended
    scene.settle()
    assert scene.done == [asked[0], other, asked[1]]
    assert len(scene.spent_ns) == len(asked) + 1


def test_windows_that_follow_each_other_are_looked_up_as_such() -> None:
    joined: list[tuple[bool, bool]] = []

    class Noting(EnergyCurve):
        def window(
            self,
            begin_ns: int,
            end_ns: int,
            aligned: bool,
            joins: tuple[bool, bool] = (False, False),
            pauses: Sequence[tuple[int, int]] = (),
        ) -> WindowEnergy:
            joined.append(joins)
            assert pauses == [(apart - pause, apart), (apart + step, BEGIN_NS * 2)]
            return super().window(begin_ns, end_ns, aligned, joins, pauses)

    class Noted(Device):
        @property
        def curve(self) -> EnergyCurve:
            return Noting(self.history, None, 1_000_000)

    scene = Scene(Noted())
    step, pause, start = TICK_NS // 3, TICK_NS // 4, BEGIN_NS - 3 * TICK_NS
    apart = start + 2 * step + pause
    windows = (
        (start + step, start + 2 * step, 1),
        (start, start + step, 1),
        (apart, apart + step, 1),
        (apart + step, BEGIN_NS * 2, PAUSE),  # it is not waited for, and joins nothing
        (apart - pause, apart, PAUSE),
    )
    scene.historian.submit(LookUp(("GPU-0",), WindowsQuery(windows), scene.done.append))
    scene.settle()
    found = scene.done[0].results["GPU-0"]
    assert [one is None for one in found.energy_uj] == [False, False, False, True, True]
    assert joined == [(True, False), (False, True), (False, False)]


def test_a_timeline_of_power_ends_with_the_newest_tick() -> None:
    scene = Scene(Device())
    query = GetTimeline(id=1, sources=["GPU-0"], domain=Domain.POWER)
    scene.historian.submit(LookUp(("GPU-0",), query, scene.done.append))
    scene.settle()
    answer = scene.done[0].results["GPU-0"]
    assert answer.t_ns[-1] == BEGIN_NS
    assert {*answer.values} == {100_000}


def test_a_gap_is_found_in_every_tier() -> None:
    """Where rows are a second apart, less than that is none; the newest ticks say more."""
    device = Device()
    scene = Scene(device)
    found = []
    for ticks in (30, 1, 40_000, 1):
        for _ in range(ticks):
            device.read(False)
        device.next_read_ns += 3 * SECOND_NS
        found.append(device.next_read_ns)
    device.read(False)
    query = GetTimeline(id=1, sources=["GPU-0"], domain=Domain.GAP)
    scene.historian.submit(LookUp(("GPU-0",), query, scene.done.append))
    while not scene.done:
        scene.turn()
    answer = scene.done[0].results["GPU-0"]
    assert answer.t_ns == found
    assert all(3000 <= ms <= 4200 for ms in answer.values)
