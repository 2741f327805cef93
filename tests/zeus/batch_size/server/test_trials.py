"""How reports and ends change a trial, and what a job then chooses, without a database."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests import seeds
from tests.zeus.batch_size.server.training import EPOCHS, MAX_POWER, convex, spec
from zeus.job import Job
from zeus.optimizer.batch_size.choosing import SILENT, Known
from zeus.optimizer.batch_size.common import CreatedJob, TrainingResult
from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError
from zeus.optimizer.batch_size.trials import JobRecord, Trial, alive, ended, lost, reported
from zeus.policy import BatchSizeOptimizer
from zeus.policy.make import POLICIES
from zeus.policy.recurrence import Start


def choose(record: JobRecord, log: Sequence[Trial], number: int) -> Start:
    return Known(record, log).choose(number)


def excluded(record: JobRecord, log: Sequence[Trial]) -> dict[int, str]:
    return Known(record, log).excluded


def job(**more: Any) -> JobRecord:
    return JobRecord(CreatedJob.model_validate(spec(**more).model_dump()), 7, 0.0)


def began(number: int = 1, batch_size: int = 64, **more: Any) -> Trial:
    return Trial(number, batch_size, began_s=0.0, heard_s=0.0, lease_s=60.0, **more)


def report(epoch: int, metric: float | None = 0.1, **more: Any) -> TrainingResult:
    """An epoch takes a second and 300 J: 300 J of cost, for any eta."""
    given = {"time": float(epoch), "energy": MAX_POWER * epoch, "current_epoch": epoch, **more}
    return TrainingResult(job_id="job", batch_size=64, trial_number=1, metric=metric, **given)


def over(
    size: int, order: int, status: Any = "ok", cost: float | None = None, **more: Any
) -> Trial:
    """A trial that has ended; one that ended by a report has reached the target."""
    spent = (convex(size) if cost is None else cost) if status == "ok" else 0.0
    given = {
        "status": status,
        "ended_s": float(order),
        "end_order": order,
        "converged": status == "ok",
        "epochs": EPOCHS if status == "ok" else 0,
        "energy": spent,
        "time": spent / MAX_POWER,
        **more,
    }
    return began(order, size, **given)


# -------------------------------------------------------------------------------------- reports


@pytest.mark.parametrize(
    ("epoch", "metric", "bound", "stop", "converged", "words"),
    [
        (1, 0.1, None, False, False, "train on"),
        (1, 0.5, None, True, True, "reaches the target"),
        (10, 0.1, None, True, False, "max_epochs 10"),
        (10, 0.6, 1.0, True, True, "reaches the target"),  # whatever it cost, and at the last epoch
        (10, 0.1, 1.0, True, False, "max_epochs 10"),
        (2, 0.1, 900.1, False, False, "train on"),
        (2, 0.1, 900.0, True, False, "would have cost 900 J; its bound is 900 J"),
        (2, 0.1, 899.0, True, False, "would have cost 900 J; its bound is 899 J"),
        (1, None, None, False, False, "train on"),  # no number is no target
    ],
)
def test_the_cost_of_a_report(
    epoch: int, metric: float, bound: float | None, stop: bool, converged: bool, words: str
) -> None:
    after, answer = reported(job(), began(cost_bound=bound), report(epoch, metric), 5.0, 3)
    assert (answer.stop_train, answer.converged) == (stop, converged)
    assert words in answer.message
    assert answer.cost == pytest.approx(300 * epoch)
    assert after.status == ("ok" if stop else "running")
    assert after.end_order == (3 if stop else None)
    assert after.stopped_by_cost == ("bound" in words)
    assert after.heard_s == 5.0
    searches = reported(job(), began(cost_bound=bound), report(epoch, metric, searching=True), 5, 3)
    assert searches[1].stop_train == (stop and "bound" not in words)


def test_a_lower_metric_may_be_the_better_one() -> None:
    lower = job(higher_is_better_metric=False, target_metric=40.0)
    assert not reported(lower, began(), report(1, 40.1), 0.0, 1)[1].converged
    assert reported(lower, began(), report(1, 40.0), 0.0, 1)[1].converged
    assert not reported(lower, began(), report(1, None), 0.0, 1)[1].converged


def test_the_next_epoch_is_predicted_without_what_finding_the_limit_took() -> None:
    # Of 600 J two epochs took 400 J: the next one is worth 200 J, not 300 J.
    told = report(2, overhead_time=2 / 3, overhead_energy=200.0)
    answer = reported(job(), began(cost_bound=801.0), told, 0.0, 1)[1]
    assert answer.predicted_cost == pytest.approx(800.0)
    assert not answer.stop_train
    assert reported(job(), began(cost_bound=799.0), told, 0.0, 1)[1].stop_train


def test_eta_weighs_energy_against_time() -> None:
    told = report(1, time=10.0, energy=100.0)
    for eta, cost in ((1.0, 100.0), (0.0, 3000.0), (0.5, 1550.0)):
        assert reported(job(eta_knob=eta), began(), told, 0.0, 1)[1].cost == pytest.approx(cost)


def test_a_report_may_be_repeated_or_come_late() -> None:
    one = reported(job(), began(), report(2), 1.0, 1)[0]
    again, answer = reported(job(), one, report(2), 2.0, 2)
    assert dataclasses.replace(again, heard_s=1.0) == one
    assert not answer.stop_train
    late, answer = reported(job(), one, report(1), 2.0, 2)
    assert late.epochs == 2
    assert late.energy == one.energy
    assert not answer.stop_train
    done = reported(job(), one, report(3, 0.9), 3.0, 3)[0]
    same, answer = reported(job(), done, report(4, 0.1), 4.0, 4)
    assert same == done
    assert answer.stop_train
    assert answer.converged
    assert "already reported" in answer.message


def test_a_lost_trial_that_reports_is_running_again() -> None:
    gone = ended(began(), "lost", 100.0, 1)
    back, answer = reported(job(), gone, report(1), 200.0, 2)
    assert back.running
    assert back.end_order is None
    assert not answer.stop_train
    done, answer = reported(job(), gone, report(1, 0.9), 200.0, 2)
    assert done.converged
    assert done.end_order == 2


@pytest.mark.parametrize("reason", ["failed", "oom", "cancelled"])
def test_a_trial_that_has_ended_stays_ended_unless_it_reached_the_target(reason: Any) -> None:
    gone = ended(began(), reason, 100.0, 1)
    after, answer = reported(job(), gone, report(1), 200.0, 2)
    assert after.status == reason
    assert after.end_order == 1
    assert after.epochs == 1  # what it has used is known now
    assert answer.stop_train
    assert not answer.converged
    done, answer = reported(job(), gone, report(1, 0.9), 200.0, 2)
    assert done.status == "ok"
    assert answer.converged


def test_ends_and_heartbeats() -> None:
    failed = ended(began(), "failed", 1.0, 1)
    assert failed.status == "failed"
    assert ended(failed, "oom", 2.0, 2) is failed
    gone = ended(began(), "lost", 1.0, 1)
    assert ended(gone, "lost", 2.0, 2) is gone
    assert ended(gone, "oom", 2.0, 2).status == "oom"  # now it is known what became of it
    assert alive(gone, 2.0).running
    assert alive(failed, 2.0) is failed
    with pytest.raises(ZeusBSORuntimeError, match="by a report") as refused:
        ended(began(), "ok", 1.0, 1)
    assert refused.value.status == 422


def test_a_trial_is_lost_after_its_lease() -> None:
    trial = began()
    assert lost([trial], 60.0) == []
    assert lost([trial], 60.1) == [trial]
    assert lost([alive(trial, 50.0)], 60.1) == []
    assert lost([dataclasses.replace(trial, lease_s=None)], 1e9) == []
    assert lost([over(64, 1)], 1e9) == []


# ------------------------------------------------------------------------------------- choosing


@pytest.mark.parametrize("policy", ["gp", "pruning-gts", "gts"])
def test_each_policy_finds_the_best_size(policy: Any) -> None:
    seed = seeds.fresh()
    record = dataclasses.replace(job(policy=policy), seed=seed)
    noise = random.Random(seed)
    log: list[Trial] = []
    for number in range(1, 41):
        size = choose(record, log, number).batch_size
        log.append(over(size, number, cost=convex(size) * math.exp(noise.gauss(0, 0.02))))
    assert log[0].batch_size == 64 or policy == "gts"
    # `gp` may look at a size that it never tried as late as that.
    assert [trial.batch_size for trial in log[-10:]].count(32) >= 9
    found = Known(record, log)
    assert found.best == 32
    assert found.best_cost == pytest.approx(1000, rel=0.05)
    chances = {one.batch_size: one.probability_best for one in found.estimates}
    assert max(chances, key=lambda size: chances[size]) == 32


_ALIKE = [(size, cost) for cost in (900.0, 1100.0) for size in (8, 16, 32, 64, 128, 256)]


def test_a_choice_depends_on_nothing_but_job_trials_and_number() -> None:
    # As good as each other, and known badly.
    log = [over(size, n + 1, cost=cost) for n, (size, cost) in enumerate(_ALIKE)]
    for policy in ("gp", "pruning-gts"):
        first = choose(job(policy=policy), log, 9)
        assert all(choose(job(policy=policy), list(log), 9) == first for _ in range(3))
    alike = job(policy="gts", mab_num_explorations=1)
    sizes = {choose(dataclasses.replace(alike, seed=n), log, 9).batch_size for n in range(40)}
    several = {choose(alike, log, number).batch_size for number in range(9, 49)}
    assert len(sizes) > 1
    assert len(several) > 1  # requests at the same time do not share their draws


def test_sizes_that_do_not_fit_into_memory_are_not_chosen_again() -> None:
    log = [over(64, 1), over(128, 2, "oom")]
    assert list(excluded(job(), log)) == [128, 256]
    for number in range(3, 40):
        choice = choose(job(), log, number)
        assert choice.batch_size < 128
        log.append(over(choice.batch_size, number))
    assert "memory" in excluded(job(), log)[256]


def test_a_size_is_parked_after_two_crashes_in_a_row() -> None:
    for between in ("lost", "cancelled"):  # these say nothing of a size
        log = [over(64, 1), over(32, 2, "failed"), over(32, 3, between), over(64, 4)]
        assert excluded(job(), log) == {}
        assert list(excluded(job(), [*log, over(32, 5, "failed")])) == [32]
        assert excluded(job(), [*log, over(32, 5), over(32, 6, "failed")]) == {}


def test_trials_that_never_report_park_a_size() -> None:
    log = [over(64, 1), *(over(32, n, "lost") for n in range(2, 6))]
    assert excluded(job(), log) == {}
    assert list(excluded(job(), [*log, over(32, 6, "lost")])) == [32]
    # Jobs that are preempted while they train are another matter.
    log = [over(64, 1), *(over(32, n, "lost", epochs=1) for n in range(2, 20))]
    assert excluded(job(), log) == {}


@pytest.mark.parametrize("policy", ["gp", "pruning-gts", "gts"])
@pytest.mark.parametrize("end", ["failed", "oom", "lost"])
def test_a_job_whose_every_run_crashes_ends_with_one_message(policy: Any, end: Any) -> None:
    record = job(policy=policy)
    log: list[Trial] = []
    with pytest.raises(ZeusBSORuntimeError, match="bso release") as refused:
        for number in range(1, 100):
            log.append(over(choose(record, log, number).batch_size, number, end))
    assert refused.value.status == 409
    assert len(log) <= 6 * SILENT
    found = Known(record, log)
    assert found.best is None
    assert list(found.excluded) == record.spec.batch_sizes
    released = dataclasses.replace(record, released=len(log))
    assert choose(released, log, 100).batch_size in record.spec.batch_sizes


def test_released_sizes_are_explored_however_many_runs_there_were() -> None:
    log = [over((32, 64)[n % 2], n) for n in range(1, 71)]

    def chosen(record: JobRecord) -> set[int]:
        return {choose(record, log, number).batch_size for number in range(71, 91)}

    assert chosen(job()) <= {32, 64}
    assert chosen(dataclasses.replace(job(), released=70)) - {32, 64}


@pytest.mark.parametrize("policy", ["gp", "pruning-gts", "gts"])
def test_only_runs_that_reached_the_target_bound_the_others(policy: Any) -> None:
    record = job(policy=policy)
    missed = over(8, 1, cost=500.0, converged=False, epochs=10)
    assert choose(record, [missed], 2).cost_bound == math.inf
    bound = choose(record, [missed, over(64, 2, cost=1000.0)], 3).cost_bound
    assert bound is not None
    assert bound >= 1500.0
    free = job(policy=policy, beta_knob=None)
    assert choose(free, [over(64, 1)], 2).cost_bound == math.inf


def test_regret_is_the_cost_beyond_the_best() -> None:
    log = [
        over(64, 1, cost=1500.0),
        over(16, 2, "failed", energy=100.0, time=100.0 / MAX_POWER),
        over(32, 3, cost=1000.0),
        over(8, 4, cost=700.0, converged=False),
        began(5, 32),
    ]
    found = Known(job(policy="pruning-gts"), log)
    assert found.best == 32
    assert found.best_cost == pytest.approx(1000.0)
    assert [number for number, _, _ in found.regret] == [1, 2, 3, 4]
    spent = [regret for _, _, regret in found.regret]
    assert spent == pytest.approx([500.0, 600.0, 600.0, 1300.0])


def test_a_policy_without_a_model_is_estimated_by_the_runs_of_each_size() -> None:
    log = [
        *(over(64, n, cost=1000.0 + 20 * n) for n in range(4)),
        *(over(32, 4 + n, cost=1000.0 + 40 * n) for n in range(4)),
        over(16, 8, converged=False),
        over(128, 9, cost=5000.0),
    ]
    found = Known(job(policy="gts"), log)
    assert [one.batch_size for one in found.estimates] == job().spec.batch_sizes
    of = {one.batch_size: one for one in found.estimates}
    assert (of[64].mean, of[32].mean) == (pytest.approx(1030.0), pytest.approx(1060.0))
    for size in (32, 64):
        one = of[size]
        assert one.low is not None
        assert one.high is not None
        assert one.low < one.mean < one.high
        assert one.runs == 4
    assert of[64].probability_best > 0.8 > of[32].probability_best > 0
    assert sum(one.probability_best for one in found.estimates) == pytest.approx(1)
    assert (of[16].mean, of[16].runs, of[8].runs) == (None, 1, 0)
    one = of[128]  # how much runs differ is not known after one
    assert (one.mean, one.low, one.high) == (pytest.approx(5000.0), None, None)
    assert (found.best, found.best_cost) == (64, of[64].mean)


class InTurn(BatchSizeOptimizer):
    """A policy of one's own: the required methods, and no more."""

    name = "in-turn"

    def register_job(self, job: Job, batch_sizes: list[int]) -> None:
        self.sizes, self.seen = batch_sizes, 0

    def predict(self, job: Job) -> int:
        return self.sizes[self.seen % len(self.sizes)]

    def observe(
        self, job: Job, batch_size: int, cost: float, converged: bool | None = None
    ) -> None:
        self.seen += 1


def test_a_policy_needs_no_more_than_the_required_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "in-turn", lambda seed: InTurn())
    record = job(policy="in-turn")
    log: list[Trial] = []
    for number in range(1, 7):
        start = choose(record, log, number)
        assert start.batch_size == record.spec.batch_sizes[number - 1]
        log.append(over(start.batch_size, number))
    assert start.cost_bound == pytest.approx(2000.0)  # by the cheapest run
    found = Known(record, [*log, over(8, 7, "oom")])
    assert found.best is None  # all sizes are at least as large
    assert Known(record, log).best == 32


def test_runs_of_sizes_that_are_out_are_still_known() -> None:
    log = [over(64, 1), over(32, 2), over(32, 3, "failed"), over(32, 4, "failed")]
    found = Known(job(), log)
    of = {one.batch_size: one for one in found.estimates}
    assert of[32].runs == 1
    assert not of[32].explored
    assert found.best == 64  # the best of those that may be chosen
