"""Processes that search together, where something goes wrong in one."""

from __future__ import annotations

import logging
import random
import warnings
from dataclasses import dataclass
from typing import Any

import pytest

from tests.seeds import fresh, tries
from tests.support import for_users
from tests.zeus.power_limit.simulated_job import HIGH, MakeJob, Process, SimulatedJob, most_steps
from zeus.optimizer.power_limit import Energy, Time
from zeus.optimizer.power_limit.leader import SILENCE_S, Leader
from zeus.optimizer.power_limit.ranks import Ranks, connect
from zeus.utils import framework

# ------------------------------------------------------------------------------------- in trouble


def test_a_rank_that_never_begins_is_named(make_job: MakeJob) -> None:
    job = make_job(3).begin()
    job[2].dead = True
    with pytest.warns(UserWarning, match="highest limit: rank 2 did not begin"):
        job.run(most_steps(job, silent=True))
    job.assert_given_up()
    assert SILENCE_S < job.steps * job.step_s < SILENCE_S + 5


def test_silence_is_a_matter_of_steps_too(make_job: MakeJob) -> None:
    # A minute passes within a few steps, as with a long evaluation before the others begin.
    job = make_job(2, step_s=30.0).begin()
    job[1].dead = True
    job.run(10)
    job[1].dead = False
    job.run(500)
    job.assert_chosen()


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
@pytest.mark.parametrize("after", [5, 12, 40])
def test_a_rank_that_dies_is_named(
    make_job: MakeJob, search: str, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(3, search=search, profile_steps=60).begin().run(after)
    job[1].die()
    with pytest.warns(UserWarning, match="highest limit: rank 1 did not report steps"):
        job.run(most_steps(job, silent=True))
    job.assert_given_up()
    assert "the power limit optimizer stopped: rank 1 did not report steps" in caplog.text


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
@pytest.mark.parametrize("after", [0, 1, 5, 12, 40])
def test_without_rank_0_the_others_give_up(make_job: MakeJob, search: str, after: int) -> None:
    job = make_job(3, search=search, profile_steps=60).begin().run(after)
    job[0].die()
    with pytest.warns(UserWarning, match="highest limit: rank 0 has not been heard of"):
        job.run(most_steps(job, silent=True))
    job.assert_given_up()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_may_not_set_limits_reports_it_to_all(
    make_job: MakeJob, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(3)
    job[rank].denied = True
    with pytest.warns(UserWarning, match="the power limit cannot be set") as told:
        job.begin().run(20)
    job.assert_given_up()
    assert job.steps < 6
    reasons = [str(one.message).partition("highest limit: ")[2] for one in for_users(told)]
    why = "the power limit cannot be set: not allowed here"
    assert sorted(reasons) == sorted({why, f"rank 1: {why}" if rank else why})
    caplog.set_level(logging.WARNING)
    assert caplog.text.count(f"rank {rank}: {why}") == 2 - rank


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_loses_its_permission(make_job: MakeJob, rank: int) -> None:
    job = make_job(3, search="exhaustive").begin().run(25)
    assert not job.done()
    job[rank].denied = True
    with pytest.warns(UserWarning, match="not allowed here"):
        job.run(30)
    job.assert_given_up()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_cannot_measure(make_job: MakeJob, rank: int) -> None:
    job = make_job(3).begin().run(5)
    job[rank].blind = True
    with pytest.warns(UserWarning, match="energy cannot be measured: no sensor"):
        job.run(20)
    job.assert_given_up()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_training_ends_first(make_job: MakeJob, rank: int) -> None:
    job = make_job(3).begin().run(12)
    job[rank].call("on_train_end")
    assert job[rank].limit == HIGH
    job[rank].dead = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        job.run(20)
    job.assert_given_up()
    expected = ["rank 1: training ended before it finished"] if rank else []
    assert [str(one.message).partition("highest limit: ")[2] for one in for_users(told)] == expected


@pytest.mark.parametrize("after", [0, 5, 13, 30])
@pytest.mark.parametrize("rank", [0, 1])
def test_when_a_rank_is_cut_off_all_go_to_the_highest_limit(
    make_job: MakeJob, rank: int, after: int
) -> None:
    job = make_job(3, search="exhaustive").begin().run(after)
    job[rank].cut_off = True
    with pytest.warns(UserWarning, match="does not answer .Broken pipe."):
        job.run(3, until_done=False)
    assert job[rank].optimizer.disabled
    assert job[rank].limit == HIGH
    with pytest.warns(UserWarning, match=rf"rank {rank} (did not|has not)"):
        job.run(most_steps(job, silent=True))
    job.assert_given_up()


def test_a_rank_that_is_cut_off_after_the_choice_keeps_it(make_job: MakeJob) -> None:
    job = make_job(3, optimum_selector=Energy()).begin().run(500)
    for process in job.processes:
        process.cut_off = True
    job.run(300, until_done=False)
    job.assert_chosen(150)


def test_without_a_store_each_stays_at_the_highest_limit(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(2)
    monkeypatch.setattr(framework, "notes", lambda prefix: None)
    with pytest.warns(UserWarning, match=r"torch.distributed has no store"):
        job.begin().run(5)
    job.assert_given_up()
    with pytest.raises(framework.RanksUnreachable):
        connect(Leader(2, *[lambda *_: None] * 2), 2)


def test_a_selector_that_fails_stops_all(make_job: MakeJob) -> None:
    class Fails(Energy):
        def select(self, measurements: Any) -> float:
            raise RuntimeError("no idea")

    job = make_job(2, optimum_selector=Fails())
    with pytest.warns(UserWarning, match="Fails could not choose"):
        job.begin().run(500)
    job.assert_given_up()


# -------------------------------------------------------------------------------------- at random


@dataclass
class Fate:
    """The events of a job, from a seed."""

    seed: int

    def make(self, make_job: MakeJob) -> SimulatedJob:
        chance = random.Random(self.seed)
        step_s = chance.choice([0.05, 0.3, 1.0, 4.0])
        late_s = chance.choice([0, 0, 0.01, step_s, 3 * step_s])
        job = make_job(
            chance.randint(1, 8),
            step_s=step_s,
            settled_s=chance.choice([0.0, 0.15, 1.0]),
            delay_s=lambda: chance.random() * late_s,
            randomness=chance,
            search=chance.choice(["adaptive", "exhaustive"]),
            optimum_selector=chance.choice([None, Energy(), Time()]),
            profile_steps=chance.choice([4, 16, 40]),
            warmup_steps=chance.choice([0, 2, 10]),
        )
        self.free = chance.random() < 0.5
        # A rank that is alone with its interruptions may be silent for long.
        self.faults = self.starved = False
        for process in job.processes:
            process.slow = chance.uniform(0.7, 1.4)
            process.gpu_count = chance.choice([1, 1, 2])
            self._interrupt(process, chance)
        if chance.random() < 0.2:
            chance.choice(job.processes).low = 180_000
        if chance.random() < 0.2:
            chance.choice(job.processes).high = 270_000
        if chance.random() < 0.3:
            one = chance.choice(job.processes)
            one.refuses |= set(chance.sample([250_000, 220_000, 200_000, 180_000, 150_000], 2))
        while chance.random() < 0.35:
            self.faults = True
            self._strike(chance.choice(job.processes), chance)
        return job

    def _interrupt(self, process: Process, chance: random.Random) -> None:
        for count in range(chance.choice([0, 0, 0, 0, 0, 1, 8])):
            self.starved = self.starved or self.free or count > 0
            what = chance.choice([("on_pause",), ("on_epoch_end",), ("on_evaluate", 0.0)])
            process.at(chance.randrange(100), lambda what=what: process.call(*what))

    def _strike(self, process: Process, chance: random.Random) -> None:
        fault = chance.choice(["dead", "end", "cut_off", "blind", "denied", "never"])
        step = chance.choice([0, 1, 2, 3, chance.randrange(150)])
        if fault == "never":
            process.dead = True
        elif fault == "denied" and step == 0:
            process.denied = True
        elif fault == "dead":
            process.at(step, process.die)
        elif fault == "end":
            process.at(step, process.end)
        else:
            process.at(step, lambda: setattr(process, fault, True))


@pytest.mark.parametrize("block", range(4))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_all_ranks_end_at_one_limit_or_at_the_highest_in_any_case(
    make_job: MakeJob, block: int
) -> None:
    first = fresh(f"block {block}")
    for seed in range(first, first + tries(25)):
        fate = Fate(seed)
        job = fate.make(make_job).begin()
        try:
            check_fate(job, fate)
        except BaseException:
            print(f"seed {seed}: {fate}, {job.options}, {job.steps} steps")
            raise


def check_fate(job: SimulatedJob, fate: Fate) -> None:
    most = most_steps(job, silent=fate.faults)
    if fate.free:
        job.run_free(4 * most)
    else:
        job.run(most)
    assert job.done()
    held = {process.limit for process in job.living if not process.optimizer.disabled}
    assert len(held) <= 1
    for process in job.living:
        if process.optimizer.disabled:
            assert process.limit == process.high
    low = max(process.low for process in job.processes)
    high = min(process.high for process in job.processes)
    for process in job.processes:
        tried = {limit for _, limit in process.limits} - {process.high}
        assert all(low <= limit <= high for limit in tried)
    lead = job[0].led
    if lead is not None and lead.search is not None:
        job.assert_whole()
    refused = set().union(*(process.refuses for process in job.processes))
    assert not held & refused
    if not fate.faults and not fate.starved and high not in refused:
        job.assert_chosen()


def test_a_note_of_another_version_is_reported_as_that() -> None:
    class Notes:
        def check(self, keys: list[str]) -> bool:
            return keys == ["command/0"]

        def get(self, key: str) -> bytes:
            return b'{"kind": "dance"}'

    with pytest.raises(
        framework.RanksUnreachable, match="another version of zeus; install the same"
    ):
        Ranks(framework.Notes(Notes()), 1, 2, None).hear(0.0, 1)
