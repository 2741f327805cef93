from __future__ import annotations

import csv
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.plans import (
    FRONTIER,
    Frontier,
    Plan,
    count_changes,
    read_plan,
)

STAGES = ((("forward", 900), ("backward", 930)), (("forward", 930), ("backward", 930)))


def plan(time_s: float, energy_j: float, effective_j: float) -> Plan:
    return Plan(STAGES, time_s, energy_j, effective_j, 10.0, energy_j * 0.999, 200.0)


def frontier() -> Frontier:
    """The middle plan takes the least energy; the slow one is for stragglers only."""
    plans = (plan(2.0, 110.0, 10.0), plan(1.5, 100.0, 25.0), plan(1.0, 120.0, 70.0))
    policies = {"one clock": ((1.0, 150.0), (1.5, 110.0)), "one power limit": ((1.2, 140.0),)}
    return Frontier(plans, "1f1b", 2, 1, 25.0, 1, 1.0, 150.0, policies)


def test_a_deadline_asks_for_energy_and_a_straggler_for_effective_energy() -> None:
    found = frontier()
    assert found.fastest() == 2
    assert found.by_deadline(9.0) == 1
    assert found.by_straggler(9.0) == 0
    assert found.by_straggler(1.7) == 1
    assert found.by_max_slowdown(1.49) == 2
    assert found.by_max_slowdown(1.5) == 1
    beside = [list(found.beside(one).values()) for one in found.plans]  # 50 W of blocking
    assert beside[:2] == [[135, 180], [110, pytest.approx(155)]]
    assert beside[2] == [150, pytest.approx(math.nan, nan_ok=True)]


def test_where_no_plan_is_fast_enough_the_fastest_is_chosen() -> None:
    assert frontier().by_deadline(0.1) == frontier().by_straggler(0.1) == 2


@pytest.mark.parametrize("factor", [0.99, math.nan])
def test_a_slowdown_below_one_is_refused(factor: float) -> None:
    with pytest.raises(PipelineFrequencyError, match="at least 1"):
        frontier().by_max_slowdown(factor)


def test_files_hold_everything(tmp_path: Path) -> None:
    frontier().write(tmp_path / "plans")
    assert Frontier.read(tmp_path / "plans") == frontier()
    assert Frontier.read(tmp_path / "plans" / "frontier.json") == frontier()
    names = sorted(path.name for path in (tmp_path / "plans").iterdir())
    assert names == [
        "freqs_pipeline_00000.py",
        "freqs_pipeline_00001.py",
        "freqs_pipeline_00002.py",
        "frontier.csv",
        "frontier.json",
    ]
    assert read_plan(tmp_path / "plans" / "freqs_pipeline_00001.py") == frontier().plans[1]


def test_simpler_policies_stand_beside_each_plan(tmp_path: Path) -> None:
    """Those that are done earlier block for the rest of the iteration."""
    made = frontier()
    slowest, fastest = made.plans[0], made.plans[-1]
    assert made.beside(slowest) == {
        "one clock": 110.0 + 50.0 * (slowest.time_s - 1.5),
        "one power limit": 140.0 + 50.0 * (slowest.time_s - 1.2),
    }
    assert made.beside(fastest)["one clock"] == 150.0
    assert math.isnan(made.beside(fastest)["one power limit"])
    made.write(tmp_path / "plans")
    with (tmp_path / "plans" / "frontier.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["one_clock_energy_j"]) for row in rows] == [
        made.beside(plan)["one clock"] for plan in made.plans
    ]


def test_a_frontier_without_peaks_is_read(tmp_path: Path) -> None:
    frontier().write(tmp_path / "plans")
    index = tmp_path / "plans" / "frontier.json"
    old = json.loads(index.read_text())
    for one in old["plans"]:
        del one["peak_power_w"]
    del old["policies"]
    index.write_text(json.dumps(old))
    found = Frontier.read(index)
    assert all(math.isnan(one.peak_power_w) for one in found.plans)
    assert FRONTIER.dump_python(found, mode="json")["plans"][0]["peak_power_w"] is None


def test_a_file_of_the_reference_is_read(tmp_path: Path) -> None:
    path = tmp_path / "freqs_pipeline_00324.py"
    path.write_text(
        "[\n[('forward', 930), ('backward', 900)],\n[('forward', 930), ('backward', 915)],\n]\n"
        "# Iteration 324 cost change: 0.0227579757019285\n"
        "# Iteration 324 total cost: 1224.8441048803174\n"
        "# Iteration 324 total cost with P2P: 2333.9241048803174\n"
    )
    found = read_plan(path)
    assert found.stages[1] == (("forward", 930), ("backward", 915))
    assert math.isnan(found.time_s)
    assert found.energy_j == 2333.9241048803174
    assert found.effective_energy_j == 1224.8441048803174
    assert found.clock_changes == 2


