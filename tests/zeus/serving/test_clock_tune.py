"""Tuning in a simulated engine, and its report."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.serving_clocks_scenarios import CHAT, H100
from benchmarks.serving_clocks_world import make_load, simulate
from zeus.serving import ClockPolicy
from zeus.serving.clock_command import load_stretch, save_stretch, tune
from zeus.serving.clock_tune import POLICY, Tuner, TuneRow, plot, table


@pytest.fixture(scope="module")
def told() -> list[str]:
    """The output of `tuned`."""
    return []


@pytest.fixture(scope="module")
def tuned(told: list[str]) -> Tuner:
    """Ten requests a second, for a quarter of an hour."""
    tuner = Tuner(H100.clocks(), 0.5, 0.025, window_s=10.0, requests=100, tell=told.append)
    load = make_load(3, lambda t: 10.0, 10.0, 900.0, CHAT)
    outcome = simulate(H100, load, tuner, ttft_s=0.5, tpot_s=0.025, seed=3)
    assert outcome.violations < 0.01, "a clock that misses is left at once"
    return tuner


def rows_of_one_load(tuner: Tuner) -> dict[int, TuneRow]:
    """Those of the load with most requests."""
    rows = list(tuner.rows())
    most = max(rows, key=lambda row: row.requests).tokens_per_s
    return {row.clock_mhz: row for row in rows if row.tokens_per_s == most}


def test_it_finds_the_lowest_clock_that_holds(tuned: Tuner) -> None:
    rows = rows_of_one_load(tuned)
    (best,) = [row for row in rows.values() if row.best]
    # Static clocks of 300 s at this load: 0 to 0.5 % miss at 1140 MHz, 1 % at 1020, 4 % at 900.
    assert 1020 <= best.clock_mhz <= 1260
    assert best.late <= 0.01
    assert best.saving == pytest.approx(0.35, abs=0.08)
    assert rows[POLICY].requests >= 100, "the policy was measured beside it"


def test_it_says_how_far_it_is(tuned: Tuner, told: list[str]) -> None:
    rows = rows_of_one_load(tuned)
    (best,) = [row for row in rows.values() if row.best]
    low, high = best.tokens_per_s
    here = [line for line in told if line.startswith(f"{low:.0f} to {high:.0f} tokens/s at ")]
    clocks = len(H100.clocks())
    assert any(f"; 1 of {clocks} clocks are judged; next" in line for line in here)
    assert any(line.endswith("; it misses the objectives") for line in told)
    assert here[-1].endswith(f"; {best.clock_mhz} MHz is the lowest clock that holds")


def test_the_policy_starts_from_the_profile(tuned: Tuner, tmp_path: Path) -> None:
    path = tmp_path / "clocks.json"
    path.write_text(json.dumps(tuned.profile()))
    stored = json.loads(path.read_text())
    assert any(load["complete"] for load in stored["loads"])
    stretch = {int(mhz): value for mhz, value in stored["stretch"].items()}
    policy = ClockPolicy(H100.clocks(), 0.5, 0.025, stretch=stretch)
    assert len(policy.stretch) >= 8
    assert policy.stretch[900] == pytest.approx(1.35, abs=0.1)


def test_the_report(tuned: Tuner, tmp_path: Path) -> None:
    rows = list(tuned.rows())
    text = table(rows)
    assert "<- lowest that holds" in text
    assert "policy" in text
    assert len(text.splitlines()) == len(rows) + 1
    plot(rows, tmp_path / "clocks.svg", 0.5, 0.025)
    assert "<svg" in (tmp_path / "clocks.svg").read_text()


def test_without_energy_there_is_no_saving_to_tell() -> None:
    tuner = Tuner([1980, 1500], 0.5, 0.025, window_s=5.0, requests=20)
    load = make_load(3, lambda t: 10.0, 10.0, 60.0, CHAT)
    simulate(H100, load, tuner, ttft_s=0.5, tpot_s=0.025, seed=3, energy_every_s=0.0)
    rows = list(tuner.rows())
    assert rows
    assert all(math.isnan(row.saving) and row.requests for row in rows)
    assert " - " in table(rows)


def test_an_objective_that_is_lost_leaves_the_highest_clock() -> None:
    tuner = Tuner(H100.clocks(), 0.5, 0.007, window_s=5.0, requests=20)
    load = make_load(3, lambda t: 10.0, 10.0, 60.0, CHAT)
    outcome = simulate(H100, load, tuner, ttft_s=0.5, tpot_s=0.007, seed=3)
    assert outcome.top_share > 0.95
    assert not any(row.best and row.clock_mhz != 1980 for row in tuner.rows())


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="window"):
        Tuner([1980], 0.5, 0.025, window_s=1.0)


@pytest.mark.parametrize(
    ("minutes", "code", "says"),
    [
        ("nan", 2, "nan is not a finite number"),
        ("inf", 2, "inf is not a finite number"),
        ("0", 2, "Invalid value for '--minutes': 0.0 is not in the range 0<x<=1000000"),
    ],
)
def test_a_time_that_is_none_is_refused(minutes: str, code: int, says: str) -> None:
    options = ["--slo-ttft", "1", "--slo-tpot", "1", "--gpu", "0", "--feed", "/none/feed"]
    result = CliRunner().invoke(tune, [*options, "--minutes", minutes])
    assert result.exit_code == code
    assert says in result.output


def test_learned_step_times_are_kept_beside_the_rest_of_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "clocks.json"
    assert load_stretch(path) is None
    path.write_text(json.dumps({"stretch": {"1980": 1.0}, "loads": [1]}))
    save_stretch(path, {1980: 1.0, 1860: 1.02})
    assert load_stretch(path) == {1980: 1.0, 1860: 1.02}
    assert json.loads(path.read_text())["loads"] == [1]
    for text in ("[]", '{"stretch": {"1980": NaN}}', '{"stretch": {"1980": -1}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="has no learned step times"):
            load_stretch(path)
