"""The comparison of policies on measured tables."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from benchmarks.fleet import follow_demand, play
from zeus_fleet.commands import main
from zeus_fleet.policies import POLICIES
from zeus_fleet.simulation import (
    CLUSTERS,
    GPUS,
    compare,
    evaluate,
    full_mw,
    mix,
    of_jobs,
    tables,
)


def test_policies_that_know_more_gain_more() -> None:
    found = compare("a40", (0.5, 0.8), (11, 12), {n: of_jobs(p) for n, p in POLICIES.items()})
    half = {name: result.progress for name, result in found[0.5].items()}
    assert half["water-filling"] > half["busy"] + 0.05
    assert half["busy"] > half["uniform"] + 0.02
    assert half["max-min"] > half["busy"] + 0.04
    assert found[0.5]["max-min"].worst > found[0.5]["water-filling"].worst
    assert found[0.8]["water-filling"].progress - found[0.8]["busy"].progress < 0.02
    assert all(0.4 < result.drawn < 1.1 for result in found[0.5].values())


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_mix_fills_the_cluster_and_all_limits_are_in_the_budget(cluster: str) -> None:
    one = mix(tables(cluster), 5)
    assert sum(job.gpus for job in one.jobs) == GPUS
    total = full_mw(one) // 2
    limits = follow_demand(one, total, 0.1)
    assert evaluate(one, limits, total).progress > 0.5
    with pytest.raises(ValueError, match="exceed"):
        evaluate(one, [job.high_mw for job in one.jobs], total)


def test_an_unknown_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="choose one of a40"):
        tables("h100")


def test_planning_seldom_costs_progress_where_jobs_come_and_go() -> None:
    often, seldom = (
        play("a40", 0.5, of_jobs(POLICIES["busy"]), period_s=period_s, seed=3, seconds=900)
        for period_s in (10, 300)
    )
    assert 0.5 < seldom < often - 0.01


def test_the_command_prints_a_row_for_each_budget() -> None:
    arguments = ["simulate", "--mixes", "1", "--budget", "50", "--budget", "90", "--known", "50"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    first, header, *rows = done.output.splitlines()
    assert first.startswith("A40, all networks")
    assert header.split() == ["BUDGET", "UNIFORM", "BUSY", "MAX-MIN", "WATER-FILLING"]
    assert [row.split()[0] for row in rows] == ["50", "90"]
    assert all(float(cell) <= 1 for row in rows for cell in row.split()[2::2])


def test_policies_that_know_of_latency_objectives_keep_them() -> None:
    arguments = ["simulate", "--cluster", "a40-sensitive", "--mixes", "2", "--budget", "50"]
    done = CliRunner().invoke(main, [*arguments, "--latency", "30"])
    assert done.exit_code == 0, done.output
    _, header, row = done.output.splitlines()
    names = header.replace("NOT TOLD", "BLIND").split()[1:]
    squeezed = dict(zip(names, re.findall(r"\((\d+) %\)", row), strict=True))
    assert int(squeezed.pop("BLIND")) > 0
    assert set(squeezed.values()) == {"0"}
