from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests import seeds
from tests.zeus.serving.server import PRIOR, STEP_NS, Served, serve, step_of
from zeus.serving import EngineStep, Ledger
from zeus.serving import digest as digest_module
from zeus.serving import settlement as settlement_module
from zeus.serving.columns import Updates
from zeus.serving.ledger import LAG_NS
from zeus.serving.rows import ClosedPeriod, RequestEnergy
from zeus.serving.wire import Arrival, Owner, group_of

TICK_NS = 10**8


def _settled(served: Served) -> ClosedPeriod:
    ledger = Ledger()
    ledger.add_steps(served.steps, served.names)
    ledger.add_updates(served.updates)
    return ledger.settle()


def _joules(rows: list[RequestEnergy]) -> dict[str, float]:
    return {row.request: row.joules for row in rows}


def _adds_up(done: ClosedPeriod, measured_j: float) -> None:
    totals = done.totals
    parts = totals.requests_j + totals.idle_j + totals.unattributed_j
    assert totals.measured_j == pytest.approx(measured_j, rel=1e-9)
    assert parts == pytest.approx(totals.measured_j, rel=1e-9)
    rows = [row for row in done.rows if not row.refused]
    assert math.fsum(row.joules for row in rows) == pytest.approx(totals.requests_j, rel=1e-9)
    for row in rows:
        assert min(row.prefill_j, row.decode_j, row.shared_j) >= 0
        assert row.prefill_j + row.decode_j + row.shared_j == pytest.approx(row.joules)


def _attributed(done: ClosedPeriod, served: Served) -> np.ndarray:
    found = _joules(done.rows)
    return np.array([found[name] for name in served.names])


def _errors(done: ClosedPeriod, served: Served) -> np.ndarray:
    return np.abs(_attributed(done, served) / served.true_j - 1)


def _mean_error(done: ClosedPeriod, served: Served) -> float:
    return float(_errors(done, served).mean())


def _misplaced(done: ClosedPeriod, served: Served) -> float:
    """What requests were given too much or too little, of all: one of two steps may be far off."""
    off_j = np.abs(_attributed(done, served) - served.true_j)
    return float(off_j.sum() / served.true_j.sum())


def _part(served: Served, kept: np.ndarray) -> Updates:
    return Updates(*(column[kept] for column in vars(served.updates).values()))


# ------------------------------------------------------------------------------------ attribution


@pytest.mark.parametrize("seen", [1.0, 0.3])
def test_every_request_gets_what_it_caused(seen):
    served = serve(seeds.fresh(), seen=seen)

    done = _settled(served)

    _adds_up(done, served.measured_j)
    assert [row.request for row in done.rows] == served.names
    assert _mean_error(done, served) < 0.02
    inside = [
        abs(row.joules - true) < 1.96 * math.hypot(row.uncertainty_j, row.rule_uncertainty_j)
        for row, true in zip(done.rows, served.true_j, strict=True)
    ]
    assert np.mean(inside) > 0.9


def test_steps_without_contexts_have_figures_with_a_larger_uncertainty():
    served = serve(seeds.fresh())
    exact = _settled(served)
    served.steps = replace(served.steps, context=np.zeros_like(served.steps.context))

    done = _settled(served)

    _adds_up(done, served.measured_j)
    assert _mean_error(done, served) < 0.06
    assert {row.method for row in done.rows} == {"regression, no contexts"}
    for row, before in zip(done.rows, exact.rows, strict=True):
        assert row.rule_uncertainty_j / row.joules > 2 * before.rule_uncertainty_j / before.joules


def test_a_changed_price_gets_weights_of_its_own():
    served = serve(seeds.fresh(), seconds=90, cost_step_at_s=45)

    done = _settled(served)

    assert done.fit is not None
    (cut_s,) = done.fit.cuts_s
    first_s, last_s = sorted((cut_s, 10**6 + 45))
    begins_s = served.steps.begin_ns / 1e9
    between = (first_s + 0.5 < begins_s) & (begins_s < last_s - 0.5)
    assert not between.any()  # while no step runs, any time is as good
    assert _mean_error(done, served) < 0.03


