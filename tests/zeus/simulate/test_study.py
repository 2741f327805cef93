from __future__ import annotations

import multiprocessing
import sys
import zlib
from dataclasses import replace
from typing import Any

import pytest

from tests.zeus.simulate.test_results import ROW
from zeus.job import Job
from zeus.policy import JITPowerLimitOptimizer, make_policy
from zeus.simulate import Simulator
from zeus.simulate.groups import GroupJob, by_group, synthetic_groups
from zeus.simulate.results import RunRow, series
from zeus.simulate.study import Case, run_case, run_study, workload_job
from zeus.simulate.summary import tables
from zeus.simulate.tables import Measurements
from zeus.simulate.workloads import power_trace, train_trace

JOB = GroupJob("a", 0.0, 1.0, "librispeech", 1.0)
LIBRISPEECH = Job("librispeech", "deepspeech2", "adamw", 40.0, 16, 192)

TOY_TRAIN = """dataset,network,batch_size,optimizer,learning_rate,run,target_metric,target_epoch
toy,net,8,sgd,0.1,1,0.5,4
toy,net,8,sgd,0.1,2,0.5,6
toy,net,16,sgd,0.1,1,0.5,5
toy,net,16,sgd,0.1,2,0.5,
toy,net,32,sgd,0.1,1,0.5,
toy,net,64,sgd,0.1,1,0.5,30
"""
TOY_POWER = """dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power
toy,net,8,sgd,100,10,90
toy,net,8,sgd,200,8,150
toy,net,16,sgd,100,7,95
toy,net,16,sgd,200,4,180
toy,net,32,sgd,200,3,190
toy,net,64,sgd,200,2,190
toy,net,64,sgd,250,2,240
"""
TOY = Job("toy", "net", "sgd", 0.5, 10, 8)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("toy")
    paths = folder / "train.csv", folder / "power.csv"
    paths[0].write_text(TOY_TRAIN)
    paths[1].write_text(TOY_POWER)
    return str(paths[0]), str(paths[1])


def test_the_expected_cost_of_recurrences(toy: tuple[str, str]) -> None:
    measurements = Measurements(*toy)
    found = {(one.batch_size, one.power_limit): one for one in measurements.expected(TOY, 0.5)}
    # 32 never reaches the target and 64 not within the epochs that a run may have.
    assert set(found) == {(8, 100), (8, 200), (16, 100), (16, 200)}
    assert found[8, 200].time == 5 * 8
    assert found[8, 200].energy == 5 * 8 * 150
    # Every second run of 16 fails, and takes all its epochs.
    assert found[16, 200].time == (5 + 10) * 4
    # Seconds cost what the highest limit of all is worth, also that of another batch size.
    assert found[8, 100].cost == 0.5 * 5 * 10 * 90 + 0.5 * 250 * 5 * 10
    cheapest = measurements.best(TOY, 0.5)
    assert (cheapest.batch_size, cheapest.power_limit) == (8, 200)
    cheapest = measurements.best(TOY, 1.0)
    assert (cheapest.batch_size, cheapest.power_limit) == (8, 100)
    assert measurements.usual(TOY, 1.0) == measurements.expected(TOY, 1.0)[1]
    with pytest.raises(ValueError, match=r"no measured run .* default batch size 32 reached"):
        measurements.usual(replace(TOY, default_bs=32), 0.5)
    with pytest.raises(ValueError, match=r"no measured run of .* reached the target"):
        measurements.best(replace(TOY, target_metric=0.9), 0.5)


def test_rows_are_the_simulators_history() -> None:
    case = Case(LIBRISPEECH, policy="pruning-gts", num_recurrence=40, eta_knob=0.3)
    rows = run_case(case)
    simulator = Simulator(
        train_trace(),
        power_trace("v100"),
        make_policy("pruning-gts", seed=1),
        JITPowerLimitOptimizer(verbose=False),
        seed=1,
        verbose=False,
    )
    history = simulator.simulate_one_job(LIBRISPEECH, 40, 2.0, 0.3)
    kept = [(row.batch_size, row.power_limit, row.energy, row.time, row.reached) for row in rows]
    assert kept == [(one.bs, one.pl, one.energy, one.time, one.reached) for one in history]
    assert [row.run for row in rows] == list(range(1, len(rows) + 1))
    assert rows[0].cost == pytest.approx(0.3 * rows[0].energy + 0.7 * 250 * rows[0].time)
    failed = [row for row in rows if not row.reached]
    assert failed, "nothing is tested of recurrences with several runs"
    for row in failed:
        assert rows[row.run].recurrence == row.recurrence
    assert [row.recurrence for row in rows if row.reached] == list(range(1, 41))
    (job,) = series(rows)
    assert len(job.costs) == 40
    assert sum(job.costs) == pytest.approx(sum(row.cost for row in rows))
    excess = sum(row.cost for row in rows) - 40 * rows[0].best_cost
    assert job.regrets[-1] == pytest.approx(excess / rows[0].best_cost)


