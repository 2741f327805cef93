from __future__ import annotations

import ast
import csv
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests import snippets
from tests.zeus.pipeline_frequency.toys import DATA
from zeus.optimizer.pipeline_frequency.command import main
from zeus.optimizer.pipeline_frequency.planner import Planner
from zeus.optimizer.pipeline_frequency.plans import Frontier
from zeus.optimizer.pipeline_frequency.profile import (
    INSTRUCTIONS,
    InstructionProfile,
    ProfileMeasurement,
    write_profile,
)

PROFILE = str(DATA / "gpt3-175b+a100.columns.csv.xz")
ROOT = Path(__file__).parents[3]
USUAL = ("--stages", "0,1,7", "--num-stages", "3", "--num-mbs", "4", "--p2p-power", "83.64")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["--inst-profile", PROFILE, *arguments])


def planned(folder: Path, *arguments: str) -> Frontier:
    """What the command writes without pictures."""
    found = run("--output-dir", str(folder), *arguments, "--plot-interval", "0")
    assert found.exit_code == 0, found.output
    assert not list(folder.glob("*.png"))
    return Frontier.read(folder)


def test_the_whole_frontier(tmp_path: Path) -> None:
    out = tmp_path / "plans"
    found = run("--output-dir", str(out), *USUAL, "--points", "12", "--plot-interval", "5")
    assert found.exit_code == 0, found.output
    frontier = Frontier.read(out)
    assert frontier.schedule == "1f1b"
    assert (frontier.num_stages, frontier.num_microbatches) == (3, 4)
    last = len(frontier.plans) - 1
    stages = ast.literal_eval((out / f"freqs_pipeline_{last:05d}.py").read_text())
    assert [len(stage) for stage in stages] == [8, 8, 8]
    assert stages[2][:2] == [("forward", 1410), ("backward", 1410)]
    assert "simpler policies" in found.output
    assert "above the lower bound" in (out / "job.log").read_text()
    assert (out / "job.log").read_text().strip() in found.output
    with (out / "frontier.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["time_s"]) for row in rows] == [plan.time_s for plan in frontier.plans]
    drawn = {path.stem for path in out.glob("*.png")}
    expected = {"profile", "frontier", "pipeline_00000", "pipeline_00005", f"pipeline_{last:05d}"}
    assert expected <= drawn
    assert drawn == {path.stem for path in out.glob("*.svg")}
    assert (out / "frontier.png").read_bytes().startswith(b"\x89PNG")
    picture = out / f"pipeline_{last:05d}.svg"
    labels = re.findall("<!-- (.+?) -->", picture.read_text())
    plan = frontier.plans[last]
    assert {"stage 0", "stage 1", "stage 2", "time (s)", "clock (MHz)"} <= {*labels}
    assert any(label.startswith(f"plan {last}: {plan.time_s:.3f} s, ") for label in labels)
    assert [labels.count(f"{name}{number}") for name in "FB" for number in range(5)] == 2 * (
        4 * [6] + [0]
    )
    tree = ET.parse(picture)
    groups = [
        node
        for node in tree.iter("{http://www.w3.org/2000/svg}g")
        if node.get("id", "").startswith("PolyCollection")
    ]
    for group in groups[:2]:  # before and after: 3 stages, 4 microbatches, forward and backward
        bars = [one.get("d", "") for one in group.iter("{http://www.w3.org/2000/svg}path")]
        corners = [[float(y) for y in re.findall(r"[ML] [\d.-]+ ([\d.-]+)", one)] for one in bars]
        tops = sorted({round(min(ys), 2) for ys in corners})
        assert (len(bars), len(tops)) == (24, 3)
        for ys in corners:  # rows of bars with a little room between them
            assert 0.8 < (max(ys) - min(ys)) / (tops[1] - tops[0]) < 0.9


@pytest.mark.parametrize(
    ("question", "most"),
    [(("--deadline", "1.0"), 1.0), (("--max-slowdown", "1.1"), 1.1), (("--straggler", "1.2"), 1.2)],
)
def test_one_plan(tmp_path: Path, question: tuple[str, ...], most: float) -> None:
    (plan,) = planned(tmp_path / "plans", *USUAL, *question).plans
    assert 0.8 < plan.time_s <= most


def test_a_plan_within_a_power_bound(tmp_path: Path) -> None:
    asked = (*USUAL, "--max-power", "800")
    (plan,) = planned(tmp_path / "fastest", *asked).plans
    assert 780 < plan.peak_power_w <= 800
    (thrifty,) = planned(tmp_path / "slower", *asked, "--max-slowdown", "1.3").plans
    assert thrifty.peak_power_w <= 800
    assert thrifty.time_s > plan.time_s
    assert thrifty.energy_j < plan.energy_j


@pytest.mark.parametrize(("schedule", "steps"), [("gpipe", 8), ("interleaved", 16)])
def test_other_schedules_and_a_blocking_power_in_a_file(
    tmp_path: Path, schedule: str, steps: int
) -> None:
    measured = tmp_path / "p2p.json"
    measured.write_text(json.dumps({"power_w": 91.5, "time_s": 10.0, "energy_j": 915.0}))
    asked = ["--stages", "0,7", "--num-stages", "2", "--num-mbs", "4", "--schedule", schedule]
    found = planned(tmp_path / "plans", *asked, "--p2p-power", str(measured), "--points", "3")
    assert len(found.plans[0].stages[0]) == steps
    assert found.p2p_power_w == 91.5


def test_underscores_and_the_references_arguments_are_taken(tmp_path: Path) -> None:
    out = tmp_path / "plans"
    arguments = [
        *("--inst_profile", PROFILE, "--output_dir", str(out), "--num_mbs", "2"),
        *("--num_stages", "8", "--p2p_power", "83.64", "--plot_interval", "0"),
        *("--unit_time", "0.005", "--noise_factor", "0.9", "--points", "5"),
    ]
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code == 0, found.output
    assert "no effect" in found.stderr


def test_a_zero_bubble_schedule_with_the_whole_iteration(tmp_path: Path) -> None:
    whole = InstructionProfile.read(PROFILE).pick([0, 7])
    rows = []
    for stage in range(2):
        for name, parts in (("forward", ["forward"]), ("backward", ["_input", "_weight"])):
            for part in parts:
                rows += [
                    ProfileMeasurement(
                        stage,
                        name + part.removeprefix("forward"),
                        one.frequency,
                        one.time_s / len(parts),
                        one.energy_j / len(parts),
                    )
                    for one in whole.options(stage, name)
                ]
        rows.append(ProfileMeasurement(stage, "all_reduce", 0, 0.05, 6.0))
    write_profile(rows, tmp_path / "split.csv")
    asked = ["--inst-profile", str(tmp_path / "split.csv"), "--output-dir", str(tmp_path / "plans")]
    asked += ["--schedule", "zb-h1", "--num-stages", "2", "--num-mbs", "4", "--points", "5"]
    found = CliRunner().invoke(main, [*asked, "--after", "all_reduce", "--plot-interval", "0"])
    assert found.exit_code == 0, found.output
    frontier = Frontier.read(tmp_path / "plans")
    for stage in frontier.plans[-1].stages:
        assert stage[-1] == ("all_reduce", 0)
        assert [name for name, _ in stage].count("backward_weight") == 4


def test_a_custom_schedule_needs_no_numbers(tmp_path: Path) -> None:
    """Case does not matter in its names, as in those of a profile."""
    path = tmp_path / "mine.json"
    order = [["Forward", 0], ["BACKWARD ", 0]]
    arcs = [[[0, "forward", 0], [1, "Forward", 0]], [[1, "backward", 0], [0, "Backward", 0]]]
    path.write_text(json.dumps({"stages": [order, order], "arcs": arcs}))
    asked = ["--stages", "0,7", "--schedule", str(path), "--points", "3"]
    assert planned(tmp_path / "plans", *asked).schedule == "mine"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*USUAL, "--deadline", "0.1"), "the fastest takes"),
        ((*USUAL, "--deadline", "nan"), "nan is not a finite number"),
        ((*USUAL, "--deadline", "1", "--straggler", "2"), "give one of --deadline, --straggler"),
        ((*USUAL, "--straggler", "0", "--points", "0"), "give one of --points, --straggler"),
        ((*USUAL, "--gpus-per-stage", "0"), "gpus_per_stage: Input should be gr"),
        (("--num-stages", "4", "--num-mbs", "4"), "8 stages and the pipeline 4"),
        (("--num-stages", "8"), "needs --num-stages and --num-mbs"),
        (("--num-stages", "8", "--num-mbs", "0"), "at least one of its microbatches"),
        ((*USUAL, "--schedule", "zigzag"), "the schedule zigzag cannot be read"),
        ((*USUAL, "--p2p-power", "nothing.json"), "neither watts nor a file"),
        ((*USUAL, "--p2p-power", "-3"), "greater than or equal to 0, not -3"),
        ((*USUAL, "--stages", "a-b"), "--stages must be"),
        ((*USUAL, "--max-slowdown", "0.5"), "a slowdown is at least 1"),
        ((*USUAL, "--points", "-2"), "at least one plan"),
        ((*USUAL, "--max-changes", "-1"), "than or equal to 0, not -1"),
        ((*USUAL, "--max-power", "0"), "must be watts above 0"),
        ((*USUAL, "--max-power", "300"), "at its lowest settings the pipeline draws up to"),
        ((*USUAL, "--max-ramp", "5", "--ramp-window", "0.1"), "changes its power by up to"),
        ((*USUAL, "--ramp-window", "nan"), "nan is not a finite number"),
        ((*USUAL, "--ramp-window", "0"), "window of a ramp must be seconds above 0, not 0"),
        ((*USUAL, "--max-power", "900", "--straggler", "3"), "a bound on power asks for one plan"),
    ],
)
def test_errors_are_reported_in_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    found = run("--output-dir", str(tmp_path / "plans"), *arguments)
    assert found.exit_code != 0
    assert says in found.stderr
    assert "Traceback" not in found.output
    assert not (tmp_path / "plans").exists()


