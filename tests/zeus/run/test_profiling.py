"""Which limit is measured when."""

from __future__ import annotations

import random

import pytest

from tests import seeds
from zeus.run.profiling import (
    NOT_PROFILING,
    PROFILING,
    WARMING_UP,
    Action,
    Close,
    Drop,
    Hold,
    Open,
    Profiler,
    Reading,
    best_limit,
    fitted,
)

LIMITS = [250_000, 200_000, 100_000]


def epoch(profiler: Profiler, iterations: int) -> list[list[Action]]:
    """What is done before each iteration, and last, when the epoch ends."""
    profiler.begin_epoch(iterations)
    done = [profiler.begin_iteration() for _ in range(iterations)]
    return [*done, profiler.interrupt()]


def test_one_limit_after_the_other_from_the_highest_down() -> None:
    profiler = Profiler(LIMITS, 2, 3)
    done = epoch(profiler, 30)
    assert done[0] == []  # the highest is held already
    assert done[2] == [Open(250_000)]
    assert done[5] == [Close(250_000, 3), Hold(200_000)]
    assert done[7] == [Open(200_000)]
    assert done[10] == [Close(200_000, 3), Hold(100_000)]
    assert done[12] == [Open(100_000)]
    assert done[15] == [Close(100_000, 3)]
    assert all(one == [] for one in done[16:])
    assert not profiler.active
    assert not profiler.complete
    for limit in LIMITS:
        profiler.measured(limit, Reading(100.0, 1.0))
    assert profiler.complete


def test_states() -> None:
    profiler = Profiler(LIMITS, 1, 1)
    assert profiler.state == NOT_PROFILING
    profiler.begin_epoch(100)
    states = []
    for _ in range(7):
        profiler.begin_iteration()
        states.append(profiler.state)
    assert states == [WARMING_UP, PROFILING] * 3 + [NOT_PROFILING]


def test_what_does_not_fit_before_the_epoch_ends_goes_on_in_the_next() -> None:
    profiler = Profiler(LIMITS, 2, 3)
    # 0 + 5 < 10 fits, 5 + 5 < 10 does not: then the highest limit is held.
    first = epoch(profiler, 10)
    assert first[5] == [Close(250_000, 3)]
    assert [one for done in first for one in done if isinstance(one, Open)] == [Open(250_000)]
    second = epoch(profiler, 10)
    assert second[0] == [Hold(200_000)]
    assert second[5] == [Close(200_000, 3), Hold(250_000)]
    third = epoch(profiler, 10)
    assert third[0] == [Hold(100_000)]
    assert third[5] == [Close(100_000, 3)]
    assert not profiler.active


def test_a_window_that_is_interrupted_is_measured_anew() -> None:
    profiler = Profiler(LIMITS, 1, 3, known={250_000: Reading(1.0, 1.0)})
    profiler.begin_epoch(100)
    assert profiler.begin_iteration() == [Hold(200_000)]
    assert profiler.begin_iteration() == [Open(200_000)]
    assert profiler.interrupt() == [Drop(200_000), Hold(250_000)]
    assert profiler.state == NOT_PROFILING
    assert profiler.begin_iteration() == [Hold(200_000)]
    assert profiler.interrupt() == [Hold(250_000)]  # while warming up there is no window
    assert profiler.begin_iteration() == [Hold(200_000)]


def test_a_window_that_is_complete_when_the_epoch_ends_counts() -> None:
    profiler = Profiler(LIMITS, 1, 2)
    profiler.begin_epoch(None)  # nobody knows how long it will be
    for _ in range(3):
        profiler.begin_iteration()
    assert profiler.interrupt() == [Close(250_000, 2)]


