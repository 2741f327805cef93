"""Powers of instructions from readings that each see several of them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from zeus.optimizer.pipeline_frequency.power_fit import (
    OUTSIDE,
    UNLIKE,
    WAITING,
    Span,
    fill,
    fit,
    mixtures,
    set_apart,
)
from zeus_common.units import MS

POWERS = {"forward": 300.0, "backward": 420.0, WAITING: 84.0, OUTSIDE: 150.0}


def pipeline(chance: random.Random, iterations: int, scale: float) -> list[list[Span]]:
    t_ns = 10**12
    made = []
    for _ in range(iterations):
        spans = []
        for _ in range(8):
            for kind, length in (("forward", 50), ("backward", 95)):
                t_ns += round(chance.uniform(0, 40) * scale * MS)
                end_ns = t_ns + round(chance.uniform(0.9, 1.1) * length * scale * MS)
                spans.append(Span(t_ns, end_ns, kind))
                t_ns = end_ns
        made.append(spans)
        t_ns += 80 * MS
    return made


def readings(
    spans: list[Span],
    chance: random.Random,
    tick_ms: int,
    window_ms: int,
    late_ns: int,
    noise: float,
) -> list[tuple[int, int]]:
    begin_ns, end_ns = spans[0].begin_ns, spans[-1].end_ns
    edges = [0, *(span.end_ns - begin_ns for span in spans)]
    lengths_s = np.diff(edges) / 1e9
    # Energy since the beginning; nothing is drawn before it or after the end.
    used_j = np.cumsum([0.0, *lengths_s * [POWERS[span.kind] for span in spans]])
    t_ns = begin_ns - 300 * MS + chance.randrange(100 * MS)
    shown = []
    while t_ns < end_ns + 300 * MS:
        window = [t_ns - window_ms * MS - begin_ns, t_ns - begin_ns]
        watts = np.diff(np.interp(window, edges, used_j)).item() / (window_ms / 1000)
        shown.append(
            (t_ns + chance.randrange(late_ns + 1), round(1000 * watts * chance.gauss(1, noise)))
        )
        t_ns += tick_ms * MS
    return shown


@pytest.mark.parametrize(("tick_ms", "window_ms"), [(100, 25), (100, 100), (20, 10), (100, 50)])
@pytest.mark.parametrize("scale", [0.2, 1.0, 2.0])
def test_powers_are_found_for_any_sensor_and_length(
    tick_ms: int, window_ms: int, scale: float
) -> None:
    chance = random.Random(f"{tick_ms}:{window_ms}:{scale}")
    spans = fill(pipeline(chance, 40, scale))
    shown = readings(spans, chance, tick_ms, window_ms, 300_000, 0.005)
    window_ns = None if window_ms == tick_ms else window_ms * MS
    found = fit(mixtures(spans, shown, window_ns))
    for kind in ("forward", "backward"):
        assert found[kind].watts == pytest.approx(POWERS[kind], rel=0.03)
        assert abs(found[kind].watts - POWERS[kind]) < 4 * found[kind].deviation_w
    assert found[WAITING].watts == pytest.approx(84, abs=12)


def test_the_stated_deviation_covers_the_error() -> None:
    """Over many short measurements, truth lies within two deviations nearly always."""
    inside = total = 0
    for seed in range(60):
        chance = random.Random(seed)
        spans = fill(pipeline(chance, 5, 1.0))
        found = fit(mixtures(spans, readings(spans, chance, 100, 25, 300_000, 0.01), 25 * MS))
        for kind in ("forward", "backward"):
            total += 1
            inside += abs(found[kind].watts - POWERS[kind]) <= 2 * found[kind].deviation_w
    assert inside >= 0.9 * total


def test_readings_of_something_else_are_left_out() -> None:
    chance = random.Random(5)
    spans = fill(pipeline(chance, 20, 1.0))
    shown = readings(spans, chance, 100, 25, 0, 0.0)
    for place in range(0, len(shown), 25):
        shown[place] = (shown[place][0], 1_500_000)
    found = fit(mixtures(spans, shown, 25 * MS))
    assert found["forward"].watts == pytest.approx(300, rel=0.01)


def test_mixtures_know_what_each_reading_saw() -> None:
    spans = [Span(0, 100, "a"), Span(100, 150, "b"), Span(150, 400, "a")]
    shown = [(50, 1), (120, 2), (190, 3), (300, 4), (500, 5)]
    assert mixtures(spans, shown, 40) == [
        ({"a": 0.5, "b": 0.5}, 0.002),
        ({"a": 1.0}, 0.003),
        ({"a": 1.0}, 0.004),
    ]
    found = mixtures(spans, shown, None)
    assert found[0] == ({"a": pytest.approx(5 / 7), "b": pytest.approx(2 / 7)}, 0.002)
    assert len(found) == 3  # the last one ends after the known range


def test_spans_of_twice_their_kinds_length_are_set_apart_and_in_no_mixture() -> None:
    ends = [0, 10, 20, 30, 50, 71]
    spans = [Span(*both, "f") for both in itertools.pairwise(ends)]
    (found,) = set_apart([[*spans, Span(71, 200, "b")]])
    assert [span.kind for span in found] == ["f", "f", "f", "f", UNLIKE, "b"]
    shown = [(10, 1), (20, 2), (55, 3), (75, 4), (85, 5)]
    assert mixtures(found, shown, 10) == [({"f": 1.0}, 0.002), ({"b": 1.0}, 0.005)]


def test_a_missed_update_is_no_reading_of_the_whole_time_since() -> None:
    spans = [Span(0, 500, "a"), Span(500, 1000, "b")]
    shown = [(100, 1), (200, 1), (300, 1), (600, 2), (700, 3)]
    assert mixtures(spans, shown, None)[2] == ({"b": 1.0}, 0.002)


def test_powers_that_cannot_be_determined_are_not_returned() -> None:
    assert fit([]) == {}
    assert fit([({"a": 0.5, "b": 0.5}, 100.0)] * 20) == {}
    assert mixtures([], [(1, 1), (2, 2)], None) == []
    assert mixtures([Span(0, 10, "a")], [(5, 1)], None) == []
    always = fit([({"a": 1.0}, watts) for watts in (98.0, 102.0)] * 10)
    # 20 readings, 2 W off, of 19 degrees of freedom.
    assert always == {"a": (pytest.approx(100), pytest.approx((20 * 4 / 19 / 20) ** 0.5))}


def test_time_between_instructions_is_waiting_and_between_iterations_not() -> None:
    one = [Span(0, 10, "f"), Span(15, 20, "b")]
    two = [Span(50, 60, "f"), Span(60, 70, "b")]
    assert [span.kind for span in fill([one, two])] == ["f", WAITING, "b", OUTSIDE, "f", "b"]
    assert fill([]) == []