def test_a_written_plan_is_a_literal_that_the_reference_can_evaluate(tmp_path: Path) -> None:
    frontier().write(tmp_path)
    text = (tmp_path / "freqs_pipeline_00000.py").read_text()
    # As the reference reads it; the text is our own.
    assert eval(text) == [list(stage) for stage in STAGES]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("__import__('os').system('touch ran')", "not a Python literal"),
        ("[[('forward', 930)],\n[('forward' 9)]]", "not a Python literal at line 2"),
        ("[]", "at least one"),
        ("[[('forward', 930)], []]", "stage 1"),
        ("[[('forward', 930), ('backward', -5)]]", "instruction 1 of stage 0"),
        ("[[('forward', True)]]", "instruction 0 of stage 0"),
        ("[[930, 915]]", "instruction 0 of stage 0"),
        ("[" * 5000, "not a Python literal"),
    ],
)
def test_an_invalid_plan_is_reported_and_never_run(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(PipelineFrequencyError, match=says) as error:
        read_plan(path)
    assert "bad.py" in error.value.message
    assert not (tmp_path / "ran").exists()
    assert not Path("ran").exists()


def test_a_folder_without_a_frontier_is_reported(tmp_path: Path) -> None:
    with pytest.raises(PipelineFrequencyError, match="run_optimization"):
        Frontier.read(tmp_path)
    (tmp_path / "frontier.json").write_text('{"plans": [{}]}')
    with pytest.raises(PipelineFrequencyError, match="not an index"):
        Frontier.read(tmp_path)
    frontier().write(tmp_path)
    (tmp_path / "freqs_pipeline_00001.py").unlink()
    with pytest.raises(PipelineFrequencyError, match=r"00001\.py cannot be read"):
        Frontier.read(tmp_path)
    os.mkfifo(tmp_path / "freqs_pipeline_00001.py")  # nobody writes to it
    with pytest.raises(PipelineFrequencyError, match=r"00001\.py cannot be read \(it is not a reg"):
        Frontier.read(tmp_path)
    (tmp_path / "freqs_pipeline_00001.py").unlink()
    index = tmp_path / "frontier.json"
    index.write_text("[" * 100 + "]" * 100)
    with pytest.raises(PipelineFrequencyError, match="levels"):
        Frontier.read(tmp_path)
    frontier().write(tmp_path)
    index.write_text(index.read_text().replace('"version": 1', '"version": 7'))
    with pytest.raises(PipelineFrequencyError, match=r"version.*make it again"):
        Frontier.read(tmp_path)


OPTION = {"frequency": 930, "time_s": 1.0, "energy_j": 100.0}
PROBLEM = {
    "profile": [
        {"stage": stage, "instruction": name, "chunk": 0, "options": [OPTION]}
        for stage in (0, 1)
        for name in ("forward", "backward")
    ],
    "pipeline": {
        "name": "1f1b",
        "num_microbatches": 1,
        "stages": [[["forward", 0, 0], ["backward", 0, 0]]] * 2,
        "arcs": [[[0, "forward", 0, 0], [1, "forward", 0, 0]]],
    },
    "p2p_power_w": 25.0,
    "gpus_per_stage": 1,
    "energy_per": "gpu",
    "change_time_s": 0.0,
    "max_changes": None,
}


@pytest.mark.parametrize(
    ("file", "place", "value", "says"),
    [
        ("problem", ("p2p_power_w",), "70", "p2p_power_w: .*not '70'"),
        ("problem", ("p2p_power_w",), -1.0, r"p2p_power_w: .*not -1\.0"),
        ("problem", ("gpus_per_stage",), 2.7, r"gpus_per_stage: .*not 2\.7"),
        ("problem", ("gpus_per_stage",), True, "gpus_per_stage: .*not True"),
        ("problem", ("energy_per",), "rack", "energy_per: .*not 'rack'"),
        ("problem", ("change_time_s",), 1e6, "change_time_s: .*not 1000000"),
        ("problem", ("max_changes",), 2.5, r"max_changes: .*not 2\.5"),
        ("problem", ("profile", 1, "stage"), "0", r"profile\.1\.stage: .*not '0'"),
        ("problem", ("profile", 1, "options", 0, "time_s"), 0, r"options\.0\.time_s: .*not 0"),
        ("problem", ("profile", 1, "options", 0, "frequency"), True, "frequency.*not True"),
        ("problem", ("profile", 1, "options"), [], r"profile\.1\.options: .*not \[\]"),
        ("problem", ("pipeline", "stages", 0, 0, 1), "0", r"stages\.0\.0\.1: .*not '0'"),
        ("problem", ("pipeline", "stages"), [[["forward", 0]]], "of 1: files are mixed"),
        ("problem", ("pipeline",), None, "pipeline: .*not None"),
        ("frontier", ("num_stages",), "2", "num_stages: .*not '2'"),
        ("frontier", ("num_stages",), 3, "of 2: files are mixed"),
        ("frontier", ("gpus_per_stage",), True, "gpus_per_stage: .*not True"),
        ("frontier", ("plans", 1, "time_s"), "1.5", r"plans\.1\.time_s: .*not '1\.5'"),
        ("frontier", ("policies", "one clock", 0, 1), True, r"one clock\.0\.1: .*not True"),
    ],
)
def test_a_wrong_value_in_a_file_is_refused_with_its_place(
    tmp_path: Path, file: str, place: tuple[str | int, ...], value: Any, says: str
) -> None:
    frontier().write(tmp_path)
    (tmp_path / "problem.json").write_text(json.dumps(PROBLEM))
    assert Frontier.read(tmp_path).problem is not None
    path = tmp_path / f"{file}.json"
    data = at = json.loads(path.read_text())
    for part in place[:-1]:
        at = at[part]
    at[place[-1]] = value
    path.write_text(json.dumps(data))
    with pytest.raises(PipelineFrequencyError, match=says) as error:
        Frontier.read(tmp_path)
    assert "mixed" in says or path.name in error.value.message
    assert "\n" not in error.value.message


def test_changes_are_counted_within_a_stage_and_0_mhz_is_none() -> None:
    assert count_changes([[("forward", 900), ("backward", 0), ("forward", 900)]]) == 0
    assert count_changes([[("forward", 900), ("backward", 915)], [("forward", 1000)]]) == 1
