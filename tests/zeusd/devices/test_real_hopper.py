"""Hopper's sensors behind the real binding: a counter that is late and takes milliseconds to read,
and power that is measured when it is read. The stand-in's own clock makes minutes pass in moments.
"""

from __future__ import annotations

import itertools
import statistics
from types import SimpleNamespace

import pytest

from tests.fake_nvml.double import H100
from tests.zeusd.devices.opening import Opener
from zeusd.devices.nvml import backend
from zeusd.devices.nvml.codes import Return
from zeusd.energy.channel import Channel
from zeusd.energy.history import SIZE, History
from zeusd.energy.meter import MS
from zeusd.energy.ticks import REST_NS

START_NS = 10**12
HOUR = 3600 * 1000 * MS
READ_US = 10
LATE_S = 60e-6
"""How late the sampler wakes up."""


class Board:
    """A stand-in with Hopper's sensors, and a channel that is fed from it.

    Attributes:
        looks: When the sensors were read.
    """

    def __init__(self, open_nvml: Opener, patch: pytest.MonkeyPatch, **changes: int) -> None:
        self.nvml, self.double = open_nvml(H100 | changes, clock_ns=START_NS, read_us=READ_US)
        patch.setattr(backend, "time", SimpleNamespace(monotonic_ns=self.double.now_ns))
        self.gpu = self.nvml.device_handle(0)
        self.history = History(memoryview(bytearray(SIZE)))
        architecture, name = self.nvml.architecture(self.gpu), self.nvml.name(self.gpu)
        self.channel = Channel(START_NS, self.history, architecture, name, H100["limit_max_mw"])
        self.looks: list[int] = []

    def run(self, seconds: float) -> None:
        until_ns = self.double.now_ns() + round(seconds * 1e9)
        while (now_ns := self.double.now_ns()) < until_ns:
            self.looks.append(now_ns)
            self.channel.observe(self.nvml.sensors(self.gpu))
            wait_ns = self.channel.next_read_ns - self.double.now_ns()
            self.double.pass_time(max(0, wait_ns) / 1e9 + LATE_S)