def test_each_clock_level_has_weights_of_its_own():
    served = serve(seeds.fresh(), seconds=90, clocks=(1.0, 0.6))

    done = _settled(served)

    assert done.fit is not None
    assert done.fit.levels == 2
    assert _mean_error(done, served) < 0.03


def test_a_start_uses_the_weights_of_its_clock():
    earlier = Ledger()
    known = serve(seeds.fresh(), seconds=90, clocks=(1.0, 0.6))
    earlier.add_updates(known.updates)
    earlier.add_steps(known.steps, known.names)
    earlier.settle()
    assert sorted(earlier.weights) == [600, 1000]
    served = serve(seeds.fresh(), seconds=12, clocks=(0.6,))
    both = np.mean(list(earlier.weights.values()), axis=0).tolist()

    errors, medians = [], []
    for prior in (earlier.weights, {0.0: both}, {600.0: [1.0]}):
        ledger = Ledger(prior=prior)
        ledger.add_updates(served.updates)
        ledger.add_steps(served.steps, served.names)
        done = ledger.settle()
        _adds_up(done, served.measured_j)
        errors.append(_misplaced(done, served))
        medians.append(float(np.median(_errors(done, served))))

    assert medians[0] < 0.02
    own, common, useless = errors
    assert own < 0.03
    assert own < common
    assert math.isnan(useless), "weights of another kind are no help: too few updates"


# ----------------------------------------------------------------------------------- conservation


def test_energy_of_missing_updates_is_unattributed():
    served = serve(seeds.fresh())
    kept = np.ones(served.updates.count, bool)
    kept[200:260] = False
    served.updates = _part(served, kept)
    covered = np.repeat(kept, 10)
    slot = (served.steps.begin_ns - 10**15) // STEP_NS
    row_slot = slot[served.steps.step_of_row]
    served.true_j = np.bincount(
        served.steps.request, served.row_j * covered[row_slot], len(served.names)
    )

    done = _settled(served)

    _adds_up(done, served.measured_j)
    refused = {row.request for row in done.rows if row.refused}
    assert refused == {
        name for name, true in zip(served.names, served.true_j, strict=True) if true == 0
    }
    found = [
        (row.joules, true)
        for row, true in zip(done.rows, served.true_j, strict=True)
        if not row.refused
    ]
    assert np.median([abs(mine / true - 1) for mine, true in found]) < 0.02


def test_steps_one_by_one_give_the_same_as_all_at_once():
    served = serve(seeds.fresh(), seconds=50)
    ledger = Ledger()
    steps, updates = served.steps, served.updates
    early: list[RequestEnergy] = []
    last = {int(request): n for n, request in enumerate(steps.request)}
    following = 0
    for n in range(steps.count):
        rows = slice(steps.first_row[n], steps.first_row[n + 1])
        ledger.step(step_of(steps, served.names, n))
        for row in range(rows.start, rows.stop):
            if last[int(steps.request[row])] == row:
                ledger.finish(served.names[steps.request[row]], tenant="someone")
        while following < updates.count and updates.end_ns[following] <= steps.end_ns[n]:
            ledger.add_updates(updates.where(slice(following, following + 1)))
            following += 1
        if n % 200 == 0:
            early += ledger.advance(int(steps.end_ns[n]))
    while following < updates.count:
        ledger.add_updates(updates.where(slice(following, following + 1)))
        following += 1
    done = ledger.settle()

    _adds_up(done, served.measured_j)
    whole = _joules(_settled(served).rows)
    assert _joules(done.rows) == pytest.approx(whole, rel=1e-6)
    assert len(ledger.requests) == 0
    assert {row.tenant for row in done.rows} == {"someone"}
    assert len({row.request for row in early}) == len(early)
    assert all(row.provisional for row in early)
    known = [row for row in early if not row.refused]
    assert known
    assert np.median([abs(row.joules / whole[row.request] - 1) for row in known]) < 0.05


def _update(ledger: Ledger, begin_ns: int, end_ns: int, joules: float) -> None:
    """Of a sensor that sees all of it."""
    ledger.add_updates(Updates.of([(begin_ns, end_ns, joules, begin_ns, end_ns, math.nan)]))


