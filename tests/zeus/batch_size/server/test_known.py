"""Incremental knowledge of a job equals knowledge computed from the beginning."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from tests import seeds
from tests.zeus.batch_size.server.conftest import Clock
from tests.zeus.batch_size.server.training import convex, spec, train
from zeus.optimizer.batch_size import choosing
from zeus.optimizer.batch_size.choosing import Known
from zeus.optimizer.batch_size.common import CreatedJob
from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError
from zeus.optimizer.batch_size.store import Store
from zeus.optimizer.batch_size.trials import JobRecord, Trial
from zeus.policy import make_policy
from zeus.policy.knowledge import Place
from zeus.policy.recurrence import Start


def run(store: Store, times: int) -> list[int]:
    """Trains a job so often; returns the sizes."""
    sizes = []
    for at in range(times):
        trial = store.begin_trial("job", f"run {at}")
        sizes.append(trial.batch_size)
        train(store, trial)
    return sizes


def refusal_or(choose: Any) -> Start | str:
    try:
        found: Start = choose()
    except ZeusBSORuntimeError as error:
        return error.message
    return found


@pytest.mark.parametrize("policy", ["gp", "pruning-gts", "gts"])
def test_cached_decisions_equal_fresh_ones(policy: Any) -> None:
    rng = random.Random(seeds.fresh())
    for _ in range(3):
        job = JobRecord(
            CreatedJob.model_validate(spec(window_size=3, policy=policy).model_dump()), 7, 0.0
        )
        trials: dict[int, Trial] = {}
        known = Known(job)
        for _ in range(25):
            changed = []
            for _ in range(rng.randint(1, 3)):
                job = dataclasses.replace(job, changes=job.changes + 1)
                old = rng.choice(list(trials.values())) if trials and rng.random() < 0.7 else None
                if old is None:
                    number = len(trials) + 1
                    made = Trial(number, rng.choice(job.spec.batch_sizes), 0.0, 0.0)
                elif old.status == "lost" and rng.random() < 0.5:
                    made = dataclasses.replace(old, status="running", ended_s=None, end_order=None)
                elif old.running:
                    status = rng.choice(["ok", "ok", "ok", "failed", "oom", "lost", "cancelled"])
                    cost = convex(old.batch_size) * rng.uniform(0.9, 1.1)
                    of_run: dict[str, Any] = {"epochs": 10, "energy": cost, "time": cost / 300}
                    made = dataclasses.replace(
                        old,
                        status=status,
                        end_order=job.changes,
                        converged=status == "ok" and rng.random() < 0.8,
                        **(of_run if status == "ok" else {}),
                    )
                else:
                    continue
                trials[made.number] = made
                changed.append(made)
                if rng.random() < 0.05:
                    job = dataclasses.replace(job, released=job.changes)
            known.update(job, changed)
            fresh = Known(job, trials.values())
            number = len(trials) + 1
            assert refusal_or(lambda: known.choose(number)) == refusal_or(
                lambda: fresh.choose(number)
            )
            assert known.excluded == fresh.excluded


def test_a_choice_counts_what_other_processes_have_written(database: str, clock: Clock) -> None:
    """Two processes, as two stores have nothing in common but the database."""
    one, other = Store(database, clock=clock), Store(database, clock=clock)
    one.register(spec())
    for at in range(8):
        store = (one, other)[at % 2]
        job, before = other.job("job")
        trial = store.begin_trial("job", f"run {at}")
        assert trial.batch_size == Known(job, before).choose(trial.trial_number).batch_size
        if at != 5:  # which stays in flight
            train(store, trial)
    assert [trial.number for trial in one.job("job")[1]] == list(range(1, 9))
    one.close()
    other.close()


def test_a_job_that_was_deleted_and_registered_again_is_another(
    tmp_path: Path, clock: Clock
) -> None:
    store, other = (Store(tmp_path / "bso.db", clock=clock) for _ in range(2))
    store.register(spec())
    run(store, 3)
    other.delete("job")
    clock.now_s += 1
    other.register(spec(default_batch_size=16))
    assert store.begin_trial("job", "new").batch_size == 16
    store.close()
    other.close()


# --- families -----------------------------------------------------------------------------------


def test_a_job_begins_with_what_its_family_knows(store: Store) -> None:
    store.register(spec(family="nightly"))
    sizes = run(store, 12)
    best = max(set(sizes[6:]), key=sizes[6:].count)
    assert best != spec().default_batch_size
    store.register(spec(job_id="job on A40", gpu_model="A40", family="nightly"))
    assert store.begin_trial("job on A40", "first").batch_size == best
    store.register(spec(job_id="job alone", gpu_model="A40"))
    assert store.begin_trial("job alone", "first").batch_size == spec().default_batch_size
    # Its own choices do not change when the family learns more.
    job, trials = store.job("job on A40")
    assert job.knowledge is not None
    assert Known(job).choose(1).batch_size == trials[0].batch_size


def test_a_family_has_a_job_for_each_gpu_model_and_range_of_power_limits(store: Store) -> None:
    whole = {"family": "nightly", "power_limits": (100, 300)}
    store.register(spec(**whole))
    sizes = run(store, 12)
    best = max(set(sizes[6:]), key=sizes[6:].count)
    capped = store.register(spec(family="nightly", power_limits=(100, 200)))
    assert capped.job_id == "job on 1 x V100, 100 to 200 W"
    assert store.begin_trial(capped.job_id, "first").batch_size == best
    assert store.register(spec(family="nightly", power_limits=(100, 200))) == capped
    assert store.register(capped) == capped
    assert store.register(spec(**whole)).job_id == "job"
    assert store.register(spec(family="nightly")).job_id == "job"  # who does not know its range
    other = store.register(spec(gpu_model="A/40", number_of_gpus=2, **whole))
    assert other.job_id == "job on 2 x A 40, 100 to 300 W"
    with pytest.raises(ZeusBSORuntimeError, match="is registered with eta_knob"):
        store.register(spec(**whole, eta_knob=0.1))
    # Without a family other GPUs are a mistake.
    store.register(spec(job_id="job alone"))
    with pytest.raises(ZeusBSORuntimeError, match="is registered with gpu_model"):
        store.register(spec(job_id="job alone", gpu_model="A40"))


def test_a_job_begins_with_what_is_known_of_its_own_gpu_model(store: Store) -> None:
    store.register(spec(gpu_model="A40", job_id="job on A40", family="nightly"))
    store.register(spec(job_id="job untried", family="nightly", power_limits=(100, 200)))
    store.register(spec(family="nightly", power_limits=(100, 300)))
    run(store, 6)
    for number in range(8):  # of which most trials end without a result
        store.begin_trial("job on A40", f"key {number}")
    capped = store.register(spec(job_id="job capped", family="nightly", power_limits=(100, 150)))
    knowledge = store.job(capped.job_id)[0].knowledge
    assert knowledge is not None
    assert (knowledge.place, knowledge.same_gpu) == (Place("V100", (100, 300)), True)


def test_a_family_member_whose_policy_is_gone_is_passed_over(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(choosing, "make_policy", lambda name, **given: make_policy("gp", **given))
        store.register(spec(family="nightly", policy="gone"))
        run(store, 4)
    other = store.register(spec(job_id="job on A40", gpu_model="A40", family="nightly"))
    assert store.job(other.job_id)[0].knowledge is None
    with pytest.raises(ZeusBSORuntimeError, match="there is no policy 'gone'"):
        store.register(spec(job_id="job again", policy="gone"))