def test_a_folder_that_exists_is_not_written_to(tmp_path: Path) -> None:
    found = run("--output-dir", str(tmp_path), *USUAL)
    assert found.exit_code == 1
    assert "exists already" in found.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["file/plans", 300 * "a"])
def test_a_folder_that_cannot_be_created_is_found_before_planning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(Planner, "__init__", lambda *_, **__: pytest.fail("it planned"))
    found = run("--output-dir", str(tmp_path / name), *USUAL)
    assert found.exit_code == 1
    assert "plans cannot be created" in found.stderr or "aaa cannot be created" in found.stderr
    assert "Traceback" not in found.output


def test_both_ways_to_start_it_import_nothing_heavy_before_they_plan() -> None:
    code = (
        "import runpy, sys\n"
        "import zeus.optimizer.pipeline_frequency as p; p.Frontier; p.Plan\n"
        "name = sys.argv.pop(1)\n"
        "run = runpy.run_path if name.endswith('.py') else runpy.run_module\n"
        "heavy = {'numpy', 'scipy', 'highspy', 'torch', 'httpx', 'fastapi', 'matplotlib'}\n"
        "try:\n    run(name, run_name='__main__')\n"
        "finally:\n    print(sorted(heavy & {*sys.modules}))"
    )
    example = ROOT / "examples/pipeline_frequency_optimizer/run_optimization.py"
    for name in ("zeus.optimizer.pipeline_frequency", str(example)):
        command = [sys.executable, "-c", code, name, "--help"]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "--inst-profile" in found.stdout
        assert found.stdout.endswith("[]\n")


