from __future__ import annotations

from zeus_common.units import SECOND_NS
from zeusd.energy.columns import SPARE, PackedColumn, Ring, size_of, tiers_size
from zeusd.energy.curve import EnergyCurve
from zeusd.energy.history import SIZE, TICK_ROWS, History, Slow
from zeusd.energy.limited import TimeLimited
from zeusd.energy.meter import Edge

TICK = 20_000_000


def fill(history: History, first: int, count: int, step_ns: int = TICK) -> None:
    """Ticks at 100 W, each 20 ms unless another step is given."""
    for number in range(first, first + count):
        t_ns = SECOND_NS + number * step_ns
        energy_uj = number * step_ns // 10_000
        edge = Edge(t_ns, energy_uj, 100_000, 100_000 + number % 7, energy_uj)
        history.add(edge, energy_uj // 1000, Slow(temperature_c=40 + number % 3))


def memory() -> memoryview:
    return memoryview(bytearray(SIZE))


def test_a_ring_keeps_the_newest_rows_under_their_numbers() -> None:
    columns = (PackedColumn("a", "q"), PackedColumn("b", "h"))
    ring = Ring(columns, 9, memoryview(bytearray(size_of(columns, 9))))
    for number in range(12):
        ring.append(number * 10, -number)
    assert (ring.start, ring.end) == (7, 12)
    assert [ring.column(0)[number] for number in range(7, 12)] == [70, 80, 90, 100, 110]
    assert ring.column(1)[11] == -11
    assert ring.column(0).first_at_least(85, ring.start, ring.end) == 9
    assert ring.column(0).first_at_least(111, ring.start, ring.end) == 12


def test_rows_are_found_and_read_wherever_the_ring_begins_again() -> None:
    columns = (PackedColumn("a", "q"),)
    ring = Ring(columns, 9, memoryview(bytearray(size_of(columns, 9))))
    column = ring.column(0)
    for count in range(40):
        rows = range(ring.start, ring.end)
        for low in rows:
            for high in range(low, ring.end + 1):
                assert column.span(low, high) == [10 * number for number in range(low, high)]
                for value in range(10 * low - 5, 10 * high + 5, 5):
                    numbers = [number for number in range(low, high) if 10 * number >= value]
                    assert column.first_at_least(value, low, high) == min(numbers, default=high)
        ring.append(10 * count)


def test_memory_is_bounded_and_the_old_is_kept_at_coarser_grain() -> None:
    block = memory()
    history = History(block)
    fill(history, 0, 2 * TICK_ROWS)  # 13 minutes
    limited = tiers_size(TimeLimited.COLUMNS)
    assert len(block) == SIZE < 1_400_000 + limited
    assert limited < 610_000
    assert history.ticks.end - history.ticks.start == TICK_ROWS - SPARE
    seconds = history.tiers[0]
    assert seconds.end == 2 * TICK_ROWS * TICK // SECOND_NS
    assert history.begins_ns == SECOND_NS
    assert history.coarse(2 * SECOND_NS) is seconds


def test_the_energy_of_a_week_is_known() -> None:
    history = History(memory())
    fill(history, 0, 7 * 8640, 10 * SECOND_NS)
    begin_ns, end_ns = 3600 * SECOND_NS, history.ends_ns
    assert history.begins_ns == SECOND_NS
    assert history.coarse(end_ns - 48 * 3600 * SECOND_NS) is history.tiers[1]
    assert history.coarse(begin_ns) is history.tiers[2]
    energy = EnergyCurve(history, None, 300_000).window(begin_ns, end_ns, False)
    true_uj = (end_ns - begin_ns) // 10_000
    assert abs(energy.energy_uj - true_uj) <= energy.uncertainty_uj < 0.01 * true_uj


def test_the_history_of_an_earlier_process_continues() -> None:
    block = memory()
    fill(History(block), 0, 500)
    after = History(block)
    assert after.ticks.end == 500
    last = after.last()
    assert last is not None
    edge, raw_mj = last
    assert edge.t_ns == SECOND_NS + 499 * TICK
    assert raw_mj == edge.counted_uj // 1000
    fill(after, 500, 1)
    assert after.t_ns[500] == SECOND_NS + 500 * TICK


def test_an_empty_history_has_no_values() -> None:
    history = History(memory())
    assert history.last() is None
    assert history.begins_ns is None
    assert history.ends_ns == 0
    assert history.coarse(0) is None
