"""The clock policy alone: what it never does, and when it must use the highest clock."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeus.serving import ClockPolicy, Queue, Step
from zeus.serving.clock_load import Objective, RateBound
from zeus.serving.clock_model import COMPARED, Comparison
from zeus.serving.clock_policy import COLD_STEPS
from zeus.serving.clock_power import Floor, longer_busy

CLOCKS = [1980, 1860, 1740, 1620, 1500, 1380, 1260, 1140, 1020, 900]
EMPTY = Queue(0, 0, 0.0)

strange = st.one_of(
    st.sampled_from([0, -1, math.nan, math.inf, -math.inf, 1e308, -1e308, 10**400, 5e-324]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0, 1000),
    st.integers(),
    st.sampled_from([np.float64(2.5), Decimal("NaN"), Decimal(3), None]),
)


class Engine:
    """Feeds a policy with steps whose time the clock lengthens by a rule.

    Args:
        policy: The policy.
        stretch: How much longer a step is at a clock than at 1980 MHz.
        base_s: A step of one sequence at 1980 MHz.
    """

    def __init__(
        self,
        policy: ClockPolicy,
        stretch: Callable[[int], float] = lambda mhz: 1.0,
        base_s: float = 0.008,
    ) -> None:
        self.policy = policy
        self.stretch = stretch
        self.base_s = base_s
        self.now = 100.0
        self.clock = policy.clock_mhz

    def steps(self, count: int, sequences: int = 8, queue: Queue = EMPTY) -> int:
        """Decode steps. Returns the clock after the last."""
        for number in range(count):
            took = self.base_s * self.stretch(self.clock) * (1 + 0.01 * math.sin(7 * number))
            begin, self.now = self.now, self.now + took
            step = Step(begin, self.now, 0, sequences, 500 * sequences, self.clock)
            self.clock = self.policy.step(step, queue)
        return self.clock


def fresh(stretch: Callable[[int], float] = lambda mhz: 1.0) -> tuple[ClockPolicy, Engine]:
    """A new policy, and its engine."""
    policy = ClockPolicy(CLOCKS, 0.5, 0.025)
    return policy, Engine(policy, stretch)


@functools.cache
def lowered() -> Engine:
    """An engine whose policy has gone down, as its steps do not get longer."""
    _, engine = fresh()
    engine.steps(2500)
    assert engine.clock < 1300
    return engine


def low() -> tuple[ClockPolicy, Engine]:
    """Another such policy, and its engine."""
    engine = copy.deepcopy(lowered())
    return engine.policy, engine


@settings(max_examples=100, deadline=None)
@given(
    floor=st.sampled_from([None, 0.0, 1000.0, 5000.0]),
    calls=st.lists(
        st.one_of(
            st.tuples(st.just("step"), st.tuples(*[strange] * 9)),
            st.tuples(st.just("finished"), st.tuples(strange, strange)),
            st.tuples(st.just("idle"), st.tuples(strange)),
            st.tuples(st.just("energy"), st.tuples(strange, strange, strange)),
            st.tuples(st.just("sane"), st.tuples(st.integers(1, 40))),
            st.tuples(st.just("told"), st.tuples(st.floats(0, 1e4), st.floats(0, 1))),
        ),
        max_size=40,
    ),
)
def test_impossible_numbers_never_raise_and_clocks_are_offered(
    floor: float | None, calls: list[tuple[str, tuple[float, ...]]]
) -> None:
    policy = ClockPolicy(CLOCKS, 0.5, 0.025, floor)
    engine = Engine(policy)
    for name, numbers in calls:
        if name == "step":
            clock = policy.step(Step(*numbers[:6]), Queue(*numbers[6:]))
        elif name == "finished":
            policy.finished(*numbers)
            continue
        elif name == "energy":
            policy.energy(*numbers)
            continue
        elif name == "told":
            for number in range(15):
                policy.energy(engine.now - 0.01 * number - 0.1, engine.now - numbers[1], numbers[0])
            continue
        elif name == "idle":
            clock = policy.idle(*numbers)
        else:
            clock = engine.steps(int(numbers[0]))
        assert clock in CLOCKS
        assert clock == 1980 or clock >= (floor or 0)
        assert clock == policy.clock_mhz
        assert not any(math.isnan(number) for number in policy.predict())


@pytest.mark.parametrize("place", range(9))
def test_numbers_of_another_type_are_numbers(place: int) -> None:
    (policy, _), (plain, _) = low(), low()
    end = 10**6
    for number in range(20):
        values = [end + number, end + number + 1, 3, 5, 300, 1980, 1, 2, 1]
        plain.step(Step(*values[:6]), Queue(*values[6:]))
        values[place] = Decimal(values[place])
        clock = policy.step(Step(*values[:6]), Queue(*values[6:]))
        assert clock == plain.clock_mhz


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(*[strange] * 9), min_size=1, max_size=20))
def test_it_recovers_from_impossible_numbers(numbers: list[tuple[float, ...]]) -> None:
    policy, _ = low()
    for one in numbers:
        policy.step(Step(*one[:6]), Queue(*one[6:]))
    for _ in range(2):  # the first may follow a time far ahead: it has jumped back
        policy.step(Step(1.0, 1.008, 0, 8, 4000, 1980), EMPTY)
    engine = Engine(policy)
    engine.now = 10.0
    assert engine.steps(3500) < 1500


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_a_stretch_that_is_measured_too_long_hides_no_level_below_it(wrong: int) -> None:
    ratios = [1.0, 0.94, 0.88, 0.82, 0.76, 0.70, 0.64, 0.58]
    true = [1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07]
    measured = [one if level < wrong else max(one, 1.2) for level, one in enumerate(true)]
    for stretch in (true, measured):
        assert Floor(ratios).level(stretch, [True] * 8, 0.5) == 7
    assert Floor(ratios).level(true, [True] * 6 + [False] * 2, 0.5) == 6, "it is tried"


@settings(deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=300), st.floats(0, 6000))
def test_levels_are_offered_clocks(clocks: list[int], floor: float) -> None:
    policy = ClockPolicy([*clocks, 5000.5, math.inf], 0.5, 0.025, floor)
    levels = policy.clocks_mhz
    assert set(levels) <= set(clocks)
    assert levels[0] == max(clocks)
    assert levels == sorted(levels, reverse=True)
    assert all(clock >= floor for clock in levels[1:])
    assert len(levels) <= 21


@pytest.mark.parametrize(
    "arguments",
    [([], 0.5, 0.025), ([0, -5], 0.5, 0.025), (CLOCKS, 0, 0.025), (CLOCKS, 0.5, math.nan)],
)
def test_wrong_arguments(arguments: tuple[list[int], float, float]) -> None:
    with pytest.raises(ValueError, match=r"clock|positive"):
        ClockPolicy(*arguments)
    with pytest.raises(ValueError, match="floor_mhz"):
        ClockPolicy(CLOCKS, 0.5, 0.025, floor_mhz=math.nan)


def test_it_starts_at_the_highest_clock() -> None:
    policy, engine = fresh()
    assert policy.idle(5.0) == 1980
    for _ in range(COLD_STEPS - 1):
        assert engine.steps(1) == 1980


def test_it_learns_how_much_longer_steps_get() -> None:
    knee = 1440
    policy, engine = fresh(lambda mhz: max(1.0, knee / mhz))
    engine.steps(4000)
    learned = policy.stretch
    assert len(learned) >= 6
    for mhz, stretch in learned.items():
        assert stretch == pytest.approx(max(1.0, knee / mhz), rel=0.04)


def test_an_objective_holds_where_steps_get_longer_at_once() -> None:
    policy = ClockPolicy(CLOCKS, 0.5, 0.010)  # 8 ms at the highest clock
    engine = Engine(policy, lambda mhz: 1980 / mhz)
    for _ in range(4000):
        engine.steps(1)
        policy.finished(0.1, engine.base_s * 1980 / engine.clock)
        assert engine.base_s * 1980 / engine.clock < 0.010
    assert engine.clock < 1980


@pytest.mark.parametrize(("ttft_s", "tpot_s"), [(0.001, 0.025), (0.5, 0.004)])
def test_a_lost_objective_is_served_at_the_highest_clock(ttft_s: float, tpot_s: float) -> None:
    policy = ClockPolicy(CLOCKS, ttft_s, tpot_s)
    engine = Engine(policy)
    for _ in range(100):
        engine.steps(20)
        policy.finished(0.05, 0.008)
    assert engine.clock == 1980


def test_requests_that_miss_for_reasons_unknown_are_a_lost_objective() -> None:
    policy, engine = low()
    for _ in range(40):
        policy.finished(2.0, 0.008)  # no queue was ever seen
    assert engine.steps(1) == 1980
    for _ in range(200):
        policy.finished(0.05, 0.008)
    assert engine.steps(2500) < 1980


def test_a_burst_is_answered_at_once() -> None:
    policy, engine = fresh()
    for number in range(2500):  # now and then a prompt, so that prompt tokens have a price
        if number % 10 == 0:
            begin, engine.now = engine.now, engine.now + 0.008 + 1000 * 3e-5 * 1980 / engine.clock
            engine.clock = policy.step(Step(begin, engine.now, 1000, 8, 4000, engine.clock), EMPTY)
        engine.steps(1)
    before = engine.clock
    assert before < 1980
    assert engine.steps(1, queue=Queue(30, 25_000, 0.2)) == 1980


def test_the_highest_clock_when_statistics_stop_while_requests_wait() -> None:
    policy, engine = low()
    engine.steps(1, queue=Queue(1, 100, 0.0))
    clocks = [policy.idle(engine.now + 0.05 * n) for n in range(10)]
    assert clocks[-1] == 1980, "within 0.5 s"
    assert clocks[1] < 1980, "not at once: a step may take a while"


def test_the_highest_clock_when_statistics_stop_while_sequences_decode() -> None:
    policy, engine = low()
    policy.finished(0.1, 0.01)  # one of eight
    assert policy.idle(engine.now + 0.5) == 1980


@pytest.mark.parametrize("before", [True, False])
def test_it_knows_that_the_engine_is_idle(before: bool) -> None:
    policy, engine = low()
    engine.steps(50, sequences=1)
    if before:
        policy.finished(0.1, 0.01)
    engine.steps(1, sequences=1)
    if not before:
        policy.finished(0.1, 0.01)
    assert policy.idle(engine.now + 0.6) < 1980


@pytest.mark.parametrize("wrong", [math.nan, -1.0, math.inf])
@pytest.mark.parametrize("place", range(5 + len(EMPTY)))  # all but the step's clock
def test_the_highest_clock_after_numbers_that_cannot_be_true(place: int, wrong: float) -> None:
    policy, engine = low()
    numbers = [engine.now, engine.now + 0.008, 0, 8, 4000, *EMPTY]
    numbers[place] = wrong
    assert policy.step(Step(*numbers[:5], engine.clock), Queue(*numbers[5:])) == 1980


def test_steps_far_longer_than_predicted_are_an_escape() -> None:
    policy, engine = low()
    engine.base_s *= 1.7
    engine.steps(5)
    assert engine.clock == 1980
    assert policy.escapes == 1


def test_noisy_step_times_are_no_escape() -> None:
    noise = random.Random(1)
    policy, engine = fresh(lambda mhz: math.exp(noise.gauss(0.0, 0.3)))
    engine.steps(10_000)
    assert policy.escapes == 0


def test_a_capped_clock_is_not_learned_as_the_one_asked_for() -> None:
    policy, engine = fresh(lambda mhz: 1980 / mhz)
    engine.steps(3000)
    learned = policy.stretch
    for _ in range(500):  # at 700 MHz, the effective clock
        begin, engine.now = engine.now, engine.now + 0.008 * 1980 / 700
        policy.step(Step(begin, engine.now, 0, 8, 4000, 700), EMPTY)
    for mhz, stretch in policy.stretch.items():
        assert stretch == pytest.approx(learned.get(mhz, stretch), rel=0.02)


def test_a_floor_is_kept_and_what_was_learned_can_be_given() -> None:
    policy = ClockPolicy(CLOCKS, 0.5, 0.025, floor_mhz=1400)
    assert Engine(policy).steps(2500) == 1500
    again = ClockPolicy(CLOCKS, 0.5, 0.025, stretch=policy.stretch)
    assert again.stretch == policy.stretch


def test_prompts_on_a_mixture_of_experts_are_predicted() -> None:
    """A prompt touches all experts, few sequences a part of them: such steps are several times as
    long, at any clock, and must be predicted so.
    """
    policy = ClockPolicy(CLOCKS, 0.5, 0.025)
    now, clock = 100.0, 1980
    lowest = clock
    for number in range(6000):
        prompt = 600 if number % 40 in (17, 18, 19, 20, 21, 22) and number > 600 else 0
        prompt += 200 if number % 29 == 0 else 0
        touched = 1 - math.exp(-(2 + prompt) / 24)
        took = 0.003 + 0.012 * touched + 5e-6 * prompt * 1980 / clock
        begin, now = now, now + took * (1 + 0.01 * math.sin(7 * number))
        clock = policy.step(Step(begin, now, prompt, 2, 1000, clock), EMPTY)
        lowest = min(lowest, clock)
    assert lowest == 900
    assert policy.escapes == 0


def test_a_miss_costs_more_margin_than_a_near_miss_and_both_more_than_a_request_gives() -> None:
    def after(*seen_s: float, ours: float = 1.0) -> float:
        objective = Objective(1.0)
        for one in seen_s:
            objective.finished(one, ours)
        return objective.margin

    start = after()
    assert after(0.5) > start > after(0.95) > after(1.05)
    assert after(*[0.5] * 40, 0.95) < start < after(*[0.5] * 60, 0.95)
    assert after(*[0.5] * 150, 1.05) < start < after(*[0.5] * 250, 1.05)
    assert after(1.05, ours=0.0) == start, "at the highest clock no margin could have avoided it"


def test_one_long_step_does_not_distort_a_comparison() -> None:
    comparison = Comparison()
    for _ in range(COMPARED):
        comparison.add(1.0)
    comparison.changed()
    found = [comparison.add(1.1 if number != 7 else 9.0) for number in range(COMPARED)]
    assert found == [None] * (COMPARED - 1) + [pytest.approx(1.1)]


def test_busy_time_grows_with_longer_steps_less_the_busier_the_engine() -> None:
    assert longer_busy(0.0, 1.5) == 0.0
    assert longer_busy(1.0, 1.5) == longer_busy(1.2, 1.5) == 1.0
    assert longer_busy(0.01, 1.5) == pytest.approx(0.015, rel=0.01), "as long, with one at a time"
    assert longer_busy(0.9, 1.5) == pytest.approx(1 - 0.1**1.5)
    assert longer_busy(longer_busy(0.7, 1.5), 1 / 1.5) == pytest.approx(0.7)


def test_the_boards_energy_keeps_a_clock_that_pays() -> None:
    """The same steps twice: on a board whose power follows the clock, and on one where it does not,
    so that longer steps cost what they take.
    """
    reached = []
    for clock_w in (300.0, 3.0):
        policy = ClockPolicy(CLOCKS, 0.5, 0.025)
        engine = Engine(policy, lambda mhz: 1980 / mhz)
        told, joules = engine.now, 0.0
        clocks = []
        for number in range(9000):
            clock = engine.clock
            clocks.append(clock)
            begin = engine.now
            engine.steps(1, sequences=1)
            busy_s = engine.now - begin
            joules += (300.0 + clock_w * (clock / 1980) ** 3) * busy_s + 30.0 * 0.006
            engine.now += 0.006  # between steps the engine waits for requests
            if number % 50 == 49:
                policy.energy(told, engine.now, joules)
                told, joules = engine.now, 0.0
        reached.append(statistics.median(clocks[4500:]))
    assert reached[0] < 1700
    assert reached[1] == 1980


def test_energy_of_steps_that_are_not_known_is_not_learned() -> None:
    policy, engine = fresh()

    def serve(windows: int) -> None:
        for _ in range(windows):
            told = engine.now
            engine.steps(100)
            policy.energy(told, engine.now, 300.0 * (engine.now - told))

    serve(20)
    before = policy.floor.windows
    assert before >= 19
    silent_s = engine.now
    for _ in range(50):  # its sequences go on, but nothing is told of them
        engine.now += 0.1
        policy.idle(engine.now)
        policy.energy(engine.now - 0.1, engine.now, 30.0)
    assert policy.floor.windows - before <= 3, "at most until the silence is noticed"
    known = policy.floor.windows
    engine.steps(1)
    policy.energy(silent_s, engine.now, 300.0 * (engine.now - silent_s))
    assert policy.floor.windows == known
    serve(3)
    assert policy.floor.windows == known + 3


# ------------------------------------------------------------------ the bound on changes of clocks

FOUR = [1980, 1500, 1200, 900]
passed = st.one_of(st.floats(0, 3), st.sampled_from([-0.5, -100.0, 70.0]))


@settings(deadline=None)
@given(st.integers(2, 20), st.lists(st.tuples(passed, st.sampled_from(FOUR)), max_size=200))
def test_the_bound_holds_and_the_highest_clock_is_always_in_reach(
    most: int, wishes: list[tuple[float, int]]
) -> None:
    bound = RateBound(1980, most)
    now, elapsed, present = 0.0, 0.0, 1980
    times: list[float] = []
    for passed_s, wanted in wishes:
        now += passed_s
        elapsed += max(0.0, passed_s)
        clock = bound.allowed(now, present, wanted)
        assert clock in (present, wanted, 1980)
        assert clock >= min(present, wanted)
        if wanted == 1980:
            assert clock == 1980, "what is wanted in need is never refused"
        if clock != present:
            times.append(elapsed)
            present = clock
        assert sum(time > elapsed - 59.999 for time in times) <= most


def test_changes_are_allowed_again_after_a_minute() -> None:
    bound = RateBound(1980, 2)
    assert bound.allowed(0.0, 1980, 900) == 900
    assert bound.allowed(1.0, 900, 1500) == 1980
    assert bound.allowed(2.0, 1980, 900) == 1980
    assert bound.allowed(62.0, 1980, 900) == 900


def test_in_the_last_quarter_of_the_changes_a_lower_clock_waits() -> None:
    bound, present = RateBound(1980, 20), 1980
    for number in range(16):
        present = bound.allowed(number / 10, present, 2880 - present)
    assert present == 1980
    assert [bound.allowed(now_s, 1980, 900) for now_s in (1.6, 7.4, 7.6)] == [1980, 1980, 900]


def test_a_policy_keeps_the_bound_under_any_load_and_clock() -> None:
    """Bursts five times a second, by a clock that runs on for a while, and then jumps."""
    policy = ClockPolicy(FOUR, 0.5, 0.025, stretch=dict.fromkeys(FOUR, 1.0))
    now, elapsed, present = 1e4, 0.0, 1980
    times: list[float] = []
    jumps_s = itertools.cycle((-5.0, -2000.0, 30.0))
    for number in range(40_000):
        jump = next(jumps_s) if number > 9000 and number % 1000 == 999 else 0.0
        begin, now = now + jump, now + jump + 0.005
        burst = number % 40 == 39
        elapsed += max(0.0, now - (begin - jump))
        queue = Queue(1, 1, 0.45) if burst else Queue(0, 0, 0.0)
        clock = policy.step(Step(begin, now, 0, 8, 4000, present), queue)
        if clock != present:
            times.append(elapsed)
            present = clock
    assert present in FOUR
    assert len(times) >= 450, "the load asks for more than is allowed"
    for first, last in zip(times, times[200:], strict=False):
        assert last - first >= 59.999, "201 changes take more than a minute"
