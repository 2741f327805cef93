"""Trials in SQLite and in PostgreSQL: each test runs on both."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.zeus.batch_size.server.conftest import Clock
from tests.zeus.batch_size.server.training import EPOCHS, body, convex, result, spec, train
from zeus.optimizer.batch_size.common import EndTrial, JobSpecFromClient, NewTrial, TrialId
from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError
from zeus.optimizer.batch_size.store import Store


@contextlib.contextmanager
def refused(status: int) -> Iterator[Any]:
    """Expects a refusal with this status."""
    with pytest.raises(ZeusBSORuntimeError) as told:
        yield told
    assert told.value.status == status, told.value.message


def end(trial: NewTrial, reason: Any) -> EndTrial:
    return EndTrial(
        job_id=trial.job_id,
        batch_size=trial.batch_size,
        trial_number=trial.trial_number,
        reason=reason,
    )


def test_a_job_is_found_again_and_must_be_the_same(store: Store) -> None:
    made, new = store.find_or_make(spec())
    assert new
    assert store.find_or_make(spec()) == (made, False)
    assert store.register(spec(batch_sizes=[256, 8, 16, 32, 64, 128, 8])) == made
    with refused(409) as told:
        store.register(spec(gpu_model="A40", target_metric=0.6))
    for differs in ("target_metric 0.5 and not 0.6", "gpu_model 'V100' and not 'A40'"):
        assert differs in told.value.message
    assert [job["job_id"] for job in store.summaries()] == [made.job_id]
    assert store.job(made.job_id)[0].spec == made


def test_names_are_made_and_differ(store: Store) -> None:
    names = [store.register(spec(None)).job_id for _ in range(3)]
    assert len(set(names)) == 3
    for name in names:
        prefix, _, digits = name.rpartition("-")
        assert prefix == "job"
        assert len(digits) == 8
        int(digits, 16)
    long = store.register(JobSpecFromClient(**{**body(None), "job_id_prefix": "p" * 400}))
    assert len(long.job_id) == 400


def test_a_job_from_the_first_trial_to_the_best_size(store: Store) -> None:
    store.register(spec())
    sizes = []
    for number in range(1, 11):
        trial = store.begin_trial("job", f"run {number}")
        assert trial.trial_number == number
        assert trial.lease_s == 60.0
        sizes.append(trial.batch_size)
        answer = train(store, trial)
        assert answer.stop_train
    assert sizes[0] == 64
    assert sizes[-3:] == [32] * 3
    record, trials = store.job("job")
    assert (record.trials, record.seed) == (10, 1)
    assert [trial.number for trial in trials] == list(range(1, 11))
    converged = [trial for trial in trials if trial.converged]
    assert len(converged) >= 5
    for trial in converged:
        assert trial.epochs == EPOCHS
        assert trial.energy == pytest.approx(convex(trial.batch_size))
    (seen,) = store.summaries()
    assert seen["cheapest_batch_size"] == 32
    assert seen["converged"] == len(converged)
    assert seen["counts"]["ok"] == 10
    assert seen["energy_j"] == pytest.approx(sum(trial.energy for trial in trials))


def test_the_same_key_gets_the_same_trial(store: Store, clock: Clock) -> None:
    store.register(spec())
    first = store.begin_trial("job", "one")
    store.report(result(first, 1, 1000.0))
    clock.now_s += 100
    # Another request finds it lost; a repeated request keeps it alive.
    assert store.begin_trial("job", "two").trial_number == 2
    assert store.job("job")[1][0].status == "lost"
    again = store.begin_trial("job", "one")
    assert (again.trial_number, again.batch_size) == (1, first.batch_size)
    assert (again.reason, again.current_epoch, again.energy) == (None, 1, 250.0)
    assert store.job("job")[1][0].running
    train(store, first)
    done = store.begin_trial("job", "one")
    assert (done.reason, done.current_epoch) == ("ok", EPOCHS)
    assert done.best_batch_size == first.batch_size
    for key in ("", "x" * 201):
        with refused(422):
            store.begin_trial("job", key)


def test_an_unknown_job_is_reported(store: Store) -> None:
    for call in (
        lambda: store.begin_trial("job", "key"),
        lambda: store.job("job"),
        lambda: store.delete("job"),
        lambda: store.release("job"),
    ):
        with refused(404) as told:
            call()
        assert "there is no job job" in told.value.message
    store.register(spec())
    trial = store.begin_trial("job", "key")
    for more in ({"trial_number": 2}, {"batch_size": 8}):
        other = trial.model_copy(update=more)
        for call in (
            lambda other=other: store.report(result(other, 1, 1.0)),
            lambda other=other: store.heartbeat(other),
            lambda other=other: store.end_trial(end(other, "failed")),
        ):
            with refused(404) as told:
                call()
            assert "has no trial" in told.value.message
    with refused(422) as told:
        store.heartbeat(TrialId(job_id="job", batch_size=64, trial_number=10**30))
    assert "larger" in told.value.message
    assert len(store.job("job")[1]) == 1


def test_leases_expire_without_heartbeats(store: Store, clock: Clock) -> None:
    store.register(spec())
    trial = store.begin_trial("job", "one")
    for _ in range(5):
        clock.now_s += 50
        store.heartbeat(trial)
    assert store.job("job")[1][0].running
    assert store.summaries()[0]["counts"]["running"] == 1
    clock.now_s += 61
    # Nobody has written it down yet, and everybody sees it.
    assert store.job("job")[1][0].status == "lost"
    assert store.summaries()[0]["counts"]["lost"] == 1
    # Its place is free: the first size has to be tried.
    assert store.begin_trial("job", "two").batch_size == 64
    store.heartbeat(trial)
    assert store.job("job")[1][0].running
    answer = train(store, trial)
    assert answer.converged
    assert [one.status for one in store.job("job")[1]] == ["ok", "running"]


def test_a_long_lease_is_the_trials_own(store: Store, clock: Clock) -> None:
    store.register(spec())
    assert store.begin_trial("job", "one", lease_s=1000.0).lease_s == 1000.0
    store.begin_trial("job", "two", lease_s=None)
    store.begin_trial("job", "three")
    clock.now_s += 900
    assert [trial.status for trial in store.job("job")[1]] == ["running", "running", "lost"]


def test_a_deleted_job_is_gone(store: Store) -> None:
    store.register(spec())
    store.register(spec("job2"))
    trial = store.begin_trial("job", "one")
    store.begin_trial("job2", "one")
    train(store, trial)
    store.delete("job")
    assert store.count() == 1
    with refused(404):
        store.report(result(trial, 1, 1.0))
    # A new job of the name has nothing of the old one.
    assert store.find_or_make(spec())[1]
    assert store.begin_trial("job", "one").trial_number == 1
    assert len(store.job("job2")[1]) == 1


def test_a_seed_of_any_size_is_kept(store: Store) -> None:
    large = 2**200 + 1
    store.register(spec(mab_seed=large))
    assert store.job("job")[0].seed == large
    store.register(spec("job-drawn", mab_seed=None))
    store.register(spec("job-drawn-too", mab_seed=None))
    seeds = {store.job(name)[0].seed for name in ("job-drawn", "job-drawn-too")}
    assert len(seeds) == 2
    assert store.begin_trial("job", "one").batch_size == 64


def test_many_at_once_get_numbers_of_their_own(database: str) -> None:
    stores = [Store(database) for _ in range(4)]
    begun: list[NewTrial] = []
    errors: list[BaseException] = []
    at_once = threading.Barrier(16)

    def one(n: int) -> None:
        try:
            at_once.wait()
            store = stores[n % 4]
            store.register(spec())  # all at the same time
            trial = store.begin_trial("job", f"key {n // 2}")  # each key twice
            begun.append(trial)
            train(store, trial)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores:
        store.close()
    assert errors == []
    assert sorted({trial.trial_number for trial in begun}) == list(range(1, 9))
    found = Store(database)
    trials = found.job("job")[1]
    assert all(trial.status == "ok" for trial in trials)
    orders = [trial.end_order for trial in trials]
    assert len(set(orders)) == 8
    found.close()
