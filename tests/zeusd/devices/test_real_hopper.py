"""Hopper's sensors behind the real binding: a counter that is late and takes milliseconds to read,
and power that is measured when it is read. The stand-in's own clock makes minutes pass in moments.
"""

from __future__ import annotations

import itertools
import statistics
from types import SimpleNamespace

import pytest

from tests.fake_nvml.double import H100
from tests.zeusd.devices.opening import Opener, code_of
from zeus_common.units import MS
from zeusd.devices.nvml import backend
from zeusd.devices.nvml.codes import Return
from zeusd.energy.channel import Channel
from zeusd.energy.history import SIZE, History

START_NS = 10**12
EPOCH_NS = 1_600_000_000 * 10**9
"""Time of day at the start of the stand-in's clock."""

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
    board.nvml.sensors(board.gpu)  # the first also asks for the product's name
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


def test_power_is_read_quickly_where_the_counter_is_of_no_interest(
    open_nvml: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(open_nvml, monkeypatch)
    whole = board.nvml.sensors(board.gpu)
    for _ in range(2):
        part = board.nvml.sensors(board.gpu, counter=False)
        assert part.took_ns == READ_US * 1000
        assert part.energy_mj is None
        assert part.power_average_mw == pytest.approx(whole.power_average_mw, rel=0.2)
        assert part.memory_power_average_mw == H100["memory_power_mw"]
    assert board.nvml.sensors(board.gpu).energy_mj is not None
    board.double.inject(0, "nvmlDeviceGetFieldValues", Return.FUNCTION_NOT_FOUND)
    board.nvml.sensors(board.gpu)  # and from now on without field values
    one_by_one = board.nvml.sensors(board.gpu, counter=False)
    assert one_by_one.power_instant_mw is not None


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
        return board.nvml.sensors(board.gpu).energy_mj

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


@pytest.mark.parametrize("burst_ms", [30, 130, 450, 2000])
@pytest.mark.parametrize("lag_ms", [4, 12])
def test_aligned_windows_of_bursts_have_the_bursts_energy(
    burst_ms: int, lag_ms: int, open_nvml: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(open_nvml, monkeypatch, counter_lag_us=lag_ms * 1000)
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


def sampled(board: Board, monkeypatch: pytest.MonkeyPatch, ahead_ns: int = 0) -> None:
    """Gives the backend the stand-in's time of day, so far ahead."""

    def time_ns() -> int:
        return board.double.now_ns() + EPOCH_NS + ahead_ns

    clock = SimpleNamespace(monotonic_ns=board.double.now_ns, time_ns=time_ns)
    monkeypatch.setattr(backend, "time", clock)


def test_the_drivers_samples_are_of_all_time(
    open_nvml: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(open_nvml, monkeypatch)
    sampled(board, monkeypatch)
    double, nvml, gpu = board.double, board.nvml, board.gpu
    double.pass_time(10)
    begin_ns = double.now_ns()
    double.burst(0, begin_ns, begin_ns + 333 * MS)
    known = nvml.power_samples(gpu, 0)
    assert len(known) == 119
    assert begin_ns - 40 * MS < known[-1][0] < double.now_ns()
    for _ in range(10):
        double.pass_time(0.137)
        newest = nvml.power_samples(gpu, known[-1][0])
        assert 5 <= len(newest) <= 8
        known += newest
    assert nvml.power_samples(gpu, known[-1][0]) == []
    energy_nj = sum(
        (end_ns - start_ns) * mw // 1000
        for (start_ns, _), (end_ns, mw) in itertools.pairwise(known)
    )
    span_ns, extra_mw = known[-1][0] - known[0][0], H100["load_mw"] - H100["idle_mw"]
    assert energy_nj == pytest.approx(
        (span_ns * H100["idle_mw"] + 333 * MS * extra_mw) / 1000, rel=0.001
    )


@pytest.mark.parametrize("step_s", [-3600, 3600])
def test_a_time_of_day_that_was_set_gives_no_sample_another_time(
    step_s: int, open_nvml: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(open_nvml, monkeypatch)
    sampled(board, monkeypatch)
    board.double.pass_time(10)
    known = board.nvml.power_samples(board.gpu, 0)
    sampled(board, monkeypatch, step_s * 10**9)  # and the driver's samples are of the time before
    board.double.pass_time(0.1)
    newest = board.nvml.power_samples(board.gpu, known[-1][0])
    if step_s > 0:
        assert newest == []
    else:  # recognizable
        assert newest[0][0] > board.double.now_ns() + 3590 * 10**9


def test_a_driver_may_keep_no_samples(open_nvml: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(open_nvml, monkeypatch, sample_us=0)
    sampled(board, monkeypatch)
    assert code_of(board.nvml.power_samples, board.gpu, 0) == Return.NOT_SUPPORTED