def test_a_job_recurs_twice_for_each_batch_size_and_power_limit() -> None:
    rows = run_case(Case(LIBRISPEECH, policy="pruning-gts"))
    assert rows[-1].recurrence == 2 * 15 * 7


def groups_of(gpu: str, policy: str, count: int = 6) -> list[Case]:
    return [
        Case(
            workload_job(jobs[0].dataset, gpu),
            gpu=gpu,
            name=name,
            policy=policy,
            seed=zlib.adler32(name.encode()),
            group=tuple(jobs),
        )
        for name, jobs in by_group(synthetic_groups(count)).items()
    ]


@pytest.mark.parametrize(
    ("name", "sizes", "energy", "time"),
    [
        (
            "synthetic-001",
            [1024, 1024, 1024, 512, 256, 128, 64, -32, -2048, *[128] * 7, 64, 256, 512, -1024]
            + [128] * 25,
            3004744.88,
            31063.72,
        ),
        (
            "synthetic-008",
            [24, 16, 24, 12, 16, 12, 12, 8, 4, 4, 4, 4, 8, 4, 4, 12, 16, 4, 4, 24, 4, 4, 4],
            35512630.64,
            234904.84,
        ),
    ],
)
def test_groups_go_as_with_the_published_policy(
    name: str, sizes: list[int], energy: float, time: float
) -> None:
    """Figures of the reference's simulator; negative: the run did not reach the target."""
    (case,) = (case for case in groups_of("p100", "pruning-gts", 60) if case.name == name)
    rows = run_case(case)
    assert [row.batch_size * (1 if row.reached else -1) for row in rows] == sizes
    assert sum(row.energy for row in rows) == pytest.approx(energy, abs=0.01)
    assert sum(row.time for row in rows) == pytest.approx(time, abs=0.01)


def test_a_groups_jobs_have_their_own_length() -> None:
    for case in groups_of("a40", "pruning-gts"):
        assert case.group is not None
        rows = run_case(case)
        reached = [row for row in rows if row.reached]
        assert len(reached) == len(case.group)
        ratios = sum(job.runtime_ratio for job in case.group)
        measured = Measurements(train_trace(), power_trace("a40"))
        expected = measured.best(case.job, case.eta_knob)
        assert sum(row.best_cost for row in reached) == pytest.approx(ratios * expected.cost)
        # And each run has the length of the job that it belongs to.
        size = reached[-1].batch_size
        some = [row for row in reached[2:] if row.batch_size == size]
        epochs = {
            round(row.time / row.best_cost * expected.cost, 6) for row in some
        }  # of a few measured runs, and perhaps one with the profiling
        targets = measured.of(case.job)[size].target_epochs[case.job.target_metric]
        assert len(epochs) <= len(set(targets)) + 1


def test_a_study_is_the_same_for_any_number_of_processes() -> None:
    cases = [
        *groups_of("p100", "pruning-gts"),
        *groups_of("p100", "gp"),
        Case(replace(LIBRISPEECH, default_bs=7), num_recurrence=3),
        Case(replace(LIBRISPEECH, default_bs=32), seed=5, num_recurrence=20),
    ]
    told: list[tuple[int, int]] = []
    here = run_study(cases, processes=1)
    there = run_study(cases, processes=2, tell=lambda done, of: told.append((done, of)))
    assert there == here
    assert there.rows == [row for case in cases for row in run_case_or_nothing(case)]
    assert told == [(done, len(cases)) for done in range(len(cases) + 1)]
    ((failed, why),) = there.failures
    assert failed is cases[-2]
    assert "default batch size 7" in why
    assert "192" in why


