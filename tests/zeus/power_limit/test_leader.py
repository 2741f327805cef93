"""Processes that search together agree, also where they are unequal."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support import for_users
from tests.zeus.power_limit.simulated_job import (
    HIGH,
    LOW,
    MAX_Q,
    MakeJob,
    SimulatedJob,
    most_steps,
)
from zeus import _node
from zeus.optimizer.power_limit import Energy, Time, ZeusCost
from zeus.optimizer.power_limit.core import LISTEN_STEPS
from zeus.optimizer.power_limit.leader import SILENCE_S, Leader
from zeus.optimizer.power_limit.messages import Choose, Piece, RankHello, Trouble, Try
from zeus.optimizer.power_limit.profile import ProfileFile
from zeus.optimizer.power_limit.search import Exhaustive, SettingsSearch
from zeus.optimizer.power_limit.settings import Setting

# ------------------------------------------------------------------------------------ in agreement


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_all_choose_the_same_of_the_energy_of_all_and_the_time_of_the_slowest(
    make_job: MakeJob, world: int, search: str
) -> None:
    job = make_job(world, search=search)
    job[world - 1].slow = 1.7
    job[0].gpu_count = 3
    job.begin().run(500)
    chosen = job.assert_chosen()
    job.assert_whole()
    assert job.search().samples
    cost = ZeusCost(0.5, world_size=world + 2)
    assert cost.select(job[0].optimizer.measurements) * 1000 == chosen
    assert all(one.optimizer.measurements == job[0].optimizer.measurements for one in job.processes)


@pytest.mark.parametrize(("selector", "limit_w"), [(Time(), 300), (Energy(), 150)])
def test_the_selector_of_rank_0_decides(make_job: MakeJob, selector: Any, limit_w: int) -> None:
    job = make_job(4)
    for process in job.processes:
        process.options["optimum_selector"] = selector if process.rank == 0 else ZeusCost(0.5)
    job.begin().run(500)
    chosen = job.assert_chosen()
    assert chosen == limit_w * 1000 or (limit_w == 300 and chosen == 250_000)


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
@pytest.mark.parametrize("seed", range(4))
def test_in_lockstep_all_change_limits_within_a_step(
    make_job: MakeJob, search: str, seed: int
) -> None:
    # Within a step, processes come in any order: one that begins before rank 0 gets no command.
    job = make_job(4, search=search, randomness=random.Random(seed)).begin().run(500)
    assert_together(job, 1)


def assert_together(job: SimulatedJob, apart: int) -> None:
    """All made the same changes, at most so many steps apart."""
    steps, limits = zip(*job[0].limits, strict=True)
    assert len(limits) > 2
    for process in job.processes[1:]:
        own_steps, own_limits = zip(*process.limits, strict=True)
        assert own_limits == limits
        assert all(0 <= b - a <= apart for a, b in zip(steps, own_steps, strict=True))


@pytest.mark.parametrize("step_s", [0.003, 0.02, 0.1])
@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
def test_steps_shorter_than_the_update_period(
    make_job: MakeJob, step_s: float, search: str
) -> None:
    job = make_job(4, step_s=step_s, search=search).begin()
    job.run(most_steps(job))
    job.assert_chosen()
    job.assert_whole()


def test_when_nothing_is_new_a_step_costs_one_question_to_the_store(make_job: MakeJob) -> None:
    job = make_job(4, warmup_steps=100).begin().run(10, until_done=False)
    before = [process.calls for process in job.processes]
    job.run(20, until_done=False)
    leads, *follow = [
        process.calls - calls for process, calls in zip(job.processes, before, strict=True)
    ]
    assert leads <= 22
    assert max(follow) <= 22


# ---------------------------------------------------------------------------- unequal processes


def test_the_limits_are_those_that_all_take(make_job: MakeJob) -> None:
    job = make_job(3, optimum_selector=Energy())
    job[1].low, job[1].high = 200_000, 350_000
    job[2].low, job[2].high = 100_000, 250_000
    job.begin()
    for process in job.processes:
        assert process.limit == process.high
    job.run(500)
    job.assert_chosen(200)
    job.assert_whole()
    assert {one.power_limit_mw for one in job.search().samples} <= {250_000, 200_000}


def test_where_no_limit_is_taken_by_all_nothing_is_tried(make_job: MakeJob) -> None:
    job = make_job(2)
    job[1].low, job[1].high = 310_000, 400_000
    with pytest.warns(UserWarning, match="no power limit that all GPUs of this job take"):
        job.begin().run(50)
    job.assert_given_up()
    assert job[1].limits == [(0, 400_000)]


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
@pytest.mark.parametrize("refused", [250_000, 200_000, 150_000])
@pytest.mark.parametrize("who", [(0,), (2,), (1, 2)])
@pytest.mark.parametrize("step_s", [1.0, 0.03])
def test_a_limit_that_one_refuses_is_left_out_by_all(
    make_job: MakeJob, search: str, refused: int, who: tuple[int, ...], step_s: float
) -> None:
    job = make_job(3, search=search, optimum_selector=Energy(), step_s=step_s)
    for rank in who:
        job[rank].refuses.add(refused)
    job.begin().run(most_steps(job))
    chosen = job.assert_chosen()
    assert chosen != refused
    job.assert_whole()
    if search == "exhaustive":
        assert chosen == (200_000 if refused == 150_000 else 150_000)
        estimates = {one.power_limit_mw for one in job[0].optimizer.estimates}
        assert estimates == {300_000, 250_000, 200_000, 150_000} - {refused}


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
def test_pieces_that_only_rank_0_cuts_are_measured_anyway(make_job: MakeJob, search: str) -> None:
    job = make_job(3, search=search).begin()
    while not job.done():
        job.run(7)
        assert job.steps < 700
        job[0].call("on_pause" if job.steps % 2 else "on_evaluate", *([] if job.steps % 2 else [0]))
    job.assert_chosen()
    job.assert_whole()


def test_a_pause_of_rank_0_in_a_long_piece_does_not_count_as_silence_of_others(
    make_job: MakeJob,
) -> None:
    # Rank 0 cuts its piece in two, and all go on before the others' second is whole. Their next
    # word comes a hundred seconds later, which is all in order.
    job = make_job(3, search="exhaustive", profile_steps=60, warmup_steps=10).begin()
    job.run(40)
    job[0].call("on_pause")
    job.run(1000)
    job.assert_chosen()
    job.assert_whole()


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
def test_a_long_silence_of_zeusd_is_no_silence_of_processes(
    make_job: MakeJob, search: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(3, search=search).begin().run(30)
    with monkeypatch.context() as meanwhile, pytest.warns(UserWarning, match="has not answered"):
        meanwhile.setattr(_node, "answers", lambda: False)
        job.run(2 * int(SILENCE_S))
    job.run(most_steps(job))
    job.assert_chosen()
    job.assert_whole()


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
@pytest.mark.parametrize("early", [-5, -2, 2, 5])
def test_steps_counted_differently(make_job: MakeJob, search: str, early: int) -> None:
    job = make_job(2, search=search).begin()
    for _ in range(abs(early)):
        job[1 if early > 0 else 0].step()
    job.run(500)
    job.assert_chosen()
    job.assert_whole()
    assert [limit for _, limit in job[1].limits] == [limit for _, limit in job[0].limits]


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
@pytest.mark.parametrize("slow", [0.6, 1.02, 1.4, 2.0])
def test_processes_that_do_not_wait_for_each_other(
    make_job: MakeJob, search: str, slow: float
) -> None:
    job = make_job(3, search=search)
    job[1].slow = slow
    job.begin().run_free(800)
    job.assert_chosen()
    job.assert_whole()


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
@pytest.mark.parametrize("refusing", [None, 0, 1])
def test_all_hold_one_profile_or_none(make_job: MakeJob, search: str, refusing: int | None) -> None:
    names = ["max-q", "max-p"]
    job = make_job(3, search=search, optimum_selector=Energy(), search_profiles=names)
    if refusing is not None:
        job[refusing].refuses_profiles = True
    job.begin().run(1500)
    job.assert_chosen()
    wanted = [] if refusing is not None else [MAX_Q]
    assert [process.profiles for process in job.processes] == [wanted] * 3
    estimates = job[2].optimizer.estimates
    assert {one.of("power_profile") for one in estimates} == (
        {None} if refusing is not None else {None, 0, 1}
    )
    job[0].end()
    assert job[0].profiles == []


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
@pytest.mark.parametrize("second", [0, 1])
def test_of_two_dies_with_a_process_each_the_first_sets_and_counts(
    make_job: MakeJob, search: str, second: int
) -> None:
    job = make_job(2, search=search, optimum_selector=Energy())
    job[second].second, job[second].weight = True, 0.0
    job.begin().run(500)
    first = job[1 - second]
    assert job.done()
    assert job[second].limits == []
    for process in (first, job[second]):
        assert process.optimizer.state.chosen
        assert process.optimizer.current_power_limit == first.limit
    assert first.limit < HIGH
    job.assert_whole()


def test_profiles_are_searched_where_a_process_has_second_dies(make_job: MakeJob) -> None:
    job = make_job(2, optimum_selector=Energy(), search_profiles=["max-q"])
    job[0].second, job[0].weight = True, 0.0
    job.begin().run(1500)
    assert job.done()
    assert job[1].profiles == [MAX_Q]


def test_second_dies_alone_are_not_searched(make_job: MakeJob) -> None:
    job = make_job(2)
    for process in job.processes:
        process.second = True
    with pytest.warns(UserWarning, match="no process of this job sees the die of each card"):
        job.begin().run(5)
    job.assert_given_up()


def test_a_piece_that_is_lost_after_a_refused_limit_delays_nobody() -> None:
    lead = Leader(
        2,
        lambda _: SettingsSearch(lambda _: Exhaustive([HIGH, LOW], 1, 4)),
        lambda *_: None,
    )

    def tell(rank: int, trial: Try, index: int) -> None:
        lead.take(
            rank,
            Piece(trial=trial.trial, index=index, steps=2, energy_j=1, energy_error_j=0, time_s=1),
        )

    def command() -> Any:
        lead.look()
        (found,) = lead.commands()
        return found

    for rank in (0, 1):
        lead.take(rank, RankHello(gpus=["GPU"], min_mw=LOW, max_mw=HIGH))
    high = command()
    for index in (0, 1):  # rank 0 cuts the piece in two
        lead.ran(high, index, 2)
        tell(0, high, index)
    tell(1, high, 0)
    low = command()
    assert low.setting == Setting(LOW)
    lead.take(0, Trouble(reason="not taken", setting=low.setting))
    lead.look()
    assert not lead.commands()  # rank 1 may still tell its second part
    tell(1, low, 0)  # no: it has left that limit
    again = command()
    assert (again.setting, again.steps) == (Setting(HIGH), 2)
    lead.ran(again, 0, 2)
    tell(0, again, 0)
    assert not lead.commands()
    tell(1, again, 0)
    assert isinstance(command(), Choose)


def test_pieces_that_are_lost_together_take_one_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision takes milliseconds of the training's thread."""
    search = SettingsSearch(lambda _: Exhaustive([HIGH, LOW], 1, 20))
    lead = Leader(1, lambda _: search, lambda *_: None)
    lead.take(0, RankHello(gpus=["GPU"], min_mw=LOW, max_mw=HIGH))
    (high,) = lead.commands()
    for index in range(5):
        lead.ran(high, index, 2)
    decided: list[int] = []
    decide = search.next

    def counted(setting: Any, position: int, outstanding: Any) -> Any:
        decided.append(position)
        return decide(setting, position, outstanding)

    monkeypatch.setattr(search, "next", counted)
    for index in range(5):
        lead.take(0, Piece(trial=high.trial, index=index, steps=2))
    lead.commands()
    assert len(decided) == 1


