from __future__ import annotations

from zeusd.front import shaper as module
from zeusd.front.shaper import Shaper, Verdict

SECOND = 10**9


def test_what_comes_at_the_pace_passes_at_once() -> None:
    shaper: Shaper[int] = Shaper(1000)
    for number in range(5000):
        assert shaper.offer(1, number, number * SECOND // 1000) is Verdict.NOW


def test_a_burst_waits_in_order_and_passes_at_the_pace() -> None:
    shaper: Shaper[int] = Shaper(1000)
    verdicts = [shaper.offer(1, number, 0) for number in range(200)]
    assert verdicts == [Verdict.NOW] * 50 + [Verdict.LATER] * 150
    passed = list(shaper.due(SECOND // 10))
    assert len(passed) in (49, 50), "no more than a burst, however long nobody looked"
    for millisecond in range(101, 300):
        passed += shaper.due(millisecond * SECOND // 1000)
    assert passed == list(range(50, 200))
    assert not shaper.waiting


def test_who_does_not_stop_is_refused_and_others_are_not() -> None:
    shaper: Shaper[str] = Shaper(1000)
    verdicts = [shaper.offer(1, "x", 0) for _ in range(2000)]
    assert verdicts.count(Verdict.NEVER) == 2000 - 50 - module.MAX_WAITING
    assert shaper.offer(2, "y", 0) is Verdict.NOW
    shaper.drop(1)
    assert not shaper.waiting


def test_nobody_waits_for_the_queue_of_another() -> None:
    shaper: Shaper[str] = Shaper(1000)
    for _ in range(300):
        shaper.offer(1, "flood", 0)
    for _ in range(60):
        shaper.offer(2, "honest", 0)
    passed = list(shaper.due(SECOND // 100))
    assert passed.count("honest") == 10
    assert passed[:4] == ["flood", "honest", "flood", "honest"]


def test_costly_operations_count_more() -> None:
    shaper: Shaper[int] = Shaper(1000)
    passed = 0
    while shaper.offer(1, 0, 0) is Verdict.NOW:
        shaper.charge(1, "state", 0)
        passed += 1
    assert passed == 13  # of a burst of 50, at four each
