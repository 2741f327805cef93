"""Jobs whose eta follows a signal or a deadline, where trials are kept."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support import wait_for
from tests.zeus.batch_size.server.conftest import Clock, Serve
from tests.zeus.batch_size.server.training import MAX_POWER, body, result, spec, train
from zeus.monitor import signals
from zeus.optimizer.batch_size import choosing
from zeus.optimizer.batch_size.common import NewTrial
from zeus.optimizer.batch_size.exceptions import ZeusBSOConfigError, ZeusBSORuntimeError
from zeus.optimizer.batch_size.server.settings import ServerSettings
from zeus.optimizer.batch_size.server.signals import Signals
from zeus.optimizer.batch_size.store import Store
from zeus.policy.signal import DAY_S, HOUR_S, Signal, eta_of
from zeus.policy.trade_off import ETAS
from zeus.utils.metric import zeus_cost

PRICES = Signal([(hour * HOUR_S, 4.0 if hour == 18 else 1.0) for hour in range(24)], period_s=DAY_S)
DEAR_S = 20 * DAY_S + 18 * HOUR_S
LIMITS = [(300.0, 1.0), (220.0, 1.1), (180.0, 1.5)]
"""Energy and time of a step: the last is the best for energy."""


@pytest.fixture
def priced(database: str, clock: Clock) -> Iterator[Store]:
    """A store that knows one signal, in the expensive hour."""
    clock.now_s = DEAR_S
    found = Store(database, clock=clock, signals={"price": PRICES})
    yield found
    found.close()


def begin(store: Store, key: str) -> NewTrial:
    return store.begin_trial("job", key)


def reach(store: Store, trial: NewTrial, energy: float, time: float, **more: Any) -> float | None:
    """A run that reaches its target in one report; returns its cost."""
    of_run = {"energy": energy, "time": time, "metric": 0.9, **more}
    return store.report(result(trial, 4, 1.0, **of_run)).cost


def test_a_trials_eta_follows_the_signal_and_is_kept_with_it(priced: Store, clock: Clock) -> None:
    priced.register(spec(signal="price"))
    trial = begin(priced, "dear")
    assert trial.eta_knob == pytest.approx(eta_of(0.5, 4 * 24 / 27))
    clock.now_s += 3 * HOUR_S
    assert begin(priced, "dear").eta_knob == trial.eta_knob  # the same trial, asked for again
    assert reach(priced, trial, 1000.0, 10.0) == pytest.approx(
        zeus_cost(1000.0, 10.0, trial.eta_knob or 0.0, MAX_POWER)
    )
    cheap = begin(priced, "cheap")
    assert cheap.eta_knob == pytest.approx(eta_of(0.5, 24 / 27))
    job, trials = priced.job("job")
    assert [one.eta_knob for one in trials] == [trial.eta_knob, cheap.eta_knob]
    assert job.spec.eta_knob == 0.5


def test_a_run_is_judged_under_the_eta_that_it_began_with(priced: Store, clock: Clock) -> None:
    priced.register(spec(signal="price"))
    for number in range(3):
        reach(priced, begin(priced, f"{number}"), 1000.0, 10.0)
    trial = begin(priced, "judged")
    bound, eta = trial.cost_bound, trial.eta_knob
    assert bound is not None
    assert eta is not None
    assert eta > 0.7
    # One epoch of energy alone, or of time alone; another would just exceed the bound under eta.
    for energy, time, stops in (
        (0.51 * bound / eta, 0.0, True),
        (0.49 * bound / eta, 0.0, False),
        (0.0, 0.49 * bound / (1 - eta) / MAX_POWER, False),
        (0.0, 0.51 * bound / (1 - eta) / MAX_POWER, True),
    ):
        asked = begin(priced, f"{energy} {time}")
        scale = (asked.cost_bound or math.nan) / bound
        assert asked.eta_knob == eta
        of_run = {"energy": energy * scale, "time": time * scale, "metric": 0.1}
        assert priced.report(result(asked, 1, 1.0, **of_run)).stop_train == stops


def test_energy_and_time_are_learned_and_not_their_cost(priced: Store, clock: Clock) -> None:
    """The larger, the faster and the more energy: the best size depends on the eta."""
    priced.register(spec(signal="price", batch_sizes=[64, 256], default_batch_size=64))
    for number in range(12):
        clock.now_s = DEAR_S + (number % 2) * 6 * HOUR_S
        trial = begin(priced, f"{number}")
        energy, time = (1000.0, 20.0) if trial.batch_size == 64 else (2500.0, 12.0)
        reach(priced, trial, energy, time)
    clock.now_s = DEAR_S + 14 * DAY_S
    dear = begin(priced, "dear")
    assert dear.batch_size == 64
    reach(priced, dear, 1000.0, 20.0)
    clock.now_s += 6 * HOUR_S
    assert begin(priced, "cheap").batch_size == 256


def test_the_best_size_is_that_of_the_jobs_eta(priced: Store) -> None:
    """In an expensive hour all trials count energy, by which 64 is the best; else 256 would be."""
    priced.register(spec(signal="price", batch_sizes=[64, 256], default_batch_size=64))
    for number in range(8):
        trial = begin(priced, f"{number}")
        assert (trial.eta_knob or 0.0) > 0.7
        energy, time = (1000.0, 20.0) if trial.batch_size == 64 else (2500.0, 12.0)
        reach(priced, trial, energy, time)
    job, trials = priced.job("job")
    assert {one.batch_size for one in trials} == {64, 256}
    found = choosing.analyze(job, trials)
    assert found.best == 256
    assert found.best_cost == pytest.approx(job.cost(2500.0, 12.0), rel=0.1)


def test_an_unknown_signal_is_refused_for_a_new_job_and_ignored_for_an_old_one(
    database: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(database, clock=clock, signals={"price": PRICES})
    with pytest.raises(ZeusBSORuntimeError, match=r"no signal 'prise', it has price; name") as told:
        store.register(spec(signal="prise"))
    assert told.value.status == 422
    store.register(spec(signal="price"))
    store.close()
    store = Store(database, clock=clock, signals={})
    store.register(spec(signal="price"))
    with caplog.at_level(logging.WARNING):
        trials = [begin(store, "first"), begin(store, "second")]
    assert [one.eta_knob for one in trials] == [None, None]
    assert caplog.text.count("has no signal 'price'") == 1
    store.close()


def test_a_deadline_takes_the_least_energy_that_is_done_in_time(
    database: str, clock: Clock
) -> None:
    store = Store(database, clock=clock)
    store.register(
        spec(done_by="00:00+00:00", batch_sizes=[64, 256], default_batch_size=64, beta_knob=20)
    )

    def day(number: int, before_s: float) -> NewTrial:
        clock.now_s = (number + 1) * DAY_S - before_s
        return begin(store, f"{number}")

    first = day(0, 12 * HOUR_S)
    assert (first.batch_size, first.eta_knob) == (64, 0.0)  # nothing is known: time counts
    reach(store, first, 1e5, 1500.0, limits=LIMITS)
    for number in range(1, 9):
        trial = day(number, 12 * HOUR_S)
        energy, time = (1e5, 1500.0) if trial.batch_size == 64 else (3e5, 600.0)
        reach(store, trial, energy, time, limits=LIMITS)
    calm = day(10, 8 * HOUR_S)
    assert (calm.batch_size, calm.eta_knob in ETAS[5:]) == (64, True)
    reach(store, calm, 1e5, 1500.0)
    hurried = day(11, 1000.0)
    # 1,500 s at the highest limit of 64 is too long; only the other size is done in time.
    assert hurried.batch_size == 256
    store.close()


def test_power_limits_tell_what_another_eta_would_have_taken(database: str, clock: Clock) -> None:
    """At the limit for energy a run takes 1.5 times as long: too long for the deadline."""
    store = Store(database, clock=clock)
    store.register(
        spec(done_by="00:00+00:00", batch_sizes=[64], default_batch_size=64, on_time=0.9)
    )
    for number in range(6):
        clock.now_s = (number + 1) * DAY_S - 12 * HOUR_S
        trial = begin(store, f"{number}")
        fast = trial.eta_knob == 0.0
        reach(store, trial, *((3e5, 1000.0) if fast else (1.8e5, 1500.0)), limits=LIMITS)
    etas = [one.eta_knob for one in store.job("job")[1]]
    assert etas[0] == 0.0
    assert set(etas[1:]) <= set(ETAS[5:])  # there is time
    clock.now_s = 20 * DAY_S - 1350.0
    assert begin(store, "hurried").eta_knob in ETAS[:5]
    store.close()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"signal": "price", "done_by": "08:00"}, "not both"),
        ({"signal": "price", "policy": "pruning-gts"}, "policy gp"),
        ({"done_by": "25:00"}, "time of day"),
        ({"done_by": "08:00", "on_time": 1.0}, "on_time"),
    ],
)
def test_jobs_that_cannot_be_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        spec(**wrong)


# --- the server -----------------------------------------------------------------------------------


def now_and_next(price: float, after: float) -> str:
    hour = datetime.now(timezone.utc).hour
    return "".join(f"{n:02}:00+00:00,{price if n == hour else after}\n" for n in range(24))


def test_the_server_follows_a_file_and_reads_it_for_no_request(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "price.csv"
    path.write_text(now_and_next(4.0, 1.0))
    http = serve(SIGNALS=f"price={path}")
    monkeypatch.setattr(signals, "read_signal", lambda path: pytest.fail("read for a request"))
    assert http.post("/jobs", json=body(signal="price")).status_code == 201
    trial = http.post("/jobs/job/trials").json()
    assert trial["eta_knob"] > 0.7
    # ml-energy/zeus's clients know nothing of it, and are served under it.
    answer = http.get("/jobs/batch_size", params={"job_id": "job"})
    assert set(answer.json()) == {"job_id", "batch_size", "trial_number"}
    shown = http.get("/jobs/job").json()["trials"]
    assert [one["eta_knob"] for one in shown] == pytest.approx(2 * [trial["eta_knob"]], rel=0.05)
    refused = http.post("/jobs", json=body("other", job_id_prefix="o", signal=str(path)))
    assert (refused.status_code, "has no signal" in refused.text) == (422, True)


def test_signals_are_fetched_again_and_the_last_ones_count_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "price.csv"
    path.write_text(now_and_next(4.0, 1.0))
    found = Signals({"price": str(path)}, every_s=0.01)
    signal = found.by_name["price"]
    assert signal.relative(0.0, 0.0) is None  # not before the thread has
    now_s = datetime.now(timezone.utc).timestamp()
    found.start()
    try:
        assert signal.relative(now_s, now_s) == pytest.approx(4 * 24 / 27)
        path.write_text(now_and_next(1.0, 1.0))
        wait_for(lambda: signal.relative(now_s, now_s) == pytest.approx(1.0), "the new prices")
        with pytest.warns(UserWarning, match="cannot be fetched"):
            path.write_text("")
            wait_for(lambda: signal._warned, "the warning")
        assert signal.relative(now_s, now_s) == pytest.approx(1.0)
    finally:
        found.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("price", "SIGNALS: must be NAME=SOURCE;NAME=SOURCE, not 'price'"),
        ("price=/nowhere/price.csv", "the signal price cannot be read"),
        ("co2=electricitymaps:Berlin", "electricitymaps:LATITUDE,LONGITUDE"),
    ],
)
def test_settings_that_are_wrong_are_one_sentence(given: str, words: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=words):
        Signals(ServerSettings.from_env({"ZEUS_BSO_SIGNALS": given}).signals)


def test_without_a_trade_off_nothing_changes(store: Store) -> None:
    store.register(spec())
    trial = begin(store, "one")
    train(store, trial)
    assert (trial.eta_knob, store.job("job")[1][0].eta_knob) == (None, None)