def test_a_reading_reports_how_long_the_counter_took(
    open_nvml: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(open_nvml, monkeypatch)
    took_us = []
    for _ in range(400):
        before_ns = board.double.now_ns()
        read = board.nvml.sensors(board.gpu)
        assert read.took_ns == board.double.now_ns() - before_ns
        assert read.t_ns == before_ns + read.took_ns // 2
        took_us.append(read.took_ns // 1000)
    fast_us, slow_us = H100["counter_read_us"] + READ_US, H100["counter_slow_us"] + READ_US
    assert set(took_us) == {fast_us, slow_us}
    assert took_us.count(slow_us) == pytest.approx(100, abs=10)


def test_the_call_for_the_counter_takes_as_long_as_its_field(
    open_nvml: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(open_nvml, monkeypatch, counter_slow_every=0)
    board.double.inject(0, "nvmlDeviceGetFieldValues", Return.FUNCTION_NOT_FOUND)
    board.nvml.sensors(board.gpu)
    read = board.nvml.sensors(board.gpu)
    assert read.took_ns == (H100["counter_read_us"] + 2 * READ_US) * 1000
    assert read.energy_mj is not None
    assert read.power_average_mw is None


def test_a_gpu_without_a_counter_is_read_at_once(
    open_nvml: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(open_nvml, monkeypatch, has_energy=0)
    assert board.nvml.sensors(board.gpu).took_ns == READ_US * 1000


def test_the_counter_shows_the_energy_until_its_lag_before_the_tick(
    open_nvml: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(open_nvml, monkeypatch, counter_read_us=0, counter_slow_every=0)
    double, lag_ns = board.double, H100["counter_lag_us"] * 1000
    first_ns = START_NS + 1_000 * MS  # a tick
    double.burst(0, first_ns - 2 * lag_ns, first_ns + 50 * MS)

    def counted_mj(t_ns: int) -> int:
        double.pass_time((t_ns - double.now_ns()) / 1e9)
        energy_mj = board.nvml.sensors(board.gpu).energy_mj
        assert energy_mj is not None
        return energy_mj

    idle_mw, load_mw = H100["idle_mw"], H100["load_mw"]
    until_ns = first_ns - lag_ns - START_NS
    shown_mj = idle_mw * (until_ns - lag_ns) // 10**9 + load_mw * lag_ns // 10**9
    assert counted_mj(first_ns - 2 * MS) < shown_mj - load_mw * lag_ns // 10**9
    double.set_load(0, 300_000)  # after what the tick counts
    assert counted_mj(first_ns) == shown_mj
    assert counted_mj(first_ns + 99 * MS) == shown_mj
    assert counted_mj(first_ns + 100 * MS) > shown_mj


def test_power_changes_at_the_first_reading_after_a_ticks_time(
    open_nvml: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(open_nvml, monkeypatch)
    double, nvml, gpu = board.double, board.nvml, board.gpu
    tick_ns = H100["tick_us"] * 1000
    changes: list[int] = []
    last_mw = None
    for _ in range(500):
        power_mw = nvml.sensors(gpu).power_instant_mw
        if power_mw != last_mw:
            changes.append(double.now_ns())
        last_mw = power_mw
        double.pass_time(0.013)
    gaps = [(later - earlier) / tick_ns for earlier, later in itertools.pairwise(changes)]
    assert min(gaps) > 0.9
    assert statistics.fmean(gaps) > 1.03
    phases = [t_ns % tick_ns / tick_ns for t_ns in changes]
    assert statistics.pstdev(phases) > 0.2  # on no lattice
    double.pass_time(1)
    double.burst(0, double.now_ns(), double.now_ns() + 10**9)
    double.pass_time(0.025)
    read = nvml.sensors(gpu)  # 25 ms of load before the reading, and 1 s of almost none
    assert read.power_instant_mw == pytest.approx(H100["load_mw"], rel=0.01)
    assert read.power_average_mw == pytest.approx(H100["idle_mw"], rel=0.4)
    assert read.memory_power_average_mw == H100["memory_power_mw"]
    assert read.module_power_mw is None


def test_the_sampler_reads_each_tick_once_and_dates_it(
    open_nvml: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(open_nvml, monkeypatch)
    board.channel.attended_ns = START_NS + HOUR
    board.run(60)
    assert board.channel.period_ns == pytest.approx(100 * MS, rel=0.0005)
    before, since_ns = len(board.looks), board.double.now_ns()
    board.run(120)
    assert (len(board.looks) - before) / 1200 < 1.2
    ticks, tick_ns, lag_ns = board.history.ticks, 100 * MS, 8 * MS  # the lag that is assumed
    dated = [board.history.t_ns[number] + lag_ns for number in range(ticks.start, ticks.end)]
    errors_ms = [
        ((t_ns - START_NS + tick_ns // 2) % tick_ns - tick_ns // 2) / MS
        for t_ns in dated
        if t_ns > since_ns
    ]
    assert len(errors_ms) > 1100
    assert statistics.fmean(map(abs, errors_ms)) < 4
    assert max(map(abs, errors_ms)) < 12


def test_the_counter_is_read_once_a_second_until_each_tick_is_of_interest(
    open_nvml: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(open_nvml, monkeypatch)
    board.run(100)
    before = len(board.looks)
    board.run(100)
    assert (len(board.looks) - before) / 100 < 3
    assert board.channel.period_ns == REST_NS
    board.channel.attended_ns = START_NS + HOUR
    board.run(10)
    before = len(board.looks)
    board.run(60)
    assert 0.9 < (len(board.looks) - before) / 600 < 1.2
    assert board.channel.period_ns == pytest.approx(100 * MS, rel=0.0005)


@pytest.mark.parametrize("burst_ms", [30, 130, 450, 2000])
@pytest.mark.parametrize("lag_ms", [4, 12])
def test_aligned_windows_of_bursts_have_the_bursts_energy(
    burst_ms: int, lag_ms: int, open_nvml: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(open_nvml, monkeypatch, counter_lag_us=lag_ms * 1000)
    board.channel.attended_ns = START_NS + HOUR
    board.run(30)
    windows = []
    for number in range(40):
        begin_ns = board.double.now_ns() + number * 2_570_000
        windows.append((begin_ns, begin_ns + burst_ms * MS))
        board.double.burst(0, *windows[-1])
        board.run(burst_ms / 1000 + 1.3)
    ratios, within = [], []
    for begin_ns, end_ns in windows:
        energy = board.channel.curve.window(begin_ns, end_ns, True)
        truth_uj = H100["load_mw"] * burst_ms
        ratios.append(energy.energy_uj / truth_uj)
        within.append(abs(energy.energy_uj - truth_uj) <= energy.uncertainty_uj)
    assert statistics.fmean(ratios) == pytest.approx(1, abs=0.02)
    assert statistics.fmean(abs(ratio - 1) for ratio in ratios) < 0.05
    assert statistics.fmean(within) > 0.9
