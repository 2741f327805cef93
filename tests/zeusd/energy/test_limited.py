"""The time limited between two times, from counters whose truth is known."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest

from tests.seeds import fresh
from zeus_common.units import MS, SECOND_NS
from zeus_ipc.limited import REASONS
from zeusd.energy.columns import tiers_size
from zeusd.energy.limited import NOT_COUNTED, TimeLimited

START_NS = 1_000 * SECOND_NS


def history() -> TimeLimited:
    return TimeLimited(memoryview(bytearray(tiers_size(TimeLimited.COLUMNS))))


class Truth:
    """A GPU that is limited in turns, and not between."""

    def __init__(self, chance: random.Random, shortest_s: float, longest_s: float) -> None:
        lengths = (round(chance.uniform(shortest_s, longest_s) * 1e9) for _ in range(400))
        self.edges = list(accumulate(lengths, initial=START_NS - 7 * SECOND_NS))

    def until(self, t_ns: int) -> int:
        """Time limited until then, ns."""
        turns = [*pairwise(self.edges)][::2]
        return sum(min(end, t_ns) - begin for begin, end in turns if begin < t_ns)

    def counters(self, t_ns: int) -> list[int | None]:
        return [self.until(t_ns), None, 0, None, None]


@pytest.mark.parametrize("restarts", [False, True])
def test_windows_are_within_one_percent_of_the_truth(restarts: bool) -> None:
    chance = random.Random(fresh())
    memory = memoryview(bytearray(tiers_size(TimeLimited.COLUMNS)))
    truth, limited, t_ns = Truth(chance, 2.2, 9.0), TimeLimited(memory), START_NS
    for _ in range(60):
        limited.add(t_ns, truth.counters(t_ns))
        t_ns += round(chance.uniform(0.95, 1.1) * 1e9)
    if restarts:
        limited = TimeLimited(memory)
    for _ in range(200):
        begin_ns = chance.randrange(START_NS + 3 * SECOND_NS, t_ns - 10 * SECOND_NS)
        end_ns = begin_ns + chance.randrange(SECOND_NS, 6 * SECOND_NS)
        true_ms = (truth.until(end_ns) - truth.until(begin_ns)) / 1e6
        found = dict(limited.window(begin_ns, end_ns))
        assert found.keys() == {"power", "board"}
        assert found["board"] == 0
        assert found["power"] == pytest.approx(true_ms, abs=(end_ns - begin_ns) / MS / 100)


def test_a_window_that_has_just_ended_is_exact_once_the_counters_were_read_after_it() -> None:
    chance = random.Random(fresh())
    for _ in range(50):
        truth, limited = Truth(chance, 2.2, 9.0), history()
        end_ns = START_NS + round(chance.uniform(20.0, 24.0) * 1e9)
        for second in range(25):
            if START_NS + second * SECOND_NS < end_ns - 200 * MS:
                limited.add(
                    START_NS + second * SECOND_NS, truth.counters(START_NS + second * SECOND_NS)
                )
        limited.add(end_ns + 60 * MS, truth.counters(end_ns + 60 * MS))
        begin_ns = end_ns - chance.randrange(SECOND_NS, 6 * SECOND_NS)
        true_ms = (truth.until(end_ns) - truth.until(begin_ns)) / 1e6
        found = dict(limited.window(begin_ns, end_ns))
        assert found["power"] == pytest.approx(true_ms, abs=(end_ns - begin_ns) / MS / 100)


def test_a_window_is_never_limited_for_longer_than_it_lasts() -> None:
    limited = history()
    for second in range(5):  # what heat and a hardware slowdown count may overlap
        limited.add(START_NS + second * SECOND_NS, [0, second * 2 * SECOND_NS, 0, 0, 0])
    begin_ns = START_NS + SECOND_NS
    assert dict(limited.window(begin_ns, begin_ns + 2 * SECOND_NS))["heat"] == 2_000


@pytest.mark.parametrize("before_ns", [(NOT_COUNTED - 500) * MS, 70_000 * MS])
def test_counters_that_wrap_or_start_again_lose_nothing_but_the_gap(before_ns: int) -> None:
    limited = history()
    wraps = before_ns > 1e15
    for second in range(10):
        ns = before_ns + second * SECOND_NS
        if not wraps and second > 4:  # the GPU was reset
            ns = (second - 4) * SECOND_NS
        limited.add(START_NS + second * SECOND_NS, [ns, 0, 0, 0, 0])
    found = dict(limited.window(START_NS, START_NS + 9 * SECOND_NS))
    assert found["power"] == (9_000 if wraps else 8_000)


def test_what_was_not_read_is_not_known() -> None:
    limited = history()
    assert [*limited.window(0, START_NS)] == []
    limited.add(START_NS, [0] * 5)
    limited.add(START_NS + SECOND_NS, [0] * 5)
    late_ns = START_NS + 30 * SECOND_NS
    for begin_ns, end_ns in ((0, START_NS), (START_NS, late_ns)):
        assert dict(limited.window(begin_ns, end_ns)) == dict.fromkeys(REASONS)


def test_what_the_driver_did_not_yet_count_is_not_known() -> None:
    limited = history()
    limited.add(START_NS, [None, 0, 0, 0, 0])
    for second in range(1, 5):
        limited.add(START_NS + second * SECOND_NS, [5_000 * SECOND_NS, 0, 0, 0, 0])
    counted_ns, end_ns = START_NS + SECOND_NS, START_NS + 4 * SECOND_NS
    for begin_ns in (START_NS, counted_ns - 1):
        assert dict(limited.window(begin_ns, end_ns))["power"] is None
    assert dict(limited.window(counted_ns, end_ns))["power"] == 0


def test_a_reading_that_fails_once_is_made_up_for() -> None:
    limited = history()
    for second in range(5):
        power_ns = None if second == 2 else second * SECOND_NS
        limited.add(START_NS + second * SECOND_NS, [power_ns, None, None, None, None])
    found = dict(limited.window(START_NS, START_NS + 4 * SECOND_NS))
    assert found == {"power": 4_000}


@pytest.mark.parametrize(("more_s", "in_all_ms"), [(0, 11_000), (5_000, 5_000)])
def test_a_counter_that_the_driver_has_stopped_is_not_known_from_then_on(
    more_s: int, in_all_ms: int
) -> None:
    """It counts again from second 9 on: from what it had, or from more than can have passed."""
    limited = history()
    for second in range(12):
        power_ns = None if 4 <= second < 9 else (second + more_s * (second >= 9)) * SECOND_NS
        limited.add(START_NS + second * SECOND_NS, [power_ns, 0, None, None, None])
        stopped = 6 <= second < 9
        recent = dict(limited.window(START_NS, START_NS + second * SECOND_NS))
        assert (recent["power"] is None, recent["heat"]) == (stopped, 0)
    found = {
        (begin, end): dict(
            limited.window(START_NS + begin * SECOND_NS, START_NS + end * SECOND_NS)
        )["power"]
        for begin, end in ((0, 3), (0, 7), (7, 10), (9, 11), (0, 11))
    }
    assert found == {(0, 3): 3_000, (0, 7): None, (7, 10): None, (9, 11): 2_000, (0, 11): in_all_ms}


def test_it_is_known_when_the_counters_were_asked_for_even_if_there_were_none() -> None:
    limited = history()
    limited.add(START_NS, [0] * 5)
    limited.add(START_NS + SECOND_NS, ())
    assert (limited.ends_ns, limited.read_ns) == (START_NS, START_NS + SECOND_NS)


def test_long_windows_come_from_the_coarser_rows() -> None:
    """The clocks are limited in the second half of each coarser row."""
    limited = history()
    for second in range(4 * 3600):
        row, within = divmod(START_NS // SECOND_NS + second, 30)
        power_ns = (15 * row + max(0, within - 15)) * SECOND_NS
        limited.add(START_NS + second * SECOND_NS, [power_ns, 0, 0, 0, 0])
    begin_ns = START_NS + 200 * SECOND_NS
    found = dict(limited.window(begin_ns, begin_ns + 3 * 3600 * SECOND_NS))
    assert found["power"] == pytest.approx(3 * 3600 * 1000 / 2, rel=0.01)
    # Where the finer rows begin: a coarser one is taken as limited all the time.
    begin_ns = START_NS + 3603 * SECOND_NS
    assert dict(limited.window(begin_ns, begin_ns + SECOND_NS))["power"] == 0