def test_a_limit_that_is_refused_is_left_out() -> None:
    profiler = Profiler(LIMITS, 0, 1, known={250_000: Reading(1.0, 1.0)})
    profiler.begin_epoch(100)
    assert profiler.begin_iteration() == [Hold(200_000), Open(200_000)]
    profiler.refused(200_000)
    assert profiler.begin_iteration() == [Hold(100_000), Open(100_000)]
    assert profiler.begin_iteration() == [Close(100_000, 1)]
    profiler.measured(100_000, Reading(1.0, 1.0))
    assert profiler.complete


def test_nothing_happens_once_it_was_given_up() -> None:
    profiler = Profiler(LIMITS, 1, 1)
    profiler.begin_epoch(100)
    profiler.begin_iteration()
    profiler.give_up()
    assert not profiler.active
    assert [profiler.begin_iteration() for _ in range(5)] == [[]] * 5
    assert profiler.interrupt() == []


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [
        (None, (10, 40)),
        (51, (10, 40)),
        (50, (9, 39)),
        (26, (5, 20)),
        (7, (1, 4)),
        (3, (1, 1)),
        (2, None),
        (1, None),
    ],
)
def test_short_epochs_make_short_windows(
    iterations: int | None, expected: tuple[int, int] | None
) -> None:
    assert fitted(10, 40, iterations) == expected


def test_epochs_that_are_too_short_are_told() -> None:
    assert not Profiler(LIMITS, 10, 40).begin_epoch(2)
    assert Profiler(LIMITS, 10, 40).begin_epoch(3)


def test_random_jobs_measure_every_limit_in_whole_windows_of_training_only() -> None:
    seed = seeds.fresh()
    draw = random.Random(seed)
    for _ in range(300):
        limits = [1000 * (9 - number) for number in range(draw.randint(1, 8))]
        warmup, measure = draw.randint(0, 12), draw.randint(1, 12)
        shortest = warmup + measure + 1
        profiler = Profiler(limits, warmup, measure)
        held, since, window, closed = limits[0], 0, -1, []
        for _ in range(10_000):
            if not profiler.active:
                break
            iterations = draw.randint(3, 40) if draw.random() < 0.9 else shortest
            small = fitted(warmup, measure, iterations)
            assert small is not None
            assert 1 <= small[1] <= measure
            assert sum(small) < iterations
            profiler.begin_epoch(iterations)
            for at in range(iterations + 1):
                last = at == iterations
                for action in profiler.interrupt() if last else profiler.begin_iteration():
                    if isinstance(action, Hold):
                        assert window < 0
                        held, since = action.power_limit_mw, at
                    elif isinstance(action, Open):
                        assert action.power_limit_mw == held
                        assert at - since >= small[0] or held == limits[0]
                        window = at
                    else:
                        assert action.power_limit_mw == held
                        if isinstance(action, Close):
                            assert action.iterations == at - window == small[1]
                            closed.append(held)
                        window = -1
                since = -warmup if last else since
            assert window < 0
        assert closed == limits


def test_the_best_limit_counts_energy_and_time_in_the_same_unit() -> None:
    # Half as fast at a third of the power: 0.5 * 300 + 0.5 * 300 = 300 J an iteration against
    # (0.5 * 100 + 0.5 * 300) / 0.5 = 400. Energy alone: 300 against 200.
    readings = {300_000: Reading(300.0, 1.0), 100_000: Reading(100.0, 0.5)}
    assert best_limit(readings, 0.5, 300.0) == 300_000
    assert best_limit(readings, 1.0, 300.0) == 100_000
    assert best_limit(readings, 0.0, 300.0) == 300_000
    # A little slower at much less power; with time a thousand times too heavy the fastest wins.
    readings = {300_000: Reading(300.0, 1.0), 100_000: Reading(100.0, 0.9)}
    assert best_limit(readings, 0.5, 300.0) == 100_000
    assert best_limit(readings, 0.5, 300_000.0) == 300_000


def test_of_equals_the_highest_limit_is_best() -> None:
    readings = {limit: Reading(100.0, 1.0) for limit in (100_000, 250_000, 200_000)}
    assert best_limit(readings, 0.5, 250.0) == 250_000
