from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.zeus.simulate.test_results import ROW
from zeus.simulate.plots import KINDS, by_label, draw
from zeus.simulate.results import RunRow, series


def runs(count: int = 5, **changes: object) -> list[RunRow]:
    """A job whose second recurrence has a run that failed."""
    rows = []
    recurrence = 1
    for run in range(1, count + 1):
        row = replace(
            ROW,
            run=run,
            recurrence=recurrence,
            batch_size=8 * 2 ** (run % 3),
            cost=10.0 * run,
            reached=run != 2,
            best_cost=20.0,
            default_cost=30.0,
        )
        rows.append(replace(row, **changes))
        recurrence += row.reached
    return rows


def texts(svg: Path) -> str:
    return "\n".join(re.findall(r"<!-- (.*?) -->", svg.read_text()))


def dots(svg: Path) -> list[int]:
    """How many points each scatter plot has."""
    collections = svg.read_text().split('<g id="PathCollection_')[1:]
    return [part.split("</g>\n   <g id=")[0].count("<use ") for part in collections]


def test_everything_of_one_job(tmp_path: Path) -> None:
    path = tmp_path / "all.svg"
    draw(runs(), path)
    shown = texts(path)
    for text in ("cost of a recurrence (J)", "cumulative regret", "batch size", "recurrence"):
        assert text in shown
    assert "squad" in shown
    assert "4 recurrences" in shown
    # Four runs that reached the target, and one that did not.
    assert dots(path) == [4, 1]


def test_a_picture_is_the_same_every_time(tmp_path: Path) -> None:
    first, second = tmp_path / "first.png", tmp_path / "second.png"
    draw(runs(), first)
    draw(runs(), second)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "one.svg"
    draw(runs(), path, [kind])
    shown = texts(path)
    assert ("cost of a recurrence" in shown) == (kind == "cost")
    assert ("cumulative regret" in shown) == (kind == "regret")
    assert bool(dots(path)) == (kind == "batch-size")


def test_policies_have_curves_and_workloads_have_axes_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "many.svg"
    rows = [
        row
        for policy in ("gp", "gts")
        for dataset in ("squad", "imagenet", "cifar100", "librispeech")
        for seed in range(3)
        for row in runs(4 + seed, policy=policy, dataset=dataset, seed=seed)
    ]
    draw(rows, path)
    shown = texts(path).splitlines()
    for text in ("gp", "gts", "squad", "imagenet", "cifar100", "librispeech"):
        assert text in shown
    assert "eta 0.5, beta inf, 24 jobs, 96 recurrences" in "\n".join(shown)
    # For each workload and policy: of jobs with 4, 5, 6 runs all but one each.
    assert dots(path) == [12, 3] * 2 * 4


def test_costs_of_different_jobs_are_compared_with_the_best(tmp_path: Path) -> None:
    path = tmp_path / "cost.svg"
    draw([*runs(name="a"), *runs(name="b", best_cost=5.0)], path, ["cost"])
    assert "cost of a recurrence / the best's" in texts(path)
    assert "10^{1}" not in texts(path), "ten times the best is no reason for a logarithmic axis"
    draw([*runs(name="a"), *runs(name="b")], path, ["cost"])
    assert "cost of a recurrence (J)" in texts(path)
    assert "40" in texts(path).splitlines()
    draw(runs(best_cost=2.0), path, ["cost"])
    assert "10^{1}" in texts(path), "both the best and much more can be seen"


def test_a_job_that_has_ended_stays_in_the_mean_of_regrets(tmp_path: Path) -> None:
    path = tmp_path / "regret.svg"
    short = runs(1, name="short", cost=80.0)
    long = [replace(row, cost=60.0 if row.run == 1 else 20.0, reached=True) for row in runs(9)]
    long = [replace(row, recurrence=row.run) for row in long]
    draw([*short, *long], path, ["regret"])
    # Regrets of 3 and 2 that no longer change: their mean is a level line.
    lines = re.findall(
        r'<g id="line2d_\d+">\s*<path d="([^"]+)"[^>]*style="[^"]*#4c72b0', path.read_text()
    )
    (line,) = lines
    points = re.findall(r"[ML] ([\d.]+) ([\d.]+)", line)
    assert len(points) >= 2
    assert len({y for _, y in points}) == 1


def test_labels_say_what_differs() -> None:
    rows = [*runs(), *runs(gpu="a40"), *runs(gpu="a40", beta_knob=3.0, seed=2)]
    assert list(by_label(series(rows))) == ["v100, beta inf", "a40, beta inf", "a40, beta 3"]
    assert list(by_label(series(runs()))) == ["gp"]


def test_figures_that_cannot_be_drawn_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"runs\.jpg must end with \.png, \.svg, \.pdf"):
        draw(runs(), tmp_path / "runs.jpg")
    with pytest.raises(ValueError, match="no run was simulated"):
        draw([], tmp_path / "runs.png")
    with pytest.raises(ValueError, match="'cake' cannot be drawn; there are cost, regret"):
        draw(runs(), tmp_path / "runs.png", ["cake"])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install 'zeusd\[plot\]'"):
        draw(runs(), tmp_path / "runs.png")