def test_the_code_on_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs the page's Python, and compares the command's output, except for its folder."""
    page = ROOT / "docs/train/pipeline_frequency.md"
    profile = InstructionProfile.read(PROFILE).pick([0, 1, 2, 7])
    rows = [
        ProfileMeasurement(stage, name, option.frequency, option.time_s, option.energy_j)
        for stage in range(4)
        for name in INSTRUCTIONS
        for option in profile.options(stage, name)
    ]
    write_profile(rows, tmp_path / "profile.csv")
    monkeypatch.chdir(tmp_path)
    first, bounded = snippets.of(page)
    names = first.run()
    del names["__name__"]
    assert "above the bound" in capsys.readouterr().out
    bounded.run(**names)
    said = capsys.readouterr().out
    assert float(said.split("up to ")[1].split()[0]) <= 1500
    shutil.rmtree(tmp_path / "plans")
    asked = ["--inst-profile", "profile.csv", "--output-dir", "plans", "--num-stages", "4"]
    asked += ["--num-mbs", "8", "--p2p-power", "83.64", "--plot-interval", "0"]
    shown = CliRunner().invoke(main, asked).output
    (printed,) = [one.source for one in snippets.of(page, "") if one.source.startswith("1f1b")]

    def figures(text: str) -> list[float]:
        return [float(number) for number in re.findall(r"[0-9.]+[0-9]", text)]

    # Solvers of other releases may find other plans that are as good.
    assert figures(shown)[:4] == figures(printed)[:4]
    assert figures(shown)[-3:] == pytest.approx(figures(printed)[-3:], rel=0.2, abs=0.02)