def test_a_process_that_is_killed_ends_the_study_and_leaves_none() -> None:
    """Also one that is killed while others send, and threads take turns in any order."""
    cases = [Case(LIBRISPEECH, policy="none")] * 3000  # fail at once
    before = {*multiprocessing.active_children()}

    def tell(done: int, of: int) -> None:
        if done == 1:
            ({*multiprocessing.active_children()} - before).pop().kill()

    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with pytest.raises(RuntimeError, match="was killed, perhaps out of memory"):
            run_study(cases, processes=2, tell=tell)
        left = {*multiprocessing.active_children()} - before
    finally:
        sys.setswitchinterval(usual_s)
    for process in left:
        process.kill()
    assert left == set()


class Odd(tuple[GroupJob, ...]):
    """A group whose jobs cannot be read, with an error that another process cannot read either."""

    def __iter__(self) -> Any:
        raise Unreadable("no", "pickle")


class Unreadable(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


class Ended(Odd):
    """Its error is one that a pipe has, too."""

    def __iter__(self) -> Any:
        raise EOFError("the work's own")


class Dark(Odd):
    def __iter__(self) -> Any:
        raise OSError("no file is to blame")


@pytest.mark.parametrize(
    ("group", "error", "words"),
    [(Odd, RuntimeError, "Unreadable: no pickle"), (Ended, EOFError, "the work's own")],
)
def test_an_error_of_the_work_is_not_called_a_killed_process(
    group: type[Odd], error: type[Exception], words: str
) -> None:
    case = Case(LIBRISPEECH, group=group((JOB,)))
    with pytest.raises(error, match=words):
        run_study([case, case], processes=2)


def run_case_or_nothing(case: Case) -> list[RunRow]:
    try:
        return run_case(case)
    except ValueError:
        return []


def test_policies_get_their_options() -> None:
    case = Case(LIBRISPEECH, policy="pruning-gts", num_recurrence=120)
    seeds = [[row.batch_size for row in run_case(replace(case, seed=seed))] for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]
    assert seeds[0] != [row.batch_size for row in run_case(replace(case, window_size=2))]


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"eta_knob": 1.1}, "eta_knob must be between 0 and 1, not 1.1"),
        ({"beta_knob": 0.0}, "beta_knob must be positive, not 0"),
        ({"num_recurrence": 0}, "at least once, not 0"),
        ({"policy": "best"}, "no policy 'best'"),
        ({"gpu": "h100"}, "no traces of a h100"),
        ({"group": ()}, "a group must have a job"),
        ({"job": replace(LIBRISPEECH, dataset="mnist")}, "nothing was measured of mnist"),
        ({"job": replace(LIBRISPEECH, target_metric=1.0)}, "no measured run"),
        ({"group": Dark((JOB,))}, "no file is to blame"),
        ({"summary_train": "/nowhere.csv"}, "/nowhere.csv cannot be read: No such file"),
    ],
)
def test_jobs_that_cannot_be_simulated_are_reported(change: dict[str, object], wrong: str) -> None:
    case = replace(Case(LIBRISPEECH), **change)
    study = run_study([case])
    assert not study.rows
    ((_, why),) = study.failures
    assert wrong in why


def test_a_study_needs_a_process() -> None:
    with pytest.raises(ValueError, match="at least one process, not 0"):
        run_study([Case(LIBRISPEECH)], processes=0)
    assert run_study([], processes=4).rows == []


def test_the_table_of_one_workload_has_its_batch_sizes() -> None:
    usual = replace(ROW, policy="p", dataset="toy", beta_knob=2.0, time=5.0, best_cost=50.0)
    usual = replace(usual, default_energy=100.0, default_time=10.0, default_cost=200.0)
    first = replace(usual, batch_size=8, power_limit=100, energy=80.0, cost=100.0, reached=True)
    rows = [
        first,
        replace(usual, recurrence=2, batch_size=16, power_limit=150, energy=40.0, cost=30.0),
        replace(first, recurrence=2, energy=60.0, cost=70.0),
    ]
    lines = tables([replace(row, run=run) for run, row in enumerate(rows, start=1)]).splitlines()
    assert lines[0] == "p: toy, bert, adamw on v100, 1 job, 2 recurrences, eta 0.5, beta 2"
    assert lines[2].split() == ["8", "100", "2", "67", "%", "0", "70.0", "5.00", "85.0"]
    assert lines[3].split() == ["16", "150", "1", "33", "%", "1", "40.0", "5.00", "30.0"]
    # Two recurrences took 180 J, 15 s and 200 J of cost, instead of 200 J, 20 s and 400 J.
    assert "-10.0 % energy, -25.0 % time, -50.0 % cost" in lines[-2]
    assert "+2.00 recurrences' cost" in lines[-1]
