"""Hopper's energy counter: it counts everything some milliseconds late, at its own ticks, and takes
milliseconds to read. `h100_waves.json` has what an H100 showed under square waves of load: each
change of its counter, and when the load ran.
"""

from __future__ import annotations

import bisect
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests import seeds
from tests.zeusd.energy.support import channel_of, empty_history, reading
from zeus_common.units import MS
from zeusd.devices.port import SensorValues
from zeusd.energy.channel import Channel

WAVES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("h100_waves.json").read_text())[
    "waves"
]
TICK = 100_002_000
"""The counter's period on that board, ns."""

IDLE_W, BURST_W = 136.0, 346.0
"""Power of that load: the waves of 2 s have whole readings of both."""


class Board:
    """A counter with regular ticks, and a channel that reads it as slowly as on an H100.

    Args:
        ticks: When it changes (ns), and its values, mJ.
        seed: Of the readings' durations.
    """

    def __init__(self, ticks: list[tuple[int, int]], seed: int) -> None:
        self.times, self.values = [t_ns for t_ns, _ in ticks], [mj for _, mj in ticks]
        self.chance = random.Random(seed)
        self.history = empty_history()
        self.now_ns = self.times[0]
        self.channel = Channel(self.now_ns, self.history, 9, "NVIDIA H100 80GB HBM3", 700_000)
        self.looks: list[int] = []

    def look(self, began_ns: int, took_ns: int, shown_ns: int) -> None:
        """A reading of what the counter shows at some time of it."""
        place = bisect.bisect_right(self.times, shown_ns)
        value_mj = self.values[max(0, place - 1)]
        middle_ns = began_ns + took_ns // 2
        self.channel.observe(SensorValues(middle_ns, value_mj, 80_000, None, None, took_ns=took_ns))

    def run(self, until_ns: int) -> None:
        while self.now_ns < until_ns:
            slow = self.chance.random() < 0.25
            took_ns = round(self.chance.uniform(*((5, 15) if slow else (2.6, 3.5))) * MS)
            self.look(self.now_ns, took_ns, self.now_ns + self.chance.randrange(took_ns))
            self.looks.append(self.now_ns)
            low_ns, high_ns = self.channel.next_read_ns, self.channel.latest_read_ns
            due_ns = self.chance.randint(low_ns, high_ns) if low_ns else 0
            late_ns = round(self.chance.expovariate(1 / 60_000))
            self.now_ns = max(due_ns, self.now_ns + took_ns) + late_ns

    def errors_ms(self, since_ns: int) -> list[float]:
        """How far each tick in the history is from a change of the counter, with the lag."""
        ticks, lag_ns = self.history.ticks, 8 * MS
        found = []
        for number in range(ticks.start, ticks.end):
            t_ns = self.history.t_ns[number] + lag_ns
            if t_ns >= since_ns:
                place = bisect.bisect_left(self.times, t_ns)
                near = self.times[max(0, place - 1) : place + 1]
                found.append(min((t_ns - one for one in near), key=abs) / MS)
        return found


def regular(seconds: float, watts: float = 80.0) -> list[tuple[int, int]]:
    period = 100_000_300
    return [(n * period, round(n * watts * 100)) for n in range(1, round(seconds * 10))]


def test_slow_readings_find_the_ticks_and_need_one_reading_each() -> None:
    board = Board(regular(200), seeds.fresh())
    board.run(60_000 * MS)
    before = len(board.looks)
    board.run(190_000 * MS)
    assert (len(board.looks) - before) / 1300 < 1.2
    errors = board.errors_ms(60_000 * MS)
    assert max(map(abs, errors)) < 8  # at most 6.8 in 160 runs with other seeds
    assert statistics.fmean(abs(error) < 6 for error in errors) > 0.94


def on_ticks(seen: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Changes that were seen to 4 ms, each on its tick: the counter is regular."""
    phases = [(t_ns - seen[0][0] + TICK // 2) % TICK for t_ns, _ in seen]
    origin = seen[0][0] + round(statistics.median(phases)) - TICK // 2
    return [(origin + round((t_ns - origin) / TICK) * TICK, mj) for t_ns, mj in seen]


@pytest.mark.parametrize("wave", WAVES[1:], ids=["2000/2000", "500/500", "20/180"])
def test_bursts_on_an_h100_have_the_power_of_the_load(wave: dict[str, Any]) -> None:
    seen = on_ticks([(t_us * 1000, mj) for t_us, mj in wave["counter"][1:]])
    first_ns, first_mj = seen[0]
    idle = [(first_ns - n * TICK, first_mj - round(n * IDLE_W * 100)) for n in range(150, 0, -1)]
    board = Board(idle + seen, seeds.fresh())
    board.run(wave["end_us"] * 1000)
    curve = board.channel.curve
    powers = []
    for begin_us, end_us in wave["bursts_us"]:
        if not first_ns + 300 * MS < begin_us * 1000 < wave["end_us"] * 1000 - 800 * MS:
            continue
        energy = curve.window(begin_us * 1000, end_us * 1000, True)
        seconds = (end_us - begin_us) / 1e6
        powers.append(energy.energy_uj / 1e6 / seconds)
        assert abs(powers[-1] - BURST_W) <= energy.uncertainty_uj / 1e6 / seconds + 0.02 * BURST_W
    assert powers
    assert statistics.fmean(powers) == pytest.approx(BURST_W, rel=0.05)


def test_one_reading_that_hangs_does_not_make_a_sensor_costly() -> None:
    board = Board(regular(60), seeds.fresh())
    for n in range(300):  # quick readings, one of which hangs
        took_ns = 3_000 * MS if n == 200 else 50_000
        board.now_ns = max(board.now_ns, board.channel.next_read_ns) + took_ns
        board.look(board.now_ns - took_ns, took_ns, board.now_ns)
    assert board.channel.period_ns == pytest.approx(100 * MS, rel=0.002)
    ticks = board.history.ticks
    assert board.history.t_ns[ticks.end - 1] - board.history.t_ns[ticks.end - 2] < 150 * MS


def test_power_without_a_usable_counter_covers_a_part_of_each_tick() -> None:
    """As on a Grace Hopper whose counter counts the module."""
    channel = channel_of(9, "NVIDIA GH200 480GB", 900_000)
    t_ns = 0
    for _ in range(2_000):
        t_ns = max(t_ns + 100_000, channel.latest_read_ns)
        power_mw = 90_000 + t_ns // (100 * MS) % 7  # a new reading every 100 ms
        channel.observe(reading(t_ns, None, power_mw))
    ends_ns = channel.history.ends_ns
    doubtful = channel.curve.window(ends_ns - 165 * MS, ends_ns - 135 * MS, True)
    assert doubtful.energy_uj == pytest.approx(90_000 * 30, rel=0.02)
    assert doubtful.uncertainty_uj > 100_000 * 30  # work between two readings leaves no trace