def test_a_request_may_span_two_periods():
    served = serve(seeds.fresh(), seconds=90)
    ledger = Ledger()
    half = served.steps.count // 2
    border_ns = int(served.steps.end_ns[half - 1])
    update = int(np.searchsorted(served.updates.end_ns, border_ns))
    ledger.add_steps(served.steps.part(0, half), served.names)
    ledger.add_updates(served.updates.where(slice(0, update)))
    for name in served.names:
        if served.steps.request[served.steps.first_row[half] :].tolist().count(int(name[1:])) == 0:
            ledger.finish(name)
    first = ledger.settle(border_ns)
    ledger.add_steps(served.steps.part(half, served.steps.count), served.names)
    ledger.add_updates(served.updates.where(slice(update, served.updates.count)))
    second = ledger.settle()

    rows = [*first.rows, *second.rows]
    assert sorted(row.request for row in rows) == sorted(served.names)
    assert ledger.totals.measured_j == pytest.approx(served.measured_j)
    total = math.fsum(row.joules for row in rows if not row.refused)
    assert total == pytest.approx(ledger.totals.requests_j)
    assert ledger.weights


def test_dummy_steps_and_start_up_are_idle_and_shown():
    ledger = Ledger(prior=PRIOR)
    for n in range(50):
        _update(ledger, n * TICK_NS, n * TICK_NS + TICK_NS, 6.0)
        if n >= 10:
            one = ([], [], [], []) if n < 30 else (["a"], [False], [1], [10])
            ledger.step(EngineStep("0", n, n * TICK_NS, n * TICK_NS + TICK_NS, *one))
    restarted = EngineStep("0", 1, 50 * TICK_NS, 51 * TICK_NS, ["b"], [False], [1], [10])
    ledger.step(restarted)

    assert [row.request for row in ledger.advance(60 * TICK_NS)] == ["a"]
    totals = ledger.settle().totals

    assert totals.measured_j == pytest.approx(300.0)
    assert totals.requests_j + totals.idle_j == pytest.approx(300.0)
    assert totals.startup_j == pytest.approx(60.0, rel=0.2)
    assert totals.dummy_j == pytest.approx(120.0, rel=0.2)
    assert totals.idle_j == pytest.approx(totals.startup_j + totals.dummy_j)


# --------------------------------------------------------------------------------------- refusals


def test_a_large_residual_is_refused():
    served = serve(seeds.fresh(), noise=0.5)

    done = _settled(served)

    _adds_up(done, served.measured_j)
    assert all("large residual" in row.reason for row in done.rows)