# ------------------------------------------------------------------------------ profiles, again


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_profile_of_rank_0_counts(make_job: MakeJob, tmp_path: Path, rank: int) -> None:
    paths = [tmp_path / f"{one}.json" for one in range(3)]
    rows = [{"power_limit": w, "energy": w * 10, "time": 10} for w in (300, 250, 200, 150)]
    paths[rank].write_text(f'{{"measurements": {rows}}}'.replace("'", '"'))
    job = make_job(3, optimum_selector=Energy())
    for process in job.processes:
        process.options["profile_path"] = paths[process.rank]
    paths[2].write_text("no profile, and nobody looks")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job.begin().run(500)
    job.assert_chosen(150)
    assert (job.steps < 6) == (rank == 0)
    assert paths[2].read_text() == "no profile, and nobody looks"
    if rank == 1:
        job.assert_whole()
        kept = [ProfileFile(path).load(path) for path in paths[:2]]
        assert [one.gpus for one in kept] == [["GPU"] * 3, None]


@pytest.mark.parametrize("launched", [True, False])
def test_a_profile_is_used_by_optimizers_created_before_the_process_group(
    make_job: MakeJob, tmp_path: Path, launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    job = make_job(2, optimum_selector=Energy(), profile_path=path).begin().run(500)
    job.assert_chosen(150)
    kept = path.read_text()

    if launched:  # by torchrun, according to its environment
        monkeypatch.setenv("WORLD_SIZE", "2")
    again = make_job(2, optimum_selector=Energy(), profile_path=path)
    again.met = False
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        again.begin()
    assert [process.limit for process in again.processes] == [HIGH] * 2
    again.met = True
    again.run(6)
    again.assert_chosen(150)
    assert json.loads(path.read_text())["samples"] == json.loads(kept)["samples"]
    assert len(for_users(told)) == (0 if launched else 2)


def test_training_that_changes_is_measured_again_by_all(make_job: MakeJob) -> None:
    job = make_job(3, optimum_selector=Energy()).begin().run(500)
    job.assert_chosen(150)
    first = [len(process.limits) for process in job.processes]
    job.step_s = 2.0
    job.run(700, until_done=False)
    job.assert_chosen(150)
    job.assert_whole()
    assert all(len(p.limits) > n + 1 for p, n in zip(job.processes, first, strict=True))
    assert_together(job, LISTEN_STEPS)


def test_a_second_optimizer_does_not_read_the_first_ones_notes(make_job: MakeJob) -> None:
    job = make_job(3, optimum_selector=Energy())
    job[1].denied = True
    with pytest.warns(UserWarning, match="not allowed here"):
        job.begin().run(20)
    job[1].denied = False
    job.begin().run(500)
    job.assert_chosen(150)
    job.assert_whole()


def test_training_twice(make_job: MakeJob) -> None:
    job = make_job(2, optimum_selector=Energy()).begin().run(15)
    for process in job.processes:
        process.call("on_train_end")
    assert [process.limit for process in job.processes] == [HIGH] * 2
    for _ in range(2):
        for process in job.processes:
            process.call("on_train_begin")
        job.run(500, until_done=False)
        job.assert_chosen(150)
        for process in job.processes:
            process.call("on_train_end")
        assert [process.limit for process in job.processes] == [HIGH] * 2