def test_requests_beside_another_process_are_refused():
    served = serve(seeds.fresh(), seconds=120, rate=0.5)
    served.updates.joules[300:600] += 15.0
    busy = np.bincount((served.steps.begin_ns - 10**15) // 10**8, minlength=1200)
    idle = np.flatnonzero(np.convolve(busy, [1, 1, 1], "same") == 0) / 10  # s, and around it

    done = _settled(served)

    _adds_up(done, served.measured_j)
    for row in done.rows:
        begin, end = ((at - 10**15) / 1e9 for at in (row.begin_ns, row.end_ns))
        if end < idle[idle < 30].max() or begin > idle[idle > 60].min():
            assert not row.refused
        if begin > 32 and end < 58:
            assert "another process" in row.reason
    assert any(row.refused for row in done.rows)


# ----------------------------------------------------------------------------------------- memory


def test_twenty_thousand_lost_requests_are_bounded(monkeypatch):
    monkeypatch.setattr(settlement_module, "MOST_REQUESTS", 1_000)
    monkeypatch.setattr(digest_module, "MOST_ROWS", 5_000)
    ledger = Ledger()
    rows: list[RequestEnergy] = []
    for tick in range(200):
        begin = tick * 10**8
        _update(ledger, begin, begin + 10**8, 30.0)
        ids = [f"r{tick}-{n}" for n in range(100)]
        ones = [1] * 100
        ledger.step(EngineStep("0", tick + 1, begin, begin + 10**8, ids, [False] * 100, ones, ones))
        if tick % 10 == 9:
            found, totals = ledger.poll(begin + 10**8 + LAG_NS)
            rows += found if totals is not None else []
            assert len(ledger.requests) <= 1_000 + 1_000
            assert ledger.digest.count <= 5_000 + 100_000
    rows += ledger.settle().rows

    assert len({row.request for row in rows}) == len(rows) == 20_000
    _adds_up(ClosedPeriod(rows, ledger.totals, None), 6_000.0)


def test_blocks_grow_when_there_are_too_many_rows(monkeypatch):
    monkeypatch.setattr(digest_module, "MOST_ROWS", 500)
    served = serve(seeds.fresh())
    ledger = Ledger()
    ledger.add_updates(served.updates)
    for begin in range(0, served.steps.count, 100):
        end = min(begin + 100, served.steps.count)
        ledger.add_steps(served.steps.part(begin, end), served.names)
        ledger.advance(int(served.steps.end_ns[end - 1]))
    assert ledger.digest.count <= 1_000

    done = ledger.settle()

    _adds_up(done, served.measured_j)
    assert _mean_error(done, served) < 0.05


def _one_by_one(count: int, finished: int) -> Ledger:
    """Steps of 100 ms with one request each, and 6 J; a part of the requests have finished."""
    ledger = Ledger(prior=PRIOR)
    for n in range(count):
        begin = n * TICK_NS
        ledger.step(EngineStep("0", n + 1, begin, begin + TICK_NS, [f"r{n}"], [False], [1], [9]))
        _update(ledger, begin, begin + TICK_NS, 6.0)
        if n < finished:
            ledger.finish(f"r{n}")
    return ledger


def test_provisional_figures_are_given_once():
    ledger = _one_by_one(40, 4)

    rows = ledger.advance(40 * TICK_NS)

    assert [row.request for row in rows] == ["r0", "r1", "r2", "r3"]
    assert all(row.provisional for row in rows)
    assert [row.joules for row in rows] == pytest.approx([6.0] * 4, rel=0.1)
    assert ledger.advance(40 * TICK_NS) == []


def test_a_figure_is_not_given_before_the_last_step_is_covered():
    ledger = Ledger(prior=PRIOR)
    for n in range(40):
        ledger.step(
            EngineStep("0", n + 1, n * TICK_NS, n * TICK_NS + TICK_NS, ["a"], [False], [1], [n])
        )
        _update(ledger, n * TICK_NS, n * TICK_NS + TICK_NS, 6.0)
    ledger.finish("a")

    assert ledger.advance(20 * TICK_NS) == []
    (row,) = ledger.advance(40 * TICK_NS)
    assert row.joules == pytest.approx(240.0, rel=0.1)
    assert row.decode_tokens == 40


def test_requests_of_an_engine_that_is_gone_are_finished():
    ledger = _one_by_one(40, 0)
    ledger.step(EngineStep("0", 1, 42 * TICK_NS, 43 * TICK_NS, ["new"], [True], [5], [0]))
    _update(ledger, 40 * TICK_NS, 43 * TICK_NS, 12.0)

    assert sorted(row.request for row in ledger.advance(50 * TICK_NS)) == sorted(
        f"r{n}" for n in range(40)
    )


def test_a_request_has_the_group_of_its_trace_or_the_one_its_front_end_names():
    ledger = _one_by_one(40, 0)
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    for name in ("r0", "r1"):
        ledger.take(Arrival("0", name, 0, 5, trace))
    ledger.take(Owner("r1", "search", "rollout"))
    ledger.take(Owner("r3", "t" * 10**5, "g" * 10**5))
    for n in range(4):
        ledger.finish(f"r{n}")

    found = {row.request: (row.tenant, row.group) for row in ledger.settle().rows}

    assert found["r0"] == ("", "ab" * 16)
    assert found["r1"] == ("search", "rollout")
    assert found["r2"] == ("", "")
    assert found["r3"] == ("t" * 200, "g" * 200)


@pytest.mark.parametrize(
    ("trace", "baggage", "group"),
    [
        ("", "", ""),
        (f"00-{'ab' * 16}-{'cd' * 8}-01", "a=b", "ab" * 16),
        (f"00-{'ab' * 16}-{'cd' * 8}-01", "a=b, zeus.group = task%2042 ;x=y", "task 42"),
        ("00-abc", "zeus.groups=x", ""),
        ("", "zeus.group=" + "x" * 500, "x" * 200),
    ],
)
def test_headers_name_a_group(trace: str, baggage: str, group: str):
    assert group_of(trace, baggage) == group
